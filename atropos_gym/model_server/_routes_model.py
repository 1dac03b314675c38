"""``/v1``: what programs call; they find their conversation by base URL, header or api key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from atropos_gym.engines.base import SamplingParams
from atropos_gym.model_server._desk import Desk
from atropos_gym.model_server.answers import (
    Answer,
    chat_answer,
    chat_events,
    completion_answer,
    completion_events,
)
from atropos_gym.model_server.refusals import Refusal
from atropos_gym.model_server.requests import Asking, ChatRequest, CompletionRequest, read_body
from atropos_gym.model_server.sessions import Session
from atropos_gym.model_server.stream import EventStream
from atropos_gym.rollout.conversation import Conversation, Drawn, Prompt

__all__ = ["model_routes"]

T = TypeVar("T")

SESSION_HEADER = "x-atropos-session"
IGNORED_HEADER = "x-atropos-ignored"


def model_routes(desk: Desk) -> APIRouter:
    """Returns the routes, under ``/v1`` and under ``/s/SESSION/MEMBER/v1``."""
    routes = APIRouter()

    async def models(request: Request) -> Response:
        one = {"id": desk.engine.model, "object": "model", "created": 0, "owned_by": "atropos-gym"}
        one["max_model_len"] = desk.engine.max_context
        wanted = request.path_params.get("model")
        if wanted is not None and wanted != desk.engine.model:
            raise Refusal(f"there is no model {wanted!r}, only {desk.engine.model!r}", 404, param="model")
        return JSONResponse(one if wanted is not None else {"object": "list", "data": [one]})

    async def chat(request: Request) -> Response:
        session, member = _speaker(desk, request)
        body = ChatRequest.model_validate_json(await read_body(request, desk.max_body_bytes))
        params, ignored = body.sampling(session.group.sampling, desk.wishes)
        tools = body.tools or None
        prompt = member.find(body.told, tools)  # type: ignore[arg-type]  # checked there
        _check_room(desk, prompt)

        async def work() -> Answer:
            # With tool_choice "none" the tools stay in the prompt, whose ids go on, and calls are only text.
            readable = None if body.tool_choice == "none" else tools
            drawn = await _unless_left(request, member.draw(prompt, n=body.n, sampling=params))
            said = member.keep([drawn], tools=readable, stop=body.stops)
            return desk.answer(
                "chatcmpl", said, logprobs=bool(body.logprobs), ids=bool(body.return_token_ids)
            )

        return await _respond(desk, session, work(), body, ignored, chat_answer, chat_events)

    async def completions(request: Request) -> Response:
        session, member = _speaker(desk, request)
        body = CompletionRequest.model_validate_json(await read_body(request, desk.max_body_bytes))
        params, ignored = body.sampling(session.group.sampling, desk.wishes)
        prompts = [member.find_raw(prompt) for prompt in body.prompts]
        for prompt in prompts:
            _check_room(desk, prompt)

        async def work() -> Answer:
            drawn = await _unless_left(request, _draw(member, prompts, body.n, params))
            said = member.keep(drawn, stop=body.stops, plain=True)
            return desk.answer(
                "cmpl", said, logprobs=body.logprobs is not None, ids=bool(body.return_token_ids)
            )

        return await _respond(desk, session, work(), body, ignored, completion_answer, completion_events)

    for prefix in ("", "/s/{session}/{member}"):
        routes.add_api_route(f"{prefix}/v1/models", models, methods=["GET"])
        routes.add_api_route(f"{prefix}/v1/models/{{model:path}}", models, methods=["GET"])
        routes.add_api_route(f"{prefix}/v1/chat/completions", chat, methods=["POST"])
        routes.add_api_route(f"{prefix}/v1/completions", completions, methods=["POST"])
    return routes


def _speaker(desk: Desk, request: Request) -> tuple[Session, Conversation]:
    """Returns who asks: by the URL, else by the header, else by the api key, both ``SESSION.MEMBER``."""
    key = request.path_params.get("session")
    if key is not None:
        return desk.sessions.member(key, request.path_params["member"])
    said = request.headers.get(SESSION_HEADER)
    if said is None:
        scheme, _, value = request.headers.get("authorization", "").partition(" ")
        said = value.strip() if scheme.lower() == "bearer" else ""
    key, _, member = said.rpartition(".")
    if not key:
        desk.sessions.counts["requests without a session"] += 1
        raise Refusal(
            "whose conversation is this? Use the base_url of a session's member, or its api_key "
            "(POST /sessions gives both)",
            401,
            kind="authentication_error",
            code="no_session",
        )
    return desk.sessions.member(key, member)


def _check_room(desk: Desk, prompt: Prompt) -> None:
    length, most = len(prompt.whole()), desk.engine.max_context
    if length >= most:
        raise Refusal(
            f"This model's maximum context length is {most} tokens; the prompt has {length}",
            code="context_length_exceeded",
            param="messages",
        )


async def _draw(
    member: Conversation, prompts: Sequence[Prompt], n: int, sampling: SamplingParams
) -> list[Drawn]:
    """Samples after all prompts at a time; the first that fails cancels the others, and is what is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(member.draw(prompt, n=n, sampling=sampling)) for prompt in prompts]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def _unless_left(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Awaits ``work`` for as long as somebody waits for it: what nobody is told is not to be kept."""
    task = asyncio.create_task(work)
    left = asyncio.create_task(_left(request))
    try:
        await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
        if left.done():
            raise Refusal("the client went away", 499, code="client_left")
        return task.result()
    finally:
        for one in (task, left):
            one.cancel()
        await asyncio.wait((task, left))
        _ = task.cancelled() or task.exception()  # nobody else asks where this request was cancelled


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _respond(
    desk: Desk,
    session: Session,
    work: Coroutine[Any, Any, Answer],
    body: Asking,
    ignored: Sequence[str],
    whole: Callable[[Answer], dict[str, Any]],
    events: Callable[..., Iterator[bytes]],
) -> Response:
    """Answers at once or as a stream, and says which wishes are not followed."""
    headers = {IGNORED_HEADER: ", ".join(ignored)} if ignored else {}

    async def asked() -> Answer:
        answer = await desk.sessions.run(session, work)
        session.ignored.update(ignored)
        return answer

    if not body.stream:
        return JSONResponse(whole(await asked()), headers=headers)
    bodies = partial(events, usage=body.wants_usage)
    return await EventStream.begin(asked(), bodies, every=desk.keep_alive, headers=headers)
