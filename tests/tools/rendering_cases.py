"""Plays the cases of tests/cases/c_rendering.json through a ChatRenderer and asserts every field."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atropos_gym.errors import NewSegment, TemplateError
from atropos_gym.messages import Feedback, Message, Reply
from atropos_gym.rendering import ChatRenderer
from atropos_gym.text_env import TextEnv
from atropos_gym.tokenizers import load_tokenizer

DATA: dict[str, Any] = json.loads(
    (Path(__file__).parent.parent / "cases" / "c_rendering.json").read_text(encoding="utf-8")
)
CASES: dict[str, dict[str, Any]] = {case["id"]: case for case in DATA["cases"]}


def tokenizer_of(folder: Path, case: dict[str, Any]) -> Any:
    """Loads the case's tokenizer; added tokens make it an object of its own."""
    if "add_tokens" not in case:
        return load_tokenizer(folder, rows=case.get("checks", {}).get("sizes", {}).get("embedding_rows"))
    from tokenizers import AddedToken
    from transformers import AutoTokenizer

    hf = AutoTokenizer.from_pretrained(folder)
    hf.add_tokens(
        [
            AddedToken(t["content"], rstrip=t["rstrip"], lstrip=False, normalized=False, special=t["special"])
            for t in case["add_tokens"]
        ]
    )
    return load_tokenizer(hf)


def renderer_of(folder: Path, case: dict[str, Any], **settings: Any) -> ChatRenderer:
    """Makes the case's renderer."""
    template = case.get("template")
    return ChatRenderer(
        tokenizer_of(folder, case),
        template=None if template is None else DATA["templates"][template],
        template_kwargs=case.get("template_kwargs"),
        stop_ids=case.get("stop_ids"),
        **settings,
    )


def runs(mask: list[int]) -> list[list[int]]:
    """Returns ``[value, length]`` runs of a mask."""
    out: list[list[int]] = []
    for value in mask:
        if out and out[-1][0] == value:
            out[-1][1] += 1
        else:
            out.append([value, 1])
    return out


def check_episode(renderer: ChatRenderer, case: dict[str, Any]) -> None:
    """Asserts prompt, replies, bridges, ids and mask of one episode."""
    tools = case.get("tools")
    ids = renderer.prompt(case["messages"], tools)
    assert ids == case["prompt_ids"]
    mask = [0] * len(ids)
    for turn in case["turns"]:
        sampled = turn["sampled"]
        reply = renderer.reply(sampled)
        assert reply.text == turn.get("reply_text", turn.get("text"))
        if "complete" in turn:
            assert reply.complete == turn["complete"]
        assert reply.malformed == turn.get("malformed", False)
        ids += sampled
        mask += [1] * len(sampled)
        if "new_messages" in turn:
            bridge = renderer.bridge(sampled, turn["new_messages"], tools)
            assert bridge == turn["bridge_ids"]
            ids += bridge
            mask += [0] * len(bridge)
    assert ids == case["ids"]
    assert runs(mask) == case["mask_runs"]
    checks = case.get("checks", {})
    if "out_of_vocab_ids" in checks:
        assert (
            renderer.unknown_ids([i for t in case["turns"] for i in t["sampled"]])
            == (checks["out_of_vocab_ids"])
        )
    if "turn_starts_inside_thinking" in checks:
        assert renderer.opens_thinking == checks["turn_starts_inside_thinking"]
    for key, field in (("reasoning", "thinking"), ("answers", "content")):
        if key in checks:
            assert [getattr(renderer.reply(t["sampled"]), field) for t in case["turns"]] == checks[key]


def check_template_mode(renderer: ChatRenderer, case: dict[str, Any]) -> None:
    """Asserts the segments that past="template" gives for the case's turns."""
    conversation = list(case["messages"])
    ids = renderer.prompt(conversation)
    segments = []
    for turn in case["turns"]:
        conversation.append({"role": "assistant", "content": renderer.reply(turn["sampled"]).text})
        if "new_messages" not in turn:
            ids = ids + turn["sampled"]
            continue
        more, opens = renderer.advance(ids, turn["sampled"], conversation, turn["new_messages"])
        conversation += turn["new_messages"]
        if opens:
            segments.append(ids + turn["sampled"])
            ids = more
        else:
            ids = ids + turn["sampled"] + more
    assert [*segments, ids] == case["template_mode"]["segments"]


def check_prompt(renderer: ChatRenderer, case: dict[str, Any]) -> None:
    """Asserts one prompt."""
    assert renderer.prompt(case["messages"], case.get("tools")) == case["prompt_ids"]


def check_inject(renderer: ChatRenderer, case: dict[str, Any]) -> None:
    """Asserts that control spellings stay text and that the ids are those of the rules."""
    ids = renderer.prompt(case["messages"], case.get("tools"))
    checks = case["checks"]
    assert ids == case["prompt_ids"]
    controls = set(checks["control_ids_in_order"]) | set(checks["control_ids_if_naive"])
    assert [i for i in ids if i in controls] == checks["control_ids_in_order"]
    tokenizer: Any = renderer.tokenizer
    naive = tokenizer.hf.apply_chat_template(
        case["messages"], tools=case.get("tools"), add_generation_prompt=True, return_dict=False
    )
    assert [i for i in naive if i in controls] == checks["control_ids_if_naive"]
    assert tokenizer.decode(ids) == tokenizer.decode(naive)


def check_full_render(renderer: ChatRenderer, case: dict[str, Any]) -> None:
    """Asserts where rendering the whole conversation again would have broken the row."""
    checks = case["checks"]
    talk = list(case["messages"])
    for turn in case["turns"]:
        talk += [{"role": "assistant", "content": turn.get("reply_text", turn.get("text"))}]
        talk += turn.get("new_messages", [])
    tokenizer: Any = renderer.tokenizer
    template = case.get("template")
    kwargs = case.get("template_kwargs") or {}

    def render() -> list[int]:
        return list(
            tokenizer.hf.apply_chat_template(
                talk,
                tools=case.get("tools"),
                chat_template=None if template is None else DATA["templates"][template],
                add_generation_prompt=talk[-1]["role"] != "assistant",
                return_dict=False,
                **kwargs,
            )
        )

    if checks.get("full_render") == "raises":
        from jinja2 import TemplateError as JinjaError

        with pytest.raises(JinjaError):
            render()
        return
    full, row = render(), case["ids"]
    if "equals_full_render" in checks:
        # Behind the last turn one of the two may go on: a newline of the template, a header that was sampled.
        shared = min(len(full), len(row))
        assert (full[:shared] == row[:shared]) == checks["equals_full_render"]
    if "full_render_first_difference" in checks:
        differs = next((i for i, (a, b) in enumerate(zip(full, row, strict=False)) if a != b), len(full))
        assert differs == checks["full_render_first_difference"]


class CaseEnv(TextEnv):
    """Says what a case says."""

    def __init__(self, case: dict[str, Any], renderer: ChatRenderer) -> None:
        self.case = case
        turns = case["turns"] if "turns" in case else [case]
        self.answers_of_the_case = [turn.get("new_messages") for turn in turns]
        super().__init__(
            renderer=renderer,
            max_turns=len(turns) + 1,
            max_turn_tokens=128,
            max_prompt_tokens=1024,
            max_feedback_tokens=512,
        )

    def begin(self, options: dict[str, Any]) -> list[Message]:
        self.turn = 0
        return [Message(**message) for message in self.case["messages"]]

    def respond(self, reply: Reply) -> Feedback:
        said = self.answers_of_the_case[self.turn]
        self.turn += 1
        return Feedback(content=said, terminated=said is None)


def play(renderer: ChatRenderer, case: dict[str, Any]) -> list[list[int]]:
    """Plays a case through an environment; returns the ids of each segment, as far as the policy read."""
    env = CaseEnv(case, renderer)
    obs, info = env.reset(seed=0)
    segments = [obs.tolist()]
    for turn in case["turns"] if "turns" in case else [case]:
        sampled = turn["sampled"]
        before = obs.tolist()
        obs, _, terminated, truncated, info = env.step(np.array(sampled, np.int32))
        assert not truncated
        if info["segment"] == len(segments) - 1:
            assert obs.tolist()[: len(before) + len(sampled)] == before + sampled
            segments[-1] = obs.tolist()
        else:
            segments[-1] = before + sampled
            segments.append(obs.tolist())
        if terminated:
            assert obs.tolist() == before + sampled
    return segments


def check_through_an_environment(renderer: ChatRenderer, case: dict[str, Any]) -> None:
    """Asserts that the observations of a TextEnv are the case's row."""
    (row,) = play(renderer, case)
    assert row == case["ids"]


def check_refuse(folder: Path, case: dict[str, Any]) -> None:
    """Asserts the strict error and what the default settings give instead."""
    strict = {k: v for k, v in case["strict"].items() if k in ("system", "tool_role")}
    with pytest.raises(TemplateError) as caught:
        renderer_of(folder, case, **strict)
    message = str(caught.value)
    name = str(folder) if "add_tokens" not in case else ""
    for word in case["strict"]["error_names"]:
        assert (name if word == "template" else word) in message
    if "auto" not in case:
        return
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        renderer = renderer_of(folder, case)
        auto = case["auto"]
        if "prompt_ids" in auto:
            for _ in range(2):
                assert renderer.prompt(case["messages"]) == auto["prompt_ids"]
        if "bridge_ids" in auto:
            for _ in range(2):
                assert renderer.bridge(auto["sampled"], case["new_messages"]) == auto["bridge_ids"]
    assert len([w for w in caught_warnings if folder.name in str(w.message)]) == 1


def check_segment(folder: Path, case: dict[str, Any]) -> None:
    """Asserts that an episode which cannot go on opens a new segment."""
    settings = {k: v for k, v in case.get("strict", {}).items() if k == "system"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        renderer = renderer_of(folder, case, **settings)
    ids = renderer.prompt(case["messages"])
    expected = case.get("strict", case)
    if "prompt_ids" in expected:
        assert ids == expected["prompt_ids"]
    said = [{"role": "assistant", "content": renderer.reply(case["sampled"]).text}]
    conversation = [*case["messages"], *said]
    more, opens = renderer.advance(ids, case["sampled"], conversation, case["new_messages"])
    assert opens
    assert more == expected["segment_2_prompt_ids"]
    with pytest.raises(NewSegment):
        renderer.bridge(case["sampled"], case["new_messages"])
    assert play(renderer, case) == [[*ids, *case["sampled"]], expected["segment_2_prompt_ids"]]
    if "user_message_instead" in case:
        instead = case["user_message_instead"]
        assert renderer.bridge(case["sampled"], instead["new_messages"]) == instead["bridge_ids"]
    if "auto" in case:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            auto = renderer_of(folder, case)
            assert auto.prompt(case["messages"]) == case["auto"]["prompt_ids"]
            assert auto.bridge(case["sampled"], case["new_messages"]) == case["auto"]["bridge_ids"]


def check_decode(folder: Path, expect: dict[str, Any], text: str | None) -> None:
    """Asserts that a turn's ids are decoded once, whole, with every marker."""
    tokenizer = load_tokenizer(folder)
    if "right" in expect:
        assert tokenizer.decode(expect["ids"][:-1]) == expect["right"]
        return
    assert tokenizer.decode(expect["ids"]) == expect["whole"] == text
    assert "".join(tokenizer.decode([i]) for i in expect["ids"]) == expect["pieces_joined"]


def invariant_rows() -> list[dict[str, Any]]:
    """Returns the rows of the case that lists what a renderer reports at construction."""
    return list(CASES["c50"]["rows"])


def check_invariants(folder: Path, row: dict[str, Any]) -> None:
    """Asserts a renderer's report and its bridges for one row."""
    expect = row["expect"]
    if expect["user"] == "refuse":
        with pytest.raises(TemplateError):
            renderer_of(folder, row)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        renderer = renderer_of(folder, row)
        report = renderer.report()
        assert report["generation_prompt"] == expect["generation_prompt"]
        assert report["history_keeps"] == expect["history_keeps"]
        assert report["system_role"] == expect["system_role"]
        assert report["last_turn_is_prefix"] == expect["last_turn_is_prefix"]
        assert renderer.min_bridge == expect["min_bridge"]
        for role in ("user", "tool"):
            wanted, got = expect[role], report[role]
            if wanted == "refuse":
                assert "refused" in got
                continue
            for key in ("close", "close_kind", "history_head_equals_prompt", "bridge_independent_of_history"):
                if key in wanted:
                    assert got[key] == wanted[key], (role, key)
            said = {"role": role, "content": "Vk4"}
            if wanted["close_kind"] == "tool_call":
                said["name"] = "probe"
            end = wanted["close"] if wanted["close"] in renderer.stop_ids else renderer.stop_ids[0]
            bridge = renderer.bridge([end], [said])
            if wanted["close_kind"] == "tool_call":
                continue  # the case's tool has another name
            assert bridge == wanted["bridge_ids"], role
