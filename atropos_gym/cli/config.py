"""The one configuration model of every verb: fields, defaults, the main job's preset, YAML in and out.

A value comes from the flag, else from the file (``--config``), else from the default. The main job's preset
replaces defaults of ``train`` where neither ``--env``, ``--policy`` nor ``--config`` is given.
"""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ByteSize, ConfigDict, Field, TypeAdapter, ValidationError

from atropos_gym._secrets import secrets_in, without_secrets
from atropos_gym._urls import without_token
from atropos_gym.errors import ConfigError, MissingData

__all__ = ["AGAIN", "MAIN_JOB", "VERBS", "Config", "load_yaml", "nearest", "resolve"]

#: The verbs, with the line that ``--help`` says of each.
VERBS = {
    "train": "teach a language model an environment; without arguments, the main job: Blackjack from scratch",
    "serve": "run the batch server between environments and trainers",
    "collect": "play episodes into a file, or stream them to a batch server",
    "eval": "measure a policy beside random and optimal play",
    "play": "play an environment yourself in the terminal, and see what a policy would",
    "view": "show a file of groups: every id, its piece and logprob, why a reward or a mask is what it is",
    "envs": "list the ready environments with their random and optimal scores",
    "check-model": "say whether a model's tokenizer and chat template can be trained on, and what to do",
    "serve-model": "let agent programs speak to a policy as to OpenAI's API, and make groups of what is said",
    "check-engine": "say whether an inference engine can be trained with, and which flag to change",
}


#: What is never written down: tokens, and secrets in URLs and in what an engine or an environment is told.
TOKENS = ("token", "env_token")
HIDING = ("server", "to", "engine", "engine_args", "env_args")

#: What may be said again of a run that goes on: it may have held secrets.
AGAIN = ("server", "engine", "engine_args", "env_args")


def _setting(
    default: Any, section: str, verbs: str, *, shown: str | None = None, metavar: str = "", **constraints: Any
) -> Any:
    """A field with its section in ``--help``, the verbs that read it, and how default and value are shown."""
    extra: dict[str, Any] = {"section": section, "verbs": verbs.split(), "shown": shown, "metavar": metavar}
    return Field(default, json_schema_extra=extra, **constraints)


def _read_size(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return int(TypeAdapter(ByteSize).validate_python(value))
    except ValidationError:
        raise ValueError("must be a number of bytes, or a size such as 16GiB or 500MB") from None


Size = Annotated[int, BeforeValidator(_read_size)]
"""Bytes, as a number or as words such as 16GiB."""


class Config(BaseModel):
    """Every setting of every verb. ``--dry-run`` prints it as YAML, ``--config`` reads it back.

    Example:
        >>> Config(updates=3).updates
        3
    """

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_default=True)

    # Task
    env: str = _setting("atropos/Blackjack-v0", "task", "train collect eval")
    """Environment id (`atropos-gym envs` lists the ready ones; `module:id` imports the module first)."""
    env_args: dict[str, Any] = _setting({}, "task", "train collect eval play")
    """Keyword arguments of the environment; on the command line one `--env-arg key=value` each."""
    history: Literal["whole", "latest"] | None = _setting(None, "task", "train collect eval play")
    """What the policy reads: the whole conversation, or the latest observation only; null: as the
    environment has it."""

    # Policy
    policy: str = _setting("tiny", "policy", "train collect eval serve-model")
    """`tiny` (a small byte-level model from scratch; `train` only), a model's name or path (`hf:PATH` is the
    same), a saved run (`runs/x`), or, for `eval`, `random`."""
    adapter: Path | None = _setting(None, "policy", "collect eval serve-model")
    """LoRA adapter folder in PEFT's form, loaded on top of the policy."""
    engine: str = _setting("hf", "policy", "train collect eval serve-model")
    """Inference engine: `hf` is in process; `vllm:URL` is a vLLM server that runs (its key in the variable
    VLLM_API_KEY); `vllm` starts one, with `vllm_python`. `atropos-gym check-engine` says what one lacks."""
    vllm_python: Path | None = _setting(None, "policy", "train collect eval serve-model")
    """The interpreter of vLLM's own environment, to start a server with."""
    engine_args: dict[str, Any] = _setting({}, "policy", "train collect eval serve-model")
    """Further arguments of the engine, such as max_model_len or train_concurrency; on the command line one
    `--engine-arg key=value` each."""
    swap: Literal["hot_swap", "restart", "none", "in_place"] = _setting("hot_swap", "policy", "train collect")
    """How a new version comes into the engine: beside the older ones; alone, after all that plays has ended;
    never; or in the middle of what runs (`hf` only)."""
    dtype: Literal["float32", "bfloat16", "float16"] = _setting(
        "float32", "policy", "train collect eval serve-model"
    )
    """Number format of the base weights, the same in engine and learner."""
    threads: int | None = _setting(None, "policy", "train collect eval serve-model", ge=1)
    """Threads that torch computes with; null: one for `tiny`, whose matrices are too small to share, else
    torch's own choice."""

    # Format lesson
    warm_up: int = _setting(0, "lesson", "train", ge=0)
    """Steps of the format lesson (transcripts of a random legal player) before GRPO; 0 leaves it out."""
    warm_up_batch_size: int = _setting(64, "lesson", "train", ge=1)
    """Transcripts in each step of the lesson."""
    warm_up_learning_rate: float = _setting(3e-3, "lesson", "train", gt=0)
    """Peak learning rate of the lesson."""
    check_lesson: bool = _setting(False, "lesson", "train")
    """Fail unless the lesson's policy plays like a random player: valid share at least 0.985 and, for
    Blackjack, an exact value within 0.05 of random play."""

    # Collection
    group_size: int = _setting(8, "collection", "train collect serve-model", ge=2)
    """Episodes from one start; they are compared with each other, so at least two."""
    concurrency: int = _setting(64, "collection", "train collect eval", ge=1)
    """Episodes in flight at a time."""
    temperature: float = _setting(1.0, "collection", "train collect serve-model", gt=0)
    """Sampling temperature. `eval` plays greedily, or at 1 (`--no-deterministic`)."""
    common_random_numbers: bool = _setting(False, "collection", "train collect")
    """All members of a group meet the same chance after the start, not only the same start."""
    legal_only: bool = _setting(False, "collection", "eval collect")
    """Sample nothing but replies that the environment says are legal. Such groups cannot be trained on, so
    `collect` writes them to a file only."""
    each_item: bool = _setting(False, "collection", "collect")
    """Play each item of the environment's data once a pass, in another order each time, instead of drawing
    one by chance for each group."""

    # Into a file, or to a batch server
    out: Path | None = _setting(None, "into a file", "collect", shown="none", metavar="FILE")
    """File to write: `.jsonl`, or `.html` for a page with coloured ids."""
    groups: int = _setting(8, "into a file", "collect", ge=1)
    """Groups to collect into the file."""
    to: str | None = _setting(None, "as a service", "collect serve-model", shown="none", metavar="URL")
    """URL of a batch server, such as http://127.0.0.1:8000: run until the trainer there has finished, post
    what it wants, and follow its policy. A token belongs into the variable ATROPOS_GYM_TOKEN. With
    `serve-model`, finished groups go there; without it, they go back to whoever finishes them."""
    max_batches_ahead: int = _setting(3, "as a service", "collect", ge=1)
    """Batches that the service may be ahead of the trainer."""
    weight: float = _setting(1.0, "as a service", "collect", ge=0)
    """The service's share of what is played, relative to other services at the same server."""
    min_batch_allocation: float | None = _setting(None, "as a service", "collect", shown="none", ge=0, le=1)
    """Share of every batch, 0 to 1, that is the service's at least."""
    state: Path | None = _setting(
        None, "as a service", "collect", shown="service.json in the spool; none without", metavar="FILE"
    )
    """File in which the service keeps how far it is: next group, last evaluation, curriculum. Started again
    with it, it goes on from there."""
    spool: Path | None = _setting(None, "as a service", "collect", shown="none", metavar="FOLDER")
    """Folder in which groups lie until the server has them: nothing that was played is lost or sent twice,
    whatever is killed. What the server refuses lies in `refused/` there, with the reason."""
    curriculum: str | None = _setting(None, "as a service", "collect", shown="none", metavar="MODULE:NAME")
    """Function of one's own that is asked at each new step of the trainer, with the step and how the last
    groups went, for the options with which groups begin from then on."""

    # Learner
    updates: int = _setting(100, "learner", "train", ge=0)
    """Optimizer steps, each followed by a new version of the adapter in the engine."""
    groups_per_update: int = _setting(8, "learner", "train", ge=1)
    """Groups in each update."""
    learning_rate: float = _setting(2e-4, "learner", "train", gt=0)
    """Peak learning rate of GRPO."""
    warm_up_updates: int = _setting(0, "learner", "train", ge=0)
    """Updates over which the learning rate rises to its peak."""
    learning_rate_end: float = _setting(1.0, "learner", "train", ge=0, le=1)
    """Share of the peak learning rate that is left at the last update; the way there is linear."""
    reduction: Literal["token_mean", "seq_mean", "constant", "episode_sum"] = _setting(
        "token_mean", "learner", "train"
    )
    """What the loss is divided by."""
    drop_equal: bool = _setting(True, "learner", "train")
    """Leave out groups whose scores are all equal."""
    entropy: float = _setting(0.0, "learner", "train", ge=0)
    """Coefficient of the entropy bonus at the first update."""
    entropy_end: float | None = _setting(None, "learner", "train", gt=0)
    """Coefficient at the last update (geometric in between, so `entropy` must be above 0); null: constant."""
    entropy_over: Literal["ids", "answers"] = _setting("ids", "learner", "train")
    """Entropy over all ids, or over the environment's answers only."""
    sub_batches: int = _setting(1, "learner", "train", ge=1)
    """Length-sorted pieces that an update is cut into at least; less padding where rows differ in length."""
    max_staleness: int = _setting(0, "learner", "train", ge=0)
    """Oldest version that is learned from, counted back from the newest."""
    engine_check: bool | None = _setting(None, "learner", "train")
    """Try the engine before learning: ids, logprobs, temperature, an adapter; null: unless it is in this
    process."""
    slope_test: bool | None = _setting(None, "learner", "train")
    """After each update test that the engine sampled with the new weights (costs a forward of the learner);
    null: unless the engine is in this process, or unknown behind a server."""
    lora_rank: int = _setting(16, "learner", "train", ge=1)
    """Rank of the adapter."""
    lora_alpha: int = _setting(32, "learner", "train", ge=1)
    """Scale of the adapter: its output is multiplied by alpha / rank."""
    checkpoint_every: int = _setting(10, "learner", "train", ge=1)
    """Updates between checkpoints; `train --resume` goes on from the last one."""

    # Server
    server: str | None = _setting(None, "server", "train")
    """URL of a running batch server that environments post to; null: local collection, or, in the main job,
    a server of the run's own."""
    own_server: bool = _setting(False, "server", "train")
    """Start a batch server of the run's own on a free loopback port and collect through it."""

    # The batch server
    host: str = _setting("127.0.0.1", "address", "serve serve-model")
    """Address to listen on. One that other machines can reach, such as 0.0.0.0, needs a token."""
    port: int = _setting(8000, "address", "serve serve-model", ge=0, le=65535)
    """Port to listen on; 0 takes a free one and prints it."""

    store: str | None = _setting(
        None, "what is kept", "serve", shown="~/.local/state/atropos_gym/server-PORT.sqlite", metavar="FILE"
    )
    """File in which the server keeps what it accepted, and from which it goes on when it is started again; or
    `memory`, which ends with the process and is what `--port 0` takes."""
    fresh: bool = _setting(False, "what is kept", "serve")
    """Forget what is in the file and start anew."""
    fsync: bool = _setting(False, "what is kept", "serve")
    """Wait for the disk before a group is called received: then it survives a power failure too, not only a
    crash of the server."""
    memory_bytes: Size = _setting(2**30, "what is kept", "serve", shown="1GiB", metavar="SIZE", ge=0)
    """So much of what is queued is held in memory; the rest lies in the file until it goes out."""
    hard_bytes: Size | None = _setting(None, "what is kept", "serve", shown="16GiB", metavar="SIZE", ge=0)
    """So much is kept in all; beyond it posts are refused for now (503). In memory alone it is half of the
    machine's memory at most."""

    token: str | None = _setting(
        None, "who may ask", "serve serve-model", shown="$ATROPOS_GYM_TOKEN, else none"
    )
    """What callers must show, as `Authorization: Bearer TOKEN` or in a URL such as http://x:TOKEN@host:8000.
    Other users of the machine can see flags, but not the variable."""
    env_token: str | None = _setting(
        None, "who may ask", "serve", shown="$ATROPOS_GYM_ENV_TOKEN, else none", metavar="TOKEN"
    )
    """A second token, good only for what environments call."""
    insecure: bool = _setting(False, "who may ask", "serve serve-model")
    """Let other machines in without a token."""
    cors_origin: str | None = _setting(None, "who may ask", "serve", shown="none")
    """Web pages that may call the server, by origin, such as https://board.example, with commas between."""

    tokenizer: str | None = _setting(None, "dashboard", "serve", shown="none: numbers", metavar="NAME")
    """Tokenizer, by name or folder, with which the page at /dashboard shows ids as text."""

    soft_groups: int | None = _setting(
        None, "when too much is queued", "serve", shown="4 batches for each environment", ge=0
    )
    """So many groups may be queued before answers to posts are held back."""
    hold_seconds: float = _setting(60.0, "when too much is queued", "serve", ge=0, le=240)
    """How long an answer is held back, in seconds: that slows environments down, and loses nothing."""

    short_batch_seconds: float = _setting(30.0, "batches", "serve", ge=0)
    """Where no groups sum to the batch size for so many seconds, a smaller batch goes out; a trainer that
    registers with `exact_batches` never gets one."""
    min_wait_seconds: float = _setting(30.0, "batches", "serve", ge=0)
    """So many seconds does a batch wait for an environment with a minimum share that sends nothing."""
    buffer_seconds: float = _setting(60.0, "batches", "serve", ge=0)
    """So many seconds do parts of a group wait for the missing ones."""
    max_deliveries: int = _setting(5, "batches", "serve", ge=1)
    """A group that was handed out so often and never acknowledged is set aside."""

    env_timeout: float = _setting(120.0, "who has gone", "serve", gt=0)
    """An environment that was silent for so many seconds counts as disconnected, until its next call."""
    trainer_timeout: float = _setting(60.0, "who has gone", "serve", gt=0)
    """A trainer that was silent for so many seconds may be replaced by one with other settings."""

    max_body_bytes: Size = _setting(
        256 * 2**20, "bodies", "serve serve-model", shown="256MiB", metavar="SIZE", ge=1
    )
    """Largest body of a request, after inflation."""
    foreign_masks: Literal["refuse", "keep"] = _setting("refuse", "bodies", "serve")
    """What becomes of groups whose masks are neither -100 nor the id, such as 0 and 1: refused, or kept as
    they are, counted and shown, for a trainer that knows what they mean."""

    # What programs may do
    reply_tokens: int = _setting(512, "programs", "serve-model", ge=1)
    """Most ids of one reply; a request may ask for fewer."""
    wishes: Literal["session", "request", "refuse"] = _setting("session", "programs", "serve-model")
    """What becomes of a request's own temperature, top_p and so on: ignored and counted, so that every reply
    can be trained on; followed, and not trained what was sampled otherwise; or refused."""
    alternatives: Literal["train", "drop"] = _setting("train", "programs", "serve-model")
    """Replies that a program did not go on from, though it did from another one to the same prompt: trained
    like the others, or left out."""
    idle_seconds: float = _setting(3600.0, "programs", "serve-model", gt=0)
    """A group without a request for so long is given up and counted."""

    # Evaluation
    episodes: int = _setting(1000, "evaluation", "train eval collect", ge=2)
    """Episodes of each evaluation."""
    final_episodes: int | None = _setting(None, "evaluation", "train", ge=2)
    """Episodes of the last evaluation; null: as many as the others."""
    eval_every: int = _setting(10, "evaluation", "train", ge=1)
    """Updates between exact values on the learning curve (Blackjack only)."""
    evaluate_every: int | None = _setting(None, "evaluation", "collect", shown="none", ge=1)
    """Steps of the trainer from one evaluation by the service to the next; none is skipped where the step
    jumps."""
    evaluate_split: str | None = _setting(None, "evaluation", "collect", shown="the one that it plays")
    """Split of the data that the service evaluates on, such as `test`."""
    deterministic: bool = _setting(True, "evaluation", "eval")
    """Play greedily; `--no-deterministic` samples at temperature 1."""

    # Run
    name: str | None = _setting(None, "run", "train collect serve-model", shown="the task's name")
    """Name of the run's folder, by default with the next free number; for `collect` and `serve-model`, of the
    environment at the server."""
    runs: Path = _setting(Path("runs"), "run", "train")
    """Folder that holds the runs."""
    seed: int = _setting(0, "run", "train collect eval play serve-model", ge=0)
    """Seed of weights, starts and sampling."""

    @classmethod
    def reads(cls, verb: str) -> list[str]:
        """Returns the names of the fields that a verb reads, in order.

        Example:
            >>> Config.reads("serve")
            ['host', 'port', 'store', 'fresh', 'fsync', 'memory_bytes', 'hard_bytes', 'token', ...]
        """
        return [name for name in cls.model_fields if verb in cls.about(name)["verbs"]]

    @classmethod
    def about(cls, name: str) -> dict[str, Any]:
        """Returns section, verbs, description, and how default and value are shown, of a field."""
        field = cls.model_fields[name]
        extra = field.json_schema_extra
        assert isinstance(extra, dict)
        return {**extra, "description": " ".join((field.description or "").split())}

    @property
    def env_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of the environment, history among them where it is set."""
        return self.env_args | ({"history": self.history} if self.history is not None else {})

    @property
    def engine_kwargs(self) -> dict[str, Any]:
        """Keyword arguments of the engine, with what has settings of its own."""
        kwargs = dict(self.engine_args)
        if self.vllm_python is not None:
            kwargs["python"] = str(self.vllm_python)
        if self.swap != "hot_swap":
            kwargs["swap"] = self.swap
        return kwargs

    @property
    def secrets(self) -> list[str]:
        """Where secrets stand that are not written down, and that a run needs again to go on.

        Example:
            >>> Config(engine="vllm:http://me:s3cret@host", engine_args={"api_key": "s3cret"}).secrets
            ['engine', 'engine_args.api_key']
        """
        return [place for name in HIDING for place in secrets_in(getattr(self, name), name)]

    def to_yaml(self) -> str:
        """Returns the whole configuration as YAML, each field under its description.

        Secrets are never written down: whoever goes on has them in variables, or says them again.
        """
        values = self.model_dump(mode="json")
        values |= dict.fromkeys(TOKENS) | {name: without_secrets(values[name]) for name in HIDING}
        lines: list[str] = []
        section = None
        for name in type(self).model_fields:
            about = self.about(name)
            if about["section"] != section:
                section = about["section"]
                lines += ([""] if lines else []) + [f"# ---- {section}"]
            lines += textwrap.wrap(about["description"], 100, initial_indent="# ", subsequent_indent="# ")
            # Escaped, not as Unicode: PyYAML writes some line ends bare and reads them back as blanks.
            lines.append(yaml.safe_dump({name: values[name]}, sort_keys=False).rstrip())
        return "\n".join(lines) + "\n"


#: What ``train`` without ``--env``, ``--policy`` and ``--config`` takes in place of the defaults: a tiny
#: language model learns Blackjack from random weights, through a batch server over HTTP.
MAIN_JOB: dict[str, Any] = {
    "env": "atropos/Blackjack-v0",
    "env_args": {"describe": "terse"},
    "history": "latest",
    "policy": "tiny",
    "warm_up": 350,
    "check_lesson": True,
    "group_size": 8,
    "groups_per_update": 96,
    "updates": 200,
    "concurrency": 768,
    "common_random_numbers": True,
    "learning_rate": 2e-3,
    "warm_up_updates": 5,
    "learning_rate_end": 0.1,
    "reduction": "episode_sum",
    "drop_equal": False,
    "entropy": 0.4,
    "entropy_end": 0.02,
    "entropy_over": "answers",
    "sub_batches": 3,
    "own_server": True,
    "episodes": 4096,
    "final_episodes": 10_000,
}


def nearest(word: str, known: Iterable[str], n: int = 3) -> str:
    """Returns ``; nearest: a, b`` for a message, or the empty string where nothing is near.

    Example:
        >>> nearest("updats", ["updates", "seed"])
        '; nearest: updates'
    """
    close = difflib.get_close_matches(word, list(known), n=n, cutoff=0.5)
    return f"; nearest: {', '.join(close)}" if close else ""


def load_yaml(path: Path) -> dict[str, Any]:
    """Reads a configuration file: a mapping from field names to values.

    Raises:
        MissingData: no such file.
        ConfigError: not YAML, not a mapping, or a key that is no field.
    """
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MissingData(
            f"no configuration file {str(path)!r}; `--dry-run` prints one to start from"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {str(path)!r} as a configuration file: {error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "unreadable"
        raise ConfigError(f"{path}{where}: not valid YAML ({problem}); one `name: value` a line") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected `name: value` lines, got a {type(values).__name__}")
    for key in values:
        if key not in Config.model_fields:
            hint = nearest(str(key), Config.model_fields) or "; `--dry-run` prints them all"
            raise ConfigError(f"{path}: unknown setting {key!r}{hint}")
    return values


def resolve(
    verb: str, flags: Mapping[str, Any], file: Path | None = None, *, main_job: bool = True
) -> Config:
    """Merges flags over file over defaults (the main job's where it applies).

    Args:
        verb: the verb that will read the configuration.
        flags: the fields given as flags; ``env_args`` and ``engine_args`` add to what file or preset say.
        file: ``--config``.
        main_job: whether the main job's values may replace defaults.

    Raises:
        ConfigError: a value out of range; the message names field, value and where it came from.

    Example:
        >>> resolve("train", {}).groups_per_update
        96
        >>> resolve("train", {"env": "atropos/Taxi-v0"}).groups_per_update
        8
    """
    named = file is not None or "env" in flags or "policy" in flags
    preset = main_job and verb == "train" and not named
    values = dict(MAIN_JOB) if preset else {}
    from_file = load_yaml(file) if file is not None else {}
    values |= from_file
    several = ("env_args", "engine_args")
    values |= {name: value for name, value in flags.items() if name not in several}
    for name in several:
        if name in flags:
            values[name] = {**(values.get(name) or {}), **flags[name]}
    if preset and "server" in flags:
        values["own_server"] = False
    try:
        config = Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_one_line(error, flags, file)) from None
    if config.entropy_end is not None and config.entropy == 0:
        raise ConfigError(
            f"entropy is 0, so it cannot go to entropy_end={config.entropy_end}; give --entropy"
        )
    if config.server is not None and config.own_server:
        shown = without_token(config.server)
        raise ConfigError(f"server is {shown!r} and own_server is true; leave one of them out")
    return config


def _one_line(error: ValidationError, flags: Mapping[str, Any], file: Path | None) -> str:
    """The first complaint of pydantic as a line for a person."""
    first = error.errors(include_url=False)[0]
    name = str(first["loc"][0])
    said = f"--{name.replace('_', '-')}" if name in flags else f"{file}: {name}" if file else name
    message = first["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    return f"{said}: {message}" + ("" if name in (*TOKENS, *HIDING) else f", got {first['input']!r}")
