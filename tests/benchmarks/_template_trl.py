"""TRL's multi-turn template handling on the cases of area c; runs under TRL's own Python, prints JSON.

Its own code is called, with a trainer's attributes and no model: ``GRPOTrainer._get_tool_suffix_ids`` for the
bridge after a tool call, and ``_chain_to_sequences`` of the asynchronous trainer, which reconciles prompts
that are rendered anew every turn. ``python _template_trl.py CASES TOKENIZERS`` answers
``{"version": ..., "grpo": {case: [status, why]}, "async": {...}}``.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Verdict = tuple[str, str]
_loaded: dict[Path, Any] = {}


def main() -> None:
    cases_file, folder = map(Path, sys.argv[1:3])
    data = json.loads(cases_file.read_text(encoding="utf-8"))
    import trl

    answers: dict[str, Any] = {"version": trl.__version__, "grpo": {}, "async": {}}
    for case in data["cases"]:
        if case["kind"] not in ("episode", "inject", "prompt", "segment"):
            continue
        if not (folder / case["tokenizer"] / "tokenizer.json").is_file():
            continue
        for name, judge in (("grpo", judge_grpo), ("async", judge_async)):
            tokenizer = load(folder / case["tokenizer"], case, data["templates"])
            try:
                answers[name][case["id"]] = judge(tokenizer, case)
            except Exception as error:  # whatever a peer raises is its answer
                answers[name][case["id"]] = ("impossible", f"{type(error).__name__}: {error}"[:160])
    print(json.dumps(answers))


def load(folder: Path, case: dict[str, Any], templates: dict[str, str]) -> Any:
    """The case's tokenizer with the case's template."""
    from tokenizers import AddedToken
    from transformers import AutoTokenizer

    if case.get("add_tokens"):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_tokens(
            [
                AddedToken(t["content"], rstrip=t["rstrip"], normalized=False, special=t["special"])
                for t in case["add_tokens"]
            ]
        )
    else:
        if folder not in _loaded:
            _loaded[folder] = AutoTokenizer.from_pretrained(folder)
        tokenizer = copy.copy(_loaded[folder])
    if "template" in case:
        tokenizer.chat_template = templates[case["template"]]
    return tokenizer


def named(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool messages with the name that TRL gives each of them."""
    return [{"name": "get", **m} if m["role"] == "tool" else m for m in messages]


def judge_inject(case: dict[str, Any], ids: list[int]) -> Verdict:
    checks = case["checks"]
    control = set(checks["control_ids_in_order"]) | set(checks["control_ids_if_naive"])
    found = [i for i in ids if i in control]
    if found == checks["control_ids_in_order"]:
        return "right", ""
    return "wrong", f"{len(found) - len(checks['control_ids_in_order'])} control ids out of plain text"


def render(tokenizer: Any, case: dict[str, Any], messages: list[dict[str, Any]], template: Any) -> list[int]:
    return list(
        tokenizer.apply_chat_template(
            messages,
            tools=case.get("tools"),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            chat_template=template,
            **case.get("template_kwargs", {}),
        )
    )


def training_template(tokenizer: Any, case: dict[str, Any]) -> tuple[Any, str]:
    """What a trainer does at construction with tools: None, or its own template in place of a known one."""
    from trl.chat_template_utils import get_training_chat_template, is_chat_template_prefix_preserving

    if is_chat_template_prefix_preserving(tokenizer):
        return None, ""
    try:
        return get_training_chat_template(tokenizer), ""
    except ValueError:
        import trl

        own = Path(trl.__file__).parent / "chat_templates" / f"{case['tokenizer']}_training.jinja"
        if "template" in case or not own.is_file():
            raise
        return own.read_text(encoding="utf-8"), "only with the template that it ships for the family"


def judge_grpo(tokenizer: Any, case: dict[str, Any]) -> Verdict:
    """``GRPOTrainer``: ids so far, ids sampled, and a suffix for the results of tools."""
    from trl import GRPOTrainer

    messages = [*case["messages"], *case.get("new_messages", [])]
    turns = case.get("turns", [case])
    said = [m for turn in turns for m in turn.get("new_messages", [])]
    if any(m["role"] != "tool" for m in said):
        return "impossible", "nothing but tool results between turns"
    if case["kind"] == "inject" and messages[-1]["role"] != "tool":
        return judge_inject(case, render(tokenizer, case, messages, None))
    if case["kind"] == "prompt":
        same = render(tokenizer, case, messages, None) == case["prompt_ids"]
        return ("right", "") if same else ("wrong", "another prompt")
    template, note = training_template(tokenizer, case)
    trainer = SimpleNamespace(
        processing_class=tokenizer,
        _tokenizer=tokenizer,
        _is_vlm=False,
        chat_template=template,
        chat_template_kwargs=case.get("template_kwargs", {}),
    )
    if case["kind"] == "inject":
        suffix = GRPOTrainer._get_tool_suffix_ids(trainer, named(messages[-1:]))
        whole = set(case["checks"]["control_ids_if_naive"])
        tail = [i for i in case["prompt_ids"] if i in whole]
        found = [i for i in suffix if i in whole]
        right = found == tail[len(tail) - len(found) :]
        return ("right", note) if right else ("wrong", "control ids out of a tool's text")
    if case["kind"] == "segment":
        return "wrong", "goes on behind the header of another role"
    for turn in turns:
        if "new_messages" not in turn:
            continue
        suffix = GRPOTrainer._get_tool_suffix_ids(trainer, named(turn["new_messages"]))
        if suffix != turn["bridge_ids"]:
            return "wrong", "no end of turn" if turn["synthesized"] else "another bridge"
    return "right", note


def parsed(tokenizer: Any, case: dict[str, Any], ids: list[int], prompt: list[int]) -> dict[str, Any]:
    """The message that it makes of a turn: by the schema of a family that it knows, else plain text."""
    import trl
    from trl.chat_template_utils import add_response_schema, parse_response

    shipped = Path(trl.__file__).parent / "chat_templates" / f"{case['tokenizer']}.jinja"
    if "template" in case or not shipped.is_file():
        return {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}
    reader = copy.copy(tokenizer)
    reader.chat_template = shipped.read_text(encoding="utf-8")  # it knows families by their exact text
    try:
        return dict(parse_response(add_response_schema(reader), ids, prefix=prompt))
    except ValueError:
        return {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)}


def judge_async(tokenizer: Any, case: dict[str, Any]) -> Verdict:
    """``AsyncGRPOTrainer``: the whole conversation rendered every turn, drift overwritten or forked.

    Its loop goes on after tool calls alone; here its way with ids is asked about user messages too.
    """
    from trl.experimental.async_grpo.async_rollout_worker import TurnRecord, _chain_to_sequences

    messages = list(case["messages"])
    if case["kind"] in ("inject", "prompt"):
        ids = render(tokenizer, case, messages, None)
        if case["kind"] == "inject":
            return judge_inject(case, ids)
        return ("right", "") if ids == case["prompt_ids"] else ("wrong", "another prompt")
    template: Any = None
    note = ""
    if any(m["role"] == "tool" for turn in case.get("turns", [case]) for m in turn.get("new_messages", [])):
        template, note = training_template(tokenizer, case)
    turns = []
    for turn in case.get("turns", [case]):
        prompt = render(tokenizer, case, messages, template)
        turns.append(TurnRecord(prompt, turn["sampled"], [0.0] * len(turn["sampled"])))
        messages.append(parsed(tokenizer, case, turn["sampled"], prompt))
        messages += named(turn.get("new_messages", []))
    if messages[-1]["role"] != "assistant":
        turns.append(TurnRecord(render(tokenizer, case, messages, template), [], []))
    sampled = [i for turn in turns for i in turn.output_ids]
    rows, _ = _chain_to_sequences(turns, "row", 1024)
    trained = [i for row in rows for i, on in zip(row.input_ids, row.completion_mask, strict=True) if on]
    if trained != sampled:
        return (
            "wrong",
            f"{len(sampled) - len(trained)} of {len(sampled)} sampled ids overwritten, not trained",
        )
    if case["kind"] == "segment":
        right = turns[-1].prompt_ids == case.get("strict", case)["segment_2_prompt_ids"]
        return ("right", "") if right else ("wrong", "another prompt")
    if len(rows) > 1:
        expected = case.get("template_mode", {}).get("segments")
        got = [row.input_ids for row in rows]
        return ("right", f"{len(rows)} rows") if expected in (None, got) else ("wrong", "other rows")
    if rows and rows[0].input_ids != case["ids"][: len(rows[0].input_ids)]:
        return "wrong", "another context"
    return "right", note


if __name__ == "__main__":
    main()
