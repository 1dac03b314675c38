"""What grows with use has an end: reasons that trainers make up, environments that come and go."""

from __future__ import annotations

from pathlib import Path

from store_tools import NOW, PLAIN, add, add_env, crash, leased, make_store, registration, saved

from atropos_gym.batch_server.state.sqlite import SqliteStore
from atropos_gym.batch_server.state.tallies import MOST_NAMES


def test_reasons_that_a_trainer_makes_up_are_kept_apart_up_to_a_number() -> None:
    store = make_store(batch_size=4)
    for loss in range(2 * MOST_NAMES):
        add(store)
        assert store.nack(leased(store).batch_id, drop=True, reason=f"loss {loss}").state == "dropped"
    set_aside = store._tallies.set_aside
    assert len(set_aside) <= MOST_NAMES + 1 and set_aside.total() == 2 * MOST_NAMES
    assert set_aside["dropped by the trainer: loss 7"] == 1
    assert set_aside["dropped by the trainer"] == MOST_NAMES


def test_environments_that_have_left_cost_nothing_until_they_come_back() -> None:
    store = make_store(batch_size=4)
    gone = [add_env(store) for _ in range(50)]
    stays = add_env(store)
    for env_id in gone:
        store.disconnect_env(env_id)
    store.tick(NOW + 1)
    assert list(store._envs.live) == [stays]
    store.env_seen(gone[3], NOW + 2)
    store.tick(NOW + 2)
    assert set(store._envs.live) == {stays, gone[3]}
    assert len(store._envs.connected) == 2 and len(store._envs) == 51


def test_of_one_that_has_left_the_parts_and_the_queue_are_still_looked_at() -> None:
    store = make_store(batch_size=8)
    env_id = add_env(store)
    add(store, 2, env_id=env_id)
    store.env_seen(env_id, NOW)
    store.tick(NOW + 30)
    assert store.status()["queue_size"] == 0
    store.tick(NOW + 100)  # released: too old; and silent for less than the time-out
    assert store.status()["queue_size"] == 1
    store.tick(NOW + 1000)
    assert not store.envs()[0]["connected"] and env_id in store._envs.live
    assert store._envs.find(env_id) is not None
    add(store, 6)
    lease = leased(store, NOW + 1001)
    store.ack(lease.batch_id)
    store.tick(NOW + 1002)
    assert env_id not in store._envs.live


def test_an_unknown_number_has_no_name() -> None:
    store = make_store()
    env_id = add_env(store, desired_name="gsm8k")
    assert (store.env_name(env_id), store.env_name(env_id + 1), store.env_name(-1)) == ("gsm8k", None, None)


def test_a_sum_of_scores_that_is_infinite_outlives_its_process(tmp_path: Path) -> None:
    with SqliteStore(tmp_path / "store.sqlite", now=NOW) as store:
        store.register(registration(8), NOW)
        assert store.take(PLAIN, NOW) is None
        add(store, 4, env_id=add_env(store), scores=[1.7e308] * 4)
        saved(store)
        again = crash(store, tmp_path / "copy.sqlite")
    assert again.envs()[0]["score_mean"] is None and again.envs()[0]["groups_received"] == 1
    again.close()
