"""Which hosts are this machine, which variable holds a server's token, and how its URL is shown."""

from __future__ import annotations

from atropos_gym._urls import is_loopback, without_token

__all__ = ["TOKEN_VARIABLE", "is_loopback", "without_token"]

TOKEN_VARIABLE = "ATROPOS_GYM_TOKEN"  # noqa: S105  # the name of a variable, not a token
