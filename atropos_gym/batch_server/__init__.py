"""The batch server: scored groups in, exact batches out, over the Atropos rollout API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atropos_gym.batch_server.app import create_app

__all__ = ["create_app"]


def __getattr__(name: str) -> Any:
    """Loads FastAPI only when a server is made: clients live in this package too."""
    if name == "create_app":
        from atropos_gym.batch_server.app import create_app

        return create_app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
