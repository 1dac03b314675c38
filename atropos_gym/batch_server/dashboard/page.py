"""The page itself: one file, nothing loaded, and a policy that lets nothing else run in it."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from importlib import resources

from atropos_gym.html import IDS_SCRIPT, LEGEND, STYLE

__all__ = ["HEADERS", "PAGE"]


def _text(name: str) -> str:
    return resources.files("atropos_gym.batch_server.dashboard").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


_STYLE = STYLE + _text("dashboard.css")
_SCRIPT = IDS_SCRIPT + _text("charts.js") + _text("dashboard.js")

#: The page; what it shows comes from the routes beside it.
PAGE = _text("dashboard.html").format(style=_STYLE, script=_SCRIPT, legend=LEGEND)

#: Only this style and this script, and requests to this server alone.
HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; style-src {_hash(_STYLE)}; script-src {_hash(_SCRIPT)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
