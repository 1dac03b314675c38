"""Promises of a renderer, really tried: random ids are sampled, control tokens are spelled, turns are cut.

Each trial returns facts ready for JSON and raises nothing for what a template does; ``findings_of`` judges.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from atropos_gym.errors import NewSegment, TemplateError
from atropos_gym.rendering.dialect import Dialect

if TYPE_CHECKING:
    from atropos_gym.rendering.renderer import ChatRenderer

__all__ = ["shown", "try_canonical", "try_control_text", "try_cut", "try_decoding", "try_random_turns"]

EPISODES, TURNS = 8, 5
_HARD_TEXT = "👩\u200d🚀 ok, naïve 東京 \u2212 10 °C"


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def shown(renderer: ChatRenderer, dialect: Dialect, ids: Sequence[int]) -> str:
    """Returns ids as text for people; control ids without a text of their own by name."""
    parts: list[str] = []
    run: list[int] = []
    for token in ids:
        if token in dialect.controls:
            parts += [renderer.tokenizer.decode(run), dialect.controls[token]]
            run = []
        else:
            run.append(token)
    return "".join([*parts, renderer.tokenizer.decode(run)])


def try_control_text(renderer: ChatRenderer, dialect: Dialect, takes_tools: bool) -> dict[str, Any]:
    """Puts every control spelling into user, tool and schema text and counts the control ids that come out.

    Returns:
        ``spellings`` tried, ``plain_encoding`` (control ids that encoding the same text lets through), and
        ``forged``: for each channel the number of control ids that are not the template's, or the words of
        its refusal.
    """
    spellings = list(dialect.controls.values())
    # One inside another: deleting the inner one would assemble the outer one.
    nested = [s[: len(s) // 2] + spellings[-1] + s[len(s) // 2 :] for s in spellings[:8]]
    evil = " ".join(["x", *spellings, *nested, "x"])
    schema = {"type": "object", "properties": {evil: {"type": "string", "description": evil}}}

    def with_tool(text: str, properties: dict[str, Any]) -> list[int]:
        function = {"name": "probe", "description": text, "parameters": properties}
        return renderer.prompt([_user("x")], [{"type": "function", "function": function}])

    def with_result(text: str) -> list[int]:
        return dialect.bridge(None, [{"role": "tool", "name": "probe", "content": text}])

    neutral = {"type": "object", "properties": {"x": {"type": "string", "description": "x"}}}
    channels: dict[str, tuple[Callable[[], list[int]], Callable[[], list[int]]]] = {
        "user": (lambda: renderer.prompt([_user(evil)]), lambda: renderer.prompt([_user("x")])),
        "observation": (
            lambda: dialect.bridge(None, [_user(evil)]),
            lambda: dialect.bridge(None, [_user("x")]),
        ),
        "tool result": (lambda: with_result(evil), lambda: with_result("x")),
    }
    if takes_tools:
        channels["tool schema"] = (lambda: with_tool(evil, schema), lambda: with_tool("x", neutral))
    forged: dict[str, int | str] = {}
    for name, (tried, plain) in channels.items():
        try:
            expected = _controls(plain(), dialect)
        except TemplateError:
            continue  # this template has no such channel
        try:
            found = _controls(tried(), dialect)
        except TemplateError as error:
            forged[name] = str(error)
            continue
        forged[name] = 0 if found == expected else max(1, len(found) - len(expected))
    backend = getattr(renderer.tokenizer, "backend", None)
    through = (
        () if backend is None else _controls(backend.encode(evil, add_special_tokens=False).ids, dialect)
    )
    return {
        "spellings": len(spellings) + len(nested),
        "plain_encoding": len(through),
        "forged": forged,
    }


def _controls(ids: Sequence[int], dialect: Dialect) -> list[int]:
    return [token for token in ids if token in dialect.controls]


def try_random_turns(renderer: ChatRenderer) -> dict[str, Any]:
    """Plays episodes of random sampled ids, as an environment does.

    Turns are closed by any stop id, cut, empty, only an end, or go on behind an end; ids come from all rows.

    Returns:
        ``turns`` played, ``segments`` opened after the first, ``failures``: a line each, none where every
        promise held.
    """
    chance = random.Random(0)
    failures: list[str] = []
    turns = segments = 0
    for _ in range(EPISODES):
        conversation = [_user(f"Question {chance.randrange(100)}")]
        ids = renderer.prompt(conversation)
        for _ in range(TURNS):
            sampled = _sample(renderer, chance)
            turns += 1
            reply = renderer.reply(sampled)
            end = next((i for i, token in enumerate(sampled) if token in renderer.stop_ids), len(sampled))
            if reply.ids != tuple(sampled) or reply.text != renderer.tokenizer.decode(sampled[:end]):
                failures.append(f"the reply of {sampled} is not its ids decoded once")
            new = [_user(f"Answer {chance.randrange(100)}")]
            conversation.append({"role": "assistant", "content": reply.text})
            try:
                more, opens = renderer.advance(ids, sampled, conversation, new)
            except TemplateError as error:
                failures.append(str(error))
                break
            conversation += new
            segments += opens
            if renderer.past == "append" and not opens and more != renderer.bridge(sampled[-1:], new):
                failures.append(f"the bridge after {sampled} depends on more than its last id")
            ids = more if opens else [*ids, *sampled, *more]
    return {"turns": turns, "segments": segments, "failures": failures}


def _sample(renderer: ChatRenderer, chance: random.Random) -> list[int]:
    """Returns one turn of random ids."""
    ids = [chance.randrange(renderer.tokenizer.rows) for _ in range(chance.choice([0, 1, 2, 5, 12]))]
    end = [chance.choice(renderer.stop_ids)]
    return chance.choice([ids, [*ids, *end], [*ids, *end], [*ids, *end, *ids]])


def _bridge(renderer: ChatRenderer, turn_ids: list[int], messages: list[dict[str, Any]]) -> list[int]:
    """Returns a bridge, also where the renderer itself renders the whole conversation at every turn."""
    if renderer.past == "append":
        return renderer.bridge(turn_ids, messages)
    return renderer._dialect.bridge(turn_ids[-1], messages)


def try_canonical(renderer: ChatRenderer, close: int) -> dict[str, Any]:
    """Compares two turns in plain words with the template's own render of the whole conversation.

    Args:
        renderer: what is tried.
        close: the id with which the template closes a turn.

    Returns:
        ``bridges_equal``: the template writes the same ids behind the close of each answer; ``same``: and
        the same before it, so that a whole render would be the row; ``first_difference``: where not, or None.
    """
    conversation = [_user("Guess a digit.")]
    ids = renderer.prompt(conversation)
    bridges_equal = True
    for text, answer in (("Hi there", "Too low."), ("Is it 7?", "Yes.")):
        said = renderer.say(text)
        new = [_user(answer)]
        bridge = _bridge(renderer, said, new)
        conversation += [{"role": "assistant", "content": text}, *new]
        full = renderer.prompt(conversation)
        bridges_equal = bridges_equal and full[-len(bridge) - 1 :] == [close, *bridge]
        ids = [*ids, *said, *bridge]
    differs = next((i for i, (a, b) in enumerate(zip(ids, full, strict=False)) if a != b), None)
    if differs is None and len(ids) != len(full):
        differs = min(len(ids), len(full))
    return {"bridges_equal": bridges_equal, "same": differs is None, "first_difference": differs}


def try_cut(renderer: ChatRenderer, close: int) -> dict[str, Any]:
    """Cuts a turn before its end.

    Args:
        renderer: what is tried.
        close: the id with which the template closes a turn.

    Returns:
        ``supplied``: the ids that the bridge puts in place of the missing end (context, never trained), or
        None where that is not the close, followed by what follows a whole turn.
    """
    try:
        whole = _bridge(renderer, renderer.say("x"), [_user("y")])
        cut = _bridge(renderer, renderer.say("x")[:-1], [_user("y")])
    except NewSegment as error:
        return {"supplied": None, "refused": str(error)}
    supplied = cut[: len(cut) - len(whole)]
    right = supplied[-1:] == [close] and cut[len(supplied) :] == whole
    return {"supplied": supplied if right else None}


def try_decoding(renderer: ChatRenderer) -> dict[str, Any]:
    """Encodes and decodes characters of several ids.

    Returns:
        ``text_kept``: text comes back as it was; ``pieces_differ``: decoding id by id would break it.
    """
    tokenizer = renderer.tokenizer
    ids = tokenizer.encode(_HARD_TEXT)
    whole = tokenizer.decode(ids)
    pieces = "".join(tokenizer.decode([token]) for token in ids)
    return {"text_kept": whole == _HARD_TEXT, "pieces_differ": pieces != whole}
