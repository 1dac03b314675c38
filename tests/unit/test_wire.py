"""Bodies of the wire: what is taken, what is refused, and that the first bad place is named."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from atropos_gym.wire import EnvRegistration, Policy, PolicyUpdate, Registration, ScoredDataGroup

GROUP = {"tokens": [[1, 2, 3], [4, 5]], "masks": [[-100, 2, 3], [-100, 5]], "scores": [1.0, 0]}
KEYS = [
    "tokens",
    "masks",
    "scores",
    "advantages",
    "ref_logprobs",
    "messages",
    "generation_params",
    "inference_logprobs",
    "overrides",
    "group_overrides",
    "images",
    "env_id",
    "distill_token_ids",
    "distill_logprobs",
]
REGISTRATION = {
    "wandb_group": "g",
    "wandb_project": "p",
    "batch_size": 8,
    "max_token_len": 64,
    "checkpoint_dir": "c",
    "save_checkpoint_interval": -1,
    "starting_step": 0,
    "num_steps": -1,
}
ENV = {"max_token_length": 64, "weight": 1.0, "group_size": 4}


def make(**fields: object) -> ScoredDataGroup:
    return ScoredDataGroup.model_validate({**GROUP, **fields})


def first_error(model: type, body: dict[str, object]) -> tuple[tuple[object, ...], str]:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    error = caught.value.errors()[0]
    return error["loc"], error["msg"]


def test_json_has_all_keys_in_the_wires_order_and_leaves_out_only_absent_logprobs() -> None:
    without = json.loads(make().to_json())
    assert list(without) == [key for key in KEYS if key != "inference_logprobs"]
    assert [key for key, value in without.items() if value is not None] == ["tokens", "masks", "scores"]
    with_logprobs = json.loads(make(inference_logprobs=[[1.0, -0.5, 0.0], [1.0, -2.0]]).to_json())
    assert list(with_logprobs) == KEYS
    assert with_logprobs["inference_logprobs"] == [[1.0, -0.5, 0.0], [1.0, -2.0]]


@pytest.mark.parametrize(
    "fields",
    [
        {"masks": [[-100, -100, -100], [-100, 5]]},  # one fully masked row is legal
        {"advantages": [[0, 0.5, 0.5], [0, -1]]},
        {"messages": [[{"role": "user", "content": None, "name": "x"}], []]},
        {"overrides": [{}, {"temperature": 0.7}]},
        {
            "distill_token_ids": [[[1, 2]] * 3, [[3, 4]] * 2],
            "distill_logprobs": [[[-1, -2]] * 3, [[-1, -2]] * 2],
        },
        {"images": {"any": ["thing"]}},
        {"env_id": 2**70},
        {"unknown": 1},
    ],
)
def test_takes_what_a_learner_can_use(fields: dict[str, object]) -> None:
    assert make(**fields).size == 2


@pytest.mark.parametrize("empty", [[], {}, None])
@pytest.mark.parametrize("name", [key for key in KEYS[3:] if key != "env_id"])
def test_an_empty_optional_field_is_absent(name: str, empty: object) -> None:
    assert getattr(make(**{name: empty}), name) is None


@pytest.mark.parametrize(
    ("fields", "loc", "words"),
    [
        ({"tokens": []}, ("tokens",), "at least 1 item"),
        ({"tokens": [[], [1]]}, ("tokens", 0), "at least 1 item"),
        ({"tokens": [[1, 2, True], [4, 5]]}, ("tokens", 0, 2), "valid integer"),
        ({"tokens": [[1, 2, 3.0], [4, 5]]}, ("tokens", 0, 2), "valid integer"),
        ({"tokens": [["1", 2, 3], [4, 5]]}, ("tokens", 0, 0), "valid integer"),
        ({"tokens": [[1, 2, 2**31], [4, 5]]}, ("tokens", 0, 2), "less than or equal to 2147483647"),
        ({"tokens": [[1, -2, 3], [4, 5]]}, ("tokens", 0, 1), "greater than or equal to 0"),
        ({"tokens": 5}, ("tokens",), "valid list"),
        ({"masks": [[-100, 2, 3]]}, ("masks",), "masks has 1 rows, tokens 2"),
        ({"masks": [[-100, 2, 3], [5]]}, ("masks", 1), "masks has 1 entries in row 1, tokens 2"),
        (
            {"masks": [[0, 1, 1], [0, 1]]},
            ("masks", 0, 0),
            "mask is 0, wanted -100 (not trained) or the token id 1",
        ),
        ({"masks": [[-100, 2, 3], [-100, 10**30]]}, ("masks", 1, 1), "less than or equal"),
        ({"masks": [[-100] * 3, [-100] * 2]}, ("masks",), "no trained token"),
        ({"scores": [1.0]}, ("scores",), "scores has 1 rows, tokens 2"),
        ({"scores": [1.0, None]}, ("scores", 1), "valid number"),
        ({"scores": [1.0, True]}, ("scores", 1), "valid number"),
        ({"scores": [float("nan"), 0.0]}, ("scores", 0), "finite"),
        ({"scores": ["NaN", 0.0]}, ("scores", 0), "valid number"),
        (
            {"advantages": [[0.1, 0.2], [0.1, 0.2]]},
            ("advantages", 0),
            "advantages has 2 entries in row 0, tokens 3",
        ),
        ({"ref_logprobs": [[0.0] * 3]}, ("ref_logprobs",), "ref_logprobs has 1 rows, tokens 2"),
        ({"inference_logprobs": [[1.0, -1.0], [1.0, -1.0]]}, ("inference_logprobs", 0), "2 entries"),
        (
            {"inference_logprobs": [[1, -1, 0.5], [1, -1]]},
            ("inference_logprobs", 0, 2),
            "0.5, wanted at most 0",
        ),
        ({"inference_logprobs": [[1, -1, float("-inf")], [1, -1]]}, ("inference_logprobs", 0, 2), "finite"),
        ({"messages": [[{"role": "user"}], []]}, ("messages", 0, 0, "content"), "no 'content'"),
        ({"messages": [[5], []]}, ("messages", 0, 0), "valid dictionary"),
        ({"messages": [[]]}, ("messages",), "messages has 1 rows, tokens 2"),
        ({"overrides": [{}]}, ("overrides",), "overrides has 1 rows, tokens 2"),
        ({"overrides": [{}, None]}, ("overrides", 1), "valid dictionary"),
        ({"env_id": -1}, ("env_id",), "greater than or equal to 0"),
        ({"env_id": True}, ("env_id",), "not numbers"),
        ({"distill_token_ids": [[[1]] * 3, [[1]]]}, ("distill_token_ids", 1), "1 entries in row 1, tokens 2"),
        (
            {"distill_token_ids": [[[1]] * 3, [[1]] * 2], "distill_logprobs": [[[-1]] * 3, [[-1], [-1, -2]]]},
            ("distill_logprobs", 1, 1),
            "2 logprobs, distill_token_ids has 1",
        ),
    ],
)
def test_names_the_first_bad_place(fields: dict[str, object], loc: tuple[object, ...], words: str) -> None:
    found, message = first_error(ScoredDataGroup, {**GROUP, **fields})
    assert found == loc
    assert words in message


@pytest.mark.parametrize("name", ["tokens", "masks", "scores"])
def test_required_fields_are_named(name: str) -> None:
    body = {key: value for key, value in GROUP.items() if key != name}
    assert first_error(ScoredDataGroup, body)[0] == (name,)


def test_untrained_logprobs_become_one_and_rounding_becomes_zero() -> None:
    group = make(inference_logprobs=[[-3.0, 1e-3, -0.5], [0.0, 1e-9]])
    assert group.inference_logprobs == [[1.0, 0.0, -0.5], [1.0, 0.0]]
    above = {**GROUP, "inference_logprobs": [[1.0, 1.001e-3, -0.5], [1.0, -1.0]]}
    assert first_error(ScoredDataGroup, above)[0] == ("inference_logprobs", 0, 1)


def test_a_million_bad_numbers_are_one_error() -> None:
    with pytest.raises(ValidationError) as caught:
        make(tokens=[[-1] * 1000] * 1000)
    assert caught.value.error_count() == 1


def test_braces_in_a_message_stay_as_they_are() -> None:
    _, message = first_error(ScoredDataGroup, {**GROUP, "messages": [[{"{role}": 1}], []]})
    assert message == "message has no 'role'"


@pytest.mark.parametrize(
    ("overrides", "version", "complete"),
    [
        (None, None, False),
        ({"policy_version": 7, "group_size": 2}, 7, True),
        ({"policy_version": "7", "group_size": 3}, None, False),
        ({"policy_version": True, "group_size": "2"}, None, False),
    ],
)
def test_reads_version_and_size_from_the_group_overrides(
    overrides: dict[str, object] | None, version: int | None, complete: bool
) -> None:
    group = make(group_overrides=overrides)
    assert (group.policy_version, group.complete) == (version, complete)
    assert group.token_count == 5


@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), min_size=1, max_size=6),
        min_size=1,
        max_size=5,
    )
)
@settings(deadline=None, max_examples=60)
def test_ids_and_masks_come_back_as_they_were(rows: list[list[tuple[int, bool]]]) -> None:
    tokens = [[token for token, _ in row] for row in rows]
    masks = [[token if trained else -100 for token, trained in row] for row in rows]
    body = {"tokens": tokens, "masks": masks, "scores": [0.1] * len(rows)}
    if not any(trained for row in rows for _, trained in row):
        assert first_error(ScoredDataGroup, body)[0] == ("masks",)
        return
    again = ScoredDataGroup.model_validate_json(ScoredDataGroup.model_validate(body).to_json())
    assert (again.tokens, again.masks, again.scores) == (tokens, masks, [0.1] * len(rows))


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=8))
@settings(deadline=None, max_examples=100)
def test_scores_are_served_bit_for_bit(scores: list[float]) -> None:
    rows = len(scores)
    group = ScoredDataGroup(tokens=[[1]] * rows, masks=[[1]] * rows, scores=scores)
    served = json.loads(group.to_json())["scores"]
    assert [value.hex() for value in served] == [value.hex() for value in scores]


def test_settings_are_read_as_the_original_reads_them() -> None:
    settings_ = Registration.model_validate(
        {**REGISTRATION, "batch_size": "16", "num_steps": 3.0, "extra": 1}
    )
    assert (settings_.batch_size, settings_.num_steps, settings_.groups_per_update) == (16, 3, None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_size", 0),
        ("batch_size", 1.5),
        ("batch_size", True),
        ("starting_step", -1),
        ("wandb_project", None),
        ("groups_per_update", 0),
        ("max_policy_lag", -1),
    ],
)
def test_registration_refuses(field: str, value: object) -> None:
    assert first_error(Registration, {**REGISTRATION, field: value})[0] == (field,)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("group_size", 0),
        ("weight", -1.0),
        ("weight", float("nan")),
        ("weight", float("inf")),
        ("min_batch_allocation", 1.5),
        ("min_batch_allocation", -0.1),
        ("min_batch_allocation", float("nan")),
        ("desired_name", 5),
    ],
)
def test_env_registration_refuses(field: str, value: object) -> None:
    assert first_error(EnvRegistration, {**ENV, field: value})[0] == (field,)


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("gsm8k", "gsm8k"),
        (None, "env"),
        ("", "env"),
        ("../../x", "x"),
        ("...", "env"),
        ("a\nb\x1b[31m/../x", "ab31m..x"),
        ("naïve-1.0_b", "nave-1.0_b"),
    ],
)
def test_names_are_fit_for_paths_and_logs(name: str | None, clean: str) -> None:
    assert EnvRegistration.model_validate({**ENV, "desired_name": name}).desired_name == clean


def test_a_policy_update_needs_a_version_unless_it_ends_the_run() -> None:
    assert first_error(PolicyUpdate, {"model_name": "m"})[0] == ("version",)
    assert first_error(PolicyUpdate, {"version": 1})[0] == ("model_name",)
    assert PolicyUpdate.model_validate({"run": "r", "finished": True}).version is None
    assert Policy().version is None
