"""ModelReport: what a person should know about a tokenizer and its template before training on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from atropos_gym.findings import Finding
from atropos_gym.rendering.dialect import Dialect

if TYPE_CHECKING:
    from atropos_gym.rendering.renderer import ChatRenderer

__all__ = ["ModelReport", "report"]


@dataclass(frozen=True, slots=True)
class ModelReport:
    """Facts and findings about one tokenizer and template.

    Attributes:
        name: the tokenizer's name.
        facts: what was found, ready for JSON.
        findings: what it means, with remedies.
    """

    name: str
    facts: Mapping[str, Any]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether training is right: no finding is ``wrong``."""
        return all(finding.status != "wrong" for finding in self.findings)

    def __getitem__(self, key: str) -> Any:
        """Returns one fact."""
        return self.facts[key]


def report(renderer: ChatRenderer, dialect: Dialect) -> ModelReport:
    """Returns the report of a renderer."""
    return ModelReport(renderer.tokenizer.name, dialect.facts(), ())
