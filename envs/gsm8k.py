"""atropos/GSM8K-v0: grade-school word problems, from the hub or from a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from atropos_gym.errors import ConfigError, MissingData, UnusableGold
from atropos_gym.messages import Feedback, Reply
from atropos_gym.rewards import read_gold_number, verify_number
from atropos_gym.text_env import TextEnv

__all__ = ["GSM8K"]

_HUB_NAME = "openai/gsm8k"
_ASK = "Solve it step by step. End with one line: ####, a blank, and the final answer as a number."

Problem = tuple[str, str]
"""(question, gold as the data set has it)"""


class GSM8K(TextEnv):
    r"""One word problem, one answer.

    Description:
        A problem is drawn uniformly from the split. The data are read when the environment is made, once a
        process; every gold is checked then.

    Actions:
        A text that commits to one number: ``#### 18``, ``\boxed{18}``, ``The answer is 18``.

    Observations:
        The question and the form of the answer.

    Rewards:
        1 for the right number, else 0.

    Episode end:
        After the only turn.

    Info:
        ``item`` (the problem's number), ``verdict`` (``right``, ``wrong``, ``unparsed``) and
        ``verdict_reason``.

    Arguments:
        split: ``"train"`` or ``"test"`` of the hub's data set; of no use with ``data``.
        data: a JSONL file with ``question`` and ``answer`` on each line, in place of the hub.
        keywords: those of ``TextEnv``.
        options: of ``reset``: ``{"item": k}`` picks a problem.

    Version history:
        v0: first version.
    """

    max_turns = 1
    max_turn_tokens = 512
    # The longest question has 985 characters, so it fits with the bytes tokenizer too.
    max_prompt_tokens = 1536

    def __init__(self, *, split: str = "train", data: str | Path | None = None, **keywords: Any) -> None:
        super().__init__(**keywords)
        if split not in ("train", "test"):
            raise ConfigError(f"split must be 'train' or 'test', got {split!r}")
        self._problems = _from_hub(split) if data is None else _from_file(str(data))
        self._item = 0

    @property
    def items(self) -> int:
        """Number of problems."""
        return len(self._problems)

    def begin(self, options: dict[str, Any]) -> str:
        """Draws a problem, or takes ``options["item"]``."""
        item = options.get("item")
        if item is None:
            item = int(self.np_random.integers(self.items))
        elif not (isinstance(item, int) and 0 <= item < self.items):
            raise ConfigError(f"item must be an int from 0 to {self.items - 1}, got {item!r}")
        self._item = item
        return f"{self._problems[item][0]}\n\n{_ASK}"

    def extra_info(self) -> Mapping[str, Any]:
        """Returns the problem's number."""
        return {"item": self._item}

    def respond(self, reply: Reply) -> Feedback:
        """Checks the number."""
        verdict = verify_number(reply.content, self._problems[self._item][1])
        return Feedback(
            reward=float(bool(verdict)),
            terminated=True,
            success=bool(verdict),
            info={"item": self._item, "verdict": str(verdict.value), "verdict_reason": verdict.reason},
        )


def _checked(rows: Iterable[Mapping[str, Any]], source: str) -> tuple[Problem, ...]:
    """Returns the problems; each gold must be one number."""
    problems = []
    for number, row in enumerate(rows, 1):
        question, answer = row.get("question"), row.get("answer")
        if not isinstance(question, str) or not isinstance(answer, str):
            raise MissingData(
                f"row {number} of {source} must have the texts question and answer, got {sorted(row)}"
            )
        try:
            read_gold_number(answer)
        except UnusableGold as error:
            raise UnusableGold(f"row {number} of {source}: {error}") from error
        # Only what follows #### is the gold; the worked solution before it is not needed again.
        problems.append((question.strip(), f"####{answer.rpartition('####')[2]}"))
    if not problems:
        raise MissingData(f"{source} holds no problem: give a file with question and answer on each line")
    return tuple(problems)


def _from_file(path: str) -> tuple[Problem, ...]:
    try:
        changed = Path(path).stat().st_mtime_ns
    except OSError as error:
        raise MissingData(
            f"data={path} cannot be read ({error.strerror}): give the path of a JSONL file"
        ) from error
    return _read_file(path, changed)


@lru_cache(maxsize=8)
def _read_file(path: str, changed: int) -> tuple[Problem, ...]:
    rows: list[Mapping[str, Any]] = []
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise MissingData(
                    f"line {number} of {path} is no JSON ({error.msg}): one object a line"
                ) from error
            if not isinstance(row, dict):
                raise MissingData(f"line {number} of {path} must be an object, got {type(row).__name__}")
            rows.append(row)
    return _checked(rows, path)


@lru_cache(maxsize=2)
def _from_hub(split: str) -> tuple[Problem, ...]:
    remedy = "or give data=FILE.jsonl (--env-arg data=FILE.jsonl), with question and answer on each line"
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise MissingData(
            f"GSM8K from the hub needs the package datasets: pip install 'atropos-gym[data]', {remedy}"
        ) from error
    try:
        rows = load_dataset(_HUB_NAME, "main", split=split)
    except Exception as error:  # no network, no such file, a refused login: the library raises many kinds
        raise MissingData(
            f"{_HUB_NAME} cannot be loaded from the hub ({type(error).__name__}): connect to a network, "
            f"{remedy}"
        ) from error
    return _checked(rows, f"{_HUB_NAME} ({split})")
