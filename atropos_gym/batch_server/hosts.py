"""Hosts: which are this machine, how a server listens and shows its URL, which variable holds its token."""

from __future__ import annotations

import os
import socket

from atropos_gym._urls import is_loopback, without_token
from atropos_gym.errors import ConfigError

__all__ = ["TOKEN_VARIABLE", "is_loopback", "listen", "without_token"]

TOKEN_VARIABLE = "ATROPOS_GYM_TOKEN"  # noqa: S105  # the name of a variable, not a token


def listen(host: str, port: int) -> socket.socket:
    """Binds an address, so that a port in use is told before anything is loaded; port 0 takes a free one.

    Raises:
        ConfigError: the address cannot be used.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        if os.name != "nt":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {getattr(error, 'strerror', None) or error}; "
            "stop what uses it, choose another port, or port 0 for a free one"
        ) from None
    listener.setblocking(False)
    return listener
