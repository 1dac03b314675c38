"""From words to a ``Command``: the verb, its configuration, and the few switches that are no settings.

Every field of ``Config`` that a verb reads is a flag of it. argparse only splits the words; values are
checked by ``Config``, so that a flag and a line of YAML are judged by the same rules.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, get_args

import yaml

from atropos_gym import __version__
from atropos_gym.cli.config import AGAIN, VERBS, Config, nearest, resolve
from atropos_gym.errors import ConfigError

__all__ = ["Command", "pairs", "parse"]

#: Fields that are mappings, with the flag that is given once for each of their entries.
REPEATED = {"env_args": "--env-arg", "engine_args": "--engine-arg"}

#: What some verbs are about: a word that is no flag, and what ``--help`` says of it.
TARGETS = {
    "collect": ("ENV", "the same as --env ENV"),
    "play": (
        "ENV",
        "an environment's id (`atropos-gym envs` lists the ready ones), or module:Class. Every line that is "
        "typed is a reply; one that ends in a backslash goes on in the next line. Ctrl-D leaves",
    ),
    "view": ("FILE", "groups that `collect` wrote (.jsonl), or bodies of /scored_data as JSON"),
    "check-model": ("NAME", "a model's name or folder (no weights are read), or bytes"),
    "check-engine": (
        "SPEC",
        "hf:PATH, vllm:URL (a server that runs), or vllm (one is started, with --vllm-python and --model)",
    ),
}

#: What ``--help`` of some verbs says at the end.
EPILOGS = {
    "serve": """\
Without flags it listens on http://127.0.0.1:8000, keeps what it has accepted in a file, and goes on from
there when it is started again. A trainer registers and asks for batches; environments register and post
groups (`atropos-gym collect ID --to URL`, or any environment of Atropos). http://127.0.0.1:8000/dashboard
shows the run in a browser, GET /health says what is wrong, GET /metrics is for Prometheus.

It runs in the foreground and prints one line once it answers. Ctrl-C or SIGTERM ends it: whoever waits is
answered, and nothing that it has accepted is lost. A second server on the same file or port is refused.
Under systemd: Type=notify, ExecStart=/path/to/atropos-gym serve --store /var/lib/NAME/server.sqlite""",
    "serve-model": """\
  atropos-gym serve-model --policy MODEL --port 8001 [--to http://127.0.0.1:8000]

POST /sessions {"group_size": 4} opens a group and says which base URL and api key each member's program gets;
the program calls /v1/chat/completions there as it would OpenAI's. POST /sessions/ID/finish {"scores": [...]}
gives the group, id for id as it was sampled, or posts it where --to says. In Python,
atropos_gym.model_server.AgentCollector does both; examples/agent_with_tools.py is a whole program.

It prints one line once it answers. Ctrl-C or SIGTERM ends it, and it says what became of the groups.""",
    "collect": """\
Into a file, to look at:
  atropos-gym collect atropos/Taxi-v0 --policy runs/x --groups 4 --out taxi.html

For a trainer, for days on end; started again after a crash, it goes on where it was:
  atropos-gym collect atropos/GSM8K-v0 --policy org/model --to http://127.0.0.1:8000 \\
      --spool spool/gsm8k --each-item --evaluate-every 50 --evaluate-split test

Ctrl-C or SIGTERM ends it: it takes its leave of the server, and what is in the spool stays there.""",
}

#: Options of some verbs that are no settings of a run, with what argparse is told of each.
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "check-model": {
        "template": {
            "type": Path,
            "metavar": "FILE",
            "help": "Jinja template in place of the tokenizer's own",
        },
        "template_kwarg": {
            "action": "append",
            "default": [],
            "metavar": "KEY=VALUE",
            "help": "a variable of the template, such as enable_thinking=false; as often as needed",
        },
        "stop_id": {
            "action": "append",
            "type": int,
            "metavar": "ID",
            "help": "an id that ends a turn, as often as needed [those of model and template]",
        },
        "past": {
            "choices": ("append", "template"),
            "default": "append",
            "help": "earlier turns stay as sampled, or the template writes them anew each turn [append]",
        },
        "rows": {"type": int, "metavar": "N", "help": "rows of the model's embedding [its config.json's]"},
        "json": {"action": "store_true", "help": "print JSON for programs in place of the table"},
    },
    "check-engine": {
        "model": {
            "metavar": "PATH",
            "help": "the learner's model, to compare logprobs and adapters with [for hf: the engine's own]",
        },
        "adapter_dir": {
            "type": Path,
            "metavar": "DIR",
            "help": "where the run will write its adapters; the engine must see it under the same path "
            "[a temporary folder]",
        },
        "temperature": {"type": float, "default": 1.0, "metavar": "X", "help": "of the run's sampling [1.0]"},
        "dtype": {
            "choices": ("float32", "bfloat16", "float16"),
            "default": "float32",
            "help": "precision that is declared of learner and engine [float32]",
        },
        "lora_rank": {"type": int, "default": 16, "metavar": "N", "help": "rank of the run's adapters [16]"},
        "vllm_python": {
            "type": Path,
            "metavar": "PATH",
            "help": "the interpreter of vLLM's own environment, to start a server with",
        },
        "api_key": {
            "metavar": "KEY",
            "help": "the server's [the variable VLLM_API_KEY, SGLANG_API_KEY or OPENAI_API_KEY]",
        },
        "json": {"action": "store_true", "help": "print JSON for programs in place of the table"},
    },
    "play": {
        "tokenizer": {"metavar": "NAME", "help": "tokenizer by name or folder [bytes]"},
        "show_ids": {"action": "store_true", "help": "print every id: its piece, and who put it there"},
    },
    "serve": {
        "reload": {"action": "store_true", "help": "accepted for `run-api`'s sake; it has no effect"},
    },
    "view": {
        "out": {"type": Path, "metavar": "PAGE", "help": "page to write [FILE with the suffix .html]"},
        "terminal": {"action": "store_true", "help": "print text in place of a page"},
        "ids": {"action": "store_true", "help": "print a table of ids in place of a page"},
        "episode": {"type": int, "metavar": "N", "help": "only this one, counted from 0"},
        "tokenizer": {"metavar": "NAME", "help": "tokenizer by name or folder, where the file has no pieces"},
        "open": {"action": "store_true", "help": "open the page in the browser"},
    },
}


@dataclass(frozen=True)
class Command:
    """A parsed command line.

    Attributes:
        verb: one of ``VERBS``.
        config: the merged configuration.
        dry_run: print the configuration and do nothing.
        resume: ``train``: the run's folder to go on with.
        given: names of the fields that were given as flags.
        target: the word that is no flag, such as the model of ``check-model``.
        options: by name, those of ``OPTIONS``.
    """

    verb: str
    config: Config
    dry_run: bool = False
    resume: Path | None = None
    given: frozenset[str] = frozenset()
    target: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


def parse(words: Sequence[str]) -> Command | None:
    """Returns the command, or None where help or the version was asked for and printed.

    Raises:
        ConfigError: an unknown verb or flag, or a value that cannot be used; one line.

    Example:
        >>> parse(["eval", "--policy", "random", "--env-arg", "describe=terse"]).config.env_args
        {'describe': 'terse'}
    """
    parser = _parser()
    if not words:
        parser.print_help()
        return None
    if not words[0].startswith("-") and words[0] not in VERBS:
        hint = nearest(words[0], VERBS) or f"; verbs: {', '.join(VERBS)}"
        raise ConfigError(f"unknown verb {words[0]!r}{hint}")
    try:
        spoken, rest = parser.parse_known_args(words)
    except SystemExit:  # --help and --version, already printed
        return None
    if spoken.verb is None:
        raise ConfigError(f"no verb given; verbs: {', '.join(VERBS)}")
    if rest:
        _refuse(spoken.verb, rest[0])
    flags = _flags(spoken)
    if spoken.target and "env" in Config.reads(spoken.verb):
        if "env" in flags:
            raise ConfigError(f"two environments: {spoken.target} and --env {flags['env']}; give one")
        flags["env"] = spoken.target
    if spoken.verb == "train" and spoken.resume is not None:
        wrong = [_flag(name) for name in flags if name not in AGAIN]
        wrong += ["--config"] if spoken.config is not None else []
        if wrong:
            raise ConfigError(
                f"--resume takes its settings from {spoken.resume}/config.yaml; leave out {', '.join(wrong)}"
            )
        given = frozenset(flags)
        said = resolve("train", flags, main_job=False)
        return Command("train", said, spoken.dry_run, spoken.resume, given)
    config = resolve(spoken.verb, flags, spoken.config)
    return Command(
        spoken.verb,
        config,
        spoken.dry_run,
        given=frozenset(flags),
        target=spoken.target,
        options={name: getattr(spoken, f"option_{name}") for name in OPTIONS.get(spoken.verb, ())},
    )


class _Parser(argparse.ArgumentParser):
    """argparse whose complaints are exceptions of ours: one line, no usage block."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; `{self.prog} --help` lists the flags")


def _parser() -> _Parser:
    parser = _Parser(
        prog="atropos-gym",
        description="Gymnasium environments in token ids, a batch server, and GRPO for language models.",
        epilog="`atropos-gym VERB --help` lists a verb's flags.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"atropos-gym {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", parser_class=_Parser)
    for verb, line in VERBS.items():
        sub = verbs.add_parser(
            verb,
            help=line,
            description=line[0].upper() + line[1:] + ".",
            usage=f"atropos-gym {verb}{_usage(verb)} [options]",
            epilog=EPILOGS.get(verb),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        _add_switches(sub, verb)
        _add_fields(sub, verb)
    return parser


def _usage(verb: str) -> str:
    """The word that is no flag, as usage shows it."""
    if verb not in TARGETS:
        return ""
    word = TARGETS[verb][0]
    return f" [{word}]" if "env" in Config.reads(verb) else f" {word}"


def _add_switches(sub: argparse.ArgumentParser, verb: str) -> None:
    if verb in TARGETS:
        metavar, about = TARGETS[verb]
        optional = "env" in Config.reads(verb)  # where there is a flag for it too
        sub.add_argument("target", metavar=metavar, help=about, nargs="?" if optional else None)
    for name, settings in OPTIONS.get(verb, {}).items():
        flags = ["-o", "--out"] if name == "out" else [_flag(name)]
        sub.add_argument(*flags, dest=f"option_{name}", **settings)
    if Config.reads(verb):
        sub.add_argument(
            "--config", type=Path, metavar="FILE", help="YAML file of settings; flags win over it"
        )
        sub.add_argument(
            "--dry-run", action="store_true", help="print the whole configuration as YAML and stop"
        )
    sub.add_argument("--debug", action="store_true", help="show the traceback of an error")
    if verb == "train":
        sub.add_argument(
            "--resume",
            type=Path,
            metavar="RUN",
            help="go on with a run's folder, such as runs/x; besides, only settings that may hold a secret "
            "(which is never written down) can be given again: --server, --engine, --engine-arg",
        )
    sub.set_defaults(dry_run=False, config=None, target="")


def _add_fields(sub: argparse.ArgumentParser, verb: str) -> None:
    sections: dict[str, Any] = {}
    for name in Config.reads(verb):
        about = Config.about(name)
        if about["section"] not in sections:
            sections[about["section"]] = sub.add_argument_group(about["section"])
        group = sections[about["section"]]
        field = Config.model_fields[name]
        text = about["description"].replace("%", "%%")
        if name in REPEATED:
            group.add_argument(_flag(name), action="append", dest=name, metavar="KEY=VALUE", help=text)
        elif field.annotation is bool:
            _add_switch(group, name, text, default=field.default)
        else:
            metavar, shown = about["metavar"] or _metavar(name), about["shown"] or _shown(field.default)
            group.add_argument(_flag(name), metavar=metavar, help=f"{text} [{shown}]")


def _add_switch(group: Any, name: str, text: str, *, default: bool) -> None:
    """A switch that can be turned on and off; help shows the way that changes something."""
    off = _flag(name).replace("--", "--no-", 1)
    on_help, off_help = (f"{text} [on]", None) if default else (text, argparse.SUPPRESS)
    group.add_argument(_flag(name), action="store_const", const=True, dest=name, help=on_help)
    group.add_argument(off, action="store_const", const=False, dest=name, help=off_help)


def _flag(name: str) -> str:
    return REPEATED.get(name) or f"--{name.replace('_', '-')}"


def _metavar(name: str) -> str:
    """What ``--help`` shows for a value: its choices, or its type."""
    annotation = Config.model_fields[name].annotation
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)] or [annotation]
    words = [word for kind in kinds for word in (get_args(kind) or (kind,)) if isinstance(word, str)]
    if words:
        return "|".join(words)
    return {int: "N", float: "X", Path: "PATH"}.get(kinds[0], name.split("_")[-1].upper())


def _shown(default: Any) -> str:
    return "null" if default is None else str(default)


def _flags(spoken: argparse.Namespace) -> dict[str, Any]:
    """The fields that were given as flags; ``null`` is None, an environment's arguments are read as YAML."""
    flags: dict[str, Any] = {}
    for name, value in vars(spoken).items():
        if name not in Config.model_fields or value is None:
            continue
        if name in REPEATED:
            flags[name] = pairs(REPEATED[name], value)
        else:
            flags[name] = None if value == "null" else value
    return flags


def pairs(flag: str, words: Sequence[str]) -> dict[str, Any]:
    """Returns the KEY=VALUE words of a repeated flag; values are read as YAML.

    Raises:
        ConfigError: a word without a key.

    Example:
        >>> pairs("--env-arg", ["describe=terse", "size=8"])
        {'describe': 'terse', 'size': 8}
    """
    return dict(_pair(flag, word) for word in words)


def _pair(flag: str, word: str) -> tuple[str, Any]:
    key, equals, text = word.partition("=")
    if not equals or not key.isidentifier():
        examples = {"--env-arg": "describe=terse", "--engine-arg": "max_model_len=1024"}
        example = examples.get(flag, "enable_thinking=false")
        raise ConfigError(f"{flag} {word!r}: expected KEY=VALUE, such as {example}")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return key, text
    return key, text if isinstance(value, datetime.date) else value  # YAML's days are no JSON


def _refuse(verb: str, word: str) -> NoReturn:
    """Says why a word is no flag of a verb: another verb's, or misspelt."""
    if not word.startswith("-"):
        raise ConfigError(
            f"{verb}: unexpected {word!r}; values belong to flags (`atropos-gym {verb} --help`)"
        )
    flag = word.split("=")[0]
    name = flag.removeprefix("--").removeprefix("no-").replace("-", "_")
    name = {"env_arg": "env_args", "engine_arg": "engine_args"}.get(name, name)
    if name in Config.model_fields and verb not in Config.about(name)["verbs"]:
        others = ", ".join(Config.about(name)["verbs"])
        raise ConfigError(f"{verb} does not read {flag}; it belongs to {others}")
    known = [_flag(name) for name in Config.reads(verb)] + ["--config", "--dry-run", "--debug", "--resume"]
    known += map(_flag, OPTIONS.get(verb, ()))
    hint = nearest(flag, known) or f"; `atropos-gym {verb} --help` lists them"
    raise ConfigError(f"{verb}: unknown flag {flag}{hint}")
