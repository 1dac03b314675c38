"""Which hosts are this machine, which variable holds a server's token, and how its URL is shown."""

from __future__ import annotations

import ipaddress
import re

__all__ = ["TOKEN_VARIABLE", "is_loopback", "without_token"]

TOKEN_VARIABLE = "ATROPOS_GYM_TOKEN"  # noqa: S105  # the name of a variable, not a token


def is_loopback(host: str) -> bool:
    """Whether a host name or address means this machine.

    >>> [is_loopback(host) for host in ("localhost", "127.0.0.1", "::1", "other.example")]
    [True, True, True, False]
    """
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def without_token(url: str) -> str:
    """Returns a server's URL as it can be shown and written down: a token in it stays secret.

    >>> without_token("http://x:TOKEN@host:8000/")
    'http://host:8000'
    """
    return re.sub(r"//[^/?#]*@", "//", url).rstrip("/")
