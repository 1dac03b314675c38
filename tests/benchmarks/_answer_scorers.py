"""Scorers of answers that answer_peers.py compares; each maps a case to a reward, or None for no reward.

Run as a program (``python _answer_scorers.py NAME``) it reads cases as lines of JSON and writes a line for
each: the reward and the CPU seconds spent. It imports nothing of this repository at the top, so that any
interpreter can run it.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Case = dict[str, Any]
Scorer = Callable[[Case], float | None]


def ours() -> Scorer:
    """This package; its formulas are compared in another process, see ``worker_seconds``."""
    from atropos_gym.errors import UnusableGold
    from atropos_gym.rewards import verify_choice, verify_math, verify_number, warm_up

    warm_up()

    def score(case: Case) -> float | None:
        try:
            if case["kind"] == "choice":
                return float(bool(verify_choice(case["completion"], case["gold"], case["options"])))
            check = verify_number if case["kind"] == "gsm8k" else verify_math
            return float(bool(check(case["completion"], case["gold"])))
        except UnusableGold:
            return None

    return score


def math_verify(*, boxed: bool) -> Scorer:
    """math-verify alone, as its README calls it; for choices with its extractor of letters."""
    from math_verify import StringExtractionConfig, parse, verify

    def score(case: Case) -> float | None:
        gold = rf"\boxed{{{case['gold']}}}" if boxed else case["gold"]
        if case["kind"] == "choice":
            letters = (StringExtractionConfig(strings=tuple("ABCDEFGHIJ"[: len(case["options"])])),)
            wanted = parse(case["gold"], extraction_config=letters)
            return float(verify(wanted, parse(case["completion"], extraction_config=letters)))
        return float(verify(parse(gold), parse(case["completion"])))

    return score


def trl(*, boxed: bool) -> Scorer:
    """TRL's ``accuracy_reward``."""
    from trl.rewards import accuracy_reward

    def score(case: Case) -> float | None:
        gold = rf"\boxed{{{case['gold']}}}" if boxed else case["gold"]
        message = [{"role": "assistant", "content": case["completion"]}]
        reward: float | None = accuracy_reward([message], [gold])[0]
        return reward

    return score


def atropos_gsm8k() -> Scorer:
    """The calls of NousResearch/atropos, environments/gsm8k_server.py: both sides boxed, LaTeX only."""
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    normal = NormalizationConfig(
        nits=False, malformed_operators=False, basic_latex=True, equations=True, boxed="all", units=True
    )
    said = LatexExtractionConfig(
        normalization_config=normal, boxed_match_priority=0, try_extract_without_anchor=False
    )

    def score(case: Case) -> float | None:
        gold = (
            case["gold"].split("#")[-1].strip().replace(",", "") if case["kind"] == "gsm8k" else case["gold"]
        )
        wanted = parse(
            rf"\boxed{{{gold}}}", extraction_mode="first_match", extraction_config=[LatexExtractionConfig()]
        )
        if not wanted:
            return None
        visible = case["completion"].split("</think>")[-1]
        answer = parse(visible, extraction_mode="first_match", extraction_config=[said])
        return float(verify(answer, wanted))

    return score


def atropos_mmlu() -> Scorer:
    """The letter extraction of NousResearch/atropos, environments/eval_environments/mmlu_eval.py.

    An ``<answer>`` tag with one letter decides; else the first of eight patterns that finds a letter of A to
    D (the last match of the four with "answer", the first match of the others); else any letter at all. The
    order of the last resort is that of a set of letters: it changes with PYTHONHASHSEED, which is 0 here.
    """
    letter = r"([ABCD]|\([ABCD]\))"
    ignore, dot = re.IGNORECASE, re.DOTALL
    patterns = [
        (re.compile(rf"final\s+answer\s+is\s*:?\s*{letter}\.?\s*I\s*hope", ignore), 0),
        (re.compile(rf"final\s+answer.{{0,100}}?\s+is\s*:?\s*{letter}", ignore | dot), -1),
        (re.compile(rf"the\s+answer\s+is\s*:?\s*{letter}", ignore), -1),
        (re.compile(rf"answer\s*:\s*.{{0,50}}?{letter}", ignore | dot), -1),
        (re.compile(rf"answer\s+{letter}", ignore), -1),
        (re.compile(rf"^\s*\**{letter}\**[\s.):]", ignore), 0),
        (re.compile(rf"\n\s*\**{letter}\**[\s.):]", ignore), 0),
        (re.compile(rf"\b{letter}\b", ignore), 0),
    ]

    def extract(text: str, count: int) -> str | None:
        valid = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[:count]
        tag = re.search(r"<answer>(.*?)</answer>", text, ignore | dot)
        if tag:
            found = re.findall(rf"\b[{valid}]\b", tag[1].upper())
            if len(found) == 1:
                return str(found[0])
        for pattern, which in patterns:
            matches = pattern.findall(text)
            if matches and (label := matches[which].strip("()").upper()) in valid:
                return str(label)
        anywhere = text.upper()
        return next((label for label in reversed(list(set(valid))) if label in anywhere), None)

    def score(case: Case) -> float | None:
        text = case["completion"]
        if text.count("<think>") == 1 and text.count("</think>") == 1:
            text = text.partition("</think>")[2].strip()
        return float(extract(text, len(case["options"])) == case["gold"])

    return score


SCORERS: dict[str, Callable[[], Scorer]] = {
    "ours": ours,
    "math-verify": lambda: math_verify(boxed=False),
    "math-verify, gold boxed": lambda: math_verify(boxed=True),
    "TRL accuracy_reward": lambda: trl(boxed=False),
    "TRL accuracy_reward, gold boxed": lambda: trl(boxed=True),
    "Atropos GSM8K": atropos_gsm8k,
    "Atropos MMLU": atropos_mmlu,
}


def worker_seconds() -> float:
    """CPU seconds of all processes that this one has started, so far; 0.0 where there is no /proc."""
    ticks = 0
    parents = {os.getpid()}
    stats = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        stats[int(folder.name)] = (int(fields[1]), sum(map(int, fields[11:15])))
    while parents:
        children = {pid for pid, (parent, _) in stats.items() if parent in parents}
        ticks += sum(stats[pid][1] for pid in children)
        parents = children
    return ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    score = SCORERS[sys.argv[1]]()
    warm = {"kind": "math", "completion": r"\boxed{\sqrt{4}}", "gold": r"\frac{4}{2}", "options": ["x", "y"]}
    score({**warm, "kind": "choice", "gold": "A"} if "MMLU" in sys.argv[1] else warm)
    before = worker_seconds()
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        case = json.loads(line)
        if case is None:
            print(json.dumps([None, worker_seconds() - before]), flush=True)
            break
        started = time.process_time()
        reward = score(case)
        print(json.dumps([reward, time.process_time() - started]), flush=True)


if __name__ == "__main__":
    main()
