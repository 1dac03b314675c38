"""JSON lines that give back what was played, and a page for people."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atropos_gym.engines import Completion
from atropos_gym.errors import ConfigError, MissingData
from atropos_gym.messages import Feedback, Reply
from atropos_gym.rendering import ChatRenderer
from atropos_gym.rollout.collector import GroupCollector
from atropos_gym.rollout.episode import EpisodeGroup
from atropos_gym.rollout.writers import JSONLWriter, read_jsonl, rollouts_html, write_html
from atropos_gym.text_env import TextEnv
from atropos_gym.tokenizers import BytesTokenizer, load_tokenizer
from atropos_gym.tokenizers.pieces import pieces_of
from tests.unit.rollout_cases import END, Countdown, Restarting, exactly

BYTES = load_tokenizer("bytes")
RENDERER = ChatRenderer("bytes")
#: A broken character, a control id, an ``<``, and no end.
ODD = Completion((0xF0, 0x9F, 259, 60), (-0.1, -0.2, -3.0, -0.4), "length")
PLAIN = Completion((106, 97, END), (-0.25, -0.5, -0.75), "stop")


@pytest.fixture
def groups() -> list[EpisodeGroup]:
    collector = GroupCollector(Countdown, exactly([PLAIN, ODD]), group_size=2, seed=3)
    played = collector.collect(2)
    collector.close()
    return played


def test_what_was_written_is_read_again(groups: list[EpisodeGroup], tmp_path: Path) -> None:
    path = tmp_path / "new" / "rollouts.jsonl"
    with JSONLWriter(path) as writer:
        writer.write(groups[0])
    with JSONLWriter(path) as writer:  # a second run appends
        writer.write(groups[1])
    assert list(read_jsonl(path)) == groups


def test_a_line_is_whole_as_soon_as_it_is_written(groups: list[EpisodeGroup], tmp_path: Path) -> None:
    with JSONLWriter(tmp_path / "r.jsonl") as writer:
        writer.write(groups[0])
        assert next(read_jsonl(writer.path)) == groups[0]


def test_a_line_holds_messages_ids_mask_and_logprobs(groups: list[EpisodeGroup], tmp_path: Path) -> None:
    with JSONLWriter(tmp_path / "r.jsonl") as writer:
        writer.write(groups[0])
    line = json.loads(writer.path.read_text())
    episode = line["episodes"][0]
    assert episode["messages"][0] == {"role": "system", "content": "Zähle."}
    row = episode["rows"][0]
    assert len(row["ids"]) == len(row["mask"]) == len(row["logprobs"])
    assert row["turns"][0]["end"] - row["turns"][0]["start"] == 3


def test_a_lone_surrogate_survives(groups: list[EpisodeGroup], tmp_path: Path) -> None:
    groups[0].episodes[0].messages[0]["content"] = "\ud800"
    with JSONLWriter(tmp_path / "r.jsonl") as writer:
        writer.write(groups[0])
    assert next(read_jsonl(writer.path)) == groups[0]
    write_html(tmp_path / "page.html", groups, BYTES, title="\ud800")


def test_numbers_that_are_no_json_are_refused(groups: list[EpisodeGroup], tmp_path: Path) -> None:
    groups[0].episodes[0].score = float("nan")
    with JSONLWriter(tmp_path / "r.jsonl") as writer:
        with pytest.raises(ValueError, match="not JSON compliant"):
            writer.write(groups[0])
        writer.write(groups[1])
    assert list(read_jsonl(writer.path)) == [groups[1]]


@pytest.mark.parametrize("line", ["{", "[1]", '{"env": "x"}', '{"episodes": [1]}', '{"episodes": 1}'])
def test_a_bad_line_is_named(groups: list[EpisodeGroup], tmp_path: Path, line: str) -> None:
    with JSONLWriter(tmp_path / "r.jsonl") as writer:
        writer.write(groups[0])
    with writer.path.open("a") as file:
        file.write("\n" + line + "\n")
    with pytest.raises(ConfigError, match=r"r\.jsonl, line 3: "):
        list(read_jsonl(writer.path))


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match="atropos-gym collect"):
        list(read_jsonl(tmp_path / "none.jsonl"))


def test_a_turn_keeps_what_the_environment_said_of_it(tmp_path: Path) -> None:
    collector = GroupCollector(Judged, exactly([PLAIN, ODD]), group_size=2, seed=3)
    (group,) = collector.collect(1)
    collector.close()
    with JSONLWriter(tmp_path / "r.jsonl") as writer:
        writer.write(group)
    assert next(read_jsonl(writer.path)) == group
    first, second = json.loads(writer.path.read_text())["episodes"][0]["rows"][0]["turns"]
    assert first["info"]["invalid_reason"] == "too long"
    assert first["info"]["reward_terms"] == {"length": -0.5}
    assert (first["legal_actions"], second["legal_actions"]) == (["a"], ["b"])


class Judged(TextEnv):
    """Two turns, the first of them invalid; what is legal changes."""

    max_turns = 2
    max_turn_tokens = 12

    def begin(self, options: dict[str, Any]) -> str:
        self.legal = "a"
        return "say a, then b"

    def respond(self, reply: Reply) -> Feedback:
        self.legal, was = "b", self.legal
        why = {"invalid_reason": "too long", "measured": np.float32(0.5).item()}
        return Feedback("go on", reward_terms={"length": -0.5}, invalid=was == "a", info=why)

    def extra_info(self) -> dict[str, Any]:
        return {"legal_actions": [self.legal]}


def test_a_wrappers_arrays_are_written_as_numbers(groups: list[EpisodeGroup], tmp_path: Path) -> None:
    groups[0].episodes[0].info["episode"] = {"r": np.float32(0.5), "l": np.array([3, 4])}
    with JSONLWriter(tmp_path / "r.jsonl") as writer:
        writer.write(groups[0])
    assert next(read_jsonl(writer.path)).episodes[0].info["episode"] == {"r": 0.5, "l": [3, 4]}


# --- what a line holds for people


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_lists_each_piece_once_and_who_put_each_id_there(
    groups: list[EpisodeGroup], tmp_path: Path
) -> None:
    with JSONLWriter(tmp_path / "r.jsonl", RENDERER) as writer:
        writer.write(groups[0])
    (line,) = lines_of(writer.path)
    assert line["tokenizer"] == "bytes"
    assert line["pieces"]["110"] == "n"
    assert line["pieces"]["240"] == "\udcf0", "a byte of a character, escaped"
    assert line["control"]["258"] == "<end>"
    ids = {id_ for episode in line["episodes"] for row in episode["rows"] for id_ in row["ids"]}
    assert set(map(int, line["pieces"] | line["control"])) == ids
    for episode in line["episodes"]:
        for row in episode["rows"]:
            assert sum(length for _, length in row["sources"]) == len(row["ids"])
    assert list(read_jsonl(writer.path)) == groups[:1], "what is for people is left out again"


def test_a_tokenizer_alone_gives_pieces_and_no_sources(groups: list[EpisodeGroup], tmp_path: Path) -> None:
    with JSONLWriter(tmp_path / "r.jsonl", BYTES) as writer:
        writer.write(groups[0])
    (line,) = lines_of(writer.path)
    assert line["control"]["257"] == "<bos>"
    assert all("sources" not in row for episode in line["episodes"] for row in episode["rows"])


def spelt(row: dict[str, Any]) -> list[tuple[str, list[int]]]:
    """The runs of a row with their ids."""
    runs, at = [], 0
    for source, length in row["sources"]:
        runs.append((source, row["ids"][at : at + length]))
        at += length
    return runs


@pytest.mark.parametrize("history", ["whole", "latest"])
@pytest.mark.parametrize("env", [Countdown, Restarting])
def test_sources_are_those_of_the_row_that_was_played(
    env: type[TextEnv], history: str, tmp_path: Path
) -> None:
    engine = exactly([PLAIN, ODD, Completion((), (), "stop")])
    collector = GroupCollector(env, engine, group_size=2, seed=5, env_kwargs={"history": history})
    with JSONLWriter(tmp_path / "r.jsonl", collector.env.renderer) as writer:
        for group in collector.collect(3):
            writer.write(group)
    collector.close()
    rows = [row for line in lines_of(writer.path) for episode in line["episodes"] for row in episode["rows"]]
    assert len(rows) > 6 or history == "whole"
    for row in rows:
        said = {"template": [], "message": [], "sampled": []}
        for source, ids in spelt(row):
            said[source] += ids
        assert said["sampled"] == [id_ for id_ in row["mask"] if id_ != -100]
        assert all(id_ >= 256 for id_ in said["template"]), "bytes: the template is control ids only"
        assert all(id_ < 256 for id_ in said["message"])


def test_a_row_that_cannot_be_explained_has_no_sources(groups: list[EpisodeGroup], tmp_path: Path) -> None:
    groups[0].episodes[0].rows[0].messages[1]["content"] = "something else"
    with JSONLWriter(tmp_path / "r.jsonl", RENDERER) as writer:
        writer.write(groups[0])
    first, second = (episode["rows"][0] for episode in lines_of(writer.path)[0]["episodes"])
    assert "sources" not in first
    assert "sources" in second


# --- pages


def test_the_page_shows_every_group_with_its_control_ids(groups: list[EpisodeGroup], tmp_path: Path) -> None:
    path = write_html(
        tmp_path / "out" / "page.html", groups, RENDERER, title="Count <down>", facts={"run": "r<1>"}
    )
    page = path.read_text()
    assert "<h1>Count &lt;down&gt;</h1>" in page
    assert "r&lt;1&gt;" in page
    found = re.search(r'type="application/json">(.*?)</script>', page)
    assert found is not None
    data = json.loads(found[1])["groups"]
    assert ["Countdown · group 0 · version 0" in data[0]["head"], len(data)] == [True, 2]
    body = "".join(json.loads(found[1])["parts"])
    for name in ("bos", "user", "assistant", "system", "end"):
        assert f">&lt;{name}&gt;</b>" in body
    assert '<b class="s y p3 c" data-i="259" data-l="-3.0000">' in body
    assert '<b class="t c" data-i="257">' in body
    assert list(path.parent.iterdir()) == [path], "no temporary file is left"


def test_a_page_of_nothing_is_a_page() -> None:
    assert "<dd>0</dd>" in rollouts_html([], BYTES)


def test_ids_are_not_shown_with_another_tokenizer(groups: list[EpisodeGroup]) -> None:
    class Other(BytesTokenizer):
        name = "other"
        fingerprint = "sha256:0000000000000000"

    with pytest.raises(ConfigError, match="group 0 holds ids of tokenizer sha256:.* other is sha256:0000"):
        rollouts_html(groups, Other())


def test_pieces_of_a_tokenizer_whose_control_ids_have_text() -> None:
    class Chat:
        """Words, one of them a control token; encodes text to words only."""

        name, rows, fingerprint = "chat", 5, "sha256:1"
        words = ("<", "b>", "<|im_end|>", "", "<b>")

        def __len__(self) -> int:
            return 5

        def decode(self, ids: list[int]) -> str:
            return "".join(self.words[i] for i in ids)

        def encode(self, text: str) -> list[int]:
            return {"<": [0], "b>": [1], "<b>": [4]}.get(text, [0])

    pieces = pieces_of(Chat())
    assert [pieces.control(i) for i in range(5)] == [None, None, "<|im_end|>", "<3>", None]
    assert [pieces.name(i) for i in range(5)] == ["<", "b>", "<|im_end|>", "<3>", "<b>"]


class Backend:
    """Spells its tokens as byte-level BPE or as byte fallback does."""

    def __init__(self, tokens: list[str]) -> None:
        self.id_to_token = dict(enumerate(tokens)).get


@pytest.mark.parametrize("tokens", [["ðŁ", "İ²"], ["<0xF0>", "<0x9F>", "<0x8E>", "<0xB2>"]])
def test_parts_of_a_character_are_known_by_their_bytes(tokens: list[str]) -> None:
    class Parts:
        name, rows, fingerprint, backend = "parts", 4, "sha256:2", Backend(tokens)

        def decode(self, ids: list[int]) -> str:
            return "\ufffd"

        def encode(self, text: str) -> list[int]:
            return []

    pieces = pieces_of(Parts())
    assert pieces.decode(range(len(tokens))) == "🎲"
    assert pieces.name(0).startswith("<0xF0>")


def test_a_blank_that_a_piece_begins_with_is_kept() -> None:
    class Sentence:
        """Drops the first piece's blank, as SentencePiece does."""

        name, rows, fingerprint = "sentence", 2, "sha256:3"

        def decode(self, ids: list[int]) -> str:
            return "".join((" Hello", "ing")[i] for i in ids).removeprefix(" ")

        def encode(self, text: str) -> list[int]:
            return []

    pieces = pieces_of(Sentence())
    assert pieces.decode([0, 1, 0]) == " Helloing Hello"
