"""Answers: every shared case, and promises that hold for any completion."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_gym.errors import UnusableGold
from atropos_gym.rewards import (
    Verdict,
    VerdictValue,
    read_gold_number,
    verify_choice,
    verify_math,
    verify_number,
    warm_up,
)

HERE = Path(__file__).parent
ALL_CASES = json.loads((HERE.parent / "cases" / "a_answers.json").read_text(encoding="utf-8"))
CHECKS: dict[str, Callable[[str, str], Verdict]] = {"gsm8k": verify_number, "math": verify_math}
CASES = [case for case in ALL_CASES if case["kind"] in CHECKS]
CHOICES = [case for case in ALL_CASES if case["kind"] == "choice"]
REASONS = {
    "right": {"equal"},
    "wrong": {"not_equal", "hedged", "too_big", "timeout"},
    "unparsed": {"no_commitment", "empty", "truncated", "too_long", "taken_back", "unclosed_think"},
}


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    warm_up()


def text_of(case: dict[str, Any]) -> str:
    if "completion" in case:
        return case["completion"]
    return "".join(text * count for text, count in case["completion_repeat"])


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_shared_case(case: dict[str, Any]) -> None:
    check = CHECKS[case["kind"]]
    if case["expect"] == "gold_error":
        with pytest.raises(UnusableGold, match="fix or drop this row"):
            check(text_of(case), case["gold"])
        return
    started = time.process_time()
    verdict = check(text_of(case), case["gold"])
    assert time.process_time() - started < 1.0
    assert verdict.value == case["expect"]
    assert verdict.reason in REASONS[case["expect"]]
    assert bool(verdict) is (case["expect"] == "right")


@pytest.mark.parametrize("case", CHOICES, ids=[case["id"] for case in CHOICES])
def test_shared_case_of_choice(case: dict[str, Any]) -> None:
    for gold in {case["gold"], case.get("gold_index", case["gold"])}:
        if case["expect"] == "gold_error":
            with pytest.raises(UnusableGold, match="fix or drop this row"):
                verify_choice(text_of(case), gold, case["options"])
            continue
        verdict = verify_choice(text_of(case), gold, case["options"])
        assert verdict.value == case["expect"]
        assert verdict.reason in REASONS[case["expect"]]


def test_every_shared_case_is_run() -> None:
    assert {case["id"] for case in CASES + CHOICES} == {f"a{number:02}" for number in range(1, 101)}


@pytest.mark.parametrize(
    ("completion", "gold", "reason"),
    [
        ("#### 1,200 clips", "1200", "equal"),
        ("#### x = 3 * 4 = 12", "12", "equal"),
        ("#### \uff11\uff12", "12", "equal"),
        ("The answer is 5. No, wait, it is 7.", "7", "equal"),
        ("The answer is 5. Actually, 7.", "5", "not_equal"),
        ("The answer is 5. Wait, let me check.", "5", "taken_back"),
        ("The answer is not 5.", "5", "no_commitment"),
        ("The answer is 5.\nUser: and 3 + 4?\nThe answer is 7.", "5", "equal"),
        ("12\n<|im_end|>13", "12", "equal"),
        ("**Answer:**\n\n$$12$$", "12", "equal"),
        (r"The answer is \(12\).", "12", "equal"),
        ("The answer is $5 because $7 is too much.", "5", "equal"),
        ("The answer is 3 or 4.", "4", "hedged"),
        ("<answer>4</answer> or <answer>5", "4", "truncated"),
        ("<Answer> 4 </Answer>", "4", "equal"),
        ("#### ", "4", "empty"),
        ("#### " + "4" * 1001, "4", "too_long"),
        ("#### none", "4", "not_equal"),
        ("-.50", "-1/2", "equal"),
        ("1.5e3", "1500", "equal"),
        (r"1.5 \times 10^{3}", "1500", "equal"),
        ("2 1/2", "2.5", "equal"),
        ("0.333333", "1/3", "equal"),
        ("0.33333", "1/3", "not_equal"),
        ("0.333334", "1/3", "not_equal"),
        ("1/0", "1", "no_commitment"),
        ("\u0663", "3", "no_commitment"),
    ],
)
def test_numbers(completion: str, gold: str, reason: str) -> None:
    assert verify_number(completion, gold).reason == reason


@pytest.mark.parametrize(
    ("answer", "gold", "equal"),
    [
        (r"\frac{\sqrt{8}}{2}", r"\sqrt{2}", True),
        ("x^2 + 2x + 1", "(x+1)^2", True),
        ("(x+1)^{20}", "(x+2)^{20}", False),
        (r"5\sqrt 2", r"\sqrt{50}", True),
        (r"2\pi", r"6.283185", False),
        ("6.283185", r"2\pi", True),
        ("6.28318", r"2\pi", False),
        ("6.283186", r"2\pi", False),
        (r"(-\infty, 3]", r"x \le 3", True),
        ("2 < x <= 5", "(2, 5]", True),
        ("5 >= x > 2", "(2, 5]", True),
        (r"x \in [0, 1)", "[0,1)", True),
        (r"(0,1) \cup (2,3)", r"(2,3) \cup (0,1)", True),
        ("(0,1)", "[0,1]", False),
        (r"\{1, 2\}", "(1, 2)", False),
        ("1 and 2", r"\{2, 1\}", True),
        ("1, 2, 2", "1, 2", False),
        ("x = 1 or x = 2", "1, 2", True),
        (r"2 \pm \sqrt{3}", r"2 - \sqrt{3}, 2 + \sqrt{3}", True),
        ("2x + 2y = 2", "x + y = 1", True),
        ("x + y = 2", "x + y = 1", False),
        ("2 + 3 = 5", "5", True),
        (r"\begin{pmatrix} 1 \\ 3 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", False),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix} 1 \\ 2 \end{bmatrix}", True),
        (r"\frac{5}{9}(F-32)", r"\frac59 (F - 32)", True),
        ("f(x) = x^2 + 1", "x^2 + 1", True),
        ("3:4", "4:3", False),
        ("1,000,000", "10^6", True),
        (r"\log_2 8", "3", True),
        ("10 feet", "10", True),
        ("10 feet", "10 foot", True),
        (r"10\text{ cm}", "10 cm", True),
        ("5x", "5", False),
        ("5 x", "5", False),
        ("not", "ton", False),
        ("Monday", "monday", True),
        (r"\text{(B)}", "B", True),
        ("1,234", "1234", True),
        ("(1,234)", "1234", False),
        ("100!", r"99! \cdot 100", True),
        ("5000!", "1", False),
        ("9^{9^{9}}", "1", False),
        ("9^9^9^9", "1", False),
        ("9^(9^9)", "1", False),
        (r"9^\frac{999999999}{1}", "1", False),
        ("(9^{9999})^{9999}", "1", False),
        ("99^{99!}", "1", False),
        ("(99!)!", "1", False),
        (r"\sum_{k=1}^{9} k", "45", True),
    ],
)
def test_forms(answer: str, gold: str, equal: bool) -> None:
    assert bool(verify_math(f"\\boxed{{{answer}}}", gold)) is equal


@pytest.mark.parametrize("check", [verify_number, verify_math])
def test_a_think_block_that_the_prompt_opened_must_be_closed(check: Callable[..., Verdict]) -> None:
    assert check("#### 4", "4", opened=True).reason == "unclosed_think"
    assert check("3?</think>#### 4", "4", opened=True)


@pytest.mark.parametrize("gold", ["", "####", "none", "3 or 4", "#### 3 4", None, b"3", True, float("nan")])
def test_a_gold_that_is_not_one_number_is_refused(gold: Any) -> None:
    with pytest.raises(UnusableGold):
        read_gold_number(gold)


@pytest.mark.parametrize("gold", [5, 5.0, np.int64(5), np.float32(5)])
def test_a_gold_may_be_a_number(gold: Any) -> None:
    assert verify_number("#### 5", gold)
    assert verify_math("#### 5", gold)


@pytest.mark.parametrize("gold", ["", "  ", "####", r"\boxed{}"])
def test_a_blank_gold_is_refused(gold: str) -> None:
    with pytest.raises(UnusableGold):
        verify_math("#### 4", gold)


def test_the_gold_stays_first() -> None:
    # An equation does not equal its solutions, whichever side it stands on.
    equation, solutions = r"\boxed{x^2-5x+6=0}", r"\{2,3\}"
    assert verify_math(equation, solutions).value == "wrong"
    assert verify_math(rf"\boxed{{{solutions}}}", "x^2-5x+6=0").value == "wrong"


def in_a_thread(work: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def in_an_event_loop(work: Callable[[], Any]) -> Any:
    async def run() -> Any:
        return work()

    return asyncio.run(run())


@pytest.mark.parametrize("place", [in_a_thread, in_an_event_loop])
def test_the_same_verdict_everywhere(place: Callable[..., Any]) -> None:
    def work() -> list[Verdict]:
        return [
            CHECKS[case["kind"]](text_of(case), case["gold"])
            for case in CASES
            if case["expect"] != "gold_error"
        ]

    assert place(work) == work()


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="no alarms on this system")
def test_the_host_programs_alarm_is_left_alone() -> None:
    before = signal.signal(signal.SIGALRM, lambda *_: None)
    try:
        signal.setitimer(signal.ITIMER_REAL, 600)
        verify_math(r"\boxed{\frac{\sqrt{8}}{2}}", r"\sqrt{2}")
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


OPTIONS = ["London", "Paris, a city", "Both A and B", "No answer is right"]


def every_verdict(completion: str, gold: str) -> list[Verdict]:
    return [
        verify_math(completion, gold),
        verify_number(completion, "12"),
        verify_choice(completion, "B", OPTIONS),
    ]


PIECES = (
    r"\boxed{ } { \frac 1 2.5 x = < , ^ ! answer: ( ) [ ] \{ \} \pm \cup $ % and no, <answer> </answer> is or"
    r" A <think> </think> \text{ 1,234 \\ User: \sqrt \infty \pi 9 B (A) London I choose wait not \le &"
    r" ** ' cm of \begin{pmatrix} \end{pmatrix} \in \log_ \overline{ 1/2 \times 10^"
    r" \circ \binom \ne > e i 0. ... sin( |"
).split(" ") + [" ", "\n", "#### ", "\u2212", "\u00b2", "\u221a", "\u00bd", "\ud800", "\0"]
GOLDS = ["x^2 + 1", r"\{1,2\}", "(0,1]", r"\pm 3", "x=5", r"\sqrt{2}", "Monday", "50\\%", "x<3", "10 cm"]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(PIECES) | st.text(max_size=3), max_size=12).map("".join),
    st.sampled_from(GOLDS),
)
def test_nothing_that_a_completion_says_raises(text: str, gold: str) -> None:
    started = time.process_time()
    for completion in (text, f"#### {text}", f"\\boxed{{{text}}}", f"The answer is {text}"):
        for verdict in every_verdict(completion, gold):
            assert verdict.reason in REASONS[verdict.value]
    assert time.process_time() - started < 4.0


REPEATED = [
    *r"\boxed{|\boxed{1}|{|}|<answer>|####|the answer is |wait, |. No, |1 |1,| |Q:|<think>".split("|"),
    *r"</think>|$|answer:|1,234,|\boxed{1} and |\text{|I think |A or |London or |answer is not ".split("|"),
    *r"no, |*|_|, - |\text{a}|5 cm |(|$1$, |\(|1/|^{|oh, ".split("|"),
    "|", "\n", "Q:\n", "<|", "answer is 1\n", "\u200b",
]  # fmt: skip


@pytest.mark.parametrize("check", [verify_math, verify_number, verify_choice])
def test_time_is_linear_in_the_length(check: Callable[..., Verdict]) -> None:
    """Every text is tried short; a quadratic one would be among the slowest, which are tried long."""
    extra = (OPTIONS,) if check is verify_choice else ()

    def seconds(text: tuple[str, str], size: int) -> float:
        long = text[0] + text[1] * (size // len(text[1]))
        started = time.process_time()
        check(long, "B" if extra else "5", *extra)
        return time.process_time() - started

    tried = [(prefix, piece) for prefix in ("", "The answer is 5. ") for piece in REPEATED]
    for text in sorted(tried, key=lambda text: seconds(text, 10_000), reverse=True)[:6]:
        assert seconds(text, 100_000) < 1.0, text


def test_half_a_million_characters_are_no_trouble() -> None:
    text = "The answer is 5. So no, wait: \n" * 16_000
    started = time.process_time()
    assert [verdict.value for verdict in every_verdict(text, "5")] == ["unparsed", "unparsed", "unparsed"]
    assert time.process_time() - started < 8.0


def test_a_verdict_is_true_only_where_it_is_right() -> None:
    truth = {value.value: bool(Verdict(value, "")) for value in VerdictValue}
    assert truth == {"right": True, "wrong": False, "unparsed": False}
