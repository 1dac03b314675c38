"""The configuration model: where a value comes from, YAML there and back, what is said of a bad one."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_gym.cli.command import parse
from atropos_gym.cli.config import MAIN_JOB, VERBS, Config, load_yaml, resolve
from atropos_gym.cli.folder import RunFolder
from atropos_gym.errors import ConfigError, MissingData


def file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_flag_wins_over_the_file_and_the_file_over_the_default(tmp_path: Path) -> None:
    path = file(tmp_path, "updates: 7\nseed: 3\n")
    config = resolve("train", {"updates": "9"}, path)
    assert (config.updates, config.seed, config.groups_per_update) == (9, 3, Config().groups_per_update)


@pytest.mark.parametrize("flags", [{"env": "atropos/Taxi-v0"}, {"policy": "some/model"}])
def test_the_main_job_ends_where_env_or_policy_is_given(flags: dict[str, str]) -> None:
    config = resolve("train", flags)
    assert config.updates == Config().updates
    assert not config.check_lesson


def test_the_main_job_ends_where_a_file_is_given(tmp_path: Path) -> None:
    assert resolve("train", {}, file(tmp_path, "seed: 1\n")).groups_per_update == Config().groups_per_update


def test_the_main_job_holds_with_other_flags() -> None:
    config = resolve("train", {"updates": "5", "history": "whole", "env_args": {"natural": True}})
    assert config.model_dump(include=set(MAIN_JOB)) == MAIN_JOB | {
        "updates": 5,
        "history": "whole",
        "env_args": {"describe": "terse", "natural": True},
    }


@pytest.mark.parametrize("verb", ["collect", "eval", "serve"])
def test_only_train_has_a_preset(verb: str) -> None:
    assert resolve(verb, {}) == Config()


def test_env_arguments_of_flags_add_to_those_of_the_file(tmp_path: Path) -> None:
    path = file(tmp_path, "env_args: {describe: terse, natural: true}\n")
    assert resolve("eval", {"env_args": {"natural": False}}, path).env_args == {
        "describe": "terse",
        "natural": False,
    }


def test_history_becomes_an_argument_of_the_environment_only_where_it_is_set() -> None:
    assert Config(env_args={"a": 1}).env_kwargs == {"a": 1}
    assert Config(env_args={"a": 1}, history="latest").env_kwargs == {"a": 1, "history": "latest"}


@settings(max_examples=60, deadline=None)
@given(
    updates=st.integers(0, 10**6),
    learning_rate=st.floats(1e-9, 1.0),
    temperature=st.floats(0.1, 5),
    name=st.none() | st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=20),
    env_args=st.dictionaries(
        st.text("abc", min_size=1), st.integers() | st.booleans() | st.text("xyz:# -"), max_size=3
    ),
)
def test_what_dry_run_prints_reads_back_as_the_same_configuration(**values: object) -> None:
    config = Config.model_validate(values)
    assert Config.model_validate(yaml.safe_load(config.to_yaml())) == config


def test_the_yaml_says_of_each_field_what_it_is() -> None:
    text = Config().to_yaml()
    for name in Config.model_fields:
        assert Config.about(name)["description"], name
        assert f"\n{name}: " in text or f"\n{name}:\n" in text
    comments = " ".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("#"))
    assert all(Config.about(name)["description"] in comments for name in Config.model_fields)


def test_every_field_is_read_by_some_verb_and_no_verb_is_unknown() -> None:
    for name in Config.model_fields:
        verbs = Config.about(name)["verbs"]
        assert verbs
        assert set(verbs) <= set(VERBS)


def test_engine_arguments_add_up_with_the_settings_of_their_own() -> None:
    words = ["--engine", "vllm", "--vllm-python", "p/python", "--engine-arg", "max_model_len=64"]
    command = parse(["train", *words, "--swap", "restart", "--engine-check", "false", "--slope-test", "null"])
    assert command is not None
    assert command.config.engine_kwargs == {"max_model_len": 64, "python": "p/python", "swap": "restart"}
    assert command.config.engine_check is False and command.config.slope_test is None


@pytest.mark.parametrize("verb", ["train", "serve", "collect", "eval"])
def test_each_field_is_a_flag_of_the_verbs_that_read_it(verb: str) -> None:
    values = {
        bool: None,
        "env_args": "a=1",
        "engine_args": "a=1",
        "swap": "none",
        "env": "x/Y-v0",
        "reduction": "constant",
        "history": "whole",
        "dtype": "float32",
        "entropy_over": "ids",
        "foreign_masks": "keep",
        "episodes": "2",
        "group_size": "2",
        "final_episodes": "2",
    }
    words = [verb]
    for name in Config.reads(verb):
        flag = "--" + name.removesuffix("s" if name.endswith("_args") else "").replace("_", "-")
        if Config.model_fields[name].annotation is bool:
            words.append(flag)
        elif not (name == "server" and verb == "train"):  # excludes own_server
            words += [flag, str(values.get(name, "1"))]
    command = parse(words)
    assert command is not None
    assert command.given == set(Config.reads(verb)) - ({"server"} if verb == "train" else set())


SECRET = "s3cret"  # noqa: S105


def test_tokens_are_never_written_down(tmp_path: Path) -> None:
    """A run's config.yaml is read by whoever may read the run; a printed one is kept in logs."""
    url = f"http://x:{SECRET}@gpu-1:8000"
    config = Config(server=url, to=f"{url}/", token=SECRET, env_token=SECRET)
    text = config.to_yaml()
    assert SECRET not in text
    assert "server: http://gpu-1:8000\n" in text and "to: http://gpu-1:8000\n" in text
    folder = RunFolder.create(config.model_copy(update={"runs": tmp_path, "name": "x"}))
    folder.save(status="running")
    assert all(SECRET not in path.read_text() for path in folder.path.iterdir())
    assert folder.config.server == url, "the run itself goes on with it"
    assert RunFolder.open(folder.path).config.server == "http://gpu-1:8000"


@pytest.mark.parametrize(
    "text",
    [
        f"server: http://x:{SECRET}@h\nown_server: true",
        f"token: [{SECRET}]",
        f"env_token: {{a: {SECRET}}}",
        f"server: [http://x:{SECRET}@h]",
    ],
)
def test_no_error_shows_a_token(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve("train", {}, file(tmp_path, text))
    assert SECRET not in str(error.value)


@pytest.mark.parametrize(
    ("said", "size"), [("1000", 1000), ("64KiB", 65536), ("1.5 GiB", 3 * 2**29), ("2GB", 2 * 10**9)]
)
def test_sizes_are_numbers_or_words(said: str, size: int) -> None:
    assert resolve("serve", {"hard_bytes": said}).hard_bytes == size


@pytest.mark.parametrize("said", ["much", "1 parsec"])
def test_a_size_that_is_none_is_named(said: str) -> None:
    with pytest.raises(ConfigError, match=f"^--hard-bytes: must be a number .*16GiB.*, got {said!r}"):
        resolve("serve", {"hard_bytes": said})
    with pytest.raises(ConfigError, match="^--hard-bytes: input should be greater than or equal to 0"):
        resolve("serve", {"hard_bytes": -1})


def test_a_switch_can_be_turned_off_and_a_value_set_to_null() -> None:
    command = parse(["train", "--no-check-lesson", "--entropy-end", "null", "--env-arg", "natural=true"])
    assert command is not None
    assert not command.config.check_lesson
    assert command.config.entropy_end is None
    assert command.config.env_args == {"describe": "terse", "natural": True}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("updats: 3", "unknown setting 'updats'; nearest: updates"),
        (
            "updates: many",
            "updates: input should be a valid integer, unable to parse string as an integer, got 'many'",
        ),
        ("seed: -1", "seed: input should be greater than or equal to 0, got -1"),
        ("history: none", "history: input should be 'whole' or 'latest', got 'none'"),
        ("- a\n- b", "expected `name: value` lines, got a list"),
        ("a: b: c", "line 1: not valid YAML"),
        ("7", "expected `name: value` lines, got a int"),
    ],
)
def test_a_bad_file_is_refused_in_one_line_that_names_it(tmp_path: Path, text: str, said: str) -> None:
    path = file(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        resolve("train", {}, path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_flag_is_named_as_a_flag_even_where_a_file_is_given(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="^--group-size: "):
        resolve("train", {"group_size": "0"}, file(tmp_path, "seed: 1"))


def test_a_missing_file_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(MissingData, match="--dry-run"):
        load_yaml(tmp_path / "absent.yaml")


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert load_yaml(file(tmp_path, "# nothing\n")) == {}


def test_a_server_given_by_url_replaces_the_main_jobs_own() -> None:
    assert resolve("train", {"server": "http://127.0.0.1:1"}).own_server is False


def test_a_server_by_url_and_one_of_its_own_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave one of them out"):
        resolve("train", {}, file(tmp_path, "server: http://127.0.0.1:1\nown_server: true\n"))
