"""Every family of chat templates, imitated offline: its row, its quirks, and what holds for all."""

from __future__ import annotations

import datetime
import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from atropos_gym.errors import NewSegment, TemplateError
from atropos_gym.rendering import ChatRenderer
from atropos_gym.tokenizers.control_text import ControlText
from tests.tools.imitation_families import (
    BROKEN,
    FAMILIES,
    REWRITES,
    Family,
    family_renderer,
    family_tokenizer,
)
from tests.tools.imitation_tokenizers import tiny_tokenizer

each = pytest.mark.parametrize("name", FAMILIES)
NAMES = sorted(FAMILIES)
THERE = "Oq7x"


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def tool(content: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "name": "f", "tool_call_id": "call00000"}


def token(renderer: ChatRenderer, text: str) -> int:
    hf: Any = renderer.tokenizer
    return int(hf.hf.convert_tokens_to_ids(text))


def text_of(renderer: ChatRenderer, ids: Sequence[int]) -> str:
    return renderer.tokenizer.decode(ids)


def end_of(renderer: ChatRenderer, close: str = "") -> int:
    """The stop id after which a message goes on; for a header family that header."""
    known = token(renderer, close.strip()) if close else -1
    return known if known in renderer.stop_ids else renderer.stop_ids[0]


@pytest.fixture
def quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


# --- the row of each family ---


@each
def test_the_row_of_a_family(name: str) -> None:
    family, renderer = FAMILIES[name], family_renderer(name)
    facts = renderer._dialect.facts()
    assert facts["generation_prompt"] == family.prompt
    assert facts["user"]["close_kind"] == family.kind
    assert facts["user"]["history_head_equals_prompt"] is family.same_head
    assert facts["user"]["bridge_independent_of_history"] is (name != "Mistral v3")
    assert "".join(kind[0] for kind, kept in facts["history_keeps"].items() if kept) == family.keeps
    assert renderer.opener == family.opener
    assert renderer.opens_thinking is bool(family.opener)
    assert renderer.think_tags == family.tags_of_thoughts
    assert renderer.tool_dialect == family.dialect
    assert renderer.past == "append"


@each
def test_the_bridge_to_a_user(name: str) -> None:
    family, renderer = FAMILIES[name], family_renderer(name)
    end = end_of(renderer, family.closes)
    bridge = renderer.bridge([60, end], [user(THERE)])
    assert text_of(renderer, bridge) == family.user
    assert renderer.bridge([end], [user(THERE)]) == bridge
    cut = renderer.bridge([60], [user(THERE)])
    assert cut == renderer.bridge([], [user(THERE)])
    assert cut[len(cut) - len(bridge) :] == bridge
    supplied = text_of(renderer, cut[: len(cut) - len(bridge)])
    assert supplied == (family.closes.strip() or family.special[1] if name != "Phi-3" else "<|end|>")
    assert len(cut) - len(bridge) == 1 + (name == "Llama 2")  # a blank belongs to its close


@each
def test_the_bridge_to_a_tool(name: str) -> None:
    family, renderer = FAMILIES[name], family_renderer(name)
    if family.tool is None:
        with pytest.raises(TemplateError, match=f"{name} cannot write role 'tool'.*set tool_role='user'"):
            family_renderer(name, tool_role="tool")
        fresh = ChatRenderer(family_tokenizer(name))
        with pytest.warns(UserWarning, match=f"{name} has no tool role") as caught:
            as_user = [fresh.bridge([fresh.stop_ids[0]], [tool(THERE)]) for _ in range(2)]
        assert len(caught) == 1
        assert as_user == [fresh.bridge([fresh.stop_ids[0]], [user(THERE)])] * 2
        return
    end = end_of(renderer, family.tool_close or family.closes)
    bridge = renderer.bridge([60, end], [tool(THERE)])
    assert text_of(renderer, bridge) == family.tool
    cut = renderer.bridge([60], [tool(THERE)])
    assert cut[len(cut) - len(bridge) :] == bridge
    assert len(cut) > len(bridge)


@each
def test_system_text_stands_in_the_first_prompt_alone(name: str) -> None:
    family = FAMILIES[name]
    renderer = ChatRenderer(family_tokenizer(name), template_kwargs=family.kwargs)
    talk = [system("Sq7x"), user("Uq7x")]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prompts = [renderer.prompt(talk) for _ in range(2)]
    text = text_of(renderer, prompts[0])
    assert text.count("Sq7x") == 1
    assert text.index("Sq7x") < text.index("Uq7x")
    assert "Sq7x" not in text_of(renderer, renderer.bridge([], [user(THERE)]))
    assert len(caught) == (family.system == "merge")
    if family.system == "merge":
        assert name in str(caught[0].message)
        assert prompts[0] == renderer.prompt([user("Sq7x\n\nUq7x")])


@each
def test_bos_stands_once(name: str) -> None:
    family, renderer = FAMILIES[name], family_renderer(name)
    first = token(renderer, family.special[0])
    ids = renderer.prompt([user("a")])
    if name == "Seed-OSS":  # BOS opens every turn
        assert ids.count(first) == 2
        return
    assert ids[:1] == [first] or not family.bos
    assert ids.count(first) == family.bos or name == "GLM-4.5"
    per_turn = name == "Llama 2"  # the one family that writes BOS before each question
    assert renderer.bridge([], [user("a")]).count(first) == per_turn


@each
def test_ids_beyond_the_tokenizer_are_told_and_have_no_text(name: str) -> None:
    renderer = family_renderer(name)
    beyond = len(renderer.tokenizer) + 7
    said = renderer.say("Hello")
    turn = [said[0], beyond, *said[1:]]
    assert renderer.unknown_ids(turn) == [beyond]
    assert renderer.reply(turn).text == renderer.reply(said).text == "Hello"
    assert renderer.reply(turn).ids == tuple(turn)


# --- quirks ---


def test_two_results_are_one_turn_where_the_template_merges_them() -> None:
    renderer = family_renderer("Qwen3")
    said = text_of(renderer, renderer.bridge(renderer.say("a"), [tool("1"), tool("2")]))
    assert said.count("<|im_start|>user") == 1
    assert said.count("<tool_response>") == 2


def test_thoughts_are_stripped_before_a_question_and_kept_before_a_result() -> None:
    renderer = family_renderer("Qwen3", past="template")
    thought = "<think>\nhm\n</think>\n\na"
    talk = [user("q"), assistant(thought)]
    prompt, turn = renderer.prompt(talk[:1]), renderer.say(thought)
    _, opens = renderer.advance(prompt, turn, talk, [user("r")])
    assert opens
    more, opens = renderer.advance(prompt, turn, talk, [tool("r")])
    assert not opens
    assert text_of(renderer, more).startswith("\n<|im_start|>user\n<tool_response>")
    append = family_renderer("Qwen3")
    assert append.advance(prompt, turn, talk, [user("r")]) == (append.bridge(turn, [user("r")]), False)


def test_an_empty_think_block_stands_before_every_turn() -> None:
    renderer = family_renderer("Qwen3 no-think")
    for ids in (renderer.prompt([user("a")]), renderer.bridge([], [user("a")])):
        assert text_of(renderer, ids).endswith("<think>\n\n</think>\n\n")
    assert not renderer.opens_thinking
    assert renderer.reply(renderer.say("a")).thinking is None


@pytest.mark.parametrize("name", ["Qwen2.5", "SmolLM2", "Nemotron 3", "Llama 3.1", "gpt-oss", "Cohere 2"])
def test_what_the_template_says_unasked_stands_in_the_prompt_alone(name: str) -> None:
    renderer = family_renderer(name)
    said = {
        "Qwen2.5": "You are a helper.", "SmolLM2": "You are small.", "Nemotron 3": "system",
        "Llama 3.1": "Today Date", "gpt-oss": "You are a model.", "Cohere 2": "Preamble",
    }[name]  # fmt: skip
    assert said in text_of(renderer, renderer.prompt([user("a")]))
    assert said not in text_of(renderer, renderer.bridge([], [user("a")]))


@pytest.mark.parametrize("name", ["Llama 3.1", "gpt-oss"])
def test_the_date_is_pinned_and_part_of_the_fingerprint(name: str) -> None:
    renderer = family_renderer(name)
    form = "%d %b %Y" if name == "Llama 3.1" else "%Y-%m-%d"
    assert datetime.date.today().strftime(form) in text_of(renderer, renderer.prompt([user("a")]))
    pinned = [
        ChatRenderer(family_tokenizer(name), template_kwargs={"date_string": day})
        for day in ("2024-07-26", "2024-07-26", "2024-07-27")
    ]
    assert "26" in text_of(renderer, pinned[0].prompt([user("a")]))
    assert pinned[0].fingerprint == pinned[1].fingerprint != pinned[2].fingerprint != renderer.fingerprint


def test_a_date_that_is_given_needs_no_clock() -> None:
    tokenizer = family_tokenizer("Llama 3.1")
    given_ = ChatRenderer(tokenizer, template_kwargs={"date_string": "1 May"})
    assert given_._dialect.facts()["clock"] is None
    assert family_renderer("Llama 3.1")._dialect.facts()["clock"] == datetime.date.today().isoformat()


def test_results_are_quoted_as_the_template_quotes() -> None:
    renderer = family_renderer("Llama 3.1")
    said = text_of(renderer, renderer.bridge(renderer.say("f"), [tool('say "hi"')]))
    assert r'"say \"hi\""' in said
    call_end = token(renderer, "<|eom_id|>")
    assert renderer.bridge([60, call_end], [tool("1")]) == renderer.bridge(renderer.say("f"), [tool("1")])


def test_a_second_round_of_tools_is_well_formed() -> None:
    """A full render of this family is not: one flag serves the whole conversation."""
    renderer = family_renderer("DeepSeek-V3")
    first, second = (renderer.bridge(renderer.say("f"), [tool(said)]) for said in ("1", "2"))
    for ids in (first, second):
        assert ids[0] == token(renderer, "<｜tool▁outputs▁begin｜>")
        assert ids[-1] == token(renderer, "<｜tool▁outputs▁end｜>")
    talk = [user("q"), assistant("f"), tool("1"), assistant("f"), tool("2")]
    assert renderer.prompt(talk)[-len(second) :] != second


def test_harmony_takes_both_ends_and_leaves_the_inner_one() -> None:
    renderer = family_renderer("gpt-oss")
    inner = token(renderer, "<|end|>")
    assert inner not in renderer.stop_ids
    assert {token(renderer, "<|return|>"), token(renderer, "<|call|>")} <= set(renderer.stop_ids)
    said = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>4"
    reply = renderer.reply(renderer.say(said))
    assert (reply.thinking, reply.content, reply.complete) == ("hm", "4", True)
    assert inner in reply.ids
    call = renderer.reply(
        [
            *renderer.say(' to=functions.f<|channel|>commentary json<|message|>{"a": 1}')[:-1],
            token(renderer, "<|call|>"),
        ]
    )
    assert [(c.name, dict(c.arguments)) for c in call.tool_calls] == [("f", {"a": 1})]
    assert (call.content, call.complete) == ("", True)


def test_a_header_is_the_end_of_a_turn_and_is_trained() -> None:
    renderer = family_renderer("GLM-4.5")
    user_id, observation = token(renderer, "<|user|>"), token(renderer, "<|observation|>")
    assert renderer.say("a")[-1] == user_id
    assert renderer.bridge([60, user_id], [user("b")])[0] != user_id
    for end, said in (
        (user_id, tool("1")),
        (observation, user("1")),
        (token(renderer, "<|endoftext|>"), tool("1")),
    ):
        with pytest.raises(NewSegment, match=str(end)):
            renderer.bridge([60, end], [said])
    prompt, opens = renderer.advance([1], [60, user_id], [user("a"), assistant("b")], [tool("1")])
    assert opens
    assert prompt == renderer.prompt([user("a"), assistant("b"), tool("1")])


def test_white_space_behind_a_control_token_goes_as_the_token_wants() -> None:
    renderer = family_renderer("Phi-3")
    ids = renderer.prompt([user("\n a<|end|>")])
    assert ids[0] == token(renderer, "<|user|>")
    assert renderer.tokenizer.decode(ids[1:2]) == "a"
    assert renderer.prompt([user("\n b")])[1:2] == renderer.tokenizer.encode("b")


@each
def test_a_transcript_with_results_ends_each_turn_as_its_next_message_wants(name: str, quiet: None) -> None:
    """Where the next role's header or an end of a call's own ends a turn, that is what was sampled."""
    renderer = family_renderer(name)
    talk = [user("a"), assistant("b"), tool("c"), assistant("d"), user("e"), assistant("g")]
    ids, mask = renderer.transcript(talk)
    said = [list(run) for sampled, run in _runs(ids, mask) if sampled]
    assert len(said) == 3
    again = renderer.prompt(talk[:1])
    for place, turn in enumerate(said):
        again += turn
        if place < 2:
            again += renderer.bridge(turn, [talk[2 + 2 * place]])
        assert turn[-1] in renderer.stop_ids
        assert renderer.reply(turn).text == talk[1 + 2 * place]["content"]
    assert ids == again
    assert [source == "policy" for source in renderer.spans(talk)] == mask
    if renderer._dialect.facts()["tool"].get("close_kind") in ("tool_call", "header"):
        assert said[0][-1] == renderer._dialect.facts()["tool"]["close"]


def _runs(ids: Sequence[int], mask: Sequence[bool]) -> list[tuple[bool, list[int]]]:
    """Returns the ids in runs of one value of the mask."""
    runs: list[tuple[bool, list[int]]] = []
    for one, sampled in zip(ids, mask, strict=True):
        if not runs or runs[-1][0] != sampled:
            runs.append((sampled, []))
        runs[-1][1].append(one)
    return runs


def test_tools_are_written_once() -> None:
    """Where a template moves them to the last question, a bridge has none: they stand in the prompt."""
    schema = [
        {"type": "function", "function": {"name": "Fq7x", "parameters": {"type": "object", "properties": {}}}}
    ]
    for name in ("Mistral v3", "Llama 3.1", "Qwen3", "gpt-oss"):
        renderer = family_renderer(name)
        assert "Fq7x" in text_of(renderer, renderer.prompt([user("a")], schema))
        bridge = renderer.bridge([renderer.stop_ids[0]], [user("a")], schema)
        assert bridge == renderer.bridge([renderer.stop_ids[0]], [user("a")])


def test_two_ends_of_a_turn_in_a_row_are_not_written_twice() -> None:
    for name in ("Cohere 2", "Command R7B"):
        renderer = family_renderer(name)
        inner, outer = token(renderer, "<|END_RESPONSE|>"), token(renderer, "<|END_OF_TURN_TOKEN|>")
        after_inner = renderer.bridge([60, inner], [user("a")])
        after_outer = renderer.bridge([60, inner, outer], [user("a")])
        assert after_inner == [outer, *after_outer]
        assert renderer.bridge([60], [user("a")]) == [inner, *after_inner]


def test_a_header_that_is_written_unasked_is_no_refusal() -> None:
    renderer = family_renderer("Command R7B")
    assert renderer.prompt([user("a")])[-1] == token(renderer, "<|CHATBOT_TOKEN|>")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Magistral", "[THINK]hm[/THINK]4"),
        ("Seed-OSS", "<seed:think>hm</seed:think>4"),
        ("Command R7B", "<|START_THINKING|>hm<|END_THINKING|>4"),
        ("Qwen3", "<think>\nhm\n</think>\n\n4"),
    ],
)
def test_thoughts_stand_in_the_models_own_tags(name: str, said: str) -> None:
    renderer = family_renderer(name)
    reply = renderer.reply(renderer.say(said))
    assert (reply.thinking, reply.content, reply.text) == ("hm", "4", said)
    assert reply.ids[0] == token(renderer, renderer.think_tags[0])
    cut = renderer.reply(renderer.say(said.partition("hm")[0] + "hm")[:-1])
    assert (cut.thinking, cut.content, cut.complete) == ("hm", "", False)
    other = "[THINK]" if name != "Magistral" else "<think>"
    assert renderer.reply(renderer.say(f"{other}hm")).thinking is None


@pytest.mark.parametrize("name", ["Qwen3.5", "Nemotron 3", "R1 distill"])
def test_an_opened_think_block_is_closed_by_the_policy_alone(name: str) -> None:
    renderer = family_renderer(name)
    reply = renderer.reply(renderer.say("hm\n</think>\n\n4"))
    assert (reply.thinking, reply.content, reply.opened) == ("hm", "4", "<think>")
    open_ = renderer.reply(renderer.say("hm"))
    assert (open_.thinking, open_.content) == ("hm", "")
    assert "</think>" not in text_of(renderer, renderer.bridge([60], [user("a")]))


def test_a_template_says_what_it_reads() -> None:
    assert family_renderer("Qwen3").reads("enable_thinking")
    assert family_renderer("Llama 3.1").reads("date_string")
    assert not family_renderer("Llama 3").reads("enable_thinking")


def test_calls_are_read_in_the_familys_form() -> None:
    said = {
        "Qwen3": '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        "Qwen3.5": "</think><tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n"
        "</tool_call>",
        "Llama 3.1": '{"name": "f", "parameters": {"a": 1}}',
        "Mistral v3": '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]',
    }
    for name, text in said.items():
        (call,) = family_renderer(name).reply(family_renderer(name).say(text)).tool_calls
        assert call.name == "f"
        assert str(call.arguments["a"]) == "1"
    assert family_renderer("SmolLM2").reply(family_renderer("SmolLM2").say(said["Qwen3"])).tool_calls == ()


# --- templates that nobody should train on ---


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_template_is_refused_by_name_with_a_remedy(name: str) -> None:
    template, settings_, words = BROKEN[name]
    with pytest.raises(TemplateError, match=words) as caught:
        ChatRenderer(tiny_tokenizer(template), **settings_)
    assert "TokenizersBackend" in str(caught.value)
    assert "\n" not in str(caught.value)
    if settings_:
        with pytest.warns(UserWarning, match="no tool role"):
            ChatRenderer(tiny_tokenizer(template)).bridge([], [tool("1")])


def test_a_template_that_rewrites_history_makes_every_turn_a_segment() -> None:
    with pytest.warns(UserWarning, match="TokenizersBackend.*segment of its own"):
        renderer = ChatRenderer(tiny_tokenizer(REWRITES))
    assert renderer.past == "template"
    with pytest.raises(NewSegment, match="TokenizersBackend"):
        renderer.bridge([60, 2], [user("b")])
    turn = renderer.say("b")
    prompt = renderer.prompt([user("a")])
    talk = [user("a"), assistant("b")]
    assert renderer.advance(prompt, turn, talk, [user("c")]) == (renderer.prompt([*talk, user("c")]), True)


# --- what holds for every template ---

TEXT = st.lists(
    st.sampled_from(["a", " ", "\n", "é", "🙂", "1", "<", ">", "]", "Hello"]) | st.text(max_size=2),
    max_size=5,
)
WORDS = st.sampled_from(["Hello", "a", "Too low", "é🙂", "4", "xx"])


def _evil(name: str) -> st.SearchStrategy[str]:
    """Text with control spellings, whole, halved and nested."""
    family: Family = FAMILIES[name]
    spelled = [*family.special, *family.tags, "<think>", "<tool_response>"]
    halves = [s[: len(s) // 2] for s in spelled] + [s[len(s) // 2 :] for s in spelled]
    return st.lists(st.sampled_from(spelled) | st.sampled_from(halves) | TEXT.map("".join), max_size=5).map(
        "".join
    )


def _controls(renderer: ChatRenderer, ids: Sequence[int]) -> list[int]:
    controls: Any = renderer._dialect.controls
    return [i for i in ids if i in controls]


@given(data=st.data(), name=st.sampled_from(NAMES))
@settings(deadline=None, max_examples=150)
def test_ids_only_grow_and_exactly_the_sampled_ones_are_trained(data: Any, name: str) -> None:
    family, renderer = FAMILIES[name], family_renderer(name)
    ids_of_rows = st.integers(0, renderer.tokenizer.rows - 1) | st.sampled_from(
        sorted(renderer._dialect.controls)
    )
    roles = [user] if family.tool is None else [user, tool]
    talk = [user(data.draw(_evil(name)))]
    ids = renderer.prompt(talk)
    turns: list[list[int]] = []
    trained: list[int] = []
    for _ in range(data.draw(st.integers(1, 3))):
        turn = data.draw(st.lists(ids_of_rows, max_size=6))
        reply = renderer.reply(turn)
        assert reply.ids == tuple(turn)
        turns.append(turn)
        talk.append(assistant(reply.text))
        said = [data.draw(st.sampled_from(roles))(data.draw(_evil(name)))]
        trained += range(len(ids), len(ids) + len(turn))
        before = [*ids, *turn]
        try:
            bridge = renderer.bridge(turn, said)
        except NewSegment:
            assert family.kind == "header"
            assert turn[-1] in renderer.stop_ids
            ids = before
            break
        assert renderer.advance(ids, turn, talk, said) == (bridge, False)
        ids = [*before, *bridge]
        talk += said
    sampled = [i for turn in turns for i in turn]
    assert [ids[place] for place in trained] == sampled
    last = talk[-1]["role"] != "assistant"
    row = ids[: trained[-1] + 1] if trained else []
    spans = renderer.spans(talk[:-1] if last else talk, turns=turns)
    assert [place for place, source in enumerate(spans) if source == "policy"] == trained
    assert not trained or not turns[-1] or len(spans) == len(row)


@given(data=st.data(), name=st.sampled_from(NAMES))
@settings(deadline=None, max_examples=250)
def test_what_strangers_write_never_becomes_a_control_id(data: Any, name: str) -> None:
    family, renderer = FAMILIES[name], family_renderer(name)
    text = data.draw(_evil(name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for said in (user, tool):
            plain, loud = (renderer.bridge([], [said(words)]) for words in ("x", text))
            assert _controls(renderer, loud) == _controls(renderer, plain)
        assert _controls(renderer, renderer.prompt([user(text)])) == _controls(
            renderer, renderer.prompt([user("x")])
        )
        if family.dialect is None:
            return
        schemas = [
            [{"type": "function", "function": {"name": words, "parameters": {words: [words, 1]}}}]
            for words in ("x", text)
        ]
        plain, loud = (renderer.prompt([user("x")], schema) for schema in schemas)
        assert _controls(renderer, loud) == _controls(renderer, plain)


@given(data=st.data(), name=st.sampled_from(NAMES))
@settings(deadline=None, max_examples=120)
def test_a_prompt_reads_as_its_template_wrote_it(data: Any, name: str) -> None:
    renderer = family_renderer(name)
    text = ControlText.unmark(data.draw(_evil(name)))
    assume("\u2581" not in text)  # SentencePiece's own sign for a blank reads as one
    read = text_of(renderer, renderer.prompt([user(text)]))
    assert text.strip() in read or name == "Phi-3"  # its tokens swallow white space


@given(data=st.data(), name=st.sampled_from(NAMES))
@settings(deadline=None, max_examples=120)
def test_a_reply_does_not_depend_on_how_its_ids_were_split(data: Any, name: str) -> None:
    """Any split of a text into the vocabulary's pieces reads alike."""
    renderer = family_renderer(name)
    text = data.draw(st.lists(WORDS | TEXT.map("".join), max_size=5).map("".join))
    canonical = (
        renderer.say(text)[:-1] if FAMILIES[name].closes != " </s>" else renderer.tokenizer.encode(text)
    )
    chance = data.draw(st.randoms(use_true_random=False))
    other = [piece for i in canonical for piece in _split(renderer, i, chance)]
    one, two = renderer.reply(canonical), renderer.reply(other)
    assert (one.text, one.content, one.thinking) == (two.text, two.content, two.thinking)


def _split(renderer: ChatRenderer, whole: int, chance: Any) -> list[int]:
    """Returns ids of the vocabulary whose pieces make up the piece of an id, or the id."""
    backend: Any = getattr(renderer.tokenizer, "backend", None)
    if whole in backend.get_added_tokens_decoder() or chance.random() < 0.3:
        return [whole]
    piece = backend.id_to_token(whole)
    for cut in range(1, len(piece)):
        parts = [backend.token_to_id(part) for part in (piece[:cut], piece[cut:])]
        if None not in parts:
            return [i for part in parts for i in _split(renderer, part, chance)]
    return [whole]


@given(data=st.data(), name=st.sampled_from(NAMES))
@settings(deadline=None, max_examples=150)
def test_a_bridge_is_what_the_template_itself_would_have_written(data: Any, name: str) -> None:
    family, renderer = FAMILIES[name], family_renderer(name)
    talk = [user(data.draw(_evil(name)))]
    row = renderer.prompt(talk)
    for _ in range(2):
        words, said = data.draw(WORDS), user(data.draw(_evil(name)))
        turn = renderer.say(words)
        bridge = renderer.bridge(turn, [said])
        row += turn + bridge
        talk += [assistant(words), said]
        full = renderer.prompt(talk)
        assert full[len(full) - len(bridge) :] == bridge
    if family.same_head and "p" in family.keeps and family.pieces != "legacy":
        assert row == full


@given(data=st.data(), name=st.sampled_from(NAMES))
@settings(deadline=None, max_examples=80)
def test_a_bridge_does_not_know_the_history(data: Any, name: str) -> None:
    renderer = family_renderer(name)
    said = [user(data.draw(_evil(name)))]
    end = end_of(renderer, FAMILIES[name].closes)
    histories = [[user("a"), assistant("b")], [user("c"), assistant("d"), user("e"), assistant("f")]]
    bridges = [
        renderer.advance(renderer.prompt(h[:-1]), [60 + k, end], h, said) for k, h in enumerate(histories)
    ]
    assert all(one == other for one, other in pairwise(bridges))


@given(data=st.data(), name=st.sampled_from(NAMES))
@settings(deadline=None, max_examples=100)
def test_spans_are_exact(data: Any, name: str) -> None:
    """The words of messages are the message's, wherever else they occur."""
    renderer = family_renderer(name)
    words = st.sampled_from(["user", "a", "assistant", "model", "Hello", "INST", "im_start"])
    talk = [user(data.draw(words)), assistant("b"), user(data.draw(words)), assistant("c")]
    ids, mask = renderer.transcript(talk)
    spans = renderer.spans(talk)
    assert [span == "policy" for span in spans] == mask
    said = [i for i, span in zip(ids, spans, strict=True) if span == "message"]
    heard = [text_of(renderer, said)] if said else []
    # A blank piece or a quote may be one id with the words; nothing else is.
    assert "".join(heard).replace(" ", "").replace("[", "") == (talk[0]["content"] + talk[2]["content"])
