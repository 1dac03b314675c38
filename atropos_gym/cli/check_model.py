"""``atropos-gym check-model``: whether a model's tokenizer and template can be trained on, and what to do.

Exit code 0: fit to train on. 1: training on it would be wrong. 2: a mistake on the command line.
"""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from atropos_gym.cli.command import Command, pairs
from atropos_gym.cli.models import find_model
from atropos_gym.errors import ConfigError, MissingData, TemplateError
from atropos_gym.rendering import ChatRenderer
from atropos_gym.rendering.report import ModelReport, refusal
from atropos_gym.tokenizers import load_tokenizer

__all__ = ["run"]

#: How errors and remedies call an argument, and how the command line does.
_FLAGS = {
    "template=": "--template FILE",
    "stop_ids=": "--stop-id ID",
    "rows=": "--rows N",
    "past='append'": "--past append",
    "past='template'": "--past template",
    "template_kwargs": "--template-kwarg",
}
_COLOURS = {"ok": "green", "note": "yellow", "wrong": "bold red"}


def run(command: Command) -> int:
    """Prints the findings and returns 0, or 1 where training would be wrong."""
    report = _check(command)
    if command.options["json"]:
        print(json.dumps(report.to_dict(), ensure_ascii=False, indent=2))
        return 0 if report.ok else 1
    console = Console(highlight=False)
    table = _in_flags(report).table(min(100, console.width) if console.is_terminal else 100)
    text = Text(f"{report.name}\n\n{table}\n\n{report.verdict}")
    for status, colour in _COLOURS.items():
        text.highlight_regex(rf"(?m)^{status}\b", colour)
    console.print(text, soft_wrap=True)
    return 0 if report.ok else 1


def _in_flags(report: ModelReport) -> ModelReport:
    """Returns the report with flags in place of Python's arguments."""
    words = re.compile("|".join(map(re.escape, _FLAGS)))

    def said(text: str) -> str:
        return words.sub(lambda found: _FLAGS[found[0]], text)

    findings = tuple(replace(f, detail=said(f.detail), remedy=said(f.remedy)) for f in report.findings)
    return replace(report, findings=findings)


def _check(command: Command) -> ModelReport:
    """Returns the report; a template that is refused has one too.

    Raises:
        MissingData: no such model, or no such template file.
        ConfigError: an option that cannot be used.
    """
    options = command.options
    variables = pairs("--template-kwarg", options["template_kwarg"])
    tokenizer = load_tokenizer(find_model(command.target), rows=options["rows"])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is warned of is a finding
            renderer = ChatRenderer(
                tokenizer,
                template=None if options["template"] is None else _read(options["template"]),
                template_kwargs=variables,
                stop_ids=options["stop_id"],
                past=options["past"],
            )
    except TemplateError as error:
        return refusal(tokenizer, error)
    return renderer.report()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise MissingData(f"no template file {str(path)!r}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {str(path)!r} as a chat template: {error}") from None
