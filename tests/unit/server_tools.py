"""A batch server inside the test: no port, no process, and a clock that is moved by hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any, TypeVar

import httpx

from atropos_gym.batch_server import create_app
from atropos_gym.batch_server.clock import ManualClock
from atropos_gym.batch_server.limits import Limits

T = TypeVar("T")

REGISTER = {
    "wandb_group": "g",
    "wandb_project": "p",
    "batch_size": 8,
    "max_token_len": 64,
    "checkpoint_dir": "ckpt",
    "save_checkpoint_interval": 0,
    "starting_step": 0,
    "num_steps": 10,
}
REGISTER_ENV = {"max_token_length": 64, "desired_name": "e", "weight": 1.0, "group_size": 4}


def group(sequences: int = 4, *, tag: float = 0.0, **fields: Any) -> dict[str, Any]:
    """A small group; ``tag`` is its first score, by which a test knows it again."""
    return {
        "tokens": [[1, 2, 3 + row] for row in range(sequences)],
        "masks": [[-100, 2, 3 + row] for row in range(sequences)],
        "scores": [tag] + [0.5] * (sequences - 1),
        **fields,
    }


class LocalServer:
    """An application and its clock; every call is one HTTP request."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.clock = ManualClock()
        self.app = create_app(limits=limits or Limits(soft_groups=1_000_000), clock=self.clock)

    def transport(self) -> httpx.ASGITransport:
        return httpx.ASGITransport(app=self.app)

    def http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            transport=self.transport(), base_url="http://127.0.0.1:8000", timeout=None, trust_env=False
        )

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run(work)

    def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        async def one() -> httpx.Response:
            async with self.http() as http:
                return await http.request(method, path, **options)

        return asyncio.run(one())

    def get(self, path: str, **params: Any) -> Any:
        response = self.call("GET", path, params=params)
        assert response.status_code == 200, response.text
        return response.json()

    def post(self, path: str, body: Any, status: int = 200, **params: Any) -> Any:
        # Not by json=: the standard library's NaN must be able to get out.
        content = json.dumps(body)
        headers = {"Content-Type": "application/json"}
        response = self.call("POST", path, content=content, headers=headers, params=params)
        assert response.status_code == status, response.text
        return response.json()

    def register(self, **fields: Any) -> Any:
        return self.post("/register", {**REGISTER, **fields})

    def start(self, **fields: Any) -> None:
        """Registers a trainer that has asked for its first batch."""
        self.register(**fields)
        assert self.get("/batch")["batch"] is None

    def add_env(self, **fields: Any) -> int:
        reply = self.post("/register-env", {**REGISTER_ENV, **fields})
        assert reply["status"] == "success"
        return int(reply["env_id"])

    def send(self, sequences: int = 4, **fields: Any) -> Any:
        return self.post("/scored_data", group(sequences, **fields))

    def sizes(self, **params: Any) -> list[int] | None:
        """Group sizes of the next batch."""
        batch = self.get("/batch", **params)["batch"]
        return None if batch is None else [len(item["tokens"]) for item in batch]

    def tags(self, **params: Any) -> list[float] | None:
        """First scores of the next batch's groups."""
        batch = self.get("/batch", **params)["batch"]
        return None if batch is None else [item["scores"][0] for item in batch]
