"""JSON lines that give back what was played, and a page for people."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from atropos_gym.engines import Completion
from atropos_gym.errors import ConfigError, MissingData
from atropos_gym.rollout.collector import GroupCollector
from atropos_gym.rollout.episode import EpisodeGroup
from atropos_gym.rollout.writers import JSONLWriter, pieces_of, read_jsonl, rollouts_html, write_html
from atropos_gym.tokenizers import BytesTokenizer, load_tokenizer
from tests.unit.rollout_cases import END, Countdown, exactly

BYTES = load_tokenizer("bytes")
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


@pytest.mark.parametrize("line", ["{", "[1]", '{"env": "x"}'])
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


def test_the_page_shows_every_group_with_its_control_ids(groups: list[EpisodeGroup], tmp_path: Path) -> None:
    path = write_html(
        tmp_path / "out" / "page.html", groups, BYTES, title="Count <down>", facts={"run": "r<1>"}
    )
    page = path.read_text()
    assert "<h1>Count &lt;down&gt;</h1>" in page
    assert "r&lt;1&gt;" in page
    assert page.count('<details class="group"') == 2
    assert "Countdown · group 1 · version 0" in page
    for name in ("bos", "user", "assistant", "system", "end"):
        assert f'<span class="c">&lt;{name}&gt;</span>' in page
    assert 'data-tip="id 259 · logprob −3.0000' in page
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

    control = pieces_of(Chat()).control
    assert [control(i) for i in range(5)] == [None, None, "<|im_end|>", "<3>", None]
