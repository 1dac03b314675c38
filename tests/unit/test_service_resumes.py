"""A service for days on end: killed and started anew, several at one server, trainers with new wishes."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from atropos_gym.batch_server.spool import Spool
from atropos_gym.errors import ConfigError, ServerError
from atropos_gym.rollout.curriculum import Progress
from atropos_gym.rollout.service import EnvironmentService
from atropos_gym.wire import ScoredDataGroup
from tests.unit.rollout_cases import run_moved, saying
from tests.unit.test_service import GROUPS, Network, Original, Trainer, play, service_of


class Killed(Exception):
    """The end of a process, as far as a test in one process can see it."""


class Deadly(Network):
    """A network on which the service's process ends at one of its posts, before or after it arrives."""

    at: int | None = None
    before = True
    posts = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        counts = request.url.path.startswith("/scored_data")
        self.posts += counts
        dies = counts and self.posts == self.at
        if dies and self.before:
            raise Killed
        response = await super().handle_async_request(request)
        if dies:
            raise Killed
        return response


def number_of(group: ScoredDataGroup) -> int:
    return int((group.group_overrides or {})["number"])


async def taken_to_the_end(trainer: Trainer, running: asyncio.Task[None]) -> list[ScoredDataGroup]:
    """What a trainer gets for its first two versions; then the run, and with it the service, ends."""
    groups = await trainer.take()
    await trainer.publish(1)
    groups += await trainer.take()
    await trainer.finish()
    await running
    await trainer.client.close()
    return groups


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("at", [1, 3])
def test_killed_at_a_post_and_started_again_nothing_is_lost_or_twice(
    tmp_path: Path, before: bool, at: int
) -> None:
    network = Deadly()
    network.at, network.before = at, before
    services = []

    async def story() -> list[ScoredDataGroup]:
        trainer = Trainer(network)
        await trainer.start()
        await trainer.publish(0)
        for _ in range(2):
            services.append(service_of(network, spool=tmp_path))
            if len(services) == 1:
                with pytest.raises(Killed):
                    await services[0].run()
        running = asyncio.create_task(services[1].run())
        return await taken_to_the_end(trainer, running)

    groups = run_moved(story())
    assert sorted(map(number_of, groups)) == list(range(2 * GROUPS))
    assert services[1].report["spool"]["posted_late"] == GROUPS - at + 1
    assert services[1].report["spool"]["waiting"] == 0
    assert json.loads((tmp_path / "service.json").read_text())["next_number"] == 2 * GROUPS


class Unanswered(Network):
    """A network that never brings the answer to the first post, whether or not that has arrived."""

    def __init__(self, *, arrives: bool) -> None:
        super().__init__()
        self.arrives = arrives
        self.posted = asyncio.Event()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if not request.url.path.startswith("/scored_data") or self.posted.is_set():
            return await super().handle_async_request(request)
        if self.arrives:
            await super().handle_async_request(request)
        self.posted.set()
        return await asyncio.Future()


@pytest.mark.parametrize("kept", ["state", "spool"])
@pytest.mark.parametrize("arrives", [True, False])
def test_cancelled_while_a_post_is_answered_it_never_plays_the_same_numbers_again(
    tmp_path: Path, arrives: bool, kept: str
) -> None:
    network = Unanswered(arrives=arrives)
    keeps = {"state": tmp_path / "service.json"} if kept == "state" else {"spool": tmp_path}

    async def story() -> list[ScoredDataGroup]:
        trainer = Trainer(network)
        await trainer.start()
        await trainer.publish(0)
        first = asyncio.create_task(service_of(network, **keeps).run())
        await network.posted.wait()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        second = service_of(network, **keeps)
        assert second.collector.next_number == GROUPS
        running = asyncio.create_task(second.run())
        return await taken_to_the_end(trainer, running)

    numbers = sorted(map(number_of, run_moved(story())))
    lost = 0 if arrives or kept == "spool" else GROUPS  # without a spool nobody else has them
    assert numbers == list(range(lost, lost + 2 * GROUPS))


@pytest.mark.parametrize("kept", [0, 2])
def test_killed_between_playing_and_saving_the_position_nothing_is_lost_or_twice(
    tmp_path: Path, kept: int
) -> None:
    """The position must not be ahead of the spool; where the spool is ahead, it counts."""

    class Dying(Spool):
        def keep(self, groups: Sequence[ScoredDataGroup]) -> Any:
            if not groups:  # only what was left is to be posted
                return super().keep(groups)
            super().keep(groups[:kept])
            raise Killed

    network = Network()

    async def story() -> list[ScoredDataGroup]:
        trainer = Trainer(network)
        await trainer.start()
        await trainer.publish(0)
        spool = Dying(tmp_path)
        first = service_of(network, spool=spool)
        if kept:  # the kill came before that
            first._position._save = lambda: None  # type: ignore[method-assign]
        with pytest.raises(Killed):
            await first.run()
        running = asyncio.create_task(service_of(network, spool=tmp_path).run())
        return await taken_to_the_end(trainer, running)

    groups = run_moved(story())
    assert sorted(map(number_of, groups)) == list(range(2 * GROUPS))


def test_the_spool_of_another_process_is_refused(tmp_path: Path) -> None:
    other = Spool(tmp_path)
    with pytest.raises(ConfigError, match="is used by another process"):
        run_moved(service_of(Network(), spool=tmp_path).run())
    other.close()


def test_a_curriculum_goes_on_where_it_was(tmp_path: Path) -> None:
    asked: list[int] = []
    turns: list[int] = []

    def harder(step: int, progress: Progress) -> dict[str, int]:
        asked.append(step)
        return {"turns": 1 + step}

    def told(groups: Sequence[Any]) -> None:
        turns.extend(sum(len(row.turns) for row in group.episodes[0].rows) for group in groups)

    network = Network()
    options: dict[str, Any] = {
        "network": network, "state": tmp_path / "s.json", "curriculum": harder, "on_post": told,
    }  # fmt: skip

    async def first(trainer: Trainer, service: EnvironmentService, network: Network) -> None:
        await trainer.start()
        for version in range(2):
            await trainer.publish(version)
            await trainer.take()
        await asyncio.sleep(5)
        raise InterruptedError

    async def second(trainer: Trainer, service: EnvironmentService, network: Network) -> None:
        await trainer.publish(2)
        await trainer.take()
        await trainer.finish()

    with pytest.raises(InterruptedError):
        play(first, **options)
    assert turns == [1] * GROUPS + [2] * GROUPS
    assert asked == [0, 1, 2]
    play(second, **options)
    assert turns[2 * GROUPS :] == [3] * GROUPS
    assert asked[:3] == [0, 1, 2] and 2 not in asked[3:], "what it said of step 2 holds again"


def test_a_trainer_without_a_policy_may_register_again_for_longer_or_shorter() -> None:
    """The service goes by what the trainer wants now, not by what it wanted when the service came."""

    async def trains(trainer: Trainer, service: EnvironmentService, network: Network) -> None:
        fields = {"groups_per_update": None, "max_policy_lag": None, "batch_size": 8}
        await trainer.start(**fields, num_steps=50)
        steps = 0
        while steps < 4:
            await asyncio.sleep(1)
            steps += await trainer.client.batch() is not None
        await trainer.client.register(**fields, num_steps=4, takeover=True)

    service, _ = play(trains)
    assert service.version is None


class Forgetful(Original):
    """The original after a restart: it fails where it does not know an environment's number."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        if request.url.path == "/status-env" and response.status_code == 404:
            return httpx.Response(500, text="Internal Server Error", request=request)
        return response


def test_an_original_server_that_was_started_anew_is_told_again() -> None:
    took: list[int] = []

    async def trains(trainer: Trainer, service: EnvironmentService, network: Network) -> None:
        fields = {"groups_per_update": None, "max_policy_lag": None, "batch_size": 8, "num_steps": 3}
        for steps in (1, 3):
            await trainer.start(**fields)
            done = 0
            while done < steps:
                await asyncio.sleep(1)
                if (batch := await trainer.client.batch()) is not None:
                    took.append(batch.sequences)
                    done += 1
            if steps == 1:
                network.up = False
                await asyncio.sleep(20)
                network.start()

    play(trains, network=Forgetful())
    assert took == [8] * 4


class Failing(Original):
    """A server that fails for good as soon as it is asked for the state of its queue."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        if request.url.path == "/status-env":
            return httpx.Response(500, text="Internal Server Error", request=request)
        return response


def test_a_server_that_fails_for_good_is_not_asked_for_ever() -> None:
    network = Failing()

    async def trains(trainer: Trainer, service: EnvironmentService, network: Network) -> None:
        await trainer.start(groups_per_update=None, max_policy_lag=None, batch_size=8)

    with pytest.raises(ServerError, match="500"):
        play(trains, network=network)
    assert network.calls["/register-env"] < 20


def test_a_number_that_another_service_has_got_at_a_new_server_is_given_up() -> None:
    network = Network()
    first, second = (service_of(network, name=name) for name in ("first", "second"))

    async def story() -> dict[int, str]:
        trainer = Trainer(network)
        running = [asyncio.create_task(first.run())]
        await trainer.start()
        await trainer.publish(0)
        await trainer.take()
        network.start()
        await trainer.start()
        await trainer.client.register_env(max_token_length=99, desired_name="other", group_size=4)
        running.append(asyncio.create_task(second.run()))
        await trainer.publish(0)
        await asyncio.sleep(10)
        await trainer.take()
        envs = (await trainer.client._http.get("/envs")).json()["envs"]
        await trainer.finish()
        await asyncio.gather(*running)
        await trainer.client.close()
        return {env["env_id"]: env["name"] for env in envs}

    names = run_moved(story())
    assert sorted(names.values()) == ["first", "other", "second"]
    assert (names[first._env_id or 0], names[second._env_id or 0]) == ("first", "second")


@pytest.mark.parametrize("lag", [0, 2])
def test_two_services_of_one_name_get_numbers_of_their_own_at_a_new_server(lag: int) -> None:
    """The second one registers first there, and gets the number and the name that the first one had."""
    network = Network()
    engines = [saying("ja"), saying("nein")]
    first, second = (service_of(network, engine, seed=seed) for seed, engine in enumerate(engines))

    async def story() -> tuple[list[Any], list[ScoredDataGroup]]:
        trainer = Trainer(network, lag=lag)
        running = []
        await trainer.start()
        await trainer.publish(0)
        for service in (first, second):
            running.append(asyncio.create_task(service.run()))
            await asyncio.sleep(3)
        assert (first._env_id, second._env_id) == (0, 1)
        network.up = False
        await asyncio.sleep(1)  # both are between two tries when it is up again
        network.start()
        await trainer.start()
        known = await trainer.client.register_env(
            max_token_length=99, desired_name=first.name, group_size=4, weight=0.0
        )
        assert known["wandb_name"] == f"{first.name}_0"
        await trainer.publish(0)
        await asyncio.sleep(10)
        envs = (await trainer.client._http.get("/envs")).json()["envs"]
        groups = await trainer.take(2 * GROUPS if lag else GROUPS)
        await trainer.finish()
        await asyncio.gather(*running)
        await trainer.client.close()
        return [env["env_id"] for env in envs], groups

    numbers, groups = run_moved(story())
    assert numbers == [0, 1, 2]
    assert sorted((first._env_id or 0, second._env_id or 0)) == [1, 2], "0 is another's of the same name"
    said = {first._env_id: b"ja", second._env_id: b"nein"}
    for group in groups:
        assert bytes(group.tokens[0][-1 - len(said[group.env_id]) : -1]) == said[group.env_id]


# -- several -------------------------------------------------------------------------------------------------


def shares(
    services: Callable[[Network], list[EnvironmentService]], batches: int, **register: Any
) -> list[Counter[str]]:
    """Groups of each batch by the name of their service, once all services are there."""
    network = Network()
    made = services(network)

    async def story() -> list[Counter[str]]:
        trainer = Trainer(network, lag=None)
        running = [asyncio.create_task(service.run()) for service in made]
        await trainer.start(groups_per_update=None, **register)
        await asyncio.sleep(2)
        await trainer.publish(0)
        await asyncio.sleep(5)
        envs = (await trainer.client._http.get("/envs")).json()["envs"]
        names = {env["env_id"]: env["name"] for env in envs}
        found = []
        for _ in range(batches):
            batch = await trainer.client.batch(wait_seconds=600)
            assert batch is not None
            found.append(Counter(names[group.env_id or 0] for group in batch.groups))
            await asyncio.sleep(1)
        await trainer.finish()
        await asyncio.gather(*running)
        await trainer.client.close()
        return found

    return run_moved(story())


def test_services_that_play_ahead_keep_to_their_weights() -> None:
    def services(network: Network) -> list[EnvironmentService]:
        weights = {"one": 1.0, "two": 2.0, "five": 5.0}
        return [
            service_of(network, name=name, seed=seed, weight=weight)
            for seed, (name, weight) in enumerate(weights.items())
        ]

    total = sum(shares(services, 12, batch_size=32), Counter())
    assert sum(total.values()) == 96
    for name, share in (("one", 12), ("two", 24), ("five", 60)):
        assert abs(total[name] - share) <= 8, total


def test_a_slow_service_with_a_large_weight_keeps_no_trainer_waiting() -> None:
    def services(network: Network) -> list[EnvironmentService]:
        fast = service_of(network, name="fast", weight=1.0)
        slow = service_of(network, name="slow", weight=9.0, seed=1)

        async def never(*arguments: Any) -> None:
            await asyncio.Event().wait()

        slow._post = never  # type: ignore[method-assign]
        return [fast, slow]

    assert shares(services, 4, batch_size=16) == [Counter(fast=4)] * 4


def test_a_minimum_is_filled_although_the_queue_is_full() -> None:
    def services(network: Network) -> list[EnvironmentService]:
        return [
            service_of(network, name="first"),
            service_of(network, name="second", seed=1, weight=0.0, min_batch_allocation=0.5),
        ]

    assert all(batch["second"] >= 4 for batch in shares(services, 6, batch_size=32)[1:])
