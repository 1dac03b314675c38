"""The page at ``/dashboard`` and the small JSON routes that it polls. All of them only read."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, HTTPException, Query
from fastapi.responses import HTMLResponse, Response

from atropos_gym.batch_server.dashboard import Dashboard
from atropos_gym.batch_server.dashboard.page import HEADERS, PAGE
from atropos_gym.batch_server.http.openapi import REFUSALS
from atropos_gym.batch_server.http.requests import reply

__all__ = ["dashboard_routes"]

LONGEST_SPAN = 3 * 86400
"""Seconds that the charts go back at most."""


def dashboard_routes(dashboard: Dashboard) -> APIRouter:
    """The page's routes."""
    router = APIRouter(prefix="/dashboard", tags=["information"], responses=REFUSALS)

    @router.get("", response_class=HTMLResponse)
    async def page() -> Response:
        """A page that shows the run as it goes on."""
        return HTMLResponse(PAGE, headers=HEADERS)

    @router.get("/data")
    async def data(span: Annotated[int, Query(ge=60, le=LONGEST_SPAN)] = 600) -> Response:
        """How things stand, and the last ``span`` seconds."""
        return reply(dashboard.data(span))

    @router.get("/trajectories")
    async def trajectories(
        find: Annotated[str, Query(max_length=200)] = "",
        before: int | None = None,
        count: Annotated[int, Query(ge=1, le=50)] = 10,
    ) -> Response:
        """Some of the latest groups, newest first; ``before`` a number goes on from there."""
        return reply(await dashboard.page(find=find, before=before, count=count))

    @router.get("/trajectories/{number}/{episode}")
    async def trajectory(number: int, episode: int) -> Response:
        """One episode's ids as HTML."""
        html = await dashboard.draw(number, episode)
        if html is None:
            raise HTTPException(404, f"episode {episode} of group {number} is not kept: only the latest are")
        return reply({"html": html})

    return router
