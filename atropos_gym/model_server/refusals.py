"""What the server refuses, in the shape in which OpenAI's clients expect errors."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse

from atropos_gym.errors import ConfigError, ContextFull, EngineError, TemplateError, VersionExpired

__all__ = ["Refusal", "refusal_of"]


class Refusal(Exception):
    """A request that is not answered.

    Attributes:
        status: of HTTP.
        kind: OpenAI's ``type`` of the error.
        code: a word for programs.
        param: the field at fault.
        retry: whether the same request may work later; clients of OpenAI obey.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry: bool = False,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.code = code
        self.param = param
        self.retry = retry

    @classmethod
    def internal(cls) -> Refusal:
        """Returns what is said of a fault of ours; what it was goes to the log."""
        return cls("internal error: see the server's log", 500, kind="server_error", code="internal")

    def body(self) -> dict[str, Any]:
        """Returns what programs read."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        """Returns the answer."""
        headers = {"x-should-retry": "true" if self.retry else "false"}
        return JSONResponse(self.body(), self.status, headers)


def refusal_of(error: Exception) -> Refusal | None:
    """Returns what a caller is told of an error of ours; None of one that nobody expected."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, VersionExpired):
        return Refusal(str(error), 410, kind="server_error", code="version_expired")
    if isinstance(error, ContextFull):
        return Refusal(str(error), 400, code="context_length_exceeded", param="messages")
    if isinstance(error, EngineError):
        return Refusal(str(error), 503, kind="server_error", code="engine_error", retry=True)
    if isinstance(error, ConfigError | TemplateError):
        return Refusal(str(error), 400, code="invalid_request")
    return None
