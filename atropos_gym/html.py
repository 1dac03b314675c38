"""Rows of ids as HTML: one renderer for files, reports and the dashboard.

Sampled ids stand apart from prompt ids, the less likely the warmer their colour, with id, logprob and
probability on hover; control ids are visible; every text is escaped. Pages are self-contained: no script,
no font, no image, nothing loaded. Knows ids only through ``Pieces``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import exp

from atropos_gym.wire import ScoredDataGroup

__all__ = ["STYLE", "Pieces", "render_group", "render_page", "render_row"]

_BROKEN = "\ufffd"
# A character of UTF-8 has at most four bytes, so at most four pieces of any tokenizer.
_LONGEST_CHARACTER = 4


@dataclass(frozen=True, slots=True)
class Pieces:
    """How ids are shown as text.

    Attributes:
        decode: ids to text; an incomplete character gives U+FFFD.
        control: the name of an id that is no text of its own (a control id), or None for text.

    Example:
        >>> pieces = Pieces(lambda ids: bytes(ids).decode("utf-8", "replace"), lambda id_: None)
        >>> pieces.chunks([104, 195, 169])
        [([104], 'h'), ([195, 169], 'é')]
    """

    decode: Callable[[Sequence[int]], str]
    control: Callable[[int], str | None]

    def chunks(self, ids: Sequence[int]) -> list[tuple[list[int], str]]:
        """Splits ids into the shortest runs that are whole characters; broken ones stand for themselves."""
        chunks = []
        position = 0
        while position < len(ids):
            length = self._whole(ids, position)
            run = list(ids[position : position + length])
            chunks.append((run, self.decode(run)))
            position += length
        return chunks

    def _whole(self, ids: Sequence[int], start: int) -> int:
        if _BROKEN not in self.decode(ids[start : start + 1]):
            return 1
        for length in range(2, _LONGEST_CHARACTER + 1):
            run = ids[start : start + length]
            if len(run) < length or any(self.control(id_) is not None for id_ in run):
                break
            if _BROKEN not in self.decode(run):
                return length
        return 1


#: Style of the rows; a page that embeds them puts it into its own <style>.
STYLE = """
.ag{--ink:#1c2024;--dim:#6b7280;--line:#e2e5ea;--card:#fff;--page:#f6f7f9;--chip:#eef0f4;
--p0:#dbeafe;--p1:#c7f0e4;--p2:#fdf0b8;--p3:#ffd9b0;--p4:#ffc2c2;--edge:#3b82f6;--good:#15803d;--bad:#b91c1c;
color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
@media (prefers-color-scheme:dark){
.ag{--ink:#e6e8eb;--dim:#949ba6;--line:#2d333b;--card:#171b21;--page:#0e1116;--chip:#242a33;
--p0:#1e3a5f;--p1:#14493f;--p2:#4d4416;--p3:#5a3a17;--p4:#5f2424;--edge:#60a5fa;
--good:#4ade80;--bad:#f87171}}
.ag *{box-sizing:border-box}
.ag h1{font-size:1.5rem;margin:0 0 .25rem;letter-spacing:-.01em}
.ag main{max-width:60rem;margin:0 auto;padding:2rem 1rem 4rem}
.ag .dim{color:var(--dim)}
.ag dl.facts{display:flex;flex-wrap:wrap;gap:.4rem 1.6rem;margin:1rem 0}
.ag dl.facts dt{color:var(--dim);font-size:.8rem}
.ag dl.facts dd{margin:0;font-weight:600;font-variant-numeric:tabular-nums}
.ag details.group{background:var(--card);border:1px solid var(--line);border-radius:10px;margin:.8rem 0}
.ag details.group>summary{cursor:pointer;padding:.65rem .9rem;font-weight:600}
.ag details.group>div{padding:0 .9rem .7rem}
.ag .chip{display:inline-block;background:var(--chip);border-radius:99px;padding:0 .55em;margin-left:.35em;
font-size:.8rem;font-weight:500;font-variant-numeric:tabular-nums}
.ag .chip.good{color:var(--good)}.ag .chip.bad{color:var(--bad)}
.ag figure.row{margin:.6rem 0;border-top:1px solid var(--line);padding-top:.5rem}
.ag figure.row figcaption{font-size:.85rem;color:var(--dim)}
.ag pre.ids{margin:.35rem 0;white-space:pre-wrap;overflow-wrap:anywhere;
font:13.5px/1.75 ui-monospace,"SF Mono",Menlo,Consolas,monospace;color:var(--dim)}
.ag .s{color:var(--ink);border-bottom:2px solid var(--edge);position:relative;border-radius:2px 2px 0 0}
.ag .p0{background:var(--p0)}.ag .p1{background:var(--p1)}.ag .p2{background:var(--p2)}
.ag .p3{background:var(--p3)}.ag .p4{background:var(--p4)}
.ag .c{font-size:.8em;border:1px solid var(--line);border-radius:4px;padding:0 .3em;margin:0 1px}
.ag .s:hover::after,.ag .s:focus::after{content:attr(data-tip);position:absolute;left:0;top:1.7em;z-index:9;
white-space:pre;background:var(--ink);color:var(--card);font:12px/1.5 system-ui,sans-serif;
padding:.3em .6em;border-radius:6px;pointer-events:none}
.ag .legend{display:flex;flex-wrap:wrap;gap:.5rem;align-items:center;font-size:.85rem;color:var(--dim)}
.ag .legend .s{padding:0 .4em}
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}body.ag{{margin:0;background:var(--page)}}</style>
</head>
<body class="ag">
<main>
<header><h1>{title}</h1>{facts}{legend}</header>
{body}
</main>
</body>
</html>
"""

# Upper ends of the colour classes, by probability of the sampled id.
_LIKELY = (0.02, 0.1, 0.35, 0.75)


def render_row(
    ids: Sequence[int], mask: Sequence[int], logprobs: Sequence[float] | None, pieces: Pieces
) -> str:
    """Returns one row of ids as a ``<pre>``.

    Args:
        ids: prompt, sampled, bridge and sampled ids of one row.
        mask: -100 where not sampled; as long as ``ids``.
        logprobs: of the sampled ids; as long as ``ids``; None where unknown.
        pieces: how ids are shown.

    Raises:
        ValueError: lengths differ.

    Example:
        >>> pieces = Pieces(lambda ids: bytes(ids).decode(), lambda id_: None)
        >>> render_row([60, 104], [-100, 104], [1.0, -0.25], pieces)  # doctest: +ELLIPSIS
        '<pre class="ids">&lt;<span class="s p0" data-tip="id 104 · logprob −0.2500 ...">h</span></pre>'
    """
    if not len(ids) == len(mask) == (len(ids) if logprobs is None else len(logprobs)):
        raise ValueError(
            f"a row's lists differ in length: {len(ids)} ids, {len(mask)} mask, logprobs {logprobs}"
        )
    parts: list[str] = []
    position = 0
    while position < len(ids):
        sampled = mask[position] != -100
        control = pieces.control(ids[position]) is not None
        end = position + 1
        # A run: consecutive text ids of one kind, so that characters made of several ids stay whole.
        while (
            end < len(ids)
            and not control
            and (mask[end] != -100) == sampled
            and pieces.control(ids[end]) is None
        ):
            end += 1
        run = ids[position:end]
        if not sampled:
            parts.append(_control(pieces, run[0]) if control else _visible(pieces.decode(run)))
        else:
            parts.append(_sampled(run, None if logprobs is None else logprobs[position:end], pieces, control))
        position = end
    return f'<pre class="ids">{"".join(parts)}</pre>'


def render_group(group: ScoredDataGroup, pieces: Pieces, *, title: str, open: bool = False) -> str:
    """Returns one group as a ``<details>``: its rows with score, success, end and turns.

    Args:
        group: as it goes over the wire.
        pieces: how ids are shown.
        title: of the group.
        open: unfolded from the start.
    """
    rows = []
    for index, ids in enumerate(group.tokens):
        about = group.overrides[index] if group.overrides else {}
        logprobs = group.inference_logprobs[index] if group.inference_logprobs else None
        rows.append(
            f'<figure class="row"><figcaption>{_caption(index, group.scores[index], about)}</figcaption>'
            f"{render_row(ids, group.masks[index], logprobs, pieces)}</figure>"
        )
    chips = "".join(_score_chip(score) for score in group.scores[:16])
    more = _chip(f"and {len(group.scores) - 16} more") if len(group.scores) > 16 else ""
    return (
        f'<details class="group"{" open" if open else ""}><summary>{escape(title)} {chips}{more}</summary>'
        f"<div>{''.join(rows)}</div></details>"
    )


def render_page(title: str, sections: Iterable[str], *, facts: Mapping[str, object] | None = None) -> str:
    """Returns a self-contained page.

    Args:
        title: heading and title of the page.
        sections: HTML, such as from ``render_group``; put in as it is.
        facts: label and value pairs for the head of the page; escaped.
    """
    shown = "".join(
        f"<div><dt>{escape(str(label))}</dt><dd>{escape(str(value))}</dd></div>"
        for label, value in (facts or {}).items()
    )
    swatches = "".join(
        f'<span class="s p{index}">{label}</span>'
        for index, label in enumerate(("p > 0.75", "0.35–0.75", "0.1–0.35", "0.02–0.1", "< 0.02"))
    )
    hint = "<span>sampled, by probability; hover for more</span>"
    legend = f'<p class="legend"><span>prompt</span>{swatches}{hint}</p>'
    return _PAGE.format(
        title=escape(title),
        style=STYLE,
        facts=f'<dl class="facts">{shown}</dl>' if shown else "",
        legend=legend,
        body="\n".join(sections),
    )


def _sampled(ids: Sequence[int], logprobs: Sequence[float] | None, pieces: Pieces, control: bool) -> str:
    """Returns a run of sampled ids, one element for each character or piece."""
    parts = []
    position = 0
    for run, text in [(list(ids), "")] if control else pieces.chunks(ids):
        known = None if logprobs is None else logprobs[position : position + len(run)]
        shown = _visible(text) if text else _control(pieces, run[0])
        likely = "p0" if known is None else _colour(min(known))
        parts.append(f'<span class="s {likely}" data-tip="{escape(_tip(run, known))}">{shown}</span>')
        position += len(run)
    return "".join(parts)


def _tip(ids: Sequence[int], logprobs: Sequence[float] | None) -> str:
    """Returns what is shown on hover: one line for each id."""
    if logprobs is None:
        return "\n".join(f"id {id_}" for id_ in ids)
    return "\n".join(
        f"id {id_} · logprob {_minus(f'{logprob:.4f}')} · p {exp(min(logprob, 0.0)):.3f}"
        for id_, logprob in zip(ids, logprobs, strict=True)
    )


def _colour(logprob: float) -> str:
    probability = exp(min(logprob, 0.0))
    return f"p{4 - sum(probability > end for end in _LIKELY)}"


def _control(pieces: Pieces, id_: int) -> str:
    return f'<span class="c">{escape(pieces.control(id_) or f"id {id_}")}</span>'


def _visible(text: str) -> str:
    """Escapes text and gives control characters their pictures; a line end also ends the line."""
    shown = []
    for character in text:
        code = ord(character)
        if character == "\n":
            shown.append("⏎\n")
        elif code < 0x20 and character != "\t":
            shown.append(chr(0x2400 + code))
        elif code == 0x7F:
            shown.append("␡")
        elif 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069:  # would turn the page's own text around
            shown.append(f"⟨U+{code:04X}⟩")
        else:
            shown.append(escape(character))
    return "".join(shown)


def _caption(index: int, score: float, about: Mapping[str, object]) -> str:
    """Returns what is said of a row: episode, score, turns, how it ended."""
    words = [f"episode {about.get('episode', index)}", _score_chip(score)]
    turns = about.get("turns")
    if isinstance(turns, list) and len(turns) > 1:
        words.append(_chip(f"{len(turns)} turns"))
    success = about.get("success")
    if success is not None:
        words.append(_chip("solved", "good") if success else _chip("not solved", "bad"))
    if about.get("end_reason"):
        words.append(_chip(str(about["end_reason"])))
    words.extend(_chip(key, "bad") for key in ("cut", "truncated") if about.get(key))
    return " ".join(words)


def _score_chip(score: float) -> str:
    return _chip(_minus(f"{score:+.3g}"), "good" if score > 0 else "bad" if score < 0 else "")


def _chip(text: str, tone: str = "") -> str:
    return f'<span class="{f"chip {tone}".strip()}">{escape(text)}</span>'


def _minus(number: str) -> str:
    return number.replace("-", "\N{MINUS SIGN}")
