"""What the facts about a template mean for training, and what to do: pure functions from facts to findings.

``wrong`` is only what would make training wrong: ids that are not the model's, turns whose end is missed,
text of strangers that becomes control ids. What is off a template's usual form, but the same in rollout and
training, is a ``note``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from atropos_gym.findings import Finding

__all__ = ["findings_of", "vocabulary_finding"]

_Facts = Mapping[str, Any]
_HISTORY = {
    "plain": "plain words",
    "whitespace": "blanks around an answer",
    "thinking": "thoughts",
    "empty": "empty answers",
}


def findings_of(facts: _Facts) -> list[Finding]:
    """Returns the findings, in the order in which a person reads them.

    Args:
        facts: those of ``ModelReport.facts``.
    """
    return [judge(facts) for judge in _JUDGES]


def _family(facts: _Facts) -> Finding:
    header = facts["header_text"]
    if header is None:
        detail = "the prompt's end is no fixed text"
    elif header == "":
        detail = "no header: an answer follows the message at once"
    else:
        detail = f"the assistant speaks after {header!r}"
    if facts["foreign_tokens"]:
        return Finding(
            "family",
            "note",
            f"{facts['family']}: {detail}; {', '.join(facts['foreign_tokens'])} is written as plain text, "
            "being no token of this tokenizer",
            "if the model was not trained so, the template is another model's: give its own (template=)",
        )
    return Finding("family", "ok", f"{facts['family']}: {detail}")


def _stop_ids(facts: _Facts) -> Finding:
    stops = facts["stop_ids"]
    ids = [stop["id"] for stop in stops]
    listed = ", ".join(f"{stop['id']} {stop['text']} ({', '.join(stop['from'])})" for stop in stops)
    end = facts["end_of_turn"]
    if end is not None and end not in ids:
        return Finding(
            "end of turn",
            "wrong",
            f"the template ends a turn with id {end}, which is not among the stop ids: {listed}",
            f"add {end} to stop_ids=, or leave stop_ids= out",
        )
    in_header = [token for token in ids if token in facts["header_ids"]]
    if in_header:
        return Finding(
            "end of turn",
            "wrong",
            f"stop id {in_header[0]} stands in the header before every answer ({facts['header_text']!r})",
            f"leave {in_header[0]} out of stop_ids=",
        )
    told = {source for stop in stops for source in stop["from"]}
    if facts["family"] == "bytes" or told & {"generation config", "given"}:
        return Finding("end of turn", "ok", listed)
    return Finding(
        "end of turn",
        "note",
        f"{listed}; no generation_config.json beside the tokenizer names others",
        "give the model's own folder, or the further end ids of its generation config with stop_ids=",
    )


def _bridge(facts: _Facts) -> Finding:
    user = facts["user"]
    detail = f"{facts['bridge_text']!r} after a closed turn, {facts['min_bridge']} ids at least"
    if facts["rewrites_history"]:
        return Finding(
            "bridge",
            "note",
            "what follows a turn changes as the conversation grows: every turn is a segment of its own",
            "give a template (template=) that writes a turn alike wherever it stands, for one row an episode",
        )
    if user["close_kind"] == "header":
        return Finding(
            "bridge",
            "note",
            f"{detail}; the next role's header ends a turn",
            "nothing; where a turn ended with the header of another role, a new segment opens",
        )
    if user["close_kind"] == "history_close_differs":
        return Finding(
            "bridge",
            "note",
            f"{detail}; history shows another end ({user['close']}) than is sampled",
            "nothing: the sampled end stays in the row and is trained",
        )
    return Finding("bridge", "ok", detail)


def _tools(facts: _Facts) -> Finding:
    tool = facts["tool"]
    schemas = "schemas are written" if facts["takes_tools"] else "schemas are not written"
    calls = f", calls are read as {facts['tool_dialect']}" if facts["tool_dialect"] else ""
    if facts["takes_tools"] and not calls:
        calls = ", calls are read in channels" if facts["channels"] else ", calls have a form not known here"
    if "refused" in tool:
        remedy = "nothing, unless the model was trained with a tool role: then give its template (template=)"
        if "none of the stop ids" in tool["refused"]:
            remedy = "give the id that ends a tool call beside the others (stop_ids=)"
        return Finding(
            "tools",
            "note",
            f"no tool role: the template {_short(tool['refused'])}; results are written as user messages; "
            f"{schemas}{calls}",
            remedy,
        )
    if facts["tool_as_user"]:
        return Finding("tools", "ok", f"results are written as user messages, as asked; {schemas}{calls}")
    needs = "; a result needs a call before it" if tool["close_kind"] == "tool_call" else ""
    return Finding("tools", "ok", f"results keep their role{needs}; {schemas}{calls}")


def _cut(facts: _Facts) -> Finding:
    cut = facts["cut_turn"]
    if cut["supplied"] is None:
        return Finding(
            "cut turn",
            "wrong",
            f"the bridge does not go on as after a whole turn {cut.get('refused', '')}".rstrip(),
            "give a template (template=) that closes every turn with one control token",
        )
    return Finding(
        "cut turn",
        "ok",
        f"the bridge supplies {cut['text']!r}, which is read and never trained",
    )


def _thinking(facts: _Facts) -> Finding:
    switches = [name for name in facts["variables"] if "think" in name or "reasoning" in name]
    switch = f"; template_kwargs can set {', '.join(switches)}" if switches else ""
    if facts["channels"]:
        return Finding("thinking", "ok", f"in channels: analysis is thinking, final is the answer{switch}")
    if not facts["think_tags"]:
        return Finding("thinking", "ok", f"no think tags in template and tokenizer{switch}")
    tag = facts["think_tags"][0]
    opened = f"the prompt opens {tag}" if facts["opener"] else f"the model opens {tag} itself, if it does"
    if facts["thoughts_kept"]:
        return Finding("thinking", "ok", f"{opened}; earlier thoughts stay in history{switch}")
    if facts["past"] == "append":
        return Finding(
            "thinking",
            "note",
            f"{opened}; the template drops earlier thoughts, past='append' keeps them, in rollout and "
            f"training alike{switch}",
            "past='template' follows the template, at the price of a new segment each turn",
        )
    return Finding(
        "thinking",
        "note",
        f"{opened}; earlier thoughts are dropped as the template does, in a new segment{switch}",
        "past='append' keeps them and an episode in one row",
    )


def _earlier_turns(facts: _Facts) -> Finding:
    lost = [
        _HISTORY[name] for name, kept in facts["history_keeps"].items() if not kept and name != "thinking"
    ]
    head = facts["user"].get("history_head_equals_prompt", True)
    if not lost and head:
        return Finding("earlier turns", "ok", "the template shows them as they were said")
    what = f"does not keep {', '.join(lost)}" if lost else "writes another header before them"
    if not head and lost:
        what = "writes earlier turns in another form than their prompt had"
    if facts["past"] == "append":
        return Finding(
            "earlier turns",
            "note",
            f"a whole render {what}; rows keep what was sampled",
            "nothing: never render or encode a conversation again, in rollout or training",
        )
    return Finding(
        "earlier turns",
        "note",
        f"the template {what}: a turn that it changes opens a new segment",
        "past='append' keeps an episode in one row",
    )


def _system(facts: _Facts) -> Finding:
    preamble = facts["preamble"]
    unasked = f"; unasked, prompts begin with {_short(preamble.strip())!r}" if preamble else ""
    if preamble and facts["system_role"]:
        stays = facts["preamble_stays"]
        unasked += ", beside a system message too" if stays else ", which a system message replaces"
    alternate = "; two user messages in a row are refused" if facts["roles_alternate"] else ""
    if not facts["merges_system"]:
        return Finding("system", "ok", f"system messages are taken as they are{unasked}{alternate}")
    return Finding(
        "system",
        "note",
        f"system text is written in front of the first user message{unasked}{alternate}",
        "nothing; system='role' insists on a role of its own where the template has one",
    )


def _user_text(facts: _Facts) -> Finding:
    if facts["user_text_kept"]:
        return Finding("user text", "ok", "is written as it is")
    return Finding(
        "user text",
        "note",
        "the template trims blanks and newlines at its ends",
        "nothing; where they carry meaning, put a word before and behind them",
    )


def _date(facts: _Facts) -> Finding:
    dated = [name for name in facts["variables"] if "date" in name]
    if facts["clock"] is not None:
        return Finding(
            "date",
            "note",
            f"the template reads the clock: pinned to {facts['clock']}, part of the fingerprint",
            "for equal prompts on other days, set date_string, such as 2025-01-31 (template_kwargs)",
        )
    if dated:
        return Finding("date", "ok", f"the clock is not read; template_kwargs can set {', '.join(dated)}")
    return Finding("date", "ok", "neither clock nor date is read")


def _bos(facts: _Facts) -> Finding:
    bos = facts["bos"]
    if bos["leading"] > 1:
        return Finding(
            "bos",
            "wrong",
            f"prompts begin with {bos['leading']} BOS ids ({bos['id']})",
            "write it once in the template (template=)",
        )
    if bos["leading"] == 0 and bos["added_by_tokenizer"]:
        return Finding(
            "bos",
            "note",
            f"the template writes no BOS, though the tokenizer puts {bos['id']} before plain text",
            "if the model was trained with one, put {{ bos_token }} in front of the template (template=)",
        )
    if bos["leading"] == 0:
        return Finding("bos", "ok", "none, as the tokenizer has it")
    trap = "; plain encoding of a rendered prompt would add a second" if bos["added_by_tokenizer"] else ""
    return Finding("bos", "ok", f"once, id {bos['id']}{trap}")


def _control_text(facts: _Facts) -> Finding:
    tried = facts["control_text"]
    channels = ", ".join(tried["forged"])
    forged = {name: count for name, count in tried["forged"].items() if count}
    naive = tried["plain_encoding"]
    through = f"; plain encoding lets {naive} through" if naive else ""
    if not forged:
        return Finding(
            "control text", "ok", f"{tried['spellings']} spellings in {channels} text stay text{through}"
        )
    said = "; ".join(
        f"{name}: {count}" if isinstance(count, str) else f"{name} text made {count} control ids"
        for name, count in forged.items()
    )
    return Finding(
        "control text",
        "wrong",
        f"strangers can write control tokens: {said}",
        "give a template (template=) that writes contents whole, and does not build tokens out of them",
    )


def _append_only(facts: _Facts) -> Finding:
    tried, canonical = facts["random_turns"], facts["canonical"]
    grew = "ids only grew" if not tried["segments"] else f"{tried['segments']} opened a new segment"
    played = f"{tried['turns']} turns of random ids: {grew}"
    if tried["failures"]:
        return Finding(
            "append only",
            "wrong",
            f"{len(tried['failures'])} of {tried['turns']} random turns failed: {tried['failures'][0]}",
            "give another template (template=), and report this one",
        )
    if facts["past"] == "template":
        return Finding("append only", "ok", f"{played}; within a segment ids only grew")
    if not canonical["bridges_equal"]:
        return Finding(
            "append only",
            "wrong",
            f"{played}; but the template itself writes other ids behind an answer than the bridge",
            "use past='template', which takes the template's own render each turn",
        )
    if canonical["same"]:
        return Finding("append only", "ok", f"{played}; plain turns equal the template's own render")
    return Finding(
        "append only",
        "ok",
        f"{played}; bridges equal the template's own (a whole render differs from id "
        f"{canonical['first_difference']} on)",
    )


def _replies(facts: _Facts) -> Finding:
    decoding = facts["decoding"]
    trap = "; id by id, characters would break" if decoding["pieces_differ"] else ""
    if decoding["text_kept"]:
        return Finding("decoding", "ok", f"turns are decoded whole, and text comes back as it was{trap}")
    return Finding(
        "decoding",
        "note",
        f"the tokenizer changes text, such as case, blanks or accents{trap}",
        "compare answers in a form that the tokenizer keeps",
    )


def vocabulary_finding(sizes: _Facts) -> Finding:
    """Returns the finding about ids and rows of the embedding.

    Args:
        sizes: ``ids``, ``needed`` and ``rows`` (None: unknown).

    Example:
        >>> vocabulary_finding({"ids": 10, "needed": 10, "rows": 8}).status
        'wrong'
    """
    needed, rows = sizes["needed"], sizes["rows"]
    if rows is None:
        return Finding(
            "vocabulary",
            "note",
            f"{sizes['ids']} ids; rows of the model's embedding unknown: no config.json beside the tokenizer",
            "give the model's own folder, or rows=",
        )
    if rows < needed:
        return Finding(
            "vocabulary",
            "wrong",
            f"{needed} ids, but the model has {rows} rows: ids from {rows} on have none",
            f"resize the model's embedding to {needed} rows and train the new ones, or use its own tokenizer",
        )
    padded = rows - needed
    if not padded:
        return Finding("vocabulary", "ok", f"{needed} ids, as many as the model has rows")
    detail = (
        f"{needed} ids, {rows} rows: {padded} rows are padding; if sampled they stay in the row, as no text"
    )
    if padded > needed // 10:
        return Finding("vocabulary", "note", detail, "see that this is the model's own tokenizer")
    return Finding("vocabulary", "ok", detail)


def _vocabulary(facts: _Facts) -> Finding:
    return vocabulary_finding(facts["sizes"])


def _fingerprint(facts: _Facts) -> Finding:
    return Finding("fingerprint", "ok", facts["fingerprint"])


def _short(text: str) -> str:
    return text if len(text) <= 70 else f"{text[:67]}..."


_JUDGES: tuple[Callable[[_Facts], Finding], ...] = (
    _family,
    _stop_ids,
    _bridge,
    _cut,
    _append_only,
    _control_text,
    _thinking,
    _earlier_turns,
    _system,
    _user_text,
    _tools,
    _date,
    _bos,
    _replies,
    _vocabulary,
    _fingerprint,
)
