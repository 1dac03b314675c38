"""Trainers that people have, as loops of their shape against our server: what each reads and trips over.

Written from what is known of each (which calls, which keys, what breaks it), not from its code. The loops
are as careless as the programs are: a key that is missing, a null where a list is wanted, a batch that jumps
over the registered size ends them with the error that the program would end with.
"""

from __future__ import annotations

from typing import Any

import pytest
from server_tools import REGISTER, LocalServer, group

#: The keys of an item, in the original's order; ``inference_logprobs`` only where somebody sent them.
KEYS = [
    "tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params",
    "inference_logprobs", "overrides", "group_overrides", "images", "env_id", "distill_token_ids",
    "distill_logprobs",
]  # fmt: skip
LOGPROBS = {"inference_logprobs": [[1.0, -0.5, -0.25]] * 4}
BATCH = int(REGISTER["batch_size"])


@pytest.fixture
def server() -> LocalServer:
    return LocalServer()


def mean_and_std(scores: list[float]) -> tuple[float, float]:
    mean = sum(scores) / len(scores)
    return mean, max((sum((s - mean) ** 2 for s in scores) / len(scores)) ** 0.5, 1e-8)


# -- the loops -----------------------------------------------------------------------------------------------


def example_trainer(
    server: LocalServer,
) -> list[tuple[list[int], list[int], float, list[float] | None, float]]:
    """Drains until null and trains on everything: (ids, labels, advantage, logprobs, temperature) a row."""
    rows = []
    while True:
        data = server.get("/batch")
        assert data.get("status") != "error", data
        if data["batch"] is None:
            return rows
        for item in data["batch"]:
            mean, std = mean_and_std(item["scores"])
            overrides = item["overrides"]  # the key must exist
            temperature = (item["generation_params"] or {}).get("temperature", 1.0)
            for i in range(len(item["tokens"])):
                advantage = (item["scores"][i] - mean) / std
                if overrides is not None and overrides[i].get("set_advantage_to_zero", False):
                    advantage = 0.0
                logprobs = None
                if "inference_logprobs" in item and i < len(item["inference_logprobs"]):  # null: TypeError
                    logprobs = item["inference_logprobs"][i]
                    assert len(logprobs) == len(item["tokens"][i])
                ids, labels = item["tokens"][i], item["masks"][i]
                assert len(ids) == len(labels)
                rows.append((ids, labels, advantage, logprobs, temperature))


def axolotl_plugin(server: LocalServer) -> list[tuple[list[int], int, float]]:
    """One reply: (ids, length of the prompt, score) a row; the prompt is what a group's rows share."""
    rows = []
    for item in server.get("/batch")["batch"] or []:
        common = 0
        while len({tuple(ids[: common + 1]) for ids in item["tokens"]}) == 1:
            common += 1
        for k, ids in enumerate(item["tokens"]):
            if item["overrides"] and item["overrides"][k].get("set_advantage_to_zero"):
                continue
            rows.append((ids, common, item["scores"][k]))
    return rows


def verl_recipe(server: LocalServer) -> list[dict[str, Any]] | None:
    """One reply: a row of equal lists; a batch that is there must not be empty."""
    batch = server.get("/batch")["batch"]
    if batch is None:
        return None
    assert batch, "an empty batch stops it"
    rows = []
    for item in batch:
        for ids, mask, score in zip(item["tokens"], item["masks"], item["scores"], strict=True):
            row = {"input_ids": ids, "response_mask": [m != -100 for m in mask], "score": score}
            assert len(ids) == len(mask) and any(row["response_mask"])
            rows.append(row)
        for optional in ("advantages", "ref_logprobs", "inference_logprobs"):  # as its forks read them
            if (values := item.get(optional)) is not None:
                for ids, value in zip(item["tokens"], values, strict=True):
                    assert len(value) == len(ids)
        assert item.get("overrides") is None or len(item["overrides"]) == len(item["tokens"])
    return rows


def tinker_atropos(server: LocalServer) -> list[tuple[list[int], list[float], list[float]]]:
    """One reply: (inputs, logprobs, advantages) a row; logprob 1.0 marks the prompt, which gets none."""
    data = []
    for item in server.get("/batch")["batch"] or []:
        mean, _ = mean_and_std(item["scores"])
        for ids, logprobs, score in zip(
            item["tokens"], item["inference_logprobs"], item["scores"], strict=True
        ):
            assert len(ids) == len(logprobs)
            advantages = [0.0 if x == 1.0 else score - mean for x in logprobs]
            data.append((ids[:-1], logprobs[1:], advantages[1:]))
    return data


def sft_gen(server: LocalServer, wanted: int) -> list[dict[str, Any]]:
    """Resets, registers, and keeps the best answer of each group until it has enough."""
    assert server.call("GET", "/reset_data").text == "Reset successful"
    server.register(num_steps=1)
    kept: list[dict[str, Any]] = []
    while len(kept) < wanted:
        for item in yield_batch(server):
            best = max(range(len(item["scores"])), key=item["scores"].__getitem__)
            messages = item["messages"][best] if item["messages"] is not None else None
            kept.append({"tokens": item["tokens"][best], "messages": messages, "score": item["scores"][best]})
    return kept


def yield_batch(server: LocalServer) -> list[dict[str, Any]]:
    """The next batch; an environment posts meanwhile, since the reset took what was there."""
    batch = server.get("/batch")["batch"]
    if batch is None:
        said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
        for tag in (1.0, 2.0):
            server.send(messages=[said] * 4, tag=tag)
    return batch or []


# -- what they need ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_logprobs", [True, False])
def test_every_key_is_there_and_null_but_logprobs_that_nobody_sent(
    server: LocalServer, with_logprobs: bool
) -> None:
    server.start()
    for _ in range(2):
        server.send(**(LOGPROBS if with_logprobs else {}))
    for item in server.get("/batch")["batch"]:
        assert list(item) == [key for key in KEYS if with_logprobs or key != "inference_logprobs"]
        given = {"tokens", "masks", "scores"} | ({"inference_logprobs"} if with_logprobs else set())
        assert {key for key, value in item.items() if value is not None} == given


@pytest.mark.parametrize(
    "optional", ["advantages", "ref_logprobs", "messages", "images", "overrides", "inference_logprobs"]
)
def test_an_empty_list_of_the_default_path_reaches_nobody(server: LocalServer, optional: str) -> None:
    server.start()
    for _ in range(2):
        server.send(**{optional: [], "group_overrides": {}})
    for item in server.get("/batch")["batch"]:
        assert item.get(optional) is None and item["group_overrides"] is None


@pytest.mark.parametrize("with_logprobs", [True, False])
def test_example_trainer(server: LocalServer, with_logprobs: bool) -> None:
    assert isinstance(server.register()["uuid"], int)
    assert server.get("/info") == {"batch_size": BATCH, "max_token_len": 64}
    assert example_trainer(server) == []
    more: dict[str, Any] = LOGPROBS if with_logprobs else {}
    zero = [{"set_advantage_to_zero": k == 0} for k in range(4)]
    for tag in (1.0, 2.0, 3.0, 4.0):
        server.send(tag=tag, generation_params={"temperature": 0.7}, overrides=zero, **more)
    rows = example_trainer(server)
    assert len(rows) == 2 * BATCH, "it drains: two batches at once"
    assert [advantage for _, _, advantage, _, _ in rows[::4]] == [0.0] * 4, "switched off by its override"
    assert all((logprobs is not None) == with_logprobs for *_, logprobs, _ in rows)
    assert {temperature for *_, temperature in rows} == {0.7}


def test_axolotl_plugin_may_poll_before_anyone_has_registered(server: LocalServer) -> None:
    reply = server.get("/batch")
    assert reply["status"] == "error" and reply["batch"] == []
    assert axolotl_plugin(server) == []
    server.post(
        "/register", {**REGISTER, "wandb_project": "p", "num_steps": -1, "save_checkpoint_interval": -1}
    )
    assert axolotl_plugin(server) == []
    for tag in (1.0, 2.0):
        server.send(tag=tag)
    rows = axolotl_plugin(server)
    assert len(rows) == BATCH
    assert {common for _, common, _ in rows} == {2}, "the prompt, found by comparison"


def test_axolotl_plugin_registers_from_every_process(server: LocalServer) -> None:
    first = server.register()
    again = server.register()
    assert {"uuid", "trainer_id"} <= set(first) and again["uuid"] != first["uuid"]
    assert server.get("/info")["batch_size"] == BATCH


def test_verl_recipe_and_its_forks(server: LocalServer) -> None:
    server.start(num_steps=-1, save_checkpoint_interval=-1)
    assert verl_recipe(server) is None, "null, not an empty list"
    server.send(3)
    server.send(5, advantages=[[0.0, 0.5, -0.5]] * 5)
    rows = verl_recipe(server)
    assert rows is not None and len(rows) == BATCH
    assert {"current_step", "queue_size"} <= set(server.get("/status"))
    assert isinstance(server.get("/envs")["envs"], list)


def test_verl_forks_that_post_masks_of_0_and_1_are_told_so(server: LocalServer) -> None:
    server.start()
    body = {**group(), "masks": [[0, 1, 1]] * 4}
    detail = server.post("/scored_data", body, 422)["detail"]
    assert detail[0]["loc"][:3] == ["body", "masks", 0]


def test_tinker_atropos(server: LocalServer) -> None:
    server.start()
    # What stands under the prompt is not the sender's to say: every such place is served as 1.0.
    for tag in (1.0, 2.0):
        server.send(tag=tag, inference_logprobs=[[0.0, -0.5, -0.25]] * 4)
    data = tinker_atropos(server)
    assert len(data) == BATCH
    for inputs, logprobs, advantages in data:
        assert len(inputs) == len(logprobs) == len(advantages) == 2
        assert all(advantage != 0.0 for advantage in advantages), "both trained ids have one"


def test_tinker_atropos_without_logprobs_fails_by_name(server: LocalServer) -> None:
    server.start()
    for _ in range(2):
        server.send()
    with pytest.raises(KeyError, match="inference_logprobs"):
        tinker_atropos(server)


def test_sft_gen_resets_a_server_that_environments_use(server: LocalServer) -> None:
    server.start()
    env_id = server.add_env()
    server.send(env_id=env_id)
    kept = sft_gen(server, 2)
    assert [row["score"] for row in kept] == [1.0, 2.0]
    assert all(row["messages"][-1]["role"] == "assistant" for row in kept)
    assert server.get("/status-env", env_id=env_id)["env_weight"] == 1.0, "its id is still good"


def test_an_exporter_posts_without_an_id(server: LocalServer) -> None:
    server.start()
    server.add_env()
    for _ in range(2):
        assert server.send()["status"] == "received"
    assert server.sizes() == [4, 4]


def test_one_batch_a_call_oldest_first_and_a_plain_call_does_not_wait(server: LocalServer) -> None:
    server.start()
    assert server.sizes() is None
    assert server.clock.time() == LocalServer().clock.time(), "no time went by"
    for tag in range(6):
        server.send(tag=float(tag))
    assert [server.tags() for _ in range(4)] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], None]
    assert server.get("/status")["current_step"] == 3
