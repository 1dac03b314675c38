"""Bodies are told of in large pieces, short answers leave in one packet, and no byte changes its place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.config import Config
from uvicorn.server import ServerState

from atropos_gym.batch_server.http.protocol import PACKET_BYTES, PIECE_BYTES, BoundedProtocol

App = Callable[[Any, Any, Any], Any]


class Wire(asyncio.Transport):
    """A connection that notes each packet, and whether reading is paused."""

    def __init__(self) -> None:
        super().__init__()
        self.packets: list[bytes] = []
        self.closed = self.paused = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: Any) -> None:
        assert not self.closed
        self.packets.append(bytes(data))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


def connect(app: App, wire: Wire) -> tuple[BoundedProtocol, ServerState]:
    """A server that somebody has connected to; its state has the requests that are being answered."""
    config = Config(app, http=BoundedProtocol, lifespan="off", log_config=None)
    config.load()
    state = ServerState()
    protocol = BoundedProtocol(config=config, server_state=state, app_state={})
    protocol.connection_made(wire)
    return protocol, state


async def talk(app: App, pieces: list[bytes]) -> Wire:
    """Sends pieces, as far as they are read, and returns what came back."""
    wire = Wire()
    protocol, state = connect(app, wire)
    for piece in pieces:
        while wire.paused:
            await asyncio.sleep(0)
        if not wire.closed:
            protocol.data_received(piece)
    while state.tasks:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    protocol.connection_lost(None)
    return wire


def post(body: bytes, cuts: list[int]) -> list[bytes]:
    """A post whose bytes come in pieces."""
    whole = b"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    places = sorted({0, len(whole), *(cut % len(whole) for cut in cuts)})
    return [whole[start:end] for start, end in zip(places, places[1:], strict=False)]


def echo(got: list[bytes], answers: list[bytes]) -> App:
    """Reads a body, and answers in parts."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while True:
            message = await receive()
            got.append(message["body"])
            if not message["more_body"]:
                break
        length = b"%d" % sum(map(len, answers))
        headers = [(b"content-length", length)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for answer in answers:
            await send({"type": "http.response.body", "body": answer, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    return app


@settings(deadline=None, max_examples=30)
@given(
    size=st.integers(1, 3 * PIECE_BYTES),
    cuts=st.lists(st.integers(0, 2**30), max_size=40),
    answers=st.lists(st.sampled_from([0, 1, 1000, PACKET_BYTES - 1, PACKET_BYTES + 1]), max_size=6),
)
def test_no_byte_changes_its_place(size: int, cuts: list[int], answers: list[int]) -> None:
    body = (b"0123456789abcdef" * (size // 16 + 1))[:size]
    parts = [bytes([65 + place]) * length for place, length in enumerate(answers)]
    got: list[bytes] = []
    wire = asyncio.run(talk(echo(got, parts), post(body, cuts)))
    assert b"".join(got) == body
    assert all(len(piece) >= PIECE_BYTES for piece in got[:-1])
    sent = b"".join(wire.packets)
    assert sent.startswith(b"HTTP/1.1 200 OK\r\n")
    assert sent.partition(b"\r\n\r\n")[2] == b"".join(parts)


def test_a_body_of_many_packets_is_told_of_once_and_its_answer_is_one_packet() -> None:
    got: list[bytes] = []
    wire = asyncio.run(talk(echo(got, [b"ok"]), post(b"x" * 9999, list(range(100, 9000, 100)))))
    assert got == [b"x" * 9999]
    assert len(wire.packets) == 1


def test_reading_waits_where_nobody_takes_the_body() -> None:
    paused: list[bool] = []

    async def run() -> None:
        taken = asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await taken.wait()
            await echo([], [])(scope, receive, send)

        wire = Wire()
        protocol, state = connect(app, wire)
        head, *packets = post(b"x" * (PIECE_BYTES + 1), [200, PIECE_BYTES // 2])
        protocol.data_received(head)
        for packet in packets:
            paused.append(wire.paused)
            protocol.data_received(packet)
        paused.append(wire.paused)
        taken.set()
        while state.tasks:
            await asyncio.sleep(0)
        paused.append(wire.paused)
        protocol.connection_lost(None)

    asyncio.run(run())
    assert paused == [False, False, True, False]


@settings(deadline=None, max_examples=30)
@given(
    sizes=st.lists(st.integers(1, 100_000), min_size=2, max_size=5),
    cuts=st.lists(st.integers(0, 2**30), max_size=12),
)
def test_requests_in_a_row_are_answered_in_turn(sizes: list[int], cuts: list[int]) -> None:
    bodies = [bytes([65 + place]) * size for place, size in enumerate(sizes)]
    whole = b"".join(b"".join(post(body, [])) for body in bodies)
    places = sorted({0, len(whole), *(cut % len(whole) for cut in cuts)})
    pieces = [whole[start:end] for start, end in zip(places, places[1:], strict=False)]
    got: list[bytes] = []
    wire = asyncio.run(talk(echo(got, [b"ok"]), pieces))
    assert got == bodies
    assert b"".join(wire.packets).count(b"HTTP/1.1 200 OK\r\n") == len(bodies)


def test_the_end_of_a_body_is_no_part_of_the_next_head() -> None:
    first, second = (b"".join(post(bytes([65 + place]) * 150_000, [])) for place in (0, 1))
    got: list[bytes] = []
    pieces = [first[:200], first[200:] + second[:30], second[30:]]
    wire = asyncio.run(talk(echo(got, [b"ok"]), pieces))
    assert got == [b"A" * 150_000, b"B" * 150_000]
    assert b" 400 " not in b"".join(wire.packets)


def test_a_head_without_end_after_a_body_is_refused() -> None:
    first = b"".join(post(b"x" * 1000, []))
    pieces = [first + b"GET / HTTP/1.1\r\nHost: here\r\nX: "] + [b"a" * 1000] * 70
    wire = asyncio.run(talk(echo([], [b"ok"]), pieces))
    assert b"HTTP/1.1 400 " in b"".join(wire.packets)


def test_a_connection_that_breaks_before_its_answer_is_sent_gets_nothing() -> None:
    failures: list[dict[str, Any]] = []
    protocols: list[BoundedProtocol] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await echo([], [b"ok"])(scope, receive, send)
        wire.closed = True
        protocols[0].connection_lost(ConnectionResetError())

    wire = Wire()

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        protocol, state = connect(app, wire)
        protocols.append(protocol)
        protocol.data_received(b"".join(post(b"x", [])))
        while state.tasks:
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(run())
    assert wire.packets == [] and failures == []


def test_what_was_written_goes_out_before_the_connection_is_closed() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"connection", b"close"), (b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"ok"})

    wire = asyncio.run(talk(app, post(b"x", [])))
    assert wire.closed
    assert b"".join(wire.packets).endswith(b"\r\n\r\nok")
