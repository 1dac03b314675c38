"""The bridge beside others on the cases of area c: ``python -m tests.benchmarks.template_peers`` at the root.

Each approach plays each case that it can be asked; it is right where its ids are the case's, and exactly the
sampled ids are trained. Beside ours: the whole conversation through ``apply_chat_template`` at every turn,
the same with transformers' ``sanitize_control_tokens``, and TRL's two trainers (``--peer-python`` names the
interpreter of an environment with TRL 1.16; without one these columns are left out, with the reason).

``--list`` also prints why each case is not right.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from atropos_gym.errors import AtroposError
from tests.benchmarks._template_trl import judge_inject, load
from tests.tools.rendering_cases import DATA, check_prompt, check_segment, renderer_of, runs

CASES_FILE = Path(__file__).parent.parent / "cases" / "c_rendering.json"
GROUPS = {
    "user messages between turns": "user",
    "tool results between turns": "tool",
    "turns cut, empty or gone on behind their end": "cut",
    "control strings in text stay text": "inject",
    "first prompt (BOS once, dates, added tokens)": "prompt",
    "history that cannot go on opens a new row": "segment",
}
Verdict = tuple[str, str]
Approach = Callable[[Path, dict[str, Any]], Verdict]


def group_of(case: dict[str, Any]) -> str | None:
    """Which row of the table a case belongs to."""
    if case["kind"] in ("inject", "prompt", "segment"):
        return str(case["kind"])
    if case["kind"] != "episode":
        return None
    stops = set(case["stop_ids"])
    sampled = [turn["sampled"] for turn in case["turns"] if "new_messages" in turn]
    if any(not (ids and ids[-1] in stops) or stops & set(ids[:-1]) for ids in sampled):
        return "cut"
    said = {m["role"] for turn in case["turns"] for m in turn.get("new_messages", [])}
    return "tool" if "tool" in said else "user"


def ours(folder: Path, case: dict[str, Any]) -> Verdict:
    """ChatRenderer with its default settings."""
    if case["kind"] == "segment":
        check_segment(folder, case)
        return "right", ""
    renderer = renderer_of(folder, case)
    if case["kind"] == "inject":
        return judge_inject(case, renderer.prompt(case["messages"], case.get("tools")))
    if case["kind"] == "prompt":
        check_prompt(renderer, case)
        return "right", ""
    ids = renderer.prompt(case["messages"], case.get("tools"))
    mask = [0] * len(ids)
    for turn in case["turns"]:
        bridge = renderer.bridge(turn["sampled"], turn["new_messages"]) if "new_messages" in turn else []
        ids += [*turn["sampled"], *bridge]
        mask += [1] * len(turn["sampled"]) + [0] * len(bridge)
    if ids == case["ids"] and runs(mask) == case["mask_runs"]:
        return "right", ""
    return "wrong", "other ids"


def whole_render(folder: Path, case: dict[str, Any], *, sanitize: bool) -> Verdict:
    """``apply_chat_template`` over the whole conversation at every turn; replies are decoded text."""
    tokenizer = load(folder, case, DATA["templates"])
    extra = {"sanitize_control_tokens": True} if sanitize else {}

    def render(messages: list[dict[str, Any]]) -> list[int]:
        kwargs = {**case.get("template_kwargs", {}), **extra}
        ids = tokenizer.apply_chat_template(
            messages, tools=case.get("tools"), add_generation_prompt=True, return_dict=False, **kwargs
        )
        return list(ids)

    messages = list(case["messages"])
    ids = render(messages)
    if case["kind"] == "inject":
        return judge_inject(case, ids)
    if case["kind"] == "prompt":
        return ("right", "") if ids == case["prompt_ids"] else ("wrong", "another prompt")
    position = 0
    for turn in case.get("turns", [case]):
        ids = render(messages)
        if case["kind"] == "episode" and ids != case["ids"][: len(ids)]:
            differs = next((i for i, (a, b) in enumerate(zip(ids, case["ids"], strict=False)) if a != b), 0)
            return "wrong", f"turn {position} reads other ids than were sampled, from {differs} on"
        stops = set(case["stop_ids"])
        end = next((i for i, token in enumerate(turn["sampled"]) if token in stops), len(turn["sampled"]))
        messages.append({"role": "assistant", "content": tokenizer.decode(turn["sampled"][:end])})
        messages += turn.get("new_messages", [])
        position += 1
    if case["kind"] == "segment":
        right = render(messages) == case.get("strict", case)["segment_2_prompt_ids"]
        return ("right", "") if right else ("wrong", "another prompt")
    if messages[-1]["role"] != "assistant":
        ids = render(messages)
    return ("right", "") if ids == case["ids"][: len(ids)] else ("wrong", "other ids at the end")


def play(approach: Approach, tokenizers: Path) -> dict[str, Verdict]:
    """Every case that can be asked, with the verdict about one approach."""
    verdicts: dict[str, Verdict] = {}
    for case in DATA["cases"]:
        folder = tokenizers / str(case.get("tokenizer"))
        if group_of(case) is None or not (folder / "tokenizer.json").is_file():
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                verdicts[case["id"]] = approach(folder, case)
            except (AssertionError, AtroposError, ValueError, TypeError) as error:
                verdicts[case["id"]] = ("wrong", f"{type(error).__name__}: {error}"[:100])
            except Exception as error:
                if type(error).__module__.partition(".")[0] != "jinja2":
                    raise
                verdicts[case["id"]] = ("impossible", f"the template refuses: {error}"[:100])
    return verdicts


def ask_trl(python: str | None, tokenizers: Path) -> tuple[dict[str, dict[str, Verdict]], str]:
    """TRL's verdicts by column, and a line that says which version answered, or why none did."""
    if python is None:
        return {}, "TRL: left out, no --peer-python (an interpreter with trl 1.16)"
    script = Path(__file__).with_name("_template_trl.py")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [python, str(script), str(CASES_FILE), str(tokenizers)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=900, check=True
        )
    except FileNotFoundError:
        return {}, f"TRL: left out, there is no {python}"
    except subprocess.CalledProcessError as error:
        return {}, f"TRL: left out, {(error.stderr.strip().splitlines() or ['no output'])[-1]}"
    answer = json.loads(done.stdout.splitlines()[-1])
    columns = {"TRL GRPOTrainer": answer["grpo"], "TRL AsyncGRPOTrainer": answer["async"]}
    return columns, f"TRL {answer['version']}"


def table(columns: dict[str, dict[str, Verdict]]) -> str:
    """The README's table: right of all cases of a group, and how many cannot be asked."""
    groups = {case["id"]: group_of(case) for case in DATA["cases"]}
    lines = [f"| cases of area c | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    totals = {name: [0, 0, 0] for name in columns}
    for title, group in GROUPS.items():
        cells = []
        for name, verdicts in columns.items():
            found = [verdict for case, (verdict, _) in verdicts.items() if groups[case] == group]
            counts = [found.count("right"), len(found), found.count("impossible")]
            totals[name] = [a + b for a, b in zip(totals[name], counts, strict=True)]
            cells.append(_cell(*counts))
        lines.append(f"| {title} | {' | '.join(cells)} |")
    lines.append(f"| **all** | {' | '.join(_cell(*totals[name]) for name in columns)} |")
    return "\n".join(lines)


def _cell(right: int, asked: int, impossible: int) -> str:
    return f"{right} of {asked}" + (f" ({impossible} impossible)" if impossible else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    home = Path(os.environ.get("ATROPOS_GYM_CACHE") or Path.home() / ".cache" / "atropos_gym")
    parser.add_argument(
        "--tokenizers", type=Path, default=home / "tokenizers", help="folder of real tokenizers"
    )
    parser.add_argument("--peer-python", help="interpreter of an environment with trl 1.16")
    parser.add_argument("--list", action="store_true", help="say why each case is not right")
    options = parser.parse_args()
    import transformers

    transformers.logging.set_verbosity_error()
    approaches: dict[str, Approach] = {
        "ours": ours,
        "whole render": lambda folder, case: whole_render(folder, case, sanitize=False),
        "… sanitized": lambda folder, case: whole_render(folder, case, sanitize=True),
    }
    columns = {name: play(approach, options.tokenizers) for name, approach in approaches.items()}
    if not columns["ours"]:
        sys.exit(f"no tokenizers in {options.tokenizers}: python tests/tools/get_tokenizers.py FOLDER")
    answered, line = ask_trl(options.peer_python, options.tokenizers)
    columns |= answered
    print(f"transformers {transformers.__version__}, {line}\n\n{table(columns)}")
    if options.list:
        for name, verdicts in columns.items():
            print(f"\n{name}")
            for case, (verdict, why) in verdicts.items():
                if verdict != "right" or why:
                    print(f"  {case}  {verdict:<10}  {why}")


if __name__ == "__main__":
    main()
