"""The environment service against the real server application, on a clock that the waiting itself moves."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from atropos_gym.batch_server import create_app
from atropos_gym.batch_server.client import AsyncBatchClient, without_token
from atropos_gym.batch_server.clock import SystemClock
from atropos_gym.engines import ScriptedEngine
from atropos_gym.errors import (
    CollectionFailed,
    ConfigError,
    EngineError,
    GroupRefused,
    ServerError,
    TokenizerMismatch,
)
from atropos_gym.rollout import _service_thread
from atropos_gym.rollout._follower import Follower
from atropos_gym.rollout._membership import Membership
from atropos_gym.rollout.evaluation import EvalResult
from atropos_gym.rollout.service import OUTAGES, EnvironmentService, Evaluation, ServiceThread
from atropos_gym.wire import ScoredDataGroup
from tests.unit.rollout_cases import Countdown, run_moved, saying

URL = "http://127.0.0.1:8000"
GROUPS = 5


class LoopClock(SystemClock):
    """The event loop's time, from a fixed date on."""

    def time(self) -> float:
        try:
            return 1_767_000_000.0 + asyncio.get_running_loop().time()
        except RuntimeError:  # the server is made before the loop runs
            return 1_767_000_000.0


class Network(httpx.AsyncBaseTransport):
    """A server that can be taken away, started anew, and listened to."""

    def __init__(self) -> None:
        self.up = True
        self.calls: Counter[str] = Counter()
        self.start()

    def start(self) -> None:
        """Starts a server that knows nothing."""
        self.up = True
        self._server = httpx.ASGITransport(create_app(clock=LoopClock()))

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if not self.up:
            raise httpx.ConnectError("connection refused", request=request)
        self.calls[request.url.path] += 1
        return await self._server.handle_async_request(request)


#: What the original API says at ``/status-env``.
STATUS_ENV = (
    "current_step", "queue_size", "unallocated_fraction", "self_queue_size", "max_group_size", "env_weight"
)  # fmt: skip


class Original(Network):
    """A server of the original API: it knows neither ``/policy`` nor groups."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.path in ("/policy", "/health"):
            return httpx.Response(404, json={"detail": "Not Found"}, request=request)
        response = await super().handle_async_request(request)
        if request.url.path == "/status-env" and response.is_success:
            known = json.loads(await response.aread())
            return httpx.Response(200, json={name: known[name] for name in STATUS_ENV}, request=request)
        return response


class Trainer:
    """A learner that learns nothing: registers, publishes, takes batches."""

    def __init__(self, network: Network, *, lag: int | None = 0, run: str = "r1") -> None:
        self.client = AsyncBatchClient(URL, transport=network, retry_seconds=5)
        self.lag = lag
        self.run = run

    async def start(self, **changes: Any) -> None:
        fields = {"batch_size": 20, "groups_per_update": GROUPS, "max_policy_lag": self.lag, "num_steps": -1}
        await self.client.register(**{**fields, **changes})
        await self.client.batch()

    async def publish(self, version: int, **changes: Any) -> None:
        fields = {"run": self.run, "version": version, "model_name": f"{self.run}-v{version}"}
        folder = None if version == 0 else f"/adapters/{self.run}-v{version}"
        await self.client.publish_policy(**{**fields, "adapter_path": folder, **changes})

    async def take(self, groups: int = GROUPS, wait_seconds: float = 600.0) -> list[ScoredDataGroup]:
        batch = await self.client.batch(groups=groups, wait_seconds=wait_seconds, lease_seconds=60)
        assert batch is not None, "no batch came"
        assert batch.batch_id is not None
        await self.client.ack(batch.batch_id)
        return batch.groups

    async def finish(self) -> None:
        await self.client.finish(self.run)


def service_of(network: Network, engine: ScriptedEngine | None = None, **options: Any) -> EnvironmentService:
    return EnvironmentService(
        Countdown,
        engine or saying("ja"),
        URL,
        transport=network,
        **{"group_size": 4, "concurrency": 20, "options": {"turns": 2}, **options},
    )


def play(
    trains: Callable[[Trainer, EnvironmentService, Network], Awaitable[None]],
    *,
    trainer: dict[str, Any] | None = None,
    network: Network | None = None,
    **options: Any,
) -> tuple[EnvironmentService, Network]:
    """Runs a service beside a trainer to the end of both."""
    network = network or Network()
    service = service_of(network, **options)

    async def both() -> None:
        learner = Trainer(network, **(trainer or {}))
        running = asyncio.create_task(service.run())
        try:
            await trains(learner, service, network)
            async with asyncio.timeout(3600):
                await running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await learner.client.close()

    run_moved(both())
    return service, network


def versions(groups: list[ScoredDataGroup]) -> list[int | None]:
    return [group.policy_version for group in groups]


# -- a whole run ---------------------------------------------------------------------------------------------


def test_each_version_gets_exactly_the_groups_it_needs() -> None:
    batches = []

    async def trains(trainer: Trainer, service: EnvironmentService, network: Network) -> None:
        await asyncio.sleep(7)  # the service is there first, and waits
        await trainer.start()
        for version in range(4):
            await trainer.publish(version)
            batches.append(await trainer.take())
        await trainer.finish()

    service, _ = play(trains)
    assert [versions(batch) for batch in batches] == [[version] * GROUPS for version in range(4)]
    assert service.report["posted"] == 4 * GROUPS
    assert service.report["versions"] == [0, 1, 2, 3]
    assert service.report["collector"]["started"] == 4 * GROUPS
    assert {group.env_id for batch in batches for group in batch} == {0}
    numbers = [(group.group_overrides or {})["number"] for batch in batches for group in batch]
    assert sorted(numbers) == list(range(4 * GROUPS))


def test_nothing_is_played_before_the_first_version_is_there() -> None:
    engine = saying("ja")

    async def trains(trainer: Trainer, service: EnvironmentService, network: Network) -> None:
        await trainer.start()
        await asyncio.sleep(20)
        assert engine.calls == []
        await trainer.publish(0)
        await trainer.take()
        await trainer.finish()

    play(trains, engine=engine)
    assert engine.calls


def test_a_version_is_confirmed_once_the_engine_has_it_and_released_in_the_end() -> None:
    async def trains(trainer: Trainer, service: EnvironmentService, network: Network) -> None:
        await trainer.start()
        await trainer.publish(0)
        await trainer.take()
        assert (await trainer.client.policy()).held == []
        await trainer.publish(1)
        await trainer.take()
        await asyncio.sleep(1)
        assert (await trainer.client.policy()).held == [1]
        await asyncio.sleep(130)  # a statement counts for 120 s: it is repeated
        assert (await trainer.client.policy()).held == [1]
        await trainer.finish()
        while service.collector._closed is False:
            await asyncio.sleep(1)
        assert (await trainer.client.policy()).held == []

    play(trains)


def test_the_caller_is_told_of_every_group_that_was_taken() -> None:
    told: list[int] = []

    async def trains(trainer: Trainer, service: EnvironmentService, network: Network) -> None:
        await trainer.start()
        await trainer.publish(0)
        await trainer.take()
        await trainer.finish()

    play(trains, on_post=lambda groups: told.extend(group.number for group in groups), first_number=100)
    assert told == [100, 101, 102, 103, 104]


def test_the_service_leaves_when_the_run_is_finished() -> None:
    async def trains(trainer: Trainer, service: EnvironmentService, network: Network) -> None:
        await trainer.start()
        await trainer.publish(0)
        await trainer.take()
        await trainer.finish()
        await asyncio.sleep(2)
        envs = (await trainer.client._http.get("/envs")).json()["envs"]
        assert [env["connected"] for env in envs] == [False]

    play(trains)


@pytest.mark.parametrize("lag", [0, 2])
def test_a_run_that_was_finished_before_the_service_came_is_neither_loaded_nor_its_end(lag: int) -> None:
    """Its last adapter may be gone; the next trainer is waited for, and its end is the service's."""
    network = Network()

    async def first(trainer: Trainer, service: EnvironmentService, network: Network) -> None:
        await trainer.start()
        await trainer.publish(3)
        await trainer.take()
        await trainer.finish()

    async def second(trainer: Trainer, service: EnvironmentService, network: Network) -> None:
        await asyncio.sleep(100)
        assert service._env_id is not None, "it is there"
        assert engine.published == [] and engine.calls == []
        await trainer.client.register(
            batch_size=20, groups_per_update=GROUPS, max_policy_lag=0, takeover=True
        )
        await asyncio.sleep(5)
        assert engine.published == []
        await trainer.publish(4)
        assert versions(await trainer.take()) == [4] * GROUPS
        await trainer.finish()

    play(first, trainer={"lag": lag}, network=network)
    engine = saying("ja")
    service, _ = play(second, trainer={"run": "r2"}, network=network, engine=engine)
    assert service.report["versions"] == [4]


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("lag", [0, 2])
def test_a_service_that_comes_before_a_new_trainers_first_version_does_not_load_the_old_one(
    lag: int, ends: bool
) -> None:
    """Whether the trainer before it finished or was killed: its weights are no longer wanted, or gone."""
    engine = saying("ja")

    async def old(network: Network) -> None:
        trainer = Trainer(network, lag=lag)
        await trainer.start()
        await trainer.publish(3)
        if ends:
            await trainer.finish()
        await trainer.client.close()

    async def new(trainer: Trainer, service: EnvironmentService, network: Network) -> None:
        await old(network)
        await trainer.start(takeover=True, num_steps=7)
        shown = await trainer.client.policy()
        assert (shown.version, shown.superseded) == (3, True), "the new one goes on counting from it"
        await asyncio.sleep(100)
        assert service._env_id is not None, "it is there"
        assert engine.published == [] and engine.calls == []
        await trainer.publish(4)
        assert versions(await trainer.take()) == [4] * GROUPS
        await trainer.finish()

    service, _ = play(new, trainer={"run": "r2", "lag": lag}, engine=engine)
    assert service.report["versions"] == [4]


@pytest.mark.parametrize("lag", [0, 2])
def test_a_running_service_plays_nothing_more_of_a_trainer_that_was_replaced(lag: int) -> None:
    """And what that one still says, once its last update is over, ends or moves nothing."""
    engine = saying("ja")

    async def trains(trainer: Trainer, service: EnvironmentService, network: Network) -> None:
        old = Trainer(network, lag=lag, run="old")
        await old.start()
        await old.publish(3)
        await old.take()
        await trainer.start(takeover=True, num_steps=7)
        await asyncio.sleep(10)  # what was under way has come, or was given up
        while await trainer.client.batch(groups=1) is not None:
            pass
        calls = len(engine.calls)
        await asyncio.sleep(100)
        assert len(engine.calls) == calls
        assert (await trainer.client.status())["queue_size"] == 0
        for late in (old.publish(4), old.finish()):
            with pytest.raises(ServerError, match=r"409.*replaced"):
                await late
        await asyncio.sleep(100)
        await trainer.publish(4)
        assert versions(await trainer.take()) == [4] * GROUPS
        await trainer.finish()
        await old.client.close()

    service, _ = play(trains, trainer={"run": "new", "lag": lag}, engine=engine)
    assert service.report["versions"] == [3, 4]


@pytest.mark.parametrize("says", ["follow", "leave"])
def test_nothing_is_said_for_another_environment_that_has_the_number_now(says: str) -> None:
    async def work() -> None:
        network = Network()
        trainer, other = Trainer(network), Trainer(network)
        follower = Follower(saying("ja"), URL)
        membership = Membership("one", follower, max_token_length=64, group_size=4)
        async with AsyncBatchClient(URL, transport=network) as client:
            await trainer.start()
            await membership.register(client)
            network.start()
            await trainer.start()
            registered = await other.client.register_env(
                desired_name="other", max_token_length=64, group_size=4
            )
            assert registered["env_id"] == membership.env_id == 0
            await other.client.policy(env_id=0, holding=[7])
            follower.version = 3
            if says == "follow":
                await follower.follow(client, membership.env_id, membership.registration)
            else:
                await membership.leave(client)
            shown = (await other.client._http.get("/envs")).json()["envs"]
            assert [(env["wandb_name"], env["connected"]) for env in shown] == [("other_0", True)]
            assert (await other.client.policy()).held == [7]
        for one in (trainer, other):
            await one.client.close()

    run_moved(work())


def test_a_service_that_comes_while_another_process_of_the_trainer_registers_follows_it() -> None:
    async def trains(trainer: Trainer, service: EnvironmentService, network: Network) -> None:
        await trainer.start()
        await trainer.publish(3)
        await trainer.start()  # each process of some trainers does, with the same settings
        assert versions(await trainer.take()) == [3] * GROUPS
        await trainer.finish()

    play(trains, trainer={"lag": 0})


def test_a_trainer_that_publishes_the_finished_runs_last_version_again_is_followed() -> None:
    async def trains(trainer: Trainer, service: EnvironmentService, network: Network) -> None:
        await trainer.start()
        await trainer.publish(3)
        await asyncio.sleep(10)
        await trainer.take()
        await trainer.finish()

    async def again(trainer: Trainer, service: EnvironmentService, network: Network) -> None:
        await asyncio.sleep(10)
        await trains(trainer, service, network)

    _, network = play(trains, trainer={"lag": 1})
    service, _ = play(again, trainer={"lag": 1}, network=network)
    assert service.report["versions"] == [3]


def test_groups_that_the_trainer_lost_are_played_again() -> None:
    async def trains(trainer: Trainer, service: EnvironmentService, network: Network) -> None:
        await trainer.start()
        await trainer.publish(0)
        batch = await trainer.client.batch(groups=GROUPS, wait_seconds=60, lease_seconds=60)
        assert batch is not None
        assert batch.batch_id is not None
        await trainer.client.nack(batch.batch_id, reason="out of memory")
        again = await trainer.take()
        assert [g.tokens for g in again] == [g.tokens for g in batch.groups], "the same groups, not new ones"
        await trainer.finish()

    play(trains)


def test_two_services_make_one_batch_together() -> None:
    network = Network()
    services = [service_of(network, name=name, seed=seed) for seed, name in enumerate(("one", "two"))]

    async def all_of_it() -> list[ScoredDataGroup]:
        trainer = Trainer(network)
        running = [asyncio.create_task(service.run()) for service in services]
        await trainer.start()
        await asyncio.sleep(3)
        await trainer.publish(0)
        groups = await trainer.take()
        await trainer.finish()
        await asyncio.gather(*running)
        await trainer.client.close()
        return groups

    groups = run_moved(all_of_it())
    assert {group.env_id for group in groups} == {0, 1}
    assert sum(service.report["posted"] for service in services) <= GROUPS + 1, "shares are rounded up"


def test_services_share_a_batch_by_weight_and_a_minimum_holds_when_they_play_ahead() -> None:
    """Exactly 8 groups a version, 3 to 1; then batches of 8, of which the second gets half."""
    network = Network()
    one = service_of(network, name="one", weight=3.0)
    two = service_of(network, name="two", seed=1, min_batch_allocation=0.5)

    async def all_of_it() -> tuple[Counter[str], list[Counter[str]]]:
        trainer = Trainer(network)
        running = [asyncio.create_task(service.run()) for service in (one, two)]
        await trainer.start(groups_per_update=8)
        await asyncio.sleep(3)
        await trainer.publish(0)
        await asyncio.sleep(3)
        names = {
            env["env_id"]: env["name"] for env in (await trainer.client._http.get("/envs")).json()["envs"]
        }

        def shares(groups: list[ScoredDataGroup]) -> Counter[str]:
            return Counter(names[group.env_id or 0] for group in groups)

        exact = shares(await trainer.take(8))
        trainer.run = "r2"
        await trainer.client.register(takeover=True, batch_size=32, num_steps=-1)
        await trainer.publish(1)
        batches = []
        for _ in range(4):
            batch = await trainer.client.batch(wait_seconds=600)
            assert batch is not None
            batches.append(shares(batch.groups))
        await trainer.finish()
        await asyncio.gather(*running)
        await trainer.client.close()
        return exact, batches

    exact, batches = run_moved(all_of_it())
    assert exact == {"one": 6, "two": 2}
    assert all(batch["two"] >= 4 for batch in batches), batches


# -- ahead ---------------------------------------------------------------------------------------------------


def queued(network: Network, trainer: Trainer) -> Callable[[], Awaitable[int]]:
    async def ask() -> int:
        return int((await trainer.client.status())["queue_size"])

    return ask


@pytest.mark.parametrize(("lag", "ahead", "most"), [(None, 3, 3 * GROUPS), (None, 1, GROUPS), (1, 3, GROUPS)])
def test_with_a_lag_a_few_batches_are_played_ahead_and_no_more(
    lag: int | None, ahead: int, most: int
) -> None:
    async def trains(trainer: Trainer, service: EnvironmentService, network: Network) -> None:
        ask = queued(network, trainer)
        await trainer.start()
        await trainer.publish(0)
        await asyncio.sleep(20)
        assert await ask() == most
        await trainer.take()
        await asyncio.sleep(20)
        assert await ask() == most
        await trainer.finish()

    service, _ = play(trains, trainer={"lag": lag}, max_batches_ahead=ahead)
    report = service.report["collector"]
    assert report["in_flight"] == 0
    assert service.report["posted"] == most + GROUPS
    assert report["delivered"] == service.report["posted"] + service.report["unposted"]


def test_a_trainer_of_the_original_api_counts_sequences_and_steps() -> None:
    """It registers without groups or lag, publishes no policy and ends after its steps."""
    took = []

    async def trains(trainer: Trainer, service: EnvironmentService, network: Network) -> None:
        await trainer.start(groups_per_update=None, max_policy_lag=None, batch_size=8, num_steps=3)
        while len(took) < 3:
            batch = await trainer.client.batch()
            await asyncio.sleep(1)
            if batch is not None:
                took.append(batch.groups)

    service, _ = play(trains, network=Original())
    assert [sum(len(group.tokens) for group in groups) for groups in took] == [8, 8, 8]
    assert service.version is None


def test_what_is_finished_is_posted_together() -> None:
    async def trains(trainer: Trainer, service: EnvironmentService, network: Network) -> None:
        await trainer.start(groups_per_update=50)
        await trainer.publish(0)
        await trainer.take(50)
        await trainer.finish()

    service, network = play(trains, trainer={"lag": None}, concurrency=80, max_batches_ahead=1)
    posts = network.calls["/scored_data"] + network.calls["/scored_data_list"]
    assert posts <= service.report["posted"] / 4


def test_a_trainer_that_comes_back_with_other_wishes_gets_them() -> None:
    async def trains(trainer: Trainer, service: EnvironmentService, network: Network) -> None:
        await trainer.start(max_policy_lag=None)
        await trainer.publish(0)
        await trainer.take()
        await trainer.client.register(
            takeover=True, batch_size=20, groups_per_update=GROUPS, max_policy_lag=0, num_steps=-1
        )
        trainer.run = "r2"
        await trainer.publish(1)
        groups = await trainer.take()
        assert versions(groups) == [1] * GROUPS
        await trainer.finish()

    play(trains)


@pytest.mark.parametrize("kind", [Network, Original])
def test_a_trainer_that_comes_back_with_larger_batches_gets_them(kind: type[Network]) -> None:
    """What was enough for three of the old batches is not enough for one of the new ones."""
    took = []

    async def trains(trainer: Trainer, service: EnvironmentService, network: Network) -> None:
        fields = {"groups_per_update": None, "max_policy_lag": None, "num_steps": 2}
        for batch_size in (8, 80):
            if took:
                await asyncio.sleep(10)  # the queue is full
            await trainer.client.register(takeover=True, batch_size=batch_size, **fields)
            async with asyncio.timeout(600):
                while (batch := await trainer.client.batch()) is None:
                    await asyncio.sleep(1)
            took.append(batch.sequences)

    play(trains, network=kind())
    assert took == [8, 80]


def test_a_trainer_may_come_back_with_another_lag_and_without_groups() -> None:
    async def trains(trainer: Trainer, service: EnvironmentService, network: Network) -> None:
        ask = queued(network, trainer)
        await trainer.start()
        await trainer.publish(0)
        for fields, most in (
            ({"groups_per_update": GROUPS, "max_policy_lag": 2}, 2 * GROUPS),
            ({"groups_per_update": GROUPS, "max_policy_lag": 3}, 3 * GROUPS),
            ({"groups_per_update": None, "max_policy_lag": None, "batch_size": 40}, 30),
        ):
            await trainer.client.register(takeover=True, **{"batch_size": 20, "num_steps": -1, **fields})
            await asyncio.sleep(20)
            assert await ask() == most
        await trainer.finish()

    play(trains, trainer={"lag": 1})


# -- evaluation ----------------------------------------------------------------------------------------------


def test_no_evaluation_is_skipped_when_the_step_jumps() -> None:
    """Every 4 steps; the trainer takes one batch, then three at once, then eight."""
    results: list[tuple[int, EvalResult]] = []
    held: list[int] = []

    def says(prompt: tuple[int, ...], params: Any, number: int) -> list[int]:
        if params.temperature == 0:
            held.append(number)
        return [*b"ja", 258]

    async def trains(trainer: Trainer, service: EnvironmentService, network: Network) -> None:
        await trainer.start()
        await trainer.publish(0)
        for jump in (1, 3, 8):
            for _ in range(jump):
                await trainer.take()
            await asyncio.sleep(2)
        await trainer.finish()

    evaluation = Evaluation(every=4, episodes=6, on_result=lambda *found: results.append(found))
    service, _ = play(
        trains,
        trainer={"lag": None},
        engine=ScriptedEngine(says),
        evaluation=evaluation,
    )
    steps = [step for step, _ in results]
    spans = [step // 4 for step in steps]
    assert steps[0] == 0 and {1, 3} <= set(spans) and len(spans) == len(set(spans)), steps
    assert all(result.episodes == 6 and result.valid == 1 for _, result in results)
    assert service.report["evaluations"] == results
    assert held, "evaluated greedily"
    assert len({result.mean for _, result in results}) == 1, "the same starts each time"


@pytest.mark.parametrize(
    ("step", "last", "due"),
    [
        (0, None, True),
        (7, None, True),
        (3, 0, False),
        (4, 0, True),
        (9, 3, True),
        (8, 7, True),
        (7, 4, False),
        (0, 8, True),  # the step went back: the server was started anew
        (3, 8, True),
    ],
)
def test_an_evaluation_is_due_at_every_multiple_reached_or_passed(
    step: int, last: int | None, due: bool
) -> None:
    """The original's test, ``last % 4 > step % 4``, misses the jump from 3 to 7 and more."""
    assert Evaluation(every=4).due(step, last) is due


def test_an_evaluation_waits_for_the_first_version_and_for_an_engine_that_recovers() -> None:
    results: list[tuple[int, EvalResult]] = []

    def faults(number: int) -> Any:
        return EngineError("restarting") if asyncio.get_running_loop().time() < 20 else None

    async def trains(trainer: Trainer, service: EnvironmentService, network: Network) -> None:
        await trainer.start(starting_step=7)
        await asyncio.sleep(5)
        assert service.report["evaluations"] == []
        await trainer.publish(0)
        await trainer.take()
        await trainer.finish()

    evaluation = Evaluation(every=4, episodes=3, on_result=lambda *found: results.append(found))
    play(trains, engine=saying("ja", faults=faults), evaluation=evaluation)
    assert [step for step, _ in results][:1] == [7]


class Dwelling(ScriptedEngine):
    """An engine that takes half a minute for each greedy turn."""

    def __init__(self) -> None:
        super().__init__(lambda prompt, params, number: [*b"ja", 258])
        self.greedy = 0

    async def generate(self, prompt_ids: Any, params: Any, n: int = 1, **options: Any) -> Any:
        if params.temperature == 0:
            self.greedy += 1
            await asyncio.sleep(30)
        return await super().generate(prompt_ids, params, n, **options)


@pytest.mark.parametrize("begun", [True, False])
def test_a_run_that_ends_waits_for_the_evaluation_at_its_last_step(begun: bool) -> None:
    engine = Dwelling()

    async def trains(trainer: Trainer, service: EnvironmentService, network: Network) -> None:
        await trainer.start()
        await trainer.publish(0)
        await trainer.take()
        before = engine.greedy
        await trainer.publish(1)
        while begun and engine.greedy == before:
            await asyncio.sleep(1)
        await trainer.finish()

    service, _ = play(trains, engine=engine, evaluation=Evaluation(every=1, episodes=2))
    assert [step for step, _ in service.report["evaluations"]] == [0, 1]
    assert service.report["versions"] == [0, 1]


def test_the_last_evaluation_can_be_cancelled_and_needs_no_server_that_has_gone() -> None:
    engine = Dwelling()
    network = Network()

    async def story() -> tuple[float, float]:
        trainer = Trainer(network)
        services = [service_of(network, engine, evaluation=Evaluation(every=1, episodes=2)) for _ in "ab"]
        running = [asyncio.create_task(service.run()) for service in services]
        await trainer.start()
        await trainer.publish(0)
        await trainer.take()
        while engine.greedy < 6:  # two of each at step 0, and those at step 1 have begun
            await asyncio.sleep(1)
        await trainer.finish()
        await asyncio.sleep(5)
        assert not any(task.done() for task in running)
        now = asyncio.get_running_loop().time
        since = now()
        running[0].cancel()
        await asyncio.wait(running[:1])
        cancelled = now() - since
        network.up = False
        await asyncio.wait(running[1:])
        await running[1]
        await trainer.client.close()
        return cancelled, now() - since

    cancelled, gone = run_moved(story())
    assert cancelled < 5
    assert gone < 200


@pytest.mark.parametrize("field", ["every", "episodes"])
def test_an_evaluation_that_cannot_be_made_is_named(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} of an evaluation must be >= 1, got 0"):
        Evaluation(**{"every": 1, field: 0})


# -- going on ------------------------------------------------------------------------------------------------


def test_a_service_goes_on_where_it_was(tmp_path: Path) -> None:
    """Numbers decide starts, chance and samples; the second service plays none of the first one's."""
    told: list[int] = []
    state = tmp_path / "folder" / "service.json"
    network = Network()

    async def trains(trainer: Trainer, service: EnvironmentService, network: Network) -> None:
        if not told:
            await trainer.start()
            await trainer.publish(0)
            await trainer.take()
        else:
            await trainer.publish(1)
            await trainer.take()
        await asyncio.sleep(1)
        if len(told) > GROUPS:
            await trainer.finish()
        else:
            raise InterruptedError

    options: dict[str, Any] = {
        "network": network,
        "state": state,
        "evaluation": Evaluation(every=100, episodes=2),
        "on_post": lambda groups: told.extend(group.number for group in groups),
    }
    with pytest.raises(InterruptedError):
        play(trains, **options)
    assert sorted(told) == list(range(GROUPS))
    service, _ = play(trains, **options)
    assert sorted(told) == list(range(2 * GROUPS))
    assert service.report["evaluations"] == [], "the one at the beginning was made before"
    assert [path.name for path in state.parent.iterdir()] == ["service.json"]


@pytest.mark.parametrize(
    ("content", "options", "match"),
    [
        ("{}", {}, "not the state of a service: 'next_number'"),
        ("broken", {}, "not the state of a service"),
        (None, {"seed": 1}, "a service with seed 0, not 1"),
    ],
)
def test_a_state_that_is_not_this_services_is_refused(
    tmp_path: Path, content: str | None, options: dict[str, Any], match: str
) -> None:
    state = tmp_path / "state.json"
    first = service_of(Network(), state=state)
    first._position.posted([3])
    if content is not None:
        state.write_text(content)
    with pytest.raises(ConfigError, match=match):
        service_of(Network(), state=state, **options)


# -- outages -------------------------------------------------------------------------------------------------


def test_the_server_may_come_late() -> None:
    async def trains(trainer: Trainer, service: EnvironmentService, network: Network) -> None:
        network.up = False
        await asyncio.sleep(100)
        network.up = True
        await trainer.start()
        await trainer.publish(0)
        await trainer.take()
        await trainer.finish()

    play(trains)


def test_an_outage_in_the_middle_is_waited_for() -> None:
    async def trains(trainer: Trainer, service: EnvironmentService, network: Network) -> None:
        await trainer.start()
        await trainer.publish(0)
        network.up = False
        await asyncio.sleep(100)
        network.up = True
        await trainer.take()
        await trainer.finish()

    service, _ = play(trains)
    assert service.report["posted"] == GROUPS


def test_a_server_that_was_started_anew_is_told_again() -> None:
    async def trains(trainer: Trainer, service: EnvironmentService, network: Network) -> None:
        await trainer.start()
        await trainer.publish(0)
        await trainer.take()
        network.up = False
        await asyncio.sleep(60)
        network.start()
        await trainer.start()
        await trainer.publish(1)
        assert versions(await trainer.take()) == [1] * GROUPS
        await trainer.finish()

    service, network = play(trains)
    assert service.report["versions"] == [0, 1]


@pytest.mark.parametrize("version", [0, 1, 2])
def test_another_run_that_counts_from_below_is_refused_instead_of_waited_for(version: int) -> None:
    """Its numbers mean other weights than the engine has under them."""

    async def trains(trainer: Trainer, service: EnvironmentService, network: Network) -> None:
        await trainer.start()
        for number in range(3):
            await trainer.publish(number)
            await trainer.take()
        network.up = False
        await asyncio.sleep(60)
        network.start()
        other = Trainer(network, run="r2")
        await other.publish(version)
        await other.start()

    with pytest.raises(ConfigError, match=rf"version {version} of run 'r2'.* version 2 of run 'r1'"):
        play(trains)


def test_another_run_may_begin_with_the_base_that_both_have() -> None:
    async def trains(trainer: Trainer, service: EnvironmentService, network: Network) -> None:
        await trainer.start()
        await trainer.publish(0)
        network.start()
        other = Trainer(network, run="r2")
        for number in range(2):
            await other.publish(number)
            await other.start()
            assert versions(await other.take()) == [number] * GROUPS
        await other.finish()

    assert play(trains)[0].report["versions"] == [0, 1]


def test_an_engine_that_recovers_is_waited_for() -> None:
    def faults(number: int) -> Any:
        return EngineError("restarting") if asyncio.get_running_loop().time() < 20 else None

    async def trains(trainer: Trainer, service: EnvironmentService, network: Network) -> None:
        await trainer.start()
        await trainer.publish(0)
        await trainer.take()
        await trainer.finish()

    service, _ = play(trains, engine=saying("ja", faults=faults))
    failed = service.report["collector"]["failed"]["engine: EngineError"]
    assert failed >= 1
    assert service.report["posted"] == GROUPS


def ends_with(
    error: type[Exception],
    match: str,
    *,
    version: int = 0,
    policy: dict[str, Any] | None = None,
    register: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    async def trains(trainer: Trainer, service: EnvironmentService, network: Network) -> None:
        await trainer.start(**(register or {}))
        await trainer.publish(version, **(policy or {}))

    with pytest.raises(error, match=match):
        play(trains, **options)


def test_an_engine_that_stays_broken_ends_the_service_with_the_reason() -> None:
    engine = saying("ja", faults=lambda number: EngineError("no GPU left"))
    ends_with(CollectionFailed, "no GPU left", engine=engine)


def test_outages_that_an_engine_recovers_from_do_not_add_up() -> None:
    """There are more of them than may come in a row."""
    engine = ScriptedEngine(
        lambda prompt, params, number: [*b"ja", 258],
        faults=lambda number: EngineError("restarting") if broken else None,
    )
    broken = False

    def lost(service: EnvironmentService) -> int:
        return int(service.report["collector"]["failed"].get("engine: EngineError", 0))

    async def trains(trainer: Trainer, service: EnvironmentService, network: Network) -> None:
        nonlocal broken
        await trainer.start()
        await trainer.publish(0)
        for _ in range(OUTAGES + 1):
            await trainer.take()
            broken = True
            before = lost(service)
            async with asyncio.timeout(60):
                while lost(service) == before:
                    await trainer.client.batch(groups=GROUPS)
                    await asyncio.sleep(1)
            broken = False
            await asyncio.sleep(60)
        await trainer.finish()

    play(trains, trainer={"lag": None}, engine=engine, max_batches_ahead=1)


def test_another_tokenizer_is_refused_by_name() -> None:
    ends_with(
        TokenizerMismatch,
        "sha256:other.*samples those of bytes",
        policy={"tokenizer_fingerprint": "sha256:other"},
    )


def test_a_version_without_adapter_cannot_be_served() -> None:
    ends_with(ConfigError, "version 3 without an adapter", version=3, policy={"adapter_path": None})


def test_a_server_that_refuses_everything_ends_the_service_with_the_first_bad_place() -> None:
    ends_with(GroupRefused, "10", register={"max_token_len": 10})


def test_refused_groups_are_counted_and_replaced() -> None:
    longest = 36

    def says(prompt: tuple[int, ...], params: Any, number: int) -> list[int]:
        return [*(b"x" * 11 if number == 1 else b"j"), 258]

    async def trains(trainer: Trainer, service: EnvironmentService, network: Network) -> None:
        await trainer.start(max_token_len=longest)
        await trainer.publish(0)
        groups = await trainer.take()
        assert max(len(row) for group in groups for row in group.tokens) <= longest
        await trainer.finish()

    service, _ = play(trains, engine=ScriptedEngine(says), options={"turns": 1})
    assert service.report["posted"] == GROUPS
    assert sum(service.report["refused"].values()) == 1
    assert service.report["collector"]["delivered"] == GROUPS + 1


# -- thread --------------------------------------------------------------------------------------------------


def test_a_thread_stops_by_itself_even_without_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network()
    network.up = False
    monkeypatch.setattr(_service_thread, "STOP", 60.0)  # it is waited for so long at most
    service = service_of(network)
    with service.in_thread() as thread:
        assert thread.alive
    assert not thread.alive
    thread.stop()


def test_a_thread_raises_what_its_service_failed_with_and_interrupts_the_learner() -> None:
    go = threading.Event()

    async def fails() -> None:
        await asyncio.to_thread(go.wait, 30)
        raise EngineError("no GPU left")

    with pytest.raises(EngineError, match="no GPU left"), ServiceThread(fails):
        with pytest.raises(KeyboardInterrupt):
            go.set()
            threading.Event().wait(30)


def test_a_thread_whose_service_ended_by_itself_is_fine() -> None:
    async def ends() -> None:
        await asyncio.sleep(0)

    thread = ServiceThread(ends).start()
    thread.stop()
    assert thread.error is None


@pytest.mark.parametrize("options", [{"max_batches_ahead": 0}, {"group_size": 0}])
def test_arguments_that_cannot_work_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))} must be >= 1, got 0"):
        service_of(Network(), **options)


def test_a_token_in_the_url_is_told_to_nobody() -> None:
    assert without_token("http://x:secret@host:8000") == "http://host:8000"
    assert without_token("http://host:8000/under") == "http://host:8000/under"
