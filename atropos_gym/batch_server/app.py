"""The batch server as an ASGI application: HTTP only, all that it knows is in the store.

uvicorn --factory atropos_gym.batch_server.app:create_app
"""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from atropos_gym.batch_server.access import Access, Guard
from atropos_gym.batch_server.bodies.details import MAX_ENTRIES, entry
from atropos_gym.batch_server.bodies.forms import Formed
from atropos_gym.batch_server.clock import Clock, SystemClock
from atropos_gym.batch_server.dashboard import Dashboard
from atropos_gym.batch_server.dashboard.watch import Pulse
from atropos_gym.batch_server.http.asgi import Bodies, Saved
from atropos_gym.batch_server.http.desk import Desk
from atropos_gym.batch_server.http.openapi import NOT_SERVED
from atropos_gym.batch_server.http.routes_dashboard import dashboard_routes
from atropos_gym.batch_server.http.routes_env import env_routes
from atropos_gym.batch_server.http.routes_info import info_routes
from atropos_gym.batch_server.http.routes_trainer import trainer_routes
from atropos_gym.batch_server.limits import Limits
from atropos_gym.batch_server.state.refusals import Conflict, Unknown
from atropos_gym.batch_server.store import MemoryStore, Store

__all__ = ["create_app"]


def create_app(
    store: Store | None = None,
    limits: Limits | None = None,
    clock: Clock | None = None,
    access: Access | None = None,
    *,
    tokenizer: str | None = None,
) -> FastAPI:
    """Builds the server; two of them can live in one process.

    Args:
        store: what it knows; a new :class:`MemoryStore` by default.
        limits: what it allows; the store's by default, else they become the store's too.
        clock: what time it is; the system's by default.
        access: who may ask; whoever reaches it on this machine by default.
        tokenizer: name or folder of what the dashboard shows ids with; by number by default.

    Returns:
        The application. Its ``state.desk.close()`` lets every held request answer at once.

    >>> create_app(MemoryStore(), Limits(max_body_bytes=2**20)).state.desk.store.limits.max_body_bytes
    1048576
    """
    store = MemoryStore(limits) if store is None else store
    if limits is not None:
        store.limits = limits
    desk = Desk(store, clock or SystemClock())
    app = FastAPI(
        title="Batch server",
        summary="Scored groups in, batches out.",
        version="1",
        responses=NOT_SERVED,
    )
    app.state.desk = desk
    for routes in (env_routes, trainer_routes, info_routes):  # what is called most is looked at first
        app.include_router(routes(desk))
    dashboard = Dashboard(desk, tokenizer)
    desk.audience.append(dashboard)
    app.include_router(dashboard_routes(dashboard))
    app.add_exception_handler(Conflict, _conflict)
    app.add_exception_handler(Unknown, _unknown)
    app.add_exception_handler(RequestValidationError, _query_refused)
    app.add_exception_handler(Exception, _failed)
    app.add_middleware(Pulse, look=dashboard.look)
    app.add_middleware(Saved, store=store)
    # The last one added is the first to see a request.
    app.add_middleware(Bodies, desk=desk)
    app.add_middleware(Guard, hosts=store.limits.allowed_hosts, access=access)
    app.add_middleware(Formed)
    return app


async def _conflict(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": str(error)}, 409)


async def _unknown(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": str(error)}, 404)


async def _query_refused(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    entries = [entry(one["type"], one["loc"], one["msg"]) for one in error.errors()[:MAX_ENTRIES]]
    return JSONResponse({"detail": entries}, 422)


async def _failed(request: Request, error: Exception) -> JSONResponse:
    # The error itself goes to the log: Starlette raises it again after this answer.
    return JSONResponse({"detail": "internal error: see the server's log"}, 500)
