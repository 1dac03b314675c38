"""ChatRenderer on ChatML templates that differ in one thing each, offline."""

from __future__ import annotations

import copy
import datetime
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_gym.errors import ConfigError, NewSegment, TemplateError
from atropos_gym.messages import ToolCall
from atropos_gym.rendering import ChatRenderer, chat_renderer
from atropos_gym.rendering.clock import on_day
from atropos_gym.tokenizers.control_text import ControlText
from tests.tools import imitation_tokenizers as imitation
from tests.tools import rendering_cases as cases

TINY: Any = ChatRenderer(imitation.tiny_tokenizer())
RENDERERS = {
    "bytes": ChatRenderer("bytes"),
    "chatml": TINY,
    "trims": ChatRenderer(imitation.tiny_tokenizer(imitation.TRIMS)),
    "default system": ChatRenderer(imitation.tiny_tokenizer(imitation.DEFAULT_SYSTEM)),
    "opens think": ChatRenderer(imitation.tiny_tokenizer(imitation.OPENS_THINK)),
    "tools": ChatRenderer(imitation.tiny_tokenizer(imitation.TOOLS)),
}
each = pytest.mark.parametrize("renderer", list(RENDERERS.values()), ids=list(RENDERERS))
END = 2


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


# --- prompts and bridges on imitation templates ---


def test_a_prompt_is_what_the_template_gives() -> None:
    hf = TINY.tokenizer.hf
    said = [{"role": "system", "content": "S"}, user("Hi\n\n<think>"), assistant("a"), user(" b ")]
    assert TINY.prompt(said) == hf.apply_chat_template(said, add_generation_prompt=True, return_dict=False)


def test_the_bridge_keeps_the_newline_behind_a_sampled_end() -> None:
    said = [user("Too low")]
    after_end = TINY.bridge([50, END], said)
    assert (
        TINY.tokenizer.decode(after_end) == "\n<|im_start|>user\nToo low<|im_end|>\n<|im_start|>assistant\n"
    )
    assert TINY.bridge([50], said) == [END, *after_end]
    assert TINY.bridge([], said) == [END, *after_end]
    assert TINY.bridge([END], said) == after_end
    assert TINY.bridge([50, END, 50], said) == [END, *after_end]


def test_a_default_system_prompt_stands_in_the_prompt_alone() -> None:
    renderer = RENDERERS["default system"]
    assert "Be kind." in renderer.tokenizer.decode(renderer.prompt([user("Hi")]))
    assert "Be kind." not in renderer.tokenizer.decode(renderer.bridge([END], [user("Hi")]))


def test_a_template_that_trims_trims_observations_and_leaves_what_was_sampled() -> None:
    renderer = RENDERERS["trims"]
    assert renderer.bridge([END], [user("  More  ")]) == renderer.bridge([END], [user("More")])
    assert renderer.report()["history_keeps"]["whitespace"] is False
    sampled = [*renderer.tokenizer.encode(" Hello \n"), END]
    prompt = renderer.prompt([user("Hi")])
    more, opens = renderer.advance(prompt, sampled, [user("Hi"), assistant(" Hello \n")], [user("x")])
    assert not opens
    template = ChatRenderer(renderer.tokenizer, past="template")
    again, opens = template.advance(prompt, sampled, [user("Hi"), assistant(" Hello \n")], [user("x")])
    assert opens
    assert "assistant\nHello<|im_end|>" in renderer.tokenizer.decode(again)
    assert more != again


def test_template_mode_goes_on_where_nothing_was_rewritten() -> None:
    renderer = ChatRenderer(TINY.tokenizer, past="template")
    prompt = renderer.prompt([user("Hi")])
    sampled = renderer.say("Hello")
    assert renderer.advance(prompt, sampled, [user("Hi"), assistant("Hello")], [user("x")]) == (
        TINY.bridge(sampled, [user("x")]),
        False,
    )


def test_an_opened_think_block_is_prompt_and_comes_again_in_every_bridge() -> None:
    renderer = RENDERERS["opens think"]
    assert renderer.opens_thinking
    assert not TINY.opens_thinking
    assert renderer.tokenizer.decode(renderer.bridge([END], [user("x")])).endswith("<think>\n")
    reply = renderer.reply([*renderer.tokenizer.encode("easy\n</think>\n\n4"), END])
    assert (reply.thinking, reply.content, reply.opened) == ("easy", "4", "<think>")
    cut = renderer.reply(renderer.tokenizer.encode("still thinking"))
    assert (cut.thinking, cut.content, cut.complete) == ("still thinking", "", False)


def test_tool_messages_follow_the_template() -> None:
    renderer = RENDERERS["tools"]
    said = renderer.tokenizer.decode(renderer.bridge([END], [{"role": "tool", "content": "42"}]))
    assert "<tool_response>42</tool_response>" in said


def test_tool_schemas_are_untrusted_text() -> None:
    renderer = RENDERERS["tools"]
    schema = [{"type": "function", "function": {"name": "f", "description": "<|im_end|>", "<|im_start|>": 1}}]
    ids = renderer.prompt([user("Hi")], tools=schema)
    plain = renderer.prompt([user("Hi")], tools=[{"type": "function", "function": {"name": "f"}}])
    assert [i for i in ids if i < 3] == [i for i in plain if i < 3]
    assert '"<|im_start|>": 1' in renderer.tokenizer.decode(ids)


def test_a_header_that_ends_a_turn_is_not_repeated() -> None:
    hf = imitation.tiny_tokenizer(imitation.HEADERS, imitation.HEADER_TOKENS)
    _, user_id, _, tool_id = hf.convert_tokens_to_ids(list(imitation.HEADER_TOKENS))
    renderer = ChatRenderer(hf, stop_ids=[user_id, tool_id])
    assert renderer.report()["user"]["close_kind"] == "header"
    bridge = renderer.bridge([50, user_id], [user("More")])
    assert renderer.tokenizer.decode(bridge) == "\nMore<|assistant|>\n"
    assert renderer.bridge([50], [user("More")]) == [user_id, *bridge]
    with pytest.raises(NewSegment, match=str(tool_id)):
        renderer.bridge([50, user_id], [{"role": "tool", "content": "42"}])
    prompt, opens = renderer.advance(
        [1], [50, user_id], [user("a"), assistant("b")], [{"role": "tool", "content": "42"}]
    )
    assert opens
    assert renderer.tokenizer.decode(prompt) == "<|user|>\na<|assistant|>\nb<|tool|>\n42<|assistant|>\n"
    assert renderer.say("b")[-1] == user_id


def _harmony() -> tuple[ChatRenderer, dict[str, int]]:
    hf = imitation.tiny_tokenizer(cases.DATA["templates"]["harmony"], imitation.HARMONY_TOKENS)
    tokens = imitation.HARMONY_TOKENS
    ids = dict(zip((t.strip("<|>") for t in tokens), hf.convert_tokens_to_ids(list(tokens)), strict=True))
    return ChatRenderer(hf, stop_ids=[ids["return"], ids["call"]]), ids


def test_a_close_that_differs_in_history_is_not_added_to_a_sampled_end() -> None:
    renderer, ids = _harmony()
    assert renderer.report()["user"]["close_kind"] == "history_close_differs"
    after = renderer.bridge([50, ids["return"]], [user("More")])
    assert renderer.tokenizer.decode(after) == "<|start|>user<|message|>More<|end|><|start|>assistant"
    assert renderer.bridge([50], [user("More")]) == [ids["end"], *after]
    said = "<|channel|>final<|message|>Ok"
    assert renderer.say(said)[-1] == ids["return"]
    reply = renderer.reply(renderer.say(said))
    assert (reply.text, reply.content, reply.thinking, reply.complete) == (said, "Ok", None, True)


def test_a_tool_result_that_needs_a_call_gets_one_and_stands_without_it() -> None:
    renderer, ids = _harmony()
    result = {"role": "tool", "name": "f", "content": "42 <|call|>"}
    assert renderer.report()["tool"]["close_kind"] == "tool_call"
    after = renderer.bridge([50, ids["call"]], [result])
    assert renderer.tokenizer.decode(after) == (
        "<|start|>functions.f to=assistant<|channel|>commentary<|message|>42 <|call|><|end|>"
        "<|start|>assistant"
    )
    assert ids["call"] not in after
    assert renderer.bridge([50], [result]) == [ids["call"], *after]
    reply = renderer.reply(
        [*TINY.tokenizer.encode(" to=functions.f"), ids["channel"], ids["message"], ids["call"]]
    )
    assert reply.tool_calls == (ToolCall("f", {"": ""}),)


def test_roles_that_must_alternate_are_reported_and_refused_by_name() -> None:
    renderer = ChatRenderer(
        imitation.tiny_tokenizer(
            cases.DATA["templates"]["turns_no_system"].replace("{{ bos_token }}", ""),
            ("<start_of_turn>", "<end_of_turn>"),
        )
    )
    assert renderer.report()["roles_alternate"]
    assert renderer.report()["history_keeps"] == {
        "plain": True,
        "whitespace": False,
        "thinking": True,
        "empty": True,
    }
    with pytest.raises(TemplateError, match="refuses roles user, user.*alternate"):
        renderer.prompt([user("a"), user("b")])
    with (
        pytest.raises(TemplateError, match="needs a user message behind it"),
        pytest.warns(UserWarning, match="no system message"),
    ):
        renderer.prompt([{"role": "system", "content": "S"}])


# --- refusals, each naming template, role and remedy ---


def test_a_template_without_an_end_of_turn_is_refused() -> None:
    with pytest.raises(TemplateError, match="no end of turn.*stop_ids="):
        ChatRenderer(imitation.tiny_tokenizer(imitation.NO_END))


def test_a_template_that_ignores_the_generation_prompt_is_refused() -> None:
    ignoring = imitation.CHATML.partition("{% if add_generation_prompt")[0]
    with pytest.raises(TemplateError, match="ignores add_generation_prompt"):
        ChatRenderer(imitation.tiny_tokenizer(ignoring))


def test_a_turn_that_ends_without_a_token_boundary_is_refused() -> None:
    glued = imitation.CHATML.replace("m.content + '<|im_end|>", "m.content + 'x<|im_end|>")
    with pytest.raises(TemplateError, match="without a token boundary before 'x"):
        ChatRenderer(imitation.tiny_tokenizer(glued))


def test_ids_inside_a_turn_do_not_end_it() -> None:
    """A generation config may name them all the same: they are left out where the template shows it."""
    thinks = imitation.CHATML.replace("m.content", "(m.thinking + '<|endoftext|>' if m.thinking) + m.content")
    hf = imitation.tiny_tokenizer(thinks.replace("if m.thinking)", "if m.thinking else '')"))
    hf.eos_token = "<|endoftext|>"
    assert ChatRenderer(hf).stop_ids == (END,)
    plain = imitation.tiny_tokenizer()
    plain.eos_token = "<|endoftext|>"
    assert ChatRenderer(plain).stop_ids == (END, 0)


def test_a_close_that_only_a_next_message_shows_is_found() -> None:
    late = (
        "{% for m in messages %}{{ ('' if loop.first else '<|im_end|>\\n') + '<|im_start|>' + m.role + '\\n' "
        "+ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_end|>\\n<|im_start|>assistant\\n' }}{% endif %}"
    )
    renderer = ChatRenderer(imitation.tiny_tokenizer(late))
    assert renderer.report()["user"]["close"] == END
    bridge = renderer.tokenizer.decode(renderer.bridge([END], [user("More")]))
    assert bridge == "\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"


def test_a_tool_role_written_as_the_assistants_is_refused() -> None:
    shy = imitation.CHATML.replace("m.role", "('user' if m.role == 'user' else 'assistant')")
    with pytest.raises(TemplateError, match="'tool' as an assistant's turn"):
        ChatRenderer(imitation.tiny_tokenizer(shy), tool_role="tool")


def test_a_tokenizer_of_another_kind_has_no_template() -> None:
    class Words:
        name, rows, fingerprint = "words", 3, "sha256:0"

        def __len__(self) -> int:
            return 3

        def encode(self, text: str) -> list[int]:
            return []

        def decode(self, ids: Sequence[int]) -> str:
            return ""

    with pytest.raises(ConfigError, match="'words'.*no chat template"):
        ChatRenderer(Words())


@pytest.mark.parametrize(
    "message", [{"role": "tool"}, {"content": "x"}, {"role": "robot", "content": "x"}], ids=str
)
def test_a_message_without_role_or_content_is_named(message: Any) -> None:
    with pytest.raises(TemplateError, match="role|content of tool"):
        TINY.prompt([message])


def test_a_tokenizer_without_template_is_refused() -> None:
    with pytest.raises(TemplateError, match="no chat template: give template="):
        ChatRenderer(imitation.tiny_tokenizer(None))


def test_a_refused_tool_role_becomes_a_user_message_with_one_warning() -> None:
    hf = imitation.tiny_tokenizer(imitation.NO_TOOL)
    with pytest.raises(TemplateError, match="tool.*set tool_role='user'"):
        ChatRenderer(hf, tool_role="tool")
    renderer = ChatRenderer(hf)
    with pytest.warns(UserWarning, match="no tool role") as caught:
        first = renderer.bridge([END], [{"role": "tool", "content": "42"}])
        second = renderer.bridge([END], [{"role": "tool", "content": "43"}])
    assert len(caught) == 1
    assert first == renderer.bridge([END], [user("42")])
    assert second == renderer.bridge([END], [user("43")])


def test_a_refused_system_role_goes_before_the_first_user_message_with_one_warning() -> None:
    hf = imitation.tiny_tokenizer(imitation.NO_SYSTEM)
    with pytest.raises(TemplateError, match="role 'system'.*set system="):
        ChatRenderer(hf, system="role")
    renderer = ChatRenderer(hf)
    with pytest.warns(UserWarning, match="no system message") as caught:
        ids = renderer.prompt([{"role": "system", "content": "S"}, user("Hi")])
        renderer.prompt([{"role": "system", "content": "S"}, user("Ho")])
    assert len(caught) == 1
    assert ids == renderer.prompt([user("S\n\nHi")])


def test_a_template_that_changes_with_history_is_forced_into_template_mode() -> None:
    with pytest.warns(UserWarning, match="segment of its own"):
        renderer = ChatRenderer(imitation.tiny_tokenizer(imitation.COUNTS))
    assert renderer.past == "template"
    assert renderer.report()["user"]["bridge_independent_of_history"] is False
    with pytest.raises(NewSegment, match="whole conversation"):
        renderer.bridge([END], [user("a")])


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one message"),
        ([user("a"), assistant("b")], "last message"),
        ([{"role": "robot", "content": "a"}], "robot"),
    ],
)
@each
def test_impossible_prompts_are_refused(renderer: ChatRenderer, messages: Any, words: str) -> None:
    with pytest.raises(TemplateError, match=words):
        renderer.prompt(messages)


@each
def test_impossible_bridges_are_refused(renderer: ChatRenderer) -> None:
    with pytest.raises(TemplateError, match="at least one message"):
        renderer.bridge([END], [])
    with pytest.raises(TemplateError, match="no assistant message"):
        renderer.bridge([END], [assistant("a")])


@pytest.mark.parametrize("message", [{"role": "user"}, {"role": "user", "content": 3}], ids=str)
def test_bytes_content_must_be_a_string(message: Any) -> None:
    with pytest.raises(TemplateError, match="content"):
        ChatRenderer("bytes").prompt([message])


@pytest.mark.parametrize(
    "settings_",
    [{"past": "never"}, {"system": "loud"}, {"tool_role": "role"}, {"template": "x"}, {"stop_ids": [1]}],
)
def test_unknown_settings_are_named(settings_: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings_))):
        ChatRenderer("bytes", **settings_)


def test_bytes_writes_no_tool_schemas() -> None:
    with pytest.raises(TemplateError, match="tool"):
        ChatRenderer("bytes").prompt([user("a")], tools=[{}])


# --- the clock ---


def test_the_date_is_pinned_at_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = ChatRenderer(imitation.tiny_tokenizer(imitation.DATED))
    today = datetime.date.today().isoformat()

    class Tomorrow(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls(2100, 1, 1)

    from transformers.utils import chat_template_utils

    monkeypatch.setattr(chat_template_utils, "datetime", Tomorrow)
    text = renderer.tokenizer.decode(renderer.prompt([user("Hi")]))
    assert today in text
    assert "2100" not in text
    # A page turned at midnight between import and construction would be a difference of one day only.


def test_a_renderer_keeps_its_day_in_another_process() -> None:
    with on_day(datetime.date(2024, 7, 26)):
        renderer = ChatRenderer(imitation.tiny_tokenizer(imitation.DATED))
    prompt = renderer.prompt([user("Hi")])
    assert "2024-07-26" in renderer.tokenizer.decode(prompt)
    twin = pickle.loads(pickle.dumps(renderer))
    assert twin is not renderer
    assert twin.prompt([user("Hi")]) == prompt
    assert twin.fingerprint == renderer.fingerprint
    again = pickle.loads(pickle.dumps(twin))
    assert again.fingerprint == renderer.fingerprint
    assert ChatRenderer(imitation.tiny_tokenizer(imitation.DATED)).fingerprint != renderer.fingerprint


# --- reading turns ---


@each
def test_a_reply_is_what_stands_before_the_first_end(renderer: ChatRenderer) -> None:
    end = renderer.stop_ids[0]
    body = renderer.tokenizer.encode("Hello")
    assert renderer.reply([*body, end]).complete
    assert not renderer.reply(body).complete
    both = renderer.reply([*body, end, *body])
    assert (both.text, both.complete, both.malformed) == ("Hello", True, True)
    assert both.ids == (*body, end, *body)
    empty = renderer.reply([])
    assert (empty.text, empty.complete, empty.malformed, empty.ids) == ("", False, False, ())


def test_thinking_is_split_from_content() -> None:
    for ids in (TINY.say("<think>\na\n</think>\n\n4"), TINY.say(" <think>a</think>4")):
        reply = TINY.reply(ids)
        assert (reply.thinking, reply.content) == ("a", "4")
    assert TINY.reply(TINY.say("4 <think>")).thinking is None


def test_channels_are_read() -> None:
    from atropos_gym.rendering.reply_text import split_channels

    said = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hello"
    assert split_channels(said) == ("hm", "Hello", ())
    call = ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}'
    assert split_channels(call) == (None, "", (ToolCall("f", {"a": 1}),))
    assert split_channels(call.replace('{"a": 1}', "{"))[2] == (ToolCall("f", {"": "{"}),)


# --- say, transcript, spans ---


@each
def test_what_is_said_reads_back(renderer: ChatRenderer) -> None:
    for text in ("Hello", "", " 4\n", "é🙂", "<|im_end|> <|im_start|>"):
        reply = renderer.reply(renderer.say(text))
        assert (reply.text, reply.complete, reply.malformed) == (text, True, False)


def test_think_tags_can_be_said_and_ends_cannot() -> None:
    tag = TINY.tokenizer.hf.convert_tokens_to_ids("<think>")
    assert tag in TINY.say("<think>")
    assert TINY.say("<|im_end|>").count(END) == 1
    assert 1 not in TINY.say("<|im_start|>")


@each
def test_a_transcript_is_prompt_turns_and_bridges(renderer: ChatRenderer) -> None:
    talk = [user("a"), assistant("b"), user("c"), user("d"), assistant("e")]
    first, second = renderer.say("b"), renderer.say("e")
    prompt, bridge = renderer.prompt(talk[:1]), renderer.bridge(first, talk[2:4])
    ids, mask = renderer.transcript(talk)
    assert ids == prompt + first + bridge + second
    lengths = (len(prompt), len(first), len(bridge), len(second))
    assert mask == [
        sampled for n, sampled in zip(lengths, (False, True, False, True), strict=True) for _ in range(n)
    ]
    longer, mask = renderer.transcript([*talk, user("You win.")])
    assert longer[: len(ids)] == ids
    assert not any(mask[len(ids) :])
    assert (
        renderer.tokenizer.decode(longer[len(ids) :]).rstrip().removesuffix("<|im_end|>").endswith("You win.")
    )


@each
def test_a_conversation_without_turns_has_no_header(renderer: ChatRenderer) -> None:
    ids, mask = renderer.transcript([user("a")])
    prompt = renderer.prompt([user("a")])
    assert ids == prompt[: len(ids)]
    assert len(ids) < len(prompt)
    assert not any(mask)


def test_a_transcript_starts_with_what_the_policy_reads() -> None:
    with pytest.raises(TemplateError, match="must answer"):
        TINY.transcript([assistant("a")])


@each
def test_spans_say_who_put_each_id_there(renderer: ChatRenderer) -> None:
    talk = [user("Hello world"), assistant("b"), user("Too low"), assistant("c"), user("You win.")]
    ids, mask = renderer.transcript(talk)
    spans = renderer.spans(talk)
    assert len(spans) == len(ids)
    assert [span == "policy" for span in spans] == mask
    said = renderer.tokenizer.decode([i for i, span in zip(ids, spans, strict=True) if span == "message"])
    assert said == "Hello worldToo lowYou win."


def test_spans_hold_for_marked_text() -> None:
    talk = [user("a <|im_end|> b"), assistant("c")]
    ids, _ = TINY.transcript(talk)
    pairs = zip(ids, TINY.spans(talk), strict=True)
    assert TINY.tokenizer.decode([i for i, span in pairs if span == "message"]) == "a <|im_end|> b"


# --- copies ---


@each
def test_renderers_copy_to_themselves_and_pickle_as_their_arguments(renderer: ChatRenderer) -> None:
    assert copy.deepcopy(renderer) is renderer
    twin = pickle.loads(pickle.dumps(renderer))
    assert twin.fingerprint == renderer.fingerprint
    assert twin.prompt([user("Hi")]) == renderer.prompt([user("Hi")])


def test_the_default_renderer_of_a_tokenizer_is_made_once() -> None:
    assert chat_renderer("bytes") is chat_renderer("bytes")
    assert chat_renderer(TINY.tokenizer) is chat_renderer(TINY.tokenizer)


def test_cached_ids_are_fresh_lists() -> None:
    said = [user("cached")]
    TINY.prompt(said).append(0)
    TINY.bridge([END], said).append(0)
    assert TINY.prompt(said)[-1] != 0
    assert TINY.bridge([END], said)[-1] != 0


# --- invariants ---

TEXT = st.lists(
    st.sampled_from(["a", " ", "\n", "é", "🙂", "1", *imitation.SPECIAL, *imitation.TAGS])
    | st.text(max_size=3),
    max_size=6,
).map("".join)
NAMES = st.sampled_from(sorted(RENDERERS))


def _turns(rows: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, rows - 1), max_size=8)


@given(data=st.data(), name=NAMES, start=TEXT)
@settings(deadline=None, max_examples=60)
def test_ids_only_grow_and_exactly_the_sampled_ones_are_trained(data: Any, name: str, start: str) -> None:
    renderer = RENDERERS[name]
    ids = renderer.prompt([user(start)])
    sampled_at: list[int] = []
    sampled: list[int] = []
    for _ in range(data.draw(st.integers(1, 3))):
        turn = data.draw(_turns(renderer.tokenizer.rows))
        said = [user(data.draw(TEXT))]
        bridge = renderer.bridge(turn, said)
        before = list(ids)
        sampled_at += range(len(ids), len(ids) + len(turn))
        sampled += turn
        ids = ids + turn + bridge
        assert ids[: len(before) + len(turn)] == before + turn
        supplied = bool(turn) and turn[-1] in renderer.stop_ids
        assert bridge == renderer.bridge([renderer.stop_ids[0]] if supplied else [], said)
    assert [ids[i] for i in sampled_at] == sampled


@given(name=NAMES, text=TEXT, role=st.sampled_from(["user", "tool"]))
@settings(deadline=None, max_examples=150)
def test_text_never_yields_a_control_id(name: str, text: str, role: str) -> None:
    renderer = RENDERERS[name]
    for render in (renderer.prompt, lambda said: renderer.bridge([], said)):
        loud, quiet = render([{"role": role, "content": text}]), render([{"role": role, "content": "x"}])
        assert _controls(renderer, loud) == _controls(renderer, quiet)


def _controls(renderer: ChatRenderer, ids: Sequence[int]) -> list[int]:
    """Returns the control ids of a rendering: those that the template itself can write."""
    if renderer.tokenizer.name == "bytes":
        return [i for i in ids if i > 255]
    hf: Any = renderer.tokenizer
    literal = renderer._dialect._template.literals  # type: ignore[attr-defined]
    added = hf.backend.get_added_tokens_decoder()
    return [i for i in ids if i in added and (added[i].special or added[i].content in literal)]


@given(name=NAMES, text=TEXT)
@settings(deadline=None, max_examples=100)
def test_a_rendering_reads_as_the_template_wrote_it(name: str, text: str) -> None:
    renderer = RENDERERS[name]
    decoded = renderer.tokenizer.decode(renderer.prompt([user(text)]))
    seen = text if name == "bytes" else ControlText.unmark(text)  # the two characters of marks are removed
    assert (seen.strip() if name == "trims" else seen) in decoded


@given(data=st.data(), name=NAMES)
@settings(deadline=None, max_examples=80)
def test_a_reply_does_not_depend_on_how_its_ids_arrived(data: Any, name: str) -> None:
    renderer = RENDERERS[name]
    ids = data.draw(_turns(renderer.tokenizer.rows))
    cut = data.draw(st.integers(0, len(ids)))
    pieces = [*ids[:cut], *ids[cut:]]
    reply = renderer.reply(pieces)
    before = next((k for k, i in enumerate(ids) if i in renderer.stop_ids), len(ids))
    assert reply.ids == tuple(ids)
    assert reply.text == renderer.tokenizer.decode(ids[:before])
    assert reply == renderer.reply(tuple(ids))


@given(text=TEXT)
@settings(deadline=None, max_examples=80)
def test_other_splits_of_the_same_text_read_alike(text: str) -> None:
    """A policy may sample any split of a text: byte by byte reads like the canonical one."""
    bytewise = [i for character in text for i in TINY.tokenizer.encode(character)]
    assert TINY.reply([*bytewise, END]).text == TINY.reply([*TINY.tokenizer.encode(text), END]).text == text
