"""ChatRenderer.report() and ``atropos-gym check-model``: what is found, what it means, and the exit code.

Promises: 1. Every finding that is not ok has a remedy. 2. What would make training wrong is ``wrong`` and
exit code 1; what a user mistypes is one line and exit code 2. 3. Promises of the renderer are tried, not
assumed: a renderer that breaks one is found out.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atropos_gym.cli import main
from atropos_gym.findings import Finding
from atropos_gym.rendering import ChatRenderer
from atropos_gym.rendering.judgement import findings_of
from atropos_gym.rendering.report import ModelReport
from atropos_gym.tokenizers import load_tokenizer
from tests.tools import imitation_tokenizers as imitation

END = 2
#: A template that removes what marks a stranger's control spelling as text.
UNMARKS = imitation.CHATML.replace("m.content", "m.content.encode('ascii', 'ignore').decode()")


def report_of(template: str | None = imitation.CHATML, special: Any = (), **settings: Any) -> ModelReport:
    return ChatRenderer(imitation.tiny_tokenizer(template, special), **settings).report()


def finding(report: ModelReport, name: str) -> Finding:
    return next(f for f in report.findings if f.name == name)


@pytest.fixture(scope="module")
def chatml() -> ModelReport:
    return report_of()


# --- facts ---


def test_the_facts_of_a_plain_template(chatml: ModelReport) -> None:
    assert chatml.ok
    assert chatml["family"] == "chatml"
    assert chatml["generation_prompt"] == "<|im_start|>assistant\n"
    assert chatml["stop_ids"] == [{"id": END, "text": "<|im_end|>", "from": ["template", "tokenizer"]}]
    assert chatml["user"] == {
        "close": END,
        "close_kind": "normal",
        "history_head_equals_prompt": True,
        "bridge_independent_of_history": True,
    }
    assert chatml["history_keeps"] == {"plain": True, "whitespace": True, "thinking": True, "empty": True}
    assert chatml["last_turn_is_prefix"] and chatml["system_role"] and chatml["user_text_kept"]
    assert chatml["cut_turn"] == {"supplied": [END], "text": "<|im_end|>"}
    assert chatml["canonical"] == {"bridges_equal": True, "same": True, "first_difference": None}
    assert chatml["random_turns"] == {"turns": 40, "segments": 0, "failures": []}
    assert chatml["bridge_text"] == "\n<|im_start|>user\n…<|im_end|>\n<|im_start|>assistant\n"


def test_bytes_have_a_report_of_the_same_form(chatml: ModelReport) -> None:
    report = ChatRenderer("bytes").report()
    assert report.ok and {f.status for f in report.findings} == {"ok"}
    assert set(report.facts) == set(chatml.facts)
    assert report["family"] == "bytes"
    assert report["min_bridge"] == 3
    assert report["stop_ids"] == [{"id": 258, "text": "<end>", "from": ["template"]}]
    assert report["bridge_text"] == "<user>…<assistant>"
    assert report["sizes"] == {"ids": 264, "needed": 264, "rows": 264}


def test_everything_is_ready_for_json(chatml: ModelReport) -> None:
    again = json.loads(json.dumps(chatml.to_dict()))
    assert again == chatml.to_dict()
    assert again["ok"] is True
    assert again["findings"][0].keys() == {"name", "status", "detail", "remedy"}


def test_control_spellings_are_tried_in_every_channel(chatml: ModelReport) -> None:
    tried = chatml["control_text"]
    assert tried["forged"] == {"user": 0, "observation": 0, "tool result": 0}
    assert tried["spellings"] >= len(imitation.SPECIAL)
    assert tried["plain_encoding"] >= tried["spellings"], "plain encoding would have let all of them through"
    assert "tool schema" in report_of(imitation.TOOLS)["control_text"]["forged"]


def _turns(header: str, end: str, assistant: str = "") -> str:
    """A template whose turns are ``header`` (with ROLE in it), content and ``end``."""
    opened = header.replace("ROLE", "' + m.role + '")
    return (
        "{% for m in messages %}{{ '" + opened + "' + m.content + '" + end + "' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '" + (assistant or header.replace("ROLE", "assistant")) + "' }}"
        "{% endif %}"
    )


@pytest.mark.parametrize(
    ("family", "template", "end"),
    [
        ("chatml", imitation.DEFAULT_SYSTEM, "<|im_end|>"),
        ("llama3", _turns("<|start_header_id|>ROLE<|end_header_id|>\\n\\n", "<|eot_id|>"), "<|eot_id|>"),
        ("gemma", _turns("<start_of_turn>ROLE\\n", "<end_of_turn>\\n"), "<end_of_turn>"),
        ("phi", _turns("<|ROLE|>\\n", "<|end|>\\n"), "<|end|>"),
        ("harmony", _turns("<|start|>ROLE<|message|>", "<|end|>", "<|start|>assistant"), "<|end|>"),
        ("cohere", _turns("<|START_OF_TURN_TOKEN|>ROLE", "<|END_OF_TURN_TOKEN|>"), "<|END_OF_TURN_TOKEN|>"),
        (
            "mistral",
            "{% for m in messages %}{{ '[INST]' + m.content + '[/INST]' if m.role == 'user' else m.content + "
            "'</s>' }}{% endfor %}",
            "</s>",
        ),
        (
            "deepseek",
            "{% for m in messages %}{{ '<｜User｜>' + m.content if m.role == 'user' else '<｜Assistant｜>' + "
            "m.content + '<｜end▁of▁sentence｜>' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}",
            "<｜end▁of▁sentence｜>",
        ),
        ("other", _turns("¶ROLE\\n", "<|im_end|>\\n"), "<|im_end|>"),
    ],
)
def test_the_family_is_seen_in_what_is_rendered(family: str, template: str, end: str) -> None:
    marks = [
        *("<|start_header_id|>", "<|end_header_id|>", "<start_of_turn>", "<|user|>", "<|assistant|>"),
        *("<|start|>", "<|message|>", "<|START_OF_TURN_TOKEN|>", "<｜User｜>", "<｜Assistant｜>"),
        *("[INST]", "[/INST]", end),
    ]
    hf = imitation.tiny_tokenizer(template, marks)
    report = ChatRenderer(hf, stop_ids=hf.convert_tokens_to_ids([end])).report()
    assert report.ok, report.table()
    assert report["family"] == family


# --- findings ---


@pytest.mark.parametrize(
    ("template", "name", "status", "said"),
    [
        (imitation.TRIMS, "earlier turns", "note", "blanks around an answer"),
        (imitation.TRIMS, "user text", "note", "trims"),
        (imitation.DEFAULT_SYSTEM, "system", "ok", "Be kind."),
        (imitation.DEFAULT_SYSTEM, "system", "ok", "which a system message replaces"),
        (imitation.OPENS_THINK, "thinking", "note", "the prompt opens <think>"),
        (imitation.TOOLS, "tools", "ok", "schemas are written"),
        (imitation.NO_TOOL, "tools", "note", "written as user messages"),
        (imitation.NO_SYSTEM, "system", "note", "in front of the first user message"),
        (imitation.COUNTS, "bridge", "note", "every turn is a segment"),
        (imitation.DATED, "date", "note", "reads the clock"),
        (imitation.CHATML, "date", "ok", "neither"),
        (imitation.CHATML, "vocabulary", "note", "rows of the model's embedding unknown"),
        (imitation.CHATML, "end of turn", "note", "no generation_config.json"),
        (imitation.CHATML, "control text", "ok", "stay text; plain encoding lets"),
        (UNMARKS, "control text", "wrong", "user text made"),
        ("{{ bos_token }}{{ bos_token }}" + imitation.CHATML, "bos", "wrong", "2 BOS ids"),
        ("{{ bos_token }}" + imitation.CHATML, "bos", "ok", "once, id 0"),
    ],
)
@pytest.mark.filterwarnings("ignore:the chat template")
def test_what_a_template_does_is_found(template: str, name: str, status: str, said: str) -> None:
    hf = imitation.tiny_tokenizer(template)
    hf.bos_token = "<|endoftext|>"
    report = ChatRenderer(hf).report()
    found = finding(report, name)
    assert (found.status, said in found.detail) == (status, True), found
    assert report.ok == (status != "wrong")


def test_the_next_roles_header_as_end_is_told() -> None:
    hf = imitation.tiny_tokenizer(imitation.HEADERS, imitation.HEADER_TOKENS)
    _, user_id, _, tool_id = hf.convert_tokens_to_ids(list(imitation.HEADER_TOKENS))
    report = ChatRenderer(hf, stop_ids=[user_id, tool_id]).report()
    assert report.ok and report["family"] == "glm"
    assert finding(report, "bridge").status == "note"
    assert report["random_turns"]["segments"] > 0, "some turns ended with the tool's header"
    assert report["cut_turn"]["supplied"] == [user_id]


def test_stop_ids_that_miss_the_templates_end_are_wrong() -> None:
    template = imitation.CHATML.replace("<|im_end|>", "<|im_end|><|endoftext|>")
    report = report_of(template, stop_ids=[0])
    assert finding(report, "end of turn").status == "wrong"
    assert "ends a turn with id 2" in finding(report, "end of turn").detail
    assert not report.ok


def test_a_stop_id_in_the_header_is_wrong() -> None:
    report = report_of(stop_ids=[1, END])
    assert finding(report, "end of turn").status == "wrong"
    assert "stands in the header" in finding(report, "end of turn").detail


@pytest.mark.parametrize(("rows", "status"), [(100, "wrong"), (None, "note"), ("fit", "ok"), (9999, "note")])
def test_ids_and_rows(rows: Any, status: str) -> None:
    hf = imitation.tiny_tokenizer()
    rows = len(hf) if rows == "fit" else rows
    report = ChatRenderer(load_tokenizer(hf, rows=rows)).report()
    assert finding(report, "vocabulary").status == status
    assert report["sizes"]["rows"] == rows


def test_a_template_that_refuses_a_longer_conversation_is_wrong() -> None:
    short = "{% if messages | length > 4 %}{{ raise_exception('too long') }}{% endif %}"
    report = report_of(short + imitation.CHATML)
    assert finding(report, "template").status == "wrong"
    assert "too long" in finding(report, "template").detail


def test_nothing_is_tried_with_ids_that_the_model_does_not_have() -> None:
    report = ChatRenderer(load_tokenizer(imitation.tiny_tokenizer(imitation.TOOLS), rows=100)).report()
    assert [f.name for f in report.findings] == ["vocabulary", "promises"]


def test_a_stop_id_that_the_model_does_not_have_is_wrong(tmp_path: Path) -> None:
    hf = imitation.tiny_tokenizer()
    hf.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": len(hf)}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [END, 999_999]}))
    report = ChatRenderer(tmp_path).report()
    assert not report.ok
    found = finding(report, "end of turn")
    assert found.status == "wrong" and "999999" in found.detail and found.remedy
    assert main(["check-model", str(tmp_path)]) == 1


def test_past_template_follows_the_template_and_says_so() -> None:
    report = report_of(imitation.OPENS_THINK, past="template")
    assert report.ok and report["past"] == "template"
    assert report["random_turns"]["segments"] > 0
    assert "past='append'" in finding(report, "thinking").remedy


def test_a_template_of_another_model_is_told() -> None:
    template = imitation.CHATML.replace("<|im_start|>", "<|turn|>")
    found = finding(report_of(template), "family")
    assert found.status == "note" and "<|turn|>" in found.detail


def _replaced(facts: Any, path: str, value: Any) -> Any:
    changed = copy.deepcopy(dict(facts))
    *groups, last = path.split(".")
    place = changed
    for group in groups:
        place = place[group]
    place[last] = value
    return changed


@pytest.mark.parametrize(
    ("path", "value", "name", "status"),
    [
        ("random_turns.failures", ["the reply of [1] is not its ids"], "append only", "wrong"),
        ("canonical.bridges_equal", False, "append only", "wrong"),
        ("canonical.same", False, "append only", "ok"),
        ("cut_turn.supplied", None, "cut turn", "wrong"),
        ("control_text.forged", {"tool result": 2}, "control text", "wrong"),
        ("control_text.forged", {"user": "the vocabulary makes control id 3"}, "control text", "wrong"),
        ("bos.added_by_tokenizer", True, "bos", "note"),
        ("decoding.text_kept", False, "decoding", "note"),
        ("channels", True, "thinking", "ok"),
        ("thoughts_kept", False, "thinking", "note"),
        ("clock", "2025-01-01", "date", "note"),
        ("roles_alternate", True, "system", "ok"),
        ("tool_dialect", "hermes", "tools", "ok"),
        ("user.close_kind", "history_close_differs", "bridge", "note"),
        ("generation_prompt", None, "family", "ok"),
    ],
)
def test_facts_are_judged(chatml: ModelReport, path: str, value: Any, name: str, status: str) -> None:
    found = {f.name: f for f in findings_of(_replaced(chatml.facts, path, value))}
    assert found[name].status == status
    assert len(found) == len(chatml.findings), "names are told apart"


def test_every_finding_that_is_not_ok_has_a_remedy_and_no_other() -> None:
    settings = {"past": "template"}
    reports = [report_of(t) for t in (imitation.TRIMS, imitation.NO_TOOL, imitation.DATED, UNMARKS)]
    for report in [*reports, report_of(imitation.OPENS_THINK, **settings)]:
        for found in report.findings:
            assert bool(found.remedy) == (found.status != "ok"), found
            assert "\n" not in found.detail + found.remedy


# --- promises are tried ---


class Broken(ChatRenderer):
    """A renderer with one of the known mistakes."""

    mistake = ""

    def bridge(self, turn_ids: Any, messages: Any, tools: Any = None) -> list[int]:
        ids = super().bridge(turn_ids, messages, tools)
        if self.mistake == "newline lost" and len(turn_ids) and turn_ids[-1] == END:
            return ids[1:]
        if self.mistake == "no close" and not (len(turn_ids) and turn_ids[-1] == END):
            return ids[1:]
        if self.mistake == "looks at the turn" and 7 in turn_ids:
            return [*ids, 7]
        return ids

    def reply(self, turn_ids: Any) -> Any:
        reply = super().reply(turn_ids)
        if self.mistake == "decoded piece by piece":
            text = "".join(self.tokenizer.decode([i]) for i in turn_ids if i != END)
            return type(reply)(text=text, content=text, ids=reply.ids, complete=reply.complete)
        return reply


@pytest.mark.parametrize(
    ("mistake", "name"),
    [
        ("newline lost", "append only"),
        ("no close", "cut turn"),
        ("decoded piece by piece", "append only"),
    ],
)
def test_a_renderer_with_a_known_mistake_is_found_out(mistake: str, name: str) -> None:
    renderer = Broken(imitation.tiny_tokenizer())
    assert renderer.report().ok
    renderer.mistake = mistake
    report = renderer.report()
    assert finding(report, name).status == "wrong", report.table()


def test_a_bridge_that_looks_at_more_than_the_last_id_is_found_out() -> None:
    renderer = Broken(load_tokenizer(imitation.tiny_tokenizer(), rows=400))
    renderer.mistake = "looks at the turn"
    chosen = iter([7, 300] * 10_000)
    import atropos_gym.rendering.trials as trials

    class Chance(trials.random.Random):
        def randrange(self, *bounds: Any, **named: Any) -> int:  # type: ignore[override]
            return next(chosen) if bounds == (400,) else super().randrange(*bounds)

    before, trials.random.Random = trials.random.Random, Chance  # type: ignore[misc]
    try:
        assert finding(renderer.report(), "append only").status == "wrong"
    finally:
        trials.random.Random = before  # type: ignore[misc]


# --- the command ---

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        code = main(["check-model", *words])
        out, err = capsys.readouterr()
        return code, out, err

    return call


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder without weights."""
    hf = imitation.tiny_tokenizer()
    hf.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"vocab_size": len(hf) + 2}))
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    return tmp_path / "model"


def test_a_model_that_is_fit(run: Run, folder: Path) -> None:
    code, out, err = run(str(folder))
    assert (code, err) == (0, "")
    assert out.startswith(f"{folder}\n\n")
    assert out.rstrip().endswith("Fit to train on.")
    said = " ".join(out.split())
    assert "0 <|endoftext|> (generation config)" in said
    assert "2 rows are padding" in said
    assert all(len(line) <= 100 for line in out.splitlines() if str(folder) not in line)


def test_json_is_the_report(run: Run, folder: Path) -> None:
    code, out, err = run(str(folder), "--json")
    assert (code, err) == (0, "")
    said = json.loads(out)
    assert said == ChatRenderer(folder).report().to_dict()


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (imitation.NO_END, ["writes no end of turn", "→ give --stop-id ID or another --template FILE"]),
        (
            imitation.CHATML.partition("{% if add_generation_prompt")[0],
            ["ignores add_generation_prompt", "→ give --template FILE with a generation prompt"],
        ),
        ("{{ messages", ["no valid Jinja", "→ give --template FILE"]),
        ("", ["drops or repeats"]),
        ("{{ persona.name }}" + imitation.CHATML, ["--template-kwarg persona=VALUE"]),
        (
            imitation.CHATML.replace("<|im_end|>", "<|eot_id|>"),
            ["<|eot_id|>: no token of this tokenizer", "give the template of this model"],
        ),
        (UNMARKS, ["strangers can write control tokens"]),
    ],
    ids=["no end", "no header", "syntax", "empty", "variable", "another model", "control text"],
)
def test_what_cannot_be_trained_on_is_exit_1_with_a_remedy(
    run: Run, folder: Path, template: str, said: list[str]
) -> None:
    (folder / "t.jinja").write_text(template)
    code, out, err = run(str(folder), "--template", str(folder / "t.jinja"))
    assert (code, err) == (1, "")
    assert "\nwrong  " in out
    assert "Training on this would be wrong" in out
    text = " ".join(out.split())
    assert not [part for part in said if part not in text], out


def test_settings_reach_the_renderer(run: Run, folder: Path) -> None:
    (folder / "t.jinja").write_text("{{ persona }}" + imitation.OPENS_THINK)
    words = [str(folder), "--template", str(folder / "t.jinja"), "--template-kwarg", "persona=Bob"]
    words += ["--past", "template", "--stop-id", "2", "--stop-id", "0", "--rows", "500", "--json"]
    code, out, _ = run(*words)
    said = json.loads(out)
    assert code == 0
    assert [stop["id"] for stop in said["stop_ids"]] == [2, 0]
    assert (said["past"], said["preamble"], said["sizes"]["rows"]) == ("template", "Bob", 500)


def test_a_model_with_too_few_rows_is_exit_1(run: Run, folder: Path) -> None:
    (folder / "config.json").write_text('{"vocab_size": 300}')
    code, out, _ = run(str(folder))
    assert code == 1
    assert "wrong  vocabulary" in out


def test_a_model_without_a_template_is_exit_1(run: Run, tmp_path: Path) -> None:
    imitation.tiny_tokenizer(None).save_pretrained(tmp_path / "bare")
    code, out, _ = run(str(tmp_path / "bare"), "--json")
    assert code == 1
    said = json.loads(out)
    assert not said["ok"] and said["sizes"]["ids"] > 300
    assert "no chat template" in said["findings"][0]["detail"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], ["NAME"]),
        (["./nowhere"], ["'./nowhere'", "no such folder"]),
        (["bytes", "--template", "none.jinja"], ["no template file 'none.jinja'"]),
        (["bytes", "--rows", "10"], ["rows", ">= 264", "got 10"]),
        (["bytes", "--rows", "few"], ["--rows", "'few'"]),
        (["bytes", "--stop-id", "x"], ["--stop-id", "'x'"]),
        (["bytes", "--stop-id", "4"], ["stop_ids= has no meaning for the bytes tokenizer"]),
        (["bytes", "--past", "present"], ["--past", "'append'", "'present'"]),
        (["bytes", "--template-kwarg", "x"], ["--template-kwarg 'x'", "KEY=VALUE"]),
        (["bytes", "--tempate", "x"], ["unknown flag --tempate", "nearest: --template"]),
        (["bytes", "--jsn"], ["unknown flag --jsn", "--json"]),
        (["bytes", "more"], ["unexpected 'more'"]),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(run: Run, words: list[str], said: list[str]) -> None:
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and err.startswith("atropos-gym: ")
    assert not [part for part in said if part not in err], err
