"""Which units make a batch. The promises, held for random queues:

1. the sum is exact unless the plan says that it is short,
2. of all exact sets the oldest-first one is chosen,
3. a set is found whenever one exists,
4. minimums are met whenever they can be met together,
5. draining a queue delivers every unit once, oldest first where sizes are equal.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_gym.batch_server import _sums
from atropos_gym.batch_server._sums import Work, combine, meet
from atropos_gym.batch_server.batching import choose, choose_below, plan_batch, shares

SIZES = st.lists(st.integers(1, 9), min_size=0, max_size=9)
OWNED = st.lists(st.tuples(st.integers(1, 6), st.sampled_from([0, 1, 2, None])), min_size=1, max_size=9)


LOOKS = st.sampled_from([1, 2, 256])


@contextmanager
def looking(first: int) -> Iterator[None]:
    """Short queues are looked at in parts too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("atropos_gym.batch_server.batching.FIRST_LOOK", first)
        yield


def exact_sets(sizes: list[int], total: int) -> list[tuple[int, ...]]:
    everything = range(len(sizes))
    sets = (chosen for count in range(len(sizes) + 1) for chosen in combinations(everything, count))
    return [chosen for chosen in sets if sum(sizes[i] for i in chosen) == total]


def oldest_first(chosen: tuple[int, ...], length: int) -> list[bool]:
    """Sorts sets: one that holds an older unit comes first."""
    return [position not in chosen for position in range(length)]


@given(SIZES, st.integers(1, 30), LOOKS)
@settings(deadline=None, max_examples=200)
def test_chooses_the_oldest_of_all_exact_sets(sizes: list[int], total: int, look: int) -> None:
    sets = exact_sets(sizes, total)
    best = min(sets, key=lambda chosen: oldest_first(chosen, len(sizes)), default=None)
    with looking(look):
        assert choose(sizes, total) == (None if best is None else list(best))


@given(
    OWNED,
    st.integers(1, 20),
    st.dictionaries(st.sampled_from([0, 1, 2]), st.integers(1, 6), max_size=3),
    LOOKS,
)
@settings(deadline=None, max_examples=200)
def test_minimums_are_met_by_the_oldest_set_that_can(
    units: list[tuple[int, int | None]], total: int, least: dict[int, int], look: int
) -> None:
    sizes, owners = [size for size, _ in units], [owner for _, owner in units]

    def meets(chosen: tuple[int, ...]) -> bool:
        return all(sum(sizes[i] for i in chosen if owners[i] == o) >= count for o, count in least.items())

    sets = [chosen for chosen in exact_sets(sizes, total) if meets(chosen)]
    best = min(sets, key=lambda chosen: oldest_first(chosen, len(sizes)), default=None)
    with looking(look):
        assert choose(sizes, total, owners, least) == (None if best is None else list(best))


@given(OWNED, st.integers(4, 12), st.dictionaries(st.sampled_from([0, 1, 2]), st.floats(0, 1), max_size=3))
@settings(deadline=None, max_examples=150)
def test_a_plan_meets_as_many_minimums_from_the_first_on_as_any_set_can(
    units: list[tuple[int, int | None]], batch_size: int, minimums: dict[int, float]
) -> None:
    sizes, owners = [size for size, _ in units], [owner for _, owner in units]
    queued = {one: sum(size for size, owner in units if owner == one) for one in minimums}
    least = list(shares(minimums, queued, batch_size).items())
    best = None
    while best is None and sum(sizes) >= batch_size:
        best = choose(sizes, batch_size, owners, dict(least))
        if not least:
            break
        least.pop()
    assert plan_batch(sizes, owners, batch_size, minimums=minimums).chosen == tuple(best or ())


@given(
    st.lists(
        st.tuples(st.sampled_from([2, 4, 6, 3]), st.sampled_from([0, 1, None])), min_size=1, max_size=12
    ),
    st.integers(4, 20),
    st.dictionaries(st.sampled_from([0, 1]), st.floats(0, 1), max_size=2),
    LOOKS,
)
@settings(deadline=None, max_examples=150)
def test_a_plan_that_costs_too_much_is_exact_and_owes_no_more_than_the_oldest_first(
    units: list[tuple[int, int | None]], batch_size: int, minimums: dict[int, float], look: int
) -> None:
    sizes, owners = [size for size, _ in units], [owner for _, owner in units]
    whole = plan_batch(sizes, owners, batch_size, minimums=minimums)
    with looking(look), pytest.MonkeyPatch.context() as patch:
        patch.setattr("atropos_gym.batch_server.batching.ENOUGH", -1)
        plan = plan_batch(sizes, owners, batch_size, minimums=minimums)
    assert plan.reason == whole.reason
    assert not whole.hurried
    if not plan.hurried:
        assert plan == whole
    assert list(plan.chosen) == sorted(set(plan.chosen))
    assert sum(sizes[at] for at in plan.chosen) == sum(sizes[at] for at in whole.chosen)
    queued = {one: sum(size for size, owner in units if owner == one) for one in minimums}
    owed = list(shares(minimums, queued, batch_size).items())
    while whole.chosen and choose(sizes, batch_size, owners, dict(owed)) is None:
        owed.pop()
    for one, least in owed if whole.chosen else []:
        assert sum(sizes[at] for at in plan.chosen if owners[at] == one) >= least


@given(st.lists(st.integers(1, 8), min_size=1, max_size=9), st.integers(9, 30))
@settings(deadline=None, max_examples=100)
def test_a_short_set_holds_the_oldest_and_is_the_largest_below(sizes: list[int], total: int) -> None:
    chosen = choose_below(sizes, total)
    reachable = [
        sum(sizes[i] for i in candidate)
        for below in range(total)
        for candidate in exact_sets(sizes, below)
        if 0 in candidate
    ]
    assert chosen[0] == 0
    assert sum(sizes[i] for i in chosen) == max(reachable)


@given(OWNED, st.integers(6, 12), st.dictionaries(st.sampled_from([0, 1, 2]), st.floats(0, 1), max_size=3))
@settings(deadline=None, max_examples=150)
def test_draining_delivers_every_unit_once(
    units: list[tuple[int, int | None]], batch_size: int, minimums: dict[int, float]
) -> None:
    queue, delivered = list(enumerate(units)), []
    while True:
        sizes, owners = [size for _, (size, _) in queue], [owner for _, (_, owner) in queue]
        plan = plan_batch(sizes, owners, batch_size, minimums=minimums, overdue=True)
        if not plan.chosen:
            assert plan.reason
            break
        assert len(set(plan.chosen)) == len(plan.chosen)
        taken = sum(sizes[i] for i in plan.chosen)
        assert taken == batch_size if not plan.short else 0 < taken < batch_size
        delivered += [queue[i] for i in plan.chosen]
        queue = [one for i, one in enumerate(queue) if i not in plan.chosen]
    # Nothing lost, nothing twice; what is left is less than a batch, because overdue units go out short.
    assert sorted(delivered + queue) == sorted(enumerate(units))
    assert sum(size for _, (size, _) in queue) < batch_size


def test_an_overdue_unit_that_fills_a_batch_goes_out_in_an_exact_one_though_a_minimum_gives_way() -> None:
    units = [(6, 0), (1, 0), (1, 0), (1, 0), (1, 0), (2, 1)]
    sizes, owners = [size for size, _ in units], [owner for _, owner in units]
    assert plan_batch(sizes, owners, 6, minimums={1: 1.0}).chosen == (1, 2, 3, 4, 5)
    plan = plan_batch(sizes, owners, 6, minimums={1: 1.0}, overdue=True)
    assert (plan.chosen, plan.short) == ((0,), False)


@given(st.integers(1, 8), st.integers(1, 20), st.integers(1, 4))
@settings(deadline=None, max_examples=50)
def test_equal_units_go_out_first_in_first_out(size: int, count: int, per_batch: int) -> None:
    plan = plan_batch([size] * count, [None] * count, size * per_batch)
    assert plan.chosen == (tuple(range(per_batch)) if count >= per_batch else ())


@pytest.mark.parametrize(
    ("sizes", "batch_size", "chosen"),
    [
        ([4] * 6 + [6], 8, (0, 1)),
        ([3, 3, 2] * 3, 8, (0, 1, 2)),
        ([16] + [4] * 8, 8, (1, 2)),  # the large one is refused at the door; here it is passed over
        ([4, 4, 8, 8, 4], 12, (0, 1, 4)),
        ([4] * 6, 10, ()),
    ],
)
def test_queues_on_which_the_original_stands_still(
    sizes: list[int], batch_size: int, chosen: tuple[int, ...]
) -> None:
    assert plan_batch(sizes, [None] * len(sizes), batch_size).chosen == chosen


def test_exact_batches_are_never_short() -> None:
    plan = plan_batch([4] * 6, [None] * 6, 10, exact=True, overdue=True)
    assert plan.chosen == ()
    assert plan.reason == "no groups sum to 10"
    assert plan.stuck


def test_an_overdue_unit_goes_out_though_others_would_sum_up() -> None:
    sizes = [3, 4, 4, 4]
    waiting = plan_batch(sizes, [None] * 4, 8)
    assert (waiting.chosen, waiting.stuck) == ((1, 2), True)
    overdue = plan_batch(sizes, [None] * 4, 8, overdue=True)
    assert (overdue.chosen, overdue.short) == ((0, 1), True)


def test_minimums_that_cannot_all_be_met_give_way_from_the_last() -> None:
    half = {0: 0.5, 1: 0.5, 2: 0.5}
    assert plan_batch([4, 4, 4], [0, 1, 2], 8, minimums=half).chosen == (0, 1)
    turned = {2: 0.5, 0: 0.5, 1: 0.5}
    assert plan_batch([4, 4, 4], [0, 1, 2], 8, minimums=turned).chosen == (0, 2)


def test_shares_shrink_in_proportion_and_ask_for_no_more_than_there_is() -> None:
    assert shares({0: 0.5, 1: 0.25}, {0: 8, 1: 1}, 8) == {0: 4, 1: 1}
    assert shares({0: 1.0, 1: 1.0}, {0: 8, 1: 8}, 8) == {0: 4, 1: 4}
    assert shares({0: 0.01}, {0: 8}, 8) == {}
    assert shares({0: 0.5}, {}, 8) == {}


def test_a_long_queue_is_planned_without_a_search_per_unit() -> None:
    assert choose([6, 4] * 5000, 8) == [1, 3]
    assert choose([4] * 10_000, 6) is None


def test_long_queues_of_multiples_with_minimums_are_planned_by_few_combinations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such sums have gaps: to combine them anew at each unit took a hundred milliseconds."""
    combined: list[int] = []

    def counted(left: int, right: int) -> int:
        combined.append(1)
        return combine(left, right)

    monkeypatch.setattr(_sums, "combine", counted)
    for pattern in ([8], [4, 8, 16, 8], [2, 4, 6, 8, 32, 16]):
        sizes = [pattern[at * 7 % len(pattern)] for at in range(10_000)]
        owners = [at % 9 for at in range(10_000)]
        plan = plan_batch(sizes, owners, 1024, minimums=dict.fromkeys(range(8), 0.1))
        assert sum(sizes[at] for at in plan.chosen) == 1024
        for owner in range(8):
            assert sum(sizes[at] for at in plan.chosen if owners[at] == owner) >= 102
    assert plan_batch([8] * 10_000, [None] * 10_000, 1023, minimums={0: 0.5}).stuck
    assert len(combined) < 50, "hundreds, before"


class Counting(Work):
    """Adds up the work of all that a plan did."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def count(self, steps: int, bits: int) -> None:
        super().count(steps, bits)
        self.steps += steps


def one_odd_unit_at_the_end() -> list[int]:
    draw = random.Random(3)
    return [2 * draw.randint(4, 32) for _ in range(9_999)] + [33]


@pytest.mark.parametrize(("batch_size", "envs"), [(8193, 4), (8193, 16), (32769, 16)])
def test_one_odd_unit_behind_thousands_of_even_ones_is_found_by_few_combinations(
    monkeypatch: pytest.MonkeyPatch, batch_size: int, envs: int
) -> None:
    """It took up to 10,000 combinations of thousands of steps: ten seconds."""
    work = Counting()
    monkeypatch.setattr("atropos_gym.batch_server.batching.Work", lambda: work)
    sizes = one_odd_unit_at_the_end()
    owners = [at % 16 for at in range(len(sizes))]
    minimums = dict.fromkeys(range(envs), 0.8 / envs)
    plan = plan_batch(sizes, owners, batch_size, minimums=minimums)
    assert sum(sizes[at] for at in plan.chosen) == batch_size
    assert plan.chosen[-1] == len(sizes) - 1
    for owner, share in minimums.items():
        assert sum(sizes[at] for at in plan.chosen if owners[at] == owner) >= int(share * batch_size)
    assert not plan.hurried
    assert work.combinations < 1_000
    assert work.steps < 10_000


def test_sums_that_cannot_be_made_are_not_sought_for_each_minimum(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Counting()
    monkeypatch.setattr("atropos_gym.batch_server.batching.Work", lambda: work)
    sizes = [17 * (1 + at * 7 % 10) for at in range(1_000)] + [3, 5]
    plan = plan_batch(
        sizes, [at % 16 for at in range(len(sizes))], 4112, minimums=dict.fromkeys(range(16), 0.06)
    )
    assert plan.reason == "no groups sum to 4112"
    assert work.combinations < 50


def test_work_is_bounded_though_the_batch_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atropos_gym.batch_server.batching.ENOUGH", 0)
    sizes = one_odd_unit_at_the_end()
    owners = [at % 16 for at in range(len(sizes))]
    plan = plan_batch(sizes, owners, 8193, minimums=dict.fromkeys(range(4), 0.2))
    assert plan.hurried
    assert sum(sizes[at] for at in plan.chosen) == 8193
    assert plan.chosen[0] == 0
    for owner in range(4):
        assert sum(sizes[at] for at in plan.chosen if owners[at] == owner) >= 1638


@given(st.sets(st.integers(0, 40), min_size=1), st.sets(st.integers(0, 40), min_size=1))
@settings(deadline=None, max_examples=100)
def test_combined_sums_are_all_sums_of_two(left: set[int], right: set[int]) -> None:
    def bits(numbers: set[int]) -> int:
        return sum(1 << number for number in numbers)

    assert combine(bits(left), bits(right)) == bits({a + b for a in left for b in right})
    for total in range(82):
        either = min((a for a in left if total - a in right), default=-1)
        assert meet(bits(left), bits(right), total) == either


@pytest.mark.parametrize("total", [10**12, 10**30])
def test_a_total_that_nobody_can_reach_costs_nothing(total: int) -> None:
    assert choose([4, 4, 4], total) is None
    assert choose([4, 4, 4], total, ["a", "b", "a"], {"a": 4}) is None
    assert choose_below([4, 4, 4], total) == [0, 1, 2]
