"""Answers of area a, scored by us and by peers, in one run: ``python -m tests.benchmarks.answer_peers``.

Each scorer runs in a process of its own; a call that takes longer than ``--limit`` seconds is a hang, its
process is killed and the next case gets a new one. TRL lives in an environment of its own: name its
interpreter with ``--trl-python`` (``pip install trl==1.16.0 math-verify==0.9.0``), else its rows are left
out. The table is printed ready for the README.

A scorer agrees on a case if it gives 1 where the answer is right, 0 where it is not, and no reward at all
where the gold is unusable. CPU is in milliseconds a case, hangs left out; that of other processes which a
scorer starts (ours compares formulas in one) is added.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
CASES = HERE.parents[1] / "cases" / "a_answers.json"
ROOT = HERE.parents[2]
ANSWERS = (
    "ours",
    "math-verify",
    "math-verify, gold boxed",
    "TRL accuracy_reward",
    "TRL accuracy_reward, gold boxed",
    "Atropos GSM8K",
)
CHOICES = ("ours", "math-verify", "Atropos MMLU")
START_SECONDS = 120


@dataclass
class Tally:
    """What a scorer did on some cases."""

    agreed: list[str] = field(default_factory=list)
    rewarded_wrongly: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    seconds: float = 0.0
    calls: int = 0

    def add(self, case: dict[str, Any], reward: float | None) -> None:
        paid = reward == 1.0
        if reward == {"right": 1.0, "gold_error": None}.get(case["expect"], 0.0):
            self.agreed.append(case["id"])
        elif paid:
            self.rewarded_wrongly.append(case["id"])
        else:
            self.missed.append(case["id"])


class Scorer:
    """A scorer's process, started again after a hang."""

    def __init__(self, name: str, python: str, limit: float) -> None:
        self.name, self.python, self.limit = name, python, limit
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            [self.python, "-W", "ignore", str(HERE.parent / "_answer_scorers.py"), self.name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"},
        )
        if self.line(START_SECONDS) != "ready":
            raise SystemExit(f"{self.name}: {self.python} cannot run it")

    def line(self, seconds: float) -> Any:
        """The next line's value; None where it does not come in time."""
        assert self.process is not None and self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            return None
        text = self.process.stdout.readline()
        return json.loads(text) if text else None

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def run(self, cases: Sequence[dict[str, Any]]) -> Tally:
        tally = Tally()
        for case in cases:
            if self.process is None:
                self.start()
            assert self.process is not None and self.process.stdin is not None
            self.process.stdin.write(json.dumps(case) + "\n")
            self.process.stdin.flush()
            answer = self.line(self.limit)
            if answer is None:
                tally.hung.append(case["id"])
                self.stop()
                continue
            reward, seconds = answer
            tally.seconds += seconds
            tally.calls += 1
            tally.add(case, reward)
        if self.process is not None and self.process.stdin is not None:
            print("null", file=self.process.stdin, flush=True)
            tally.seconds += (self.line(self.limit) or [None, 0.0])[1]
        self.stop()
        return tally


def read_cases() -> list[dict[str, Any]]:
    cases = json.loads(CASES.read_text(encoding="utf-8"))
    for case in cases:
        if "completion" not in case:
            case["completion"] = "".join(text * count for text, count in case["completion_repeat"])
    fields = ("id", "kind", "completion", "gold", "options", "expect")
    return [{name: case.get(name) for name in fields} for case in cases]


def row(name: str, tally: Tally, boxed: set[str]) -> str:
    ids = " ".join(tally.rewarded_wrongly)
    wrongly = f"{len(tally.rewarded_wrongly)}: {ids}" if ids else "0"
    in_boxes = f" {len(boxed.intersection(tally.agreed))} |" if boxed else ""
    cpu = f"{1000 * tally.seconds / max(1, tally.calls):.1f}"
    return f"| {name} | {len(tally.agreed)} |{in_boxes} {wrongly} | {' '.join(tally.hung) or '0'} | {cpu} |"


def main() -> None:
    """Runs all scorers and prints two tables."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--trl-python", help="interpreter of an environment with trl")
    options.add_argument("--limit", type=float, default=20.0, help="seconds after which a call is a hang")
    options.add_argument(
        "--missed", action="store_true", help="also list the right answers that got no reward"
    )
    given = options.parse_args()
    cases = read_cases()
    answers = [case for case in cases if case["kind"] != "choice"]
    choices = [case for case in cases if case["kind"] == "choice"]
    boxed = {case["id"] for case in answers if r"\boxed{" in case["completion"]}
    notes = []
    print(
        f"| scorer | {len(answers)} answers | {len(boxed)} with a box | rewarded wrongly | hangs | CPU, ms |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for name in ANSWERS:
        if name.startswith("TRL") and not given.trl_python:
            continue
        python = given.trl_python if name.startswith("TRL") else sys.executable
        tally = Scorer(name, python, given.limit).run(answers)
        print(row(name, tally, boxed), flush=True)
        notes.append((name, tally))
    print(f"\n| scorer | {len(choices)} choices | rewarded wrongly | hangs | CPU, ms |")
    print("| --- | --- | --- | --- | --- |")
    for name in CHOICES:
        tally = Scorer(name, sys.executable, given.limit).run(choices)
        print(row(name, tally, set()), flush=True)
        notes.append((name, tally))
    if given.missed:
        print()
        for name, tally in notes:
            print(f"{name}: no reward for {' '.join(tally.missed) or 'none that is right'}")


if __name__ == "__main__":
    main()
