"""Texts that break parsers: pieces to join, pieces to repeat, and texts that know nothing of a game."""

from __future__ import annotations

import random
from collections.abc import Iterator

from atropos_gym.parsing import format_action

PIECES = [
    "{", "}", "[", "]", '"', ":", ",", " ", "\n", '"a"', '"b":', "1", "-", "0", ".5", "e9", "true",
    "null", "\\", "\\u00e9", "\\n", "\t", "'", "NaN", "{}", "[]",
]  # fmt: skip

OPENERS = [
    "",
    "action: ",
    '{"action": ',
    '<tool_call>{"name": "',
    "[TOOL_CALLS][",
    "<function=act><parameter=action>",
]
REPEATED = [
    "<action>", "</action>", "<action>hit</action>", "hit ", "hit,", "not hit ", " ", "\n", "\t",
    "action: ", "action: 3", "I choose ", "I  ", "pick ", "*", "`", "1 (", "hit\nUser:", "User:\n",
    "</s>", "<think>", "</think>", "\u0130", "```", "```\n", "~~~\n````\n", "{", "}", "[", '{"', '{"a":',
    "{}", "{},", '{"action": "hit"},', "{'", '"', "\\", '\\"', "[1, 0],", "[0.5, 0.5]\n", "9", "1,",
    "[NaN,", "<tool_call>", "<tool_call>{", "<tool_call>{}", "</tool_call>",
    '<tool_call>{"name": "act"}</tool_call>', "<function=", "<function=act>", "<parameter=a>",
    "</parameter>", "<function=act><parameter=action>x</parameter>",
    "<tool_call><function=act></function></tool_call>", "[TOOL_CALLS]", "[TOOL_CALLS]a[ARGS]{}",
    "[TOOL_CALLS]a[CALL_ID]b ", "<|python_tag|>{", '{"name":', '{"name": "a", "parameters": {}};',
    "<|im_end|>", "\nObservation:\n",
]  # fmt: skip

PROSE = (
    "the a of and to in is it you that he was for on are with as his they be at one have this from or "
    "had by hot word but what some we can out other were all there when up use your how said an each "
    "she which do their time if will way about many then them write would like so these her long make "
    "thing see him two has look more day could go come did number sound no most people my over know "
    "water than call first who may down side been now find any new work part take get place made live "
    "where after back little only round man year came show every good me give our under name very left "
    "right choose hit pick stick card dealer passenger south north east west pickup dropoff action move "
    "answer "
).split()


def random_texts(names: tuple[str, ...], format: str, dialect: str | None, seed: int) -> Iterator[str]:
    """Texts that know nothing of the game: words, digits, lists, symbols, templates with planted actions."""
    draw = random.Random(seed)
    pieces = [*PIECES, *REPEATED, *names]
    planted = [format_action(name, format, dialect=dialect) for name in names]
    while True:
        yield " ".join(draw.choices(PROSE, k=draw.randrange(1, 25)))
        yield "".join(draw.choices("0123456789 ,.-\n", k=draw.randrange(1, 8)))
        yield " ".join(draw.choices(names, k=draw.randrange(1, 6)))
        yield ", ".join(draw.sample(names, len(names)))
        yield " or ".join(draw.sample(planted, 2))
        yield "".join(draw.choices(planted, k=draw.randrange(1, 4)))
        yield "".join(draw.choices(pieces, k=draw.randrange(1, 12)))
        prose = " ".join(draw.choices(PROSE, k=5))
        yield f"I saw {draw.choice(planted)} on a sign. {prose} {draw.choice(planted)}"
        yield f"{draw.choice(planted)}\nObservation: {draw.choice(planted)}\n{draw.choice(planted)}"
        between = draw.choice(["", "or ", "not ", "and "])
        yield f"My choice is {draw.choice(names)} {between}{draw.choice(names)}"
        yield f"<think>{draw.choice(planted)}{draw.choice(['</think>', ''])}{draw.choice(planted)}"
