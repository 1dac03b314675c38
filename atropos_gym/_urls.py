"""Servers' URLs: which hosts are this machine, and how a URL is shown without what is secret in it."""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache

__all__ = ["is_loopback", "without_token"]

#: What stands before a host. The second way is a password with a slash, which makes no URL but is a secret:
#: behind the colon is no port.
_USER = re.compile(r"//(?:[^/?#]*|(?!\[)[^/?#@:]*:(?!\d*(?:[/?#,]|$))(?:(?!,\w+://).)*)@")


@lru_cache(256)
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
    """Returns a server's URL, or what names an engine by it, as it can be shown: a token stays secret.

    >>> without_token("http://x:TOKEN@host:8000/")
    'http://host:8000'
    >>> without_token("vllm:http://x:TOKEN@one:8000,http://x:TOKEN@two:8000")
    'vllm:http://one:8000,http://two:8000'
    """
    return _USER.sub("//", url).rstrip("/")
