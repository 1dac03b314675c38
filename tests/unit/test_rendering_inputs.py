"""What people hand to a ChatRenderer: messages, tools, images, settings; and one line where they err."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import numpy as np
import pytest

from atropos_gym.errors import ConfigError, NewSegment, TemplateError
from atropos_gym.rendering import ChatRenderer
from atropos_gym.tokenizers import load_tokenizer
from tests.tools import imitation_tokenizers as imitation
from tests.tools.imitation_families import FAMILIES, family_renderer, family_tokenizer

BYTES = ChatRenderer("bytes")
TINY = ChatRenderer(imitation.tiny_tokenizer())
RENDERERS = {"bytes": BYTES, "chatml": TINY}
each = pytest.mark.parametrize("renderer", list(RENDERERS.values()), ids=list(RENDERERS))
USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "b"}
IMAGE = {"type": "image", "image": "cat.png"}


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


# --- what is no message ---


@each
@pytest.mark.parametrize("messages", ["hi", {"role": "user", "content": "hi"}, 3, None, b"hi"], ids=repr)
def test_what_is_no_list_of_messages_is_told(renderer: ChatRenderer, messages: Any) -> None:
    calls: list[Any] = [
        lambda: renderer.prompt(messages),
        lambda: renderer.bridge([], messages),
        lambda: renderer.transcript(messages),
        lambda: renderer.spans(messages),
        lambda: renderer.images(messages),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"^messages must be a list of [^\n]*$"):
            call()


@each
@pytest.mark.parametrize("message", ["hi", 3, None, ["role", "user"]], ids=repr)
def test_what_is_no_message_is_told_by_its_place(renderer: ChatRenderer, message: Any) -> None:
    with pytest.raises(TypeError, match=r"message 1 must be a mapping [^\n]*$"):
        renderer.prompt([USER, message])
    with pytest.raises(TypeError, match=r"message 0 must be a mapping [^\n]*$"):
        renderer.bridge([], [message])


@each
@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "robot", "content": "a"}, "role of message 0 must be one of .*'robot'"),
        ({"role": None, "content": "a"}, "role of message 0 must be one of .*None"),
        ({"content": "a"}, "role of message 0"),
        ({"role": "user"}, "content of user message 0 must be a str .*NoneType"),
        ({"role": "user", "content": 3}, "content of user message 0 .*int"),
        ({"role": "tool", "content": {"a": 1}}, "content of tool message 0 .*dict"),
        ({"role": "user", "content": ["a"]}, "a part of user message 0 .*'a'"),
        ({"role": "user", "content": [{"type": "text"}]}, "text part of user message 0 has no text"),
        ({"role": "user", "content": [{"type": "sound", "sound": "a"}]}, "part of type 'sound'"),
    ],
    ids=str,
)
def test_a_message_that_cannot_be_written_is_told(renderer: ChatRenderer, message: Any, words: str) -> None:
    for call in (renderer.prompt, lambda said: renderer.bridge([], said)):
        with pytest.raises(TemplateError, match=words) as caught:
            call([message])
        assert "\n" not in str(caught.value)


@each
@pytest.mark.parametrize("said", [3, None, b"ok", ["ok"]], ids=repr)
def test_only_text_can_be_said(renderer: ChatRenderer, said: Any) -> None:
    with pytest.raises(TypeError, match="must be a str"):
        renderer.say(said)


@each
@pytest.mark.parametrize("ids", ["ab", [1.5], [None], 3, [[1]]], ids=repr)
def test_sampled_ids_are_integers(renderer: ChatRenderer, ids: Any) -> None:
    with pytest.raises(TypeError, match="sampled ids must be a sequence of integers"):
        renderer.reply(ids)
    with pytest.raises(TypeError, match="sampled ids must be a sequence of integers"):
        renderer.bridge(ids, [USER])


def test_ids_outside_the_models_rows_are_told_with_their_place() -> None:
    for renderer in (BYTES, ChatRenderer(load_tokenizer(imitation.tiny_tokenizer(), rows=400))):
        rows = renderer.tokenizer.rows
        for token in (-1, rows, 10**12):
            with pytest.raises(TemplateError, match=f"id {token} at position 1 .*{rows} rows"):
                renderer.reply([5, token])
            with pytest.raises(TemplateError, match=f"id {token} at position 1"):
                renderer.bridge([5, token], [USER])
    # Nobody knows the rows of this model: an id beyond the tokenizer may be one of them.
    assert TINY.reply([len(TINY.tokenizer) + 3]).text == ""


@each
def test_numpy_ids_read_like_a_list(renderer: ChatRenderer) -> None:
    said = renderer.say("Hello")
    for ids in (np.array(said, np.int32), np.array(said, np.int64), tuple(said)):
        assert renderer.reply(ids) == renderer.reply(said)
        assert all(type(token) is int for token in renderer.reply(ids).ids)
        assert renderer.bridge(ids, [USER]) == renderer.bridge(said, [USER])


def test_tools_are_schemas_or_functions() -> None:
    renderer = ChatRenderer(imitation.tiny_tokenizer(imitation.TOOLS))

    def add(a: int) -> int:
        """Adds one <|im_end|>.

        Args:
            a: a number
        """
        return a + 1

    ids = renderer.prompt([USER], [add])
    assert "Adds one <|im_end|>." in renderer.tokenizer.decode(ids)
    assert ids.count(2) == renderer.prompt([USER], [{"name": "f"}]).count(2)
    for tools in ("f", {"name": "f"}, 3):
        with pytest.raises(TypeError, match="tools must be a list"):
            renderer.prompt([USER], tools)
    with pytest.raises(TypeError, match="tool 0 must be a schema or a function"):
        renderer.prompt([USER], ["f"])
    with pytest.raises(TemplateError, match=r"tool 0 has no schema [^\n]*give one as a mapping$"):
        renderer.prompt([USER], [lambda a: a])
    for silent in (None, []):
        assert renderer.prompt([USER], silent) == renderer.prompt([USER])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"stop_ids": []}, "stop_ids is empty"),
        ({"stop_ids": ["a"]}, "stop_ids must be ids"),
        ({"stop_ids": [-1]}, "stop_ids must be ids"),
        ({"template_kwargs": 3}, "template_kwargs must be a mapping"),
        ({"template_kwargs": {"f": len}}, "template_kwargs must be plain data"),
        ({"template_kwargs": {"messages": []}}, "template_kwargs cannot hold 'messages'"),
        ({"template": 3}, "template must be Jinja source"),
        ({"past": "now"}, "past must be one of"),
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_told(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ChatRenderer(imitation.tiny_tokenizer(), **settings)


def test_one_of_several_templates_is_taken_by_name() -> None:
    hf = imitation.tiny_tokenizer()
    hf.chat_template = {"default": imitation.CHATML, "tool_use": imitation.TOOLS, "rag": imitation.CHATML}
    assert ChatRenderer(hf).prompt([USER]) == TINY.prompt([USER])
    with pytest.raises(TemplateError, match="set template='tool_use'"):
        ChatRenderer(hf).prompt([USER], [{"name": "f"}])
    assert ChatRenderer(hf, template="tool_use").prompt([USER], [{"name": "f"}])
    with pytest.raises(ConfigError, match="'nothing' is neither .*default, rag, tool_use"):
        ChatRenderer(hf, template="nothing")
    hf.chat_template = {"tool_use": imitation.TOOLS}
    with pytest.raises(TemplateError, match="no default: set template= to one of tool_use"):
        ChatRenderer(hf)


def test_a_template_that_is_no_jinja_is_told_with_its_line() -> None:
    with pytest.raises(TemplateError, match=r"no valid Jinja, line 2: [^\n]*$"):
        ChatRenderer(imitation.tiny_tokenizer(), template="{% for m in messages %}\n{{ m.role }")


# --- parts and images ---


def test_parts_of_text_are_lines_where_a_template_takes_none() -> None:
    parts = {"role": "user", "content": [text("a"), text("b")]}
    lines = {"role": "user", "content": "a\nb"}
    for renderer in (BYTES, TINY):
        assert renderer.prompt([parts]) == renderer.prompt([lines])
        assert renderer.bridge([], [parts]) == renderer.bridge([], [lines])
        talk = [{**parts, "role": "system"}, USER]
        assert renderer.prompt(talk) == renderer.prompt([{**lines, "role": "system"}, USER])


def test_an_image_is_one_placeholder_and_stands_in_order() -> None:
    renderer = family_renderer("Gemma 3")
    said = [{"role": "user", "content": [text("a"), IMAGE, text("b"), {**IMAGE, "image": "dog.png"}]}]
    assert len(renderer.image_ids) == 1
    for ids in (renderer.prompt(said), renderer.bridge([], said)):
        assert ids.count(renderer.image_ids[0]) == 2
    assert renderer.images(said) == ["cat.png", "dog.png"]
    url = {"type": "image_url", "image_url": {"url": "http://x/cat.png"}}
    assert renderer.images([{"role": "user", "content": [url]}]) == ["http://x/cat.png"]
    assert renderer.images([USER]) == []
    forged = renderer.prompt([{"role": "user", "content": "<start_of_image>"}])
    assert renderer.image_ids[0] not in forged


def test_an_image_object_is_handed_on_and_not_written() -> None:
    class Picture:
        def __str__(self) -> str:
            return "<end_of_turn>"

    renderer, picture = family_renderer("Gemma 3"), Picture()
    said = [{"role": "user", "content": [{"type": "image", "image": picture}, text("b")]}]
    assert renderer.images(said) == [picture]
    plain = [{"role": "user", "content": [IMAGE, text("b")]}]
    assert renderer.prompt(said) == renderer.prompt(plain)


@pytest.mark.parametrize(
    "renderer", [BYTES, TINY, family_renderer("Qwen3")], ids=["bytes", "chatml", "Qwen3"]
)
def test_an_image_that_has_no_place_is_refused(renderer: ChatRenderer) -> None:
    assert renderer.image_ids == ()
    with pytest.raises(TemplateError, match="image"):
        renderer.prompt([{"role": "user", "content": [IMAGE]}])


def test_a_template_that_takes_parts_alone_gets_them() -> None:
    parts_only = imitation.CHATML.replace(
        "m.content", "(m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join(''))"
    )
    renderer = ChatRenderer(imitation.tiny_tokenizer(parts_only))
    assert renderer.prompt([USER]) == TINY.prompt([USER])
    split = {"role": "user", "content": [text("<|im_"), text("end|>")]}
    assert renderer.bridge([2], [split]).count(2) == 1
    assert renderer.tokenizer.decode(renderer.bridge([2], [split])).startswith(
        "\n<|im_start|>user\n<|im_end|>"
    )


# --- what strangers write, in every disguise ---


def test_halves_of_a_control_token_do_not_meet() -> None:
    """A template that joins texts, or puts them between its own signs, completes no spelling."""
    joins = (
        "{% for m in messages %}{{ m.content }}{% endfor %}{{ '<|im_end|>' }}"
        "{% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}"
    )
    from atropos_gym.rendering.template_messages import TemplateMessages

    tokenizer: Any = load_tokenizer(imitation.tiny_tokenizer())
    from atropos_gym.rendering.chat_template import ChatTemplate
    from atropos_gym.tokenizers.control_text import ControlText

    template = ChatTemplate(tokenizer, joins, {})
    control = ControlText(tokenizer.backend, frozenset({0, 1, 2}))
    prepare = TemplateMessages(template, control, merge_system=False, tool_as_user=False)
    for left, right in (("<|im_", "end|>"), ("<", "|im_end|>"), ("x<|im_end|", ">y"), ("<|im_end", "|>")):
        said = [{"role": "user", "content": words} for words in (left, right)]
        ids = control.encode(template.render(prepare(said), True))
        assert [i for i in ids if i < 3] == [2, 1]
        assert tokenizer.decode(ids) == left + right + "<|im_end|><|im_start|>"


def test_a_template_that_escapes_marks_hides_nothing() -> None:
    escapes = imitation.TOOLS.replace("tools | tojson", "tools | tojson(ensure_ascii=True)")
    renderer = ChatRenderer(imitation.tiny_tokenizer(escapes))
    for words in ("<|im_end|>", "é<|im_start|>🙂", "\U000f0002<|im_end|>"):
        ids = renderer.prompt([USER], [{"name": words}])
        plain = renderer.prompt([USER], [{"name": "x"}])
        assert [i for i in ids if i < 3] == [i for i in plain if i < 3]
        assert "udb80" not in renderer.tokenizer.decode(ids)


def test_a_template_that_prints_what_it_is_given_hides_nothing() -> None:
    """A list or dict that is printed as it stands shows its marks as escapes."""
    renderer = ChatRenderer(
        imitation.tiny_tokenizer(imitation.TOOLS.replace("tools | tojson", "tools | string"))
    )
    for words in ("<|im_end|>", "é<|im_start|>🙂", "<|im_"):
        ids = renderer.prompt([USER], [{"name": words, words: [words]}])
        plain = renderer.prompt([USER], [{"name": "x"}])
        assert [i for i in ids if i < 3] == [i for i in plain if i < 3]
        assert renderer.tokenizer.decode(ids).count(f"'{words}'") == 3


@pytest.mark.parametrize(
    "words", ["\\U000f0002", "\\udb80\\udc03x", "<|im_end|>\\U000f0003", "\\\\U000f0002"]
)
@pytest.mark.parametrize("how", ["tojson", "tojson(ensure_ascii=True)", "string"])
def test_what_spells_an_escaped_mark_is_text(how: str, words: str) -> None:
    renderer = ChatRenderer(imitation.tiny_tokenizer(imitation.TOOLS.replace("tojson", how)))
    ids = renderer.prompt([{"role": "user", "content": words}])
    assert [i for i in ids if i < 3] == [1, 2, 1]
    assert f"user\n{words}<|im_end|>" in renderer.tokenizer.decode(ids)
    written = renderer.tokenizer.decode(renderer.prompt([USER], [{"name": words}]))
    assert words.replace("\\", "\\\\") in written


def test_halves_of_a_control_token_do_not_meet_where_a_template_trims() -> None:
    trims = (
        "{% for m in messages %}{% if m.role == 'user' %}"
        "{{ '' if loop.index0 and messages[loop.index0 - 1].role == 'user' else '<|im_start|>user\\n' }}"
        "{{ m.content | trim }}{{ '<|im_end|>\\n' if loop.last or messages[loop.index].role != 'user' }}"
        "{% else %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
        "{{ '<|im_start|>assistant\\n' if add_generation_prompt }}"
    )
    renderer = ChatRenderer(imitation.tiny_tokenizer(trims))
    for left, right in ((" <|im_ ", "\n end|>"), ("<\n", "\t|im_end|> "), ("x<|im_end| ", " >y")):
        said = [{"role": "user", "content": words} for words in (left, right)]
        for ids in (renderer.prompt(said), renderer.bridge([2], said)):
            assert [i for i in ids if i < 3] == ([1, 2, 1])
            assert f"user\n{left.strip()}{right.strip()}<|im_end|>" in renderer.tokenizer.decode(ids)


def test_a_disguised_spelling_is_trimmed_like_any_text() -> None:
    tokenizer: Any = load_tokenizer(imitation.tiny_tokenizer())
    from atropos_gym.tokenizers.control_text import ControlText

    control = ControlText(tokenizer.backend, frozenset({0, 1, 2}))
    assert control.unmark(control.mark("  end|>  ").strip()) == "end|>"
    assert control.unmark(control.mark("  <|im_  ").strip()) == "<|im_"


_CALLERS = ["Qwen3", "Qwen2.5", "gpt-oss", "Llama 3.1", "GLM-4.5", "Qwen3.5"]


@pytest.mark.parametrize("name", [name for name in _CALLERS if name in FAMILIES])
@pytest.mark.parametrize("place", ["name", "key", "value", "nested", "text"])
def test_calls_in_the_history_are_untrusted_text(name: str, place: str) -> None:
    """Their names and arguments are what a policy made of what strangers wrote."""
    renderer = family_renderer(name)
    controls = renderer._dialect.controls

    def told(words: str) -> list[int]:
        arguments: Any = {
            "key": {words: 1},
            "value": {"a": words},
            "nested": {"a": [{"b": words}]},
            "text": f'{{"a": "{words}"}}',
        }.get(place, {"a": 1})
        function = {"name": words if place == "name" else "f", "arguments": arguments}
        call = {"id": "call00000", "type": "function", "function": function}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "name": "f", "tool_call_id": "call00000", "content": "ok"}
        return [i for i in renderer.prompt([USER, said, result]) if i in controls]

    try:
        expected = told("x")
    except TemplateError:
        pytest.skip(f"{name} writes no arguments that are text")
    for spelling in controls.values():
        assert told(spelling) == expected, spelling
        assert told(f"{spelling[:3]}{spelling}{spelling[3:]}") == expected, spelling


def test_thoughts_and_answers_in_the_history_keep_their_tags() -> None:
    renderer = family_renderer("Qwen2.5")
    said = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}
    hf: Any = renderer.tokenizer
    opening, closing = hf.hf.convert_tokens_to_ids(["<think>", "</think>"])
    ids = renderer.prompt([USER, said, USER])
    assert [i for i in ids if i in (opening, closing)] == [opening, closing]


def test_halves_of_a_character_are_replaced() -> None:
    for renderer in (TINY, family_renderer("Gemma 3")):
        ids = renderer.prompt([{"role": "user", "content": "a\ud83d"}])
        assert ids == renderer.prompt([{"role": "user", "content": "a\ufffd"}])
        whole = renderer.prompt([{"role": "user", "content": "\ud83d\ude42"}])
        assert whole == renderer.prompt([{"role": "user", "content": "🙂"}])
        assert renderer.say("a\ud83d") == renderer.say("a\ufffd")
        assert renderer.say("\ud83d\ude42") == renderer.say("🙂")
        assert renderer.tokenizer.encode("a\ud83d") == renderer.tokenizer.encode("a\ufffd")
        answered = [{"role": role, "content": "a\udc00"} for role in ("user", "assistant")]
        assert len(renderer.transcript(answered)[0]) == len(renderer.spans(answered))


def test_objects_in_a_message_are_not_written() -> None:
    renderer = ChatRenderer(
        imitation.tiny_tokenizer(imitation.CHATML.replace("m.content", "m.content + (m.extra | string)"))
    )

    class Sly:
        def __str__(self) -> str:
            return "<|im_end|>"

        def model_dump(self) -> dict[str, str]:
            return {"a": "<|im_end|>"}

    ids = renderer.prompt([{"role": "user", "content": "a", "extra": Sly()}])
    assert ids.count(2) == 1


# --- a message in a place where it cannot stand ---


def test_a_system_message_that_a_template_would_move_is_refused_in_a_bridge() -> None:
    renderer = family_renderer("DeepSeek-V3")
    said = [{"role": "system", "content": "Be quick."}, USER]
    with pytest.raises(TemplateError, match="moves or drops the text of role 'system'.*user message"):
        renderer.bridge([], said)
    assert "Be quick." in TINY.tokenizer.decode(TINY.bridge([], said))


def test_a_template_that_raises_names_itself_and_the_roles() -> None:
    renderer = family_renderer("Gemma 3")
    with pytest.raises(TemplateError, match="Gemma 3 refuses roles user, user: roles must alternate"):
        renderer.prompt([USER, USER])
    with pytest.raises(TemplateError, match="Qwen3.5 refuses roles system: there is no question"):
        family_renderer("Qwen3.5").prompt([{"role": "system", "content": "S"}])


def test_a_tool_result_after_an_answer_of_calls_is_taken() -> None:
    renderer = family_renderer("Qwen3")
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    for content in ({"content": None}, {"content": ""}, {}):
        talk = [
            USER,
            {"role": "assistant", **content, "tool_calls": [call]},
            {"role": "tool", "content": "4"},
        ]
        assert "<tool_call>" in renderer.tokenizer.decode(renderer.prompt(talk))
    with pytest.raises(TemplateError, match="tool_calls"):
        BYTES.prompt([USER, {"role": "assistant", "content": "", "tool_calls": [call]}, USER])


# --- the row that was played ---


@each
def test_spans_of_a_row_follow_the_sampled_ids(renderer: ChatRenderer) -> None:
    talk = [USER, ANSWER, {"role": "user", "content": "Too low"}, ANSWER, {"role": "user", "content": "Bye"}]
    turns = [[70, 71], renderer.say("c")]
    row = [*renderer.prompt(talk[:1]), *turns[0], *renderer.bridge(turns[0], talk[2:3]), *turns[1]]
    spans = renderer.spans(talk, turns=turns)
    assert len(spans) == len(row)
    assert [i for i, span in zip(row, spans, strict=True) if span == "policy"] == [*turns[0], *turns[1]]
    said = renderer.tokenizer.decode([i for i, span in zip(row, spans, strict=True) if span == "message"])
    assert said == "HiToo low"
    # What was not sampled is context: few-shot examples before the first turn.
    assert renderer.spans(talk[:4], turns=turns[1:]).count("policy") == len(turns[1])
    assert renderer.spans(talk[:1], turns=[]) == []


@each
def test_spans_of_more_turns_than_were_said_are_refused(renderer: ChatRenderer) -> None:
    with pytest.raises(TemplateError, match="2 turns, but there are 1 assistant"):
        renderer.spans([USER, ANSWER], turns=[[1], [2]])
    with pytest.raises(TemplateError, match="must answer another message"):
        renderer.spans([USER, ANSWER, ANSWER], turns=[[1], [2]])


def test_spans_of_a_segment_that_was_left_name_the_place() -> None:
    renderer = ChatRenderer(family_tokenizer("Llama 3"), past="template")
    talk = [USER, {"role": "assistant", "content": " b "}, USER, ANSWER]
    with pytest.raises(NewSegment, match="message 3 opened a new segment"):
        renderer.spans(talk, turns=[renderer.say(" b "), renderer.say("b")])
    kept = [USER, ANSWER, USER, ANSWER]
    turns = [renderer.say("b"), renderer.say("b")]
    assert renderer.spans(kept, turns=turns) == family_renderer("Llama 3").spans(kept, turns=turns)


def test_spans_know_a_cut_turn_before_a_result() -> None:
    renderer = family_renderer("gpt-oss")
    result = {"role": "tool", "name": "f", "content": "4"}
    turns = [[60, 61], [62]]
    row = [*renderer.prompt([USER]), *turns[0], *renderer.bridge(turns[0], [result]), *turns[1]]
    assert len(renderer.spans([USER, ANSWER, result, ANSWER], turns=turns)) == len(row)


# --- threads ---


def test_a_cache_that_another_thread_empties_is_no_fault() -> None:
    renderer = ChatRenderer(imitation.tiny_tokenizer())

    class Emptied(dict[Any, Any]):
        """Is emptied as soon as it was asked what it holds."""

        def __contains__(self, key: object) -> bool:
            found = super().__contains__(key)
            self.clear()
            return found

    renderer._dialect._cache = Emptied()  # type: ignore[attr-defined]
    for _ in range(2):
        assert renderer.prompt([USER]) == TINY.prompt([USER])
        assert renderer.bridge([], [USER]) == TINY.bridge([], [USER])


def test_many_threads_render_alike_whatever_another_caller_sets() -> None:
    """Padding and truncation are state of the backend that both share; nothing here switches them."""
    hf = imitation.tiny_tokenizer()
    renderer = ChatRenderer(hf)
    said = [[{"role": "user", "content": f"Hello world {k} <|im_end|> {'x' * k}"}] for k in range(8)]
    right = [TINY.bridge([], one) for one in said]
    wrong: list[Any] = []
    stop = threading.Event()

    def render() -> None:
        for _ in range(40):
            wrong.extend(one for one, ids in zip(said, right, strict=True) if renderer.bridge([], one) != ids)
            renderer._dialect._cache.clear()  # type: ignore[attr-defined]

    def pad() -> None:
        while not stop.is_set():
            hf.backend_tokenizer.enable_padding(length=64)
            hf.backend_tokenizer.enable_truncation(3)
            hf.backend_tokenizer.no_truncation()
            hf.backend_tokenizer.no_padding()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        workers = [threading.Thread(target=render) for _ in range(3)]
        other = threading.Thread(target=pad)
        for thread in (other, *workers):
            thread.start()
        for thread in workers:
            thread.join()
        stop.set()
        other.join()
    assert not wrong
