"""The store's promises, without HTTP. Times are passed in; nobody waits.

1. what was accepted is delivered once, or again only where a lease ran out or was given back,
2. oldest first; what comes back takes its old place,
3. a batch counts one step, at its first delivery,
4. what no trainer can use is set aside and counted, never lost in silence,
5. environments that fall silent hold nobody up.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from store_model import LIMITS, StoreModel
from store_tools import (
    LEASE,
    NOW,
    PLAIN,
    add,
    add_env,
    leased,
    make_store,
    names,
    publish,
    registration,
    taken,
    version,
)

from atropos_gym.batch_server.limits import Limits
from atropos_gym.batch_server.state.intake import Incoming
from atropos_gym.batch_server.state.leases import REMEMBERED
from atropos_gym.batch_server.state.refusals import Conflict, Refused, Unknown
from atropos_gym.batch_server.state.stock import Request
from atropos_gym.batch_server.store import MemoryStore
from atropos_gym.wire import EnvRegistration, PolicyUpdate, ScoredDataGroup

# Order and steps.


def test_first_in_first_out_and_one_step_a_batch() -> None:
    store = make_store(batch_size=4)
    added = [add(store) for _ in range(3)]
    assert store.status()["queue_size"] == 3
    assert [taken(store) for _ in range(4)] == [[added[0]], [added[1]], [added[2]], None]
    assert store.status()["current_step"] == 3


def test_a_batch_that_never_arrived_goes_back_to_the_head_and_counts_no_step() -> None:
    store = make_store()
    added = [add(store) for _ in range(4)]
    lease = store.take(PLAIN, NOW)
    assert names(lease) == added[:2]
    assert lease is not None
    store.put_back(lease)
    assert store.status()["current_step"] == 0
    again = store.take(LEASE, NOW)
    assert names(again) == added[:2]
    assert again is not None and (again.delivery, again.step) == (1, 1)


def test_a_batch_that_never_arrived_keeps_its_step_when_a_later_one_did() -> None:
    store = make_store()
    for _ in range(4):
        add(store)
    first, second = store.take(PLAIN, NOW), leased(store)
    assert first is not None
    store.put_back(first)
    assert second.step == 2
    again = leased(store)
    assert (again.step, again.first, store.status()["current_step"]) == (1, False, 2)


# Leases.


def test_an_ack_ends_a_lease_and_can_be_repeated() -> None:
    store = make_store()
    add(store), add(store)
    lease = leased(store)
    assert store.status()["leased_groups"] == 2
    assert store.ack(lease.batch_id).step_at_end == 1
    add(store), add(store)
    taken(store)
    assert store.ack(lease.batch_id).step_at_end == 1, "the same answer, though the step has moved on"
    assert store.status()["leased_groups"] == 0


def test_an_expired_lease_is_a_nack() -> None:
    store = make_store()
    added = [add(store) for _ in range(2)]
    first = leased(store, seconds=60)
    store.tick(NOW + 59.9)
    assert store.take(LEASE, NOW + 59.9) is None
    store.tick(NOW + 60)
    second = store.take(LEASE, NOW + 60)
    assert names(second) == added
    assert second is not None
    assert second.batch_id != first.batch_id
    assert (second.delivery, second.step) == (2, first.step)
    assert store.status()["current_step"] == 1


def test_an_expired_lease_still_acks_while_no_one_has_its_groups() -> None:
    store = make_store()
    add(store), add(store)
    lease = leased(store)
    store.tick(NOW + 61)
    assert store.ack(lease.batch_id).state == "acked"
    assert taken(store) is None, "acked groups are not delivered again"


@pytest.mark.parametrize("why", ["handed out too often", "older than the lag"])
def test_an_expired_lease_still_acks_when_its_groups_were_set_aside(why: str) -> None:
    """A learner that slept has learned them all the same, and nobody else has."""
    store = make_store(
        limits=Limits(max_deliveries=1 if why == "handed out too often" else 5), max_policy_lag=0
    )
    publish(store, 1)
    add(store, **version(1)), add(store, **version(1))
    lease = leased(store)
    store.tick(NOW + 61)
    if why == "older than the lag":
        publish(store, 2)
    assert store.status()["queue_size"] == 0
    assert store.ack(lease.batch_id) is store.ack(lease.batch_id) is lease
    with pytest.raises(Conflict):
        store.extend(lease.batch_id, 60, NOW + 61)


def test_an_expired_lease_cannot_be_acked_once_its_groups_are_leased_again() -> None:
    store = make_store()
    add(store), add(store)
    old = leased(store)
    store.tick(NOW + 61)
    new = leased(store, now=NOW + 61)
    for late in (
        lambda: store.ack(old.batch_id),
        lambda: store.nack(old.batch_id, drop=True),
        lambda: store.extend(old.batch_id, 60, NOW + 61),
    ):
        with pytest.raises(Conflict, match="ran out and its groups went to someone else"):
            late()
    store.ack(new.batch_id)
    with pytest.raises(Conflict):
        store.ack(old.batch_id)


def test_an_expired_lease_can_be_given_back_or_dropped_while_no_one_has_its_groups() -> None:
    store = make_store()
    add(store), add(store)
    first = leased(store)
    store.tick(NOW + 61)
    assert store.nack(first.batch_id, drop=False).state == "requeued"
    with pytest.raises(Conflict, match="was requeued: it cannot be extended"):
        store.extend(first.batch_id, 60, NOW + 61)
    second = leased(store, now=NOW + 61)
    store.tick(NOW + 122)
    assert store.nack(second.batch_id, drop=True).state == "dropped"
    assert store.status()["queue_size"] == 0
    with pytest.raises(Conflict, match="was dropped: it cannot be given back"):
        store.nack(second.batch_id, drop=False)


def test_extend_keeps_a_lease_and_takes_an_expired_one_back() -> None:
    store = make_store()
    add(store), add(store)
    lease = leased(store, seconds=60)
    assert store.extend(lease.batch_id, 60, NOW + 50).expires_at == NOW + 110
    store.tick(NOW + 109)
    assert store.status()["leased_groups"] == 2
    store.tick(NOW + 110)
    assert store.status()["leased_groups"] == 0
    assert store.extend(lease.batch_id, 60, NOW + 111).expires_at == NOW + 171
    assert store.take(PLAIN, NOW + 111) is None
    assert store.ack(lease.batch_id).state == "acked"


def test_nack_requeues_in_the_old_order_and_drop_sets_aside() -> None:
    store = make_store(batch_size=4)
    added = [add(store) for _ in range(3)]
    first = leased(store)
    second = leased(store)
    assert store.nack(second.batch_id, drop=False).group_count == 1
    assert store.nack(first.batch_id, drop=False).group_count == 1
    assert store.nack(first.batch_id, drop=False).group_count == 1, "repeated: the same answer"
    assert taken(store) == [added[0]]
    again = leased(store)
    assert names(again) == [added[1]]
    assert store.nack(again.batch_id, drop=True, reason="oom").state == "dropped"
    assert taken(store) == [added[2]]
    assert "1 groups set aside: dropped by the trainer: oom" in store.health()["warnings"]
    with pytest.raises(Conflict):
        store.ack(again.batch_id)


def test_a_group_that_is_never_acked_is_set_aside_in_the_end() -> None:
    store = make_store(batch_size=4, limits=Limits(max_deliveries=2))
    name = add(store)
    for delivery in (1, 2):
        lease = leased(store)
        assert (names(lease), lease.delivery) == ([name], delivery)
        store.nack(lease.batch_id, drop=False)
    assert store.take(LEASE, NOW) is None
    assert "1 groups set aside: handed out 2 times without an ack" in store.health()["warnings"]


def test_an_unknown_batch_is_unknown() -> None:
    store = make_store()
    with pytest.raises(Unknown, match="unknown batch_id 'b-9'"):
        store.ack("b-9")


def test_ended_leases_are_remembered_for_a_while_without_their_groups() -> None:
    store = make_store(batch_size=4)
    add(store)
    first = leased(store)
    store.ack(first.batch_id)
    assert first.units == ()
    for _ in range(REMEMBERED):
        add(store)
        store.ack(leased(store).batch_id)
    with pytest.raises(Unknown):
        store.ack(first.batch_id)


# By groups.


def test_groups_by_number_oldest_first() -> None:
    store = make_store(batch_size=100)
    added = [add(store, size) for size in (1, 5, 2)]
    assert taken(store, Request(groups=2)) == added[:2]
    assert taken(store, Request(groups=2)) is None
    assert taken(store, Request(groups=2, partial=True)) == added[2:]
    assert taken(store, Request(groups=2, partial=True)) is None


def test_groups_per_update_takes_the_place_of_sequences() -> None:
    store = make_store(batch_size=2, groups_per_update=3)
    added = [add(store, 5) for _ in range(4)]  # larger than batch_size: no matter here
    assert taken(store) == added[:3]
    assert taken(store) is None
    assert store.reason == "1 of 3 groups queued"


def test_groups_wanted_is_what_the_newest_version_lacks() -> None:
    store = make_store(groups_per_update=3, max_policy_lag=0)
    assert store.info()["groups_wanted"] == 3
    publish(store, 0)
    for wanted in (2, 1, 0):
        add(store, **version(0))
        assert store.info()["groups_wanted"] == wanted
    lease = leased(store)
    assert store.info()["groups_wanted"] == 0, "they were made, though they are not queued any more"
    store.ack(lease.batch_id)
    publish(store, 1)
    assert store.info()["groups_wanted"] == 3
    add(store)  # who does not say counts for the newest
    add(store, **version(0))  # too old: set aside, so it fills nothing
    assert store.info()["groups_wanted"] == 2
    add(store, **version(1)), add(store, **version(1))
    store.nack(leased(store).batch_id, drop=True)
    assert store.info()["groups_wanted"] == 3, "dropped ones are made again"


def test_groups_that_name_no_version_count_for_the_one_they_are_there_for() -> None:
    store = make_store(groups_per_update=4, limits=Limits(max_deliveries=1))
    publish(store, 1)
    add(store), add(store), add(store)
    assert store.info()["groups_wanted"] == 1
    publish(store, 2)
    assert store.info()["groups_wanted"] == 1, "they are still queued, and the next batch takes them"
    lease = store.take(Request(groups=3, lease_seconds=60), NOW)
    assert lease is not None
    publish(store, 3)
    assert store.info()["groups_wanted"] == 4
    store.nack(lease.batch_id, drop=True)
    assert store.info()["groups_wanted"] == 4, "what did not count for a version is not lost to it"


def test_old_groups_are_set_aside_when_the_version_moves_on() -> None:
    store = make_store(batch_size=4, max_policy_lag=1)
    publish(store, 3)
    for number in (2, 3, None):
        add(store, **version(number))
    held = leased(store)  # version 2 is under way
    publish(store, 4)
    publish(store, 5)
    assert store.status()["queue_size"] == 1, "the unknown one stays"
    store.nack(held.batch_id, drop=False)
    assert store.status()["queue_size"] == 1
    assert "2 groups set aside: older than max_policy_lag" in store.health()["warnings"]


# Trainers.


def test_settings_change_only_by_takeover_or_after_silence() -> None:
    store = MemoryStore()
    first = store.register(registration(4), NOW)
    assert store.register(registration(4), NOW + 1) != first, "a second rank of the same trainer"
    with pytest.raises(Conflict, match="batch_size 4 there, 8 here"):
        store.register(registration(8), NOW + 61)
    store.trainer_seen(NOW + 61)
    with pytest.raises(Conflict):
        store.register(registration(8), NOW + 121)
    store.register(registration(8, starting_step=500), NOW + 122)
    assert store.status()["current_step"] == 500
    with pytest.raises(Conflict, match="was replaced"):
        store.trainer_seen(NOW + 122, first)
    third = store.register(registration(16), NOW + 122, takeover=True)
    store.trainer_seen(NOW + 122, third)
    assert store.status()["current_step"] == 500, "a step never goes back"


def test_early_groups_are_kept_and_those_that_can_never_fit_are_set_aside() -> None:
    store = MemoryStore()
    fits, _, _ = add(store, 4), add(store, 9), add(store, 4)
    store.register(registration(8), NOW)
    assert store.status()["queue_size"] == 2
    assert "1 groups set aside: more sequences than batch_size" in store.health()["warnings"]
    store.register(registration(8, max_token_len=1), NOW, takeover=True)
    assert store.status()["queue_size"] == 0
    assert "2 groups set aside: a sequence longer than max_token_len" in store.health()["warnings"]
    assert fits == "g-1"


def test_reset_keeps_nothing_but_the_numbers_of_environments() -> None:
    store = make_store()
    env_id = add_env(store)
    add(store, env_id=env_id), add(store, 2, env_id=env_id)
    publish(store, 1)
    lease = leased(store) if store.take(PLAIN, NOW) else None
    assert lease is None
    store.reset()
    assert store.status() == {
        "current_step": 0,
        "queue_size": 0,
        "queue_sequences": 0,
        "leased_groups": 0,
        "policy_version": None,
        "finished": False,
        "reason": "no trainer has registered",
    }
    assert store.info() == {"batch_size": -1, "max_token_len": -1}
    assert store.latest_example() is None
    assert [env["connected"] for env in store.envs()] == [False]
    store.env_seen(env_id, NOW)
    assert store.envs()[0]["connected"]
    assert store.status_env(env_id)["queue_size"] == 0


def test_a_batch_that_was_on_its_way_does_not_come_back_after_a_reset() -> None:
    store = make_store()
    add(store), add(store)
    lease = store.take(PLAIN, NOW)
    assert lease is not None
    store.reset()
    store.put_back(lease)
    store.delivered(lease)
    assert store.status()["queue_size"] == 0


def test_names_of_batches_and_groups_go_on_after_a_reset() -> None:
    store = make_store()
    add(store), add(store)
    old = leased(store)
    store.reset()
    store.register(registration(), NOW)
    assert [add(store), add(store)] == ["g-3", "g-4"]
    new = leased(store)
    assert new.batch_id != old.batch_id
    for call in (
        lambda: store.ack(old.batch_id),
        lambda: store.nack(old.batch_id, drop=False),
        lambda: store.extend(old.batch_id, 60, NOW),
    ):
        with pytest.raises(Unknown):
            call()
    assert store.status()["leased_groups"] == 2, "whoever was reset cannot touch the next one's batch"


# Environments.


def test_environments_register_once_the_trainer_asks_for_batches() -> None:
    store = MemoryStore()
    settings_ = EnvRegistration(max_token_length=64, desired_name="e", weight=1.0, group_size=4)
    assert store.register_env(settings_, NOW) is None
    store.register(registration(), NOW)
    assert store.register_env(settings_, NOW) is None
    store.take(PLAIN, NOW)
    assert store.register_env(settings_, NOW) is not None


def test_parts_of_a_group_wait_for_each_other_and_stay_together() -> None:
    store = make_store(batch_size=4)
    env_id = add_env(store)
    parts = [add(store, 3, env_id=env_id)]
    assert store.envs()[0]["buffered_sequences"] == 3
    assert store.status()["queue_size"] == 0
    whole = add(store, 4, env_id=env_id)
    parts.append(add(store, 1, env_id=env_id))
    assert taken(store) == parts, "the first part came before the whole group"
    assert taken(store) == [whole]


def test_what_need_not_wait_for_parts_is_queued_at_once() -> None:
    store = make_store()
    env_id = add_env(store, group_size=4)
    add(store, 6, env_id=env_id)  # larger than a group
    add(store, 2, env_id=env_id, **version(1, group_size=2))  # its sender says that it is complete
    add(store, 2, env_id=None)
    add(store, 2, env_id=99)
    huge = add_env(store, group_size=16)  # such a group could never be delivered whole
    add(store, 4, env_id=huge)
    assert store.status()["queue_size"] == 5
    assert "1 groups came from environments that never registered" in store.health()["warnings"]


def test_leftover_parts_are_released_after_a_time_or_when_the_environment_leaves() -> None:
    store = make_store()
    env_id = add_env(store)
    add(store, 3, env_id=env_id)
    store.tick(NOW + 59)
    assert store.status()["queue_size"] == 0
    store.tick(NOW + 60)
    assert store.status()["queue_size"] == 1
    add(store, 3, env_id=env_id, now=NOW + 60)
    store.disconnect_env(env_id)
    assert store.status()["queue_size"] == 2


def test_a_silent_environment_leaves_and_any_call_brings_it_back() -> None:
    store = make_store()
    quiet, loud = add_env(store, min_batch_allocation=0.5), add_env(store)
    store.env_seen(loud, NOW + 121)
    store.tick(NOW + 121)
    assert [env["connected"] for env in store.envs()] == [False, True]
    assert store.status_env(loud)["unallocated_fraction"] == 1.0
    add(store, env_id=quiet, now=NOW + 121)
    assert store.envs()[0]["connected"]
    assert store.status_env(loud)["unallocated_fraction"] == 0.5


def test_status_env_counts_in_groups_of_the_asking_environment_and_changes_nothing() -> None:
    store = make_store()
    small, large = add_env(store, group_size=1, weight=1.0), add_env(store, group_size=4, weight=3.0)
    for _ in range(6):
        add(store, 1, env_id=small)
    add(store, 8, env_id=large)
    ours = store.status_env(large)
    assert (ours["queue_size"], ours["self_queue_size"], ours["max_group_size"]) == (3, 2, 8)
    assert ours["env_weight"] == 0.75
    theirs = store.status_env(small)
    assert (theirs["queue_size"], theirs["self_queue_size"], theirs["env_weight"]) == (14, 6, 0.25)
    assert store.status_env(large) == ours
    with pytest.raises(Unknown, match="env_id 7"):
        store.status_env(7)


def test_weights_that_sum_to_nothing_divide_by_nothing() -> None:
    store = make_store()
    env_id = add_env(store, weight=0.0)
    assert store.status_env(env_id)["env_weight"] == 0.01


# Minimums.


def test_a_minimum_waits_for_its_environment_but_not_for_ever() -> None:
    store = make_store()
    first = add_env(store)
    add_env(store, min_batch_allocation=0.5)
    for _ in range(4):
        add(store, env_id=first)
    assert store.take(PLAIN, NOW) is None
    assert store.reason == "e_1 has a minimum but nothing queued, for 30 s more"
    store.tick(NOW + 29)
    assert store.take(PLAIN, NOW + 29) is None
    store.tick(NOW + 30)
    assert taken(store, now=NOW + 30) == ["g-1", "g-2"]
    waived = "1 batches were formed without e_1: it has a minimum but sent nothing"
    assert waived in store.health()["warnings"]


def test_a_batch_whose_search_was_cut_is_exact_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atropos_gym.batch_server.batching.ENOUGH", -1)
    store = make_store(batch_size=8)
    odd, even = (add_env(store, min_batch_allocation=0.5, group_size=size) for size in (3, 4))
    add(store, 3, env_id=odd), add(store, 4, env_id=even), add(store, 4, env_id=even)
    assert taken(store) == ["g-2", "g-3"]
    cut = "1 batches may have left older groups behind: to try all was too much work"
    assert cut in store.health()["warnings"]


def test_minimums_are_met_and_the_rest_is_oldest_first() -> None:
    store = make_store(batch_size=12)
    first, second = add_env(store), add_env(store, min_batch_allocation=0.3)
    for _ in range(4):
        add(store, env_id=first)
    add(store)
    add(store, env_id=second)
    assert taken(store) == ["g-1", "g-2", "g-6"]


def test_groups_without_a_sender_fill_the_free_part() -> None:
    store = make_store()
    env_id = add_env(store, min_batch_allocation=0.5)
    for _ in range(4):
        add(store)
    add(store, env_id=env_id)
    assert taken(store) == ["g-1", "g-5"]


def test_three_halves_strand_nobody() -> None:
    store = make_store()
    envs = [add_env(store, min_batch_allocation=0.5) for _ in range(3)]
    for env_id in envs * 2:
        add(store, env_id=env_id)
    delivered = [taken(store), taken(store)]
    store.tick(NOW + 30)  # the one whose turn is over has nothing left and is not waited for any longer
    delivered.append(taken(store, now=NOW + 30))
    assert sorted(name for batch in delivered if batch for name in batch) == [f"g-{i}" for i in range(1, 7)]


# Short batches.


def test_a_short_batch_goes_out_after_a_time_and_is_counted() -> None:
    store = make_store(batch_size=10)
    for _ in range(6):
        add(store)
    assert store.take(PLAIN, NOW) is None
    assert store.take(PLAIN, NOW + 29) is None
    assert store.reason == "no groups sum to 10"
    assert taken(store, now=NOW + 30) == ["g-1", "g-2"]
    assert any(warning.startswith("1 batches were short") for warning in store.health()["warnings"])


def test_exact_batches_stay_exact() -> None:
    store = make_store(batch_size=10, exact_batches=True)
    for _ in range(6):
        add(store)
    for now in (NOW, NOW + 1000):
        assert store.take(PLAIN, now) is None
    assert "no batch: no groups sum to 10" in store.health()["warnings"]


# Refusals.


def test_a_list_is_taken_whole_or_not_at_all() -> None:
    store = make_store(batch_size=4)
    groups = [
        ScoredDataGroup(tokens=[[1]] * size, masks=[[1]] * size, scores=[0.0] * size) for size in (4, 5, 1, 6)
    ]
    with pytest.raises(Refused) as refused:
        store.add_groups([Incoming.of(group) for group in groups], NOW)
    assert [(problem.index, problem.path) for problem in refused.value.problems] == [
        (1, ("tokens",)),
        (3, ("tokens",)),
    ]
    assert store.status()["queue_size"] == 0


def test_another_tokenizer_is_refused() -> None:
    store = make_store()
    add(store, **version(0, tokenizer_fingerprint="sha256:b"))  # nothing published yet
    publish(store, 0, tokenizer_fingerprint="sha256:a")
    add(store, **version(0, tokenizer_fingerprint="sha256:a"))
    add(store, **version(0))
    with pytest.raises(Refused, match="sampled with tokenizer sha256:b, the learner's is sha256:a"):
        add(store, **version(0, tokenizer_fingerprint="sha256:b"))


# Policy.


def test_versions_grow_within_a_run_and_over_runs() -> None:
    store = MemoryStore()
    assert store.policy(NOW).version is None
    publish(store, 0)
    publish(store, 2, adapter_path="/a")
    publish(store, 2, adapter_path="/a")  # the same post again
    for number, run, path in ((2, "r", "/b"), (1, "r", None), (2, "s", "/a"), (0, "s", None)):
        with pytest.raises(Conflict, match="publish 3 or above"):
            publish(store, number, run, adapter_path=path)
    publish(store, 3, "s")
    policy = store.policy(NOW)
    assert (policy.version, policy.run, policy.model_name, policy.published_at) == (3, "s", "s-v3", NOW)


def test_a_run_ends_and_a_new_one_begins() -> None:
    store = MemoryStore()
    publish(store, 0)
    with pytest.raises(Conflict, match="run 'other' is not the current one, 'r'"):
        store.publish(PolicyUpdate(run="other", finished=True), NOW)
    store.publish(PolicyUpdate(run="r", finished=True), NOW)
    store.publish(PolicyUpdate(run="r", finished=True), NOW)
    assert store.policy(NOW).finished and store.status()["finished"]
    publish(store, 1, "s")
    assert not store.policy(NOW).finished


def test_a_trainer_that_registers_begins_where_a_run_has_ended() -> None:
    store = MemoryStore()
    publish(store, 3, tokenizer_fingerprint="a")
    store.publish(PolicyUpdate(run="r", finished=True), NOW)
    store.register(registration(), NOW + 1)
    policy = store.policy(NOW + 1)
    assert not policy.finished and not store.status()["finished"]
    assert (policy.version, policy.run, policy.published_at) == (3, "r", NOW), "the next one is above it"
    again = PolicyUpdate(run="r", version=3, model_name="r-v3", tokenizer_fingerprint="a")
    store.publish(again, NOW + 2)
    assert store.policy(NOW + 2).published_at == NOW + 2, (
        "the same weights, for the trainer that is there now"
    )


def superseded(store: MemoryStore) -> bool:
    shown, status = store.policy(NOW), store.status()
    assert shown.superseded == status.get("superseded", False)
    assert shown.version == status["policy_version"] == 3, "the next version is above it in any case"
    return shown.superseded


@pytest.mark.parametrize("seconds", [1, 61])
def test_what_another_trainer_published_is_superseded_until_the_new_one_publishes(seconds: int) -> None:
    store = MemoryStore()
    publish(store, 3)
    first = store.register(registration(8), NOW)
    assert not superseded(store), "nobody registered before it"
    again = store.register(registration(8), NOW + seconds)
    assert superseded(store) == (seconds > 60), "else it may be a process more of the same trainer"
    if seconds > 60:
        publish(store, 3)  # it goes on with the same weights
    store.register(registration(12), NOW + seconds, takeover=True, trainer_id=again)
    assert not superseded(store), "the same trainer with other wishes"
    store.register(registration(16), NOW + seconds, takeover=True, trainer_id=first)
    assert superseded(store), "that one was replaced"
    store.register(registration(16), NOW + seconds)
    assert superseded(store), "still nobody has published"
    publish(store, 3)
    assert not superseded(store)
    store.register(registration(8), NOW + seconds, takeover=True)
    assert superseded(store)
    publish(store, 4, "s")
    assert not store.policy(NOW).superseded


def test_the_end_of_a_run_whose_trainer_came_again_is_its_end() -> None:
    store = MemoryStore()
    store.register(registration(8), NOW)
    publish(store, 3)
    again = store.register(registration(12), NOW, takeover=True)
    store.publish(PolicyUpdate(run="r", finished=True), NOW, trainer_id=again)
    assert store.policy(NOW).finished and not superseded(store)
    store.register(registration(12), NOW)
    assert superseded(store), "who comes after the end is another one"


@pytest.mark.parametrize("named", [True, False])
def test_the_end_of_a_run_whose_trainer_was_replaced_is_not_the_new_ones(named: bool) -> None:
    store = MemoryStore()
    first = store.register(registration(8), NOW)
    publish(store, 3)
    store.register(registration(12), NOW, takeover=True)
    with pytest.raises(Conflict, match=r"another trainer has registered since run 'r' published"):
        store.publish(PolicyUpdate(run="r", finished=True), NOW, trainer_id=first if named else None)
    assert superseded(store) and not store.policy(NOW).finished


def test_a_trainer_that_names_its_id_may_change_its_settings_at_once() -> None:
    store = MemoryStore()
    first = store.register(registration(8), NOW)
    publish(store, 3)
    second = store.register(registration(12), NOW + 1, trainer_id=first)
    assert not superseded(store), "what it published goes on"
    with pytest.raises(Conflict, match="other settings"):
        store.register(registration(16), NOW + 2, trainer_id="0" * 32)
    with pytest.raises(Conflict, match="other settings"):
        store.register(registration(16), NOW + 2, trainer_id=first)
    store.register(registration(16), NOW + 2, trainer_id=second)


def test_the_first_tokenizer_stays_unless_forced() -> None:
    store = MemoryStore()
    publish(store, 0, tokenizer_fingerprint="a")
    publish(store, 1)
    with pytest.raises(Conflict, match="b differs from the first one, a"):
        publish(store, 2, tokenizer_fingerprint="b")
    store.publish(
        PolicyUpdate(run="r", version=2, model_name="m", tokenizer_fingerprint="b"), NOW, force=True
    )
    publish(store, 3, tokenizer_fingerprint="b")


def test_held_is_the_union_of_what_services_said_lately() -> None:
    store = MemoryStore()
    store.hold(3, [11, 12], NOW)
    store.hold(4, [12, 13], NOW + 60)
    assert store.policy(NOW + 60).held == [11, 12, 13]
    store.hold(3, [14], NOW + 61)
    assert store.policy(NOW + 61).held == [12, 13, 14]
    assert store.policy(NOW + 181).held == [14]
    store.hold(3, [], NOW + 181)
    assert store.policy(NOW + 181).held == []


# Nothing lost, nothing twice.


class Deliveries(StoreModel):
    """Any interleaving, in memory."""

    def open(self) -> MemoryStore:
        return MemoryStore(LIMITS)


class FreshDeliveries(Deliveries):
    """With a trainer that takes no group that lags behind."""

    always = "fresh"


Deliveries.TestCase.settings = settings(deadline=None, max_examples=40, stateful_step_count=40)
FreshDeliveries.TestCase.settings = settings(deadline=None, max_examples=20, stateful_step_count=40)
TestDeliveries = Deliveries.TestCase
TestFreshDeliveries = FreshDeliveries.TestCase
