"""``atropos-gym view``: what a person sees of a file, and what they are told of one that is damaged."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atropos_gym.cli import main
from atropos_gym.cli._transcript import Transcript, wants_colour
from atropos_gym.engines import Completion
from atropos_gym.html import Pieces, ShownRow
from atropos_gym.rendering import ChatRenderer
from atropos_gym.rollout.collector import GroupCollector
from atropos_gym.rollout.episode import EpisodeGroup
from atropos_gym.rollout.reading import FileOfGroups
from atropos_gym.rollout.writers import JSONLWriter
from atropos_gym.tokenizers import load_tokenizer
from tests.unit.rollout_cases import END, Countdown, exactly

BYTES = load_tokenizer("bytes")
ODD = Completion((0xF0, 0x9F, 259, 60), (-0.1, -0.2, -5.0, -0.4), "length")
PLAIN = Completion((106, 97, END), (-0.25, -0.5, -0.75), "stop")
WIRE = {"tokens": [[65, 66], [65, 67, 68]], "masks": [[-100, 66], [-100, 67, 68]], "scores": [1, 0.5]}

View = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def played() -> list[EpisodeGroup]:
    collector = GroupCollector(Countdown, exactly([PLAIN, ODD]), group_size=2, seed=3)
    groups = collector.collect(3)
    collector.close()
    return groups


@pytest.fixture
def file(played: list[EpisodeGroup], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    with JSONLWriter("games.jsonl", ChatRenderer("bytes")) as writer:
        for group in played:
            writer.write(group)
    return Path("games.jsonl")


@pytest.fixture
def view(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> View:
    monkeypatch.chdir(tmp_path)

    def call(*words: str) -> tuple[int, str, str]:
        code = main(["view", *words])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def data_of(path: str) -> list[dict[str, Any]]:
    found = re.search(r'type="application/json">(.*?)</script>', Path(path).read_text())
    assert found is not None
    data = json.loads(found[1])
    for group in data["groups"]:
        for episode in group["episodes"]:
            episode["body"] = "".join(data["parts"][place] for place in episode["body"])
    return data["groups"]


# --- the page


def test_the_page_stands_beside_the_file(file: Path, view: View) -> None:
    assert view(str(file)) == (0, "games.html\n", "")
    data = data_of("games.html")
    assert [len(group["episodes"]) for group in data] == [2, 2, 2]
    assert 'class="t c" data-i="257">&lt;bos&gt;' in data[0]["episodes"][0]["body"]


def test_the_page_is_written_where_it_is_wanted(file: Path, view: View) -> None:
    assert view(str(file), "-o", "new/page.html", "--episode", "3") == (0, "new/page.html\n", "")
    assert [[one["number"] for one in group["episodes"]] for group in data_of("new/page.html")] == [[3]]


def test_the_file_itself_is_not_overwritten(file: Path, view: View) -> None:
    before = file.read_text()
    code, _, err = view(str(file), "-o", str(file))
    assert code == 2
    assert "is the file that is shown" in err
    assert file.read_text() == before


def test_a_page_that_cannot_be_written_is_one_line(file: Path, view: View) -> None:
    Path("taken").touch()
    code, _, err = view(str(file), "-o", "taken/page.html")
    assert code == 2
    assert err.count("\n") == 1
    assert "choose another with -o" in err


def test_open_asks_the_browser(file: Path, view: View, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: bool(asked.append(url)))
    code, _, err = view(str(file), "--open")
    assert code == 0
    assert asked[0].startswith("file:///")
    assert "open games.html yourself" in err


# --- the terminal


def test_the_terminal_says_what_the_page_says(file: Path, view: View, played: list[EpisodeGroup]) -> None:
    code, out, err = view(str(file), "--terminal")
    assert (code, err) == (0, "")
    assert "\x1b" not in out
    first = played[0].episodes[0]
    assert f"seed {first.seed}" in out
    assert f"#0 episode 0 · score +{first.score:.4g}" in out
    assert "  | <bos><system>Zähle.<user>noch" in out
    assert "  > ja<end>" in out
    assert "least likely '<system>', p 0.00674" in out
    assert "cut: no end id" in out
    assert "user, at the end, read by no policy\n  | Fertig 🎲" in out


def test_one_episode_is_shown_with_its_group(file: Path, view: View) -> None:
    _, out, _ = view(str(file), "--terminal", "--episode", "3")
    assert re.findall(r"^#\d+", out, re.MULTILINE) == ["#3"]
    assert "Countdown · group 1" in out


@pytest.mark.parametrize("number", ["6", "-1"])
def test_an_episode_that_is_not_there(file: Path, view: View, number: str) -> None:
    code, out, err = view(str(file), "--terminal", "--episode", number)
    assert (code, out) == (2, "")
    assert f"--episode {number}: games.jsonl holds 6 episodes, numbered from 0" in err


def test_ids_are_a_table_of_all_that_is_known(file: Path, view: View, played: list[EpisodeGroup]) -> None:
    _, out, _ = view(str(file), "--ids", "--episode", "0")
    rows = [line.split() for line in out.splitlines() if re.match(r"  +\d+ ", line)]
    row = played[0].episodes[0].rows[0]
    assert [int(cells[1]) for cells in rows] == row.ids
    assert [int(cells[0]) for cells in rows] == list(range(len(row.ids)))
    assert [cells[3] == "trained" for cells in rows] == [id_ != -100 for id_ in row.mask]
    assert rows[0] == ["0", "257", "template", "no", "<bos>"]
    assert rows[row.turns[0].start] == [
        str(row.turns[0].start),
        "106",
        "sampled",
        "trained",
        "−0.25",
        "0.779",
        "j",
    ]
    assert "␣" in out
    assert "<0xC3>" in out


def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert wants_colour(Terminal())
    assert not wants_colour(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not wants_colour(Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_colour(Terminal())


@pytest.mark.parametrize("ids", [False, True])
def test_colours_change_no_text(ids: bool) -> None:
    smile = list("😀 x\ny".encode())
    row = ShownRow([257, *smile, 258], [-100, *smile, 258], [1.0, *[-0.5] * len(smile), -9.0])
    pieces = Pieces(
        lambda id_: bytes([id_]).decode("utf-8", "surrogateescape") if id_ < 256 else "",
        lambda id_: {257: "<bos>", 258: "<end>"}.get(id_),
    )
    plain = "\n".join(Transcript(ids=ids).row(row, pieces))
    painted = "\n".join(Transcript(colour=True, ids=ids).row(row, pieces))
    assert "\x1b[4;1;31m<end>\x1b[0m" in painted
    assert re.sub(r"\x1b\[[\d;]*m", "", painted) == plain


def test_what_was_said_cannot_drive_the_terminal() -> None:
    evil = list(b"\x1b[2J\x07")
    row = ShownRow(evil, [-100] * len(evil))
    assert "".join(Transcript().row(row, Pieces(chr, lambda id_: None))).isprintable()


# --- files of other kinds


def test_files_of_before_still_open(played: list[EpisodeGroup], view: View) -> None:
    """No pieces, no sources, no ``info`` of turns: the fingerprint says that ids are bytes."""
    data = played[0].to_dict()
    for episode in data["episodes"]:
        for row in episode["rows"]:
            for turn in row["turns"]:
                del turn["info"], turn["legal_actions"]
    Path("old.jsonl").write_text(json.dumps(data) + "\n")
    code, out, err = view("old.jsonl", "--terminal")
    assert (code, err) == (0, "")
    assert "<bos><system>Zähle." in out


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(WIRE),
        json.dumps(WIRE) + "\n",
        json.dumps([WIRE]),
        json.dumps({"batch": [WIRE]}),
        json.dumps(WIRE, indent=2),
        json.dumps([WIRE], indent=2) + "\n",
        "\n\n" + json.dumps(WIRE) + "\n\n",
    ],
    ids=["line", "line end", "list", "batch", "laid out", "list laid out", "blank lines"],
)
def test_groups_of_the_wire_are_shown_however_they_are_laid_out(text: str, view: View) -> None:
    Path("wire.json").write_text(text)
    code, out, err = view("wire.json", "--terminal")
    assert code == 0
    assert "#1 episode 1 · score +0.5 · advantage −0.25" in out
    assert "⟨67⟩⟨68⟩" in out
    assert err == (
        "atropos-gym: wire.json does not say what its ids spell; --tokenizer NAME shows their text\n"
    )


def test_a_tokenizer_gives_the_pieces_that_a_file_lacks(view: View) -> None:
    Path("wire.json").write_text(json.dumps(WIRE))
    code, out, err = view("wire.json", "--terminal", "--tokenizer", "bytes")
    assert (code, err) == (0, "")
    assert "  > CD" in out


def test_another_tokenizer_is_refused(view: View) -> None:
    about = {"tokenizer_fingerprint": "sha256:0123456789abcdef"}
    Path("wire.json").write_text(json.dumps({**WIRE, "group_overrides": about}))
    code, _, err = view("wire.json", "--tokenizer", "bytes")
    assert code == 2
    assert "wire.json holds ids of tokenizer sha256:01234567, bytes is sha256:" in err


def test_a_group_on_the_wire_says_as_much_as_it_holds(played: list[EpisodeGroup], view: View) -> None:
    Path("wire.jsonl").write_bytes(played[0].to_wire().to_json() + b"\n")
    code, out, err = view("wire.jsonl", "--terminal")
    assert (code, err) == (0, "")
    assert "group 0 · version 0" in out
    assert "temperature 1" in out
    assert f"reward +{played[0].episodes[0].rewards[0]:.4g}" in out
    assert "  > ja<end>" in out


# --- damage


def test_a_cut_last_line_costs_that_line(file: Path, view: View) -> None:
    text = file.read_text()
    file.write_text(text[: len(text) - 400])
    code, out, err = view(str(file), "--terminal")
    assert code == 0
    assert out.count("Countdown · group") == 2
    assert err.startswith(
        "atropos-gym: games.jsonl: line 3 is not JSON (the file ends in it: its writer was cut"
    )
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2 is not JSON: "),
        ("[1, 2", "line 2 is not JSON: "),
        ("[" * 100_000, "line 2 is"),
        ("7", "line 2 is left out: a group is a JSON object, this is a int"),
        (
            '{"a": 1, "b": 2}',
            "it has neither `episodes` (by collect) nor `tokens` (the wire); it has `a`, `b`",
        ),
        ('{"episodes": [{}]}', "line 2 is left out"),
        ('{"episodes": 3}', "line 2 is left out"),
        ('{"tokens": [[1]], "masks": [[1]]}', "line 2 is no group of the wire: scores: "),
        (
            '{"tokens": [["x"]], "masks": [[1]], "scores": [1]}',
            "is no group of the wire: tokens.0.0: ",
        ),
        ('{"tokens": [[1, 2]], "masks": [[1]], "scores": [1]}', "line 2 is no group of the wire"),
    ],
)
def test_a_line_that_is_no_group_is_named_and_the_rest_is_shown(
    file: Path, view: View, line: str, said: str
) -> None:
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], line, *lines[1:], ""]))
    code, out, err = view(str(file), "--terminal")
    assert code == 0
    assert out.count("Countdown · group") == 3
    assert err.count("\n") == 1
    assert said in err


def damaged(change: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], None]:
    return lambda data: change(data["episodes"][0]["rows"][0])


@pytest.mark.parametrize(
    "change",
    [
        damaged(lambda row: row["ids"].pop()),
        damaged(lambda row: row["mask"].append(1)),
        damaged(lambda row: row.update(sources=[["template", 1]])),
        damaged(lambda row: row.update(sources="x")),
        damaged(lambda row: row["turns"][0].update(end=10_000)),
        damaged(lambda row: row["turns"][0].update(start="x")),
        damaged(lambda row: row.pop("logprobs")),
        lambda data: data.update(pieces={"x": "y"}),
        lambda data: data.update(pieces=3),
        lambda data: data["episodes"].append(None),
        lambda data: data.update(number=None, future=1),
    ],
)
def test_a_damaged_group_is_left_out_by_name(
    file: Path, view: View, change: Callable[[dict[str, Any]], None]
) -> None:
    lines = file.read_text().splitlines()
    data = json.loads(lines[1])
    change(data)
    file.write_text("\n".join([lines[0], json.dumps(data), lines[2], ""]))
    code, out, err = view(str(file))
    assert (code, out) == (0, "games.html\n")
    assert len(data_of("games.html")) == 2
    assert "games.jsonl: line 2 is left out: " in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty; `atropos-gym collect"),
        (b"\n\n", "is empty"),
        (b"\x89PNG\r\n\x1a\n\xff\xfe", "is no text file"),
        (b"hello\nworld\n", "line 1 is not JSON"),
        (b"{}", "line 1 is left out: it has neither"),
        (b"[]", "is empty"),
        (b'{"tokens": [[1', "line 1 is not JSON (the file ends in it"),
    ],
)
def test_a_file_without_a_group_is_one_line(view: View, content: bytes, said: str) -> None:
    Path("bad.jsonl").write_bytes(content)
    code, out, err = view("bad.jsonl")
    assert (code, out) == (2, "")
    assert err.startswith("atropos-gym: bad.jsonl")
    assert err.count("\n") == 1
    assert said in err
    assert not Path("bad.html").exists()


def test_a_file_that_is_not_there(view: View) -> None:
    code, _, err = view("none.jsonl")
    assert code == 2
    assert "no file 'none.jsonl'; `atropos-gym collect" in err


def test_a_folder_says_what_lies_in_it(view: View) -> None:
    Path("runs/x/rollouts").mkdir(parents=True)
    Path("runs/x/rollouts/after.jsonl").touch()
    code, _, err = view("runs/x")
    assert code == 2
    assert "runs/x is a folder" in err
    assert "runs/x/rollouts/after.jsonl" in err


@pytest.mark.parametrize("words", [[], ["a.jsonl", "--episode", "x"], ["a.jsonl", "--tokeniser", "y"]])
def test_a_mistake_in_the_words_is_one_line(view: View, words: list[str]) -> None:
    code, out, err = view(*words)
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_a_long_file_is_read_one_group_at_a_time(file: Path) -> None:
    groups = iter(FileOfGroups(file, BYTES))
    assert next(groups).number == 0
    assert next(groups).first == 2
