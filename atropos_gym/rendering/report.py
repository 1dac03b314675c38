"""ModelReport: what a person should know about a tokenizer and its template before training on them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from atropos_gym import findings
from atropos_gym.errors import TemplateError
from atropos_gym.findings import Finding
from atropos_gym.rendering.dialect import Dialect
from atropos_gym.rendering.judgement import findings_of, vocabulary_finding
from atropos_gym.rendering.trials import (
    shown,
    try_canonical,
    try_control_text,
    try_cut,
    try_decoding,
    try_random_turns,
)
from atropos_gym.tokenizers import Tokenizer

if TYPE_CHECKING:
    from atropos_gym.rendering.renderer import ChatRenderer

__all__ = ["ModelReport", "refusal", "report"]

#: Words in the render of one message that tell a family; the first that fits. Only said, never obeyed.
_FAMILIES = (
    ("llama3", ("<|start_header_id|>", "<|end_header_id|>")),
    ("harmony", ("<|start|>", "<|message|>")),
    ("chatml", ("<|im_start|>", "<|im_end|>")),
    ("gemma", ("<start_of_turn>",)),
    ("deepseek", ("<｜User｜>",)),
    ("cohere", ("<|START_OF_TURN_TOKEN|>",)),
    ("mistral", ("[INST]",)),
    ("phi", ("<|user|>", "<|end|>")),
    ("glm", ("<|user|>", "<|assistant|>")),
)
#: What a control token looks like in the families above.
_MARKER = re.compile(r"<[|｜][^<>|｜\s]+[|｜]>|<(?:start|end)_of_turn>|<turn\|>|<\|turn>")


@dataclass(frozen=True, slots=True)
class ModelReport:
    """Facts and findings about one tokenizer and template.

    Attributes:
        name: the tokenizer's name.
        findings: what was found, with remedies.
        facts: the same for programs, ready for JSON: those of ``template_facts`` and of the trials, and
            ``family``, ``past``, ``stop_ids``, ``opener``, ``min_bridge``, ``sizes``, ``bos``,
            ``fingerprint``. Empty of all but sizes where nothing could be tried.

    Example:
        >>> from atropos_gym import ChatRenderer
        >>> report = ChatRenderer("bytes").report()
        >>> report.ok, report["min_bridge"], report["user"]["close"]
        (True, 3, 258)
    """

    name: str
    findings: tuple[Finding, ...]
    facts: Mapping[str, Any] = field(repr=False)

    @property
    def ok(self) -> bool:
        """Whether training is right: no finding is ``wrong``."""
        return findings.fit(self.findings)

    def __getitem__(self, key: str) -> Any:
        """Returns one fact."""
        return self.facts[key]

    def to_dict(self) -> dict[str, Any]:
        """Returns everything, ready for JSON."""
        return {
            "name": self.name,
            "ok": self.ok,
            "findings": [asdict(finding) for finding in self.findings],
            **self.facts,
        }

    def table(self, width: int = 100) -> str:
        """Returns the findings for a person: a line each, its remedy under it.

        Args:
            width: the most characters of a line, at least 60.
        """
        return findings.table(self.findings, width)

    @property
    def verdict(self) -> str:
        """What it all comes to, in one line."""
        return findings.verdict(self.findings)


def report(renderer: ChatRenderer, dialect: Dialect) -> ModelReport:
    """Tries a renderer and returns what was found.

    Args:
        renderer: what to look at.
        dialect: its form of conversation.
    """
    sizes = _sizes(renderer.tokenizer)
    rows = sizes["rows"]
    if rows is not None and rows <= max([*dialect.controls, *renderer.stop_ids]):
        beyond = [stop for stop in renderer.stop_ids if stop >= rows]
        untried = Finding(
            "promises",
            "note",
            "not tried: control ids lie beyond the model's rows",
            "mend the vocabulary or the stop ids first",
        )
        found = (vocabulary_finding(sizes), *_never_sampled(beyond, rows), untried)
        return ModelReport(renderer.tokenizer.name, found, {"sizes": sizes})
    with warnings.catch_warnings():
        # What the renderer warns of once, such as merged system text, is a finding here.
        warnings.simplefilter("ignore")
        try:
            facts = _facts(renderer, dialect)
        except TemplateError as error:  # an ordinary conversation that it does not take
            return refusal(renderer.tokenizer, error)
    return ModelReport(renderer.tokenizer.name, tuple(findings_of(facts)), facts)


def _never_sampled(beyond: Sequence[int], rows: int) -> list[Finding]:
    """Returns the finding about stop ids that the model does not have."""
    if not beyond:
        return []
    detail = f"stop id {beyond[0]} lies beyond the model's {rows} rows: it can never be sampled"
    remedy = "mend eos_token_id in the model's generation_config.json, or give stop_ids="
    return [Finding("end of turn", "wrong", detail, remedy)]


def refusal(tokenizer: Tokenizer, error: TemplateError) -> ModelReport:
    """Returns the report of a tokenizer whose template was refused at construction."""
    # Errors say first what is wrong and last what to do: "...; give template= that ...".
    detail, _, remedy = re.sub(r"[;:] (?=(?:give|set|use) )", "\0", str(error)).partition("\0")
    detail = detail.replace(f"the chat template of {tokenizer.name}", "the chat template")
    sizes = _sizes(tokenizer)
    missing = re.search(r"'(\w+)' is undefined", detail)
    if missing is not None:
        remedy = f"give the variable that the template reads: template_kwargs {missing[1]}=VALUE"
    foreign = _foreign(tokenizer, detail)
    if foreign:
        detail += f" ({', '.join(foreign)}: no token of this tokenizer)"
        remedy = "give the template of this model, or the tokenizer of this template (template=)"
    findings = (
        Finding("template", "wrong", detail, remedy or "give another template (template=)"),
        vocabulary_finding(sizes),
    )
    return ModelReport(tokenizer.name, findings, {"sizes": sizes})


def _foreign(tokenizer: Tokenizer, text: str) -> list[str]:
    """Returns what looks like control tokens in rendered text but is none of this tokenizer's."""
    backend = getattr(tokenizer, "backend", None)
    if backend is None:
        return []
    return [word for word in dict.fromkeys(_MARKER.findall(text)) if backend.token_to_id(word) is None]


def _facts(renderer: ChatRenderer, dialect: Dialect) -> dict[str, Any]:
    """Returns all facts."""
    found = dialect.facts()
    hf = getattr(renderer.tokenizer, "hf", None)
    if "refused" in found["tool"]:
        reason = found["tool"]["refused"].removeprefix(f"the chat template of {renderer.tokenizer.name} ")
        found["tool"] = {"refused": reason}
    end = renderer.say("x")[-1:]
    bridge_text = shown(renderer, dialect, dialect.bridge(end[-1], [{"role": "user", "content": "…"}]))
    cut = try_cut(renderer, found["user"]["close"])
    return {
        "family": _family(found["head"], hf is None),
        "foreign_tokens": _foreign(renderer.tokenizer, found["head"] + bridge_text),
        **found,
        "past": renderer.past,
        "rewrites_history": dialect.rewrites_history,
        "merges_system": bool(dialect.identity.get("merge_system", False)),
        "tool_as_user": bool(dialect.identity.get("tool_as_user", False)),
        "tool_dialect": renderer.tool_dialect,
        "channels": dialect.channels,
        "stop_ids": _stop_ids(renderer, dialect, found["end_of_turn"]),
        "opener": renderer.opener,
        "think_tags": list(renderer.think_tags) if _thinks(renderer, dialect, found) else None,
        "min_bridge": renderer.min_bridge,
        "bridge_text": bridge_text,
        "header_text": _header_text(renderer, dialect, found),
        "cut_turn": {**cut, "text": shown(renderer, dialect, cut["supplied"] or [])},
        "control_text": try_control_text(renderer, dialect, found["takes_tools"]),
        "random_turns": try_random_turns(renderer),
        "canonical": try_canonical(renderer, found["user"]["close"]),
        "decoding": try_decoding(renderer),
        "sizes": _sizes(renderer.tokenizer),
        "bos": _bos(renderer),
        "fingerprint": renderer.fingerprint,
    }


def _thinks(renderer: ChatRenderer, dialect: Dialect, found: Mapping[str, Any]) -> bool:
    """Returns whether template or tokenizer know the tags of thoughts."""
    opening = renderer.think_tags[0]
    backend = getattr(renderer.tokenizer, "backend", None)
    token = None if backend is None else backend.token_to_id(opening)
    return found["writes_thoughts"] or opening in dialect.controls.values() or token is not None


def _family(head: str, is_bytes: bool) -> str:
    """Returns the family's name by the control tokens that a prompt shows, or ``other``."""
    if is_bytes:
        return "bytes"
    return next((name for name, words in _FAMILIES if all(word in head for word in words)), "other")


def _header_text(renderer: ChatRenderer, dialect: Dialect, found: Mapping[str, Any]) -> str | None:
    """Returns what a prompt ends in before the assistant speaks; None where that is not known."""
    if found["generation_prompt"] is None or dialect.identity["kind"] != "bytes":
        return found["generation_prompt"]  # type: ignore[no-any-return]
    return dialect.controls[renderer.prompt([{"role": "user", "content": "x"}])[-1]]


def _stop_ids(renderer: ChatRenderer, dialect: Dialect, end_of_turn: int | None) -> list[dict[str, Any]]:
    """Returns each id that ends a turn, with its text and where it came from."""
    tokenizer = renderer.tokenizer
    eos = getattr(getattr(tokenizer, "hf", None), "eos_token_id", None)
    listed = []
    for token in renderer.stop_ids:
        named = {
            "template": token == end_of_turn,
            "tokenizer": token == eos,
            "generation config": token in getattr(tokenizer, "config_eos_ids", ()),
        }
        source = [name for name, is_so in named.items() if is_so] or ["given"]
        text = dialect.controls.get(token) or tokenizer.decode([token])
        listed.append({"id": token, "text": text, "from": source})
    return listed


def _sizes(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns ids, ``needed`` (up to the last id) and rows of the embedding, None where they are unknown."""
    backend = getattr(tokenizer, "backend", None)
    added = () if backend is None else backend.get_added_tokens_decoder()
    known = getattr(tokenizer, "rows_known", True)
    return {
        "ids": len(tokenizer),
        "needed": max(len(tokenizer), *(token + 1 for token in added)) if added else len(tokenizer),
        "rows": tokenizer.rows if known else None,
    }


def _bos(renderer: ChatRenderer) -> dict[str, Any]:
    """Returns the BOS id, how often a prompt begins with it, and whether plain encoding would add another."""
    tokenizer = renderer.tokenizer
    hf = getattr(tokenizer, "hf", None)
    ids = renderer.prompt([{"role": "user", "content": "x"}])
    bos = ids[0] if hf is None else hf.bos_token_id
    count = next((i for i, token in enumerate(ids) if token != bos), len(ids))
    backend = getattr(tokenizer, "backend", None)
    adds = backend is not None and bos is not None and backend.encode("x").ids[:1] == [bos]
    return {"id": bos, "leading": count, "added_by_tokenizer": adds}
