"""``atropos-gym play``: a person plays in the terminal and sees what a policy would.

What is typed becomes the ids that a policy would have sampled for it (``ChatRenderer.say``); reward, what was
invalid and why, and the end are said after each turn.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import numpy as np

from atropos_gym.cli._transcript import Transcript, wants_colour
from atropos_gym.cli.command import Command
from atropos_gym.cli.environment import make_env
from atropos_gym.engines.base import Completion
from atropos_gym.errors import ConfigError
from atropos_gym.html import Fact, ShownRow, ShownTurn, Source, number, score_fact, stretches
from atropos_gym.messages import Message
from atropos_gym.rollout._rows import BrokenIds, RowBuilder
from atropos_gym.rollout._sources import row_sources
from atropos_gym.rollout.episode import Episode, Row, Turn
from atropos_gym.text_env import TextEnv
from atropos_gym.tokenizers.pieces import pieces_of

__all__ = ["run"]

_HELP = "Type a reply; a line that ends in \\ goes on in the next one. Ctrl-D leaves."


def run(command: Command) -> int:
    """Plays episode after episode, each with the next seed, until the person leaves."""
    config, options = command.config, command.options
    kwargs = config.env_kwargs
    if options["tokenizer"] is not None:
        kwargs = kwargs | {"tokenizer": options["tokenizer"]}
    env = make_env(command.target, kwargs)
    with suppress(ImportError):  # where there is one, lines can be edited
        importlib.import_module("readline")
    game = _Game(env, show_ids=options["show_ids"])
    game.say(f"{command.target} · tokenizer {env.tokenizer.name}\n{_HELP}")
    returns: list[float] = []
    try:
        for seed in count(config.seed):
            returns.append(game.play(seed))
            game.say(_standing(returns, env))
    except (EOFError, KeyboardInterrupt):
        game.say("\nleft" if game.over else "\nleft in the middle of an episode, which does not count")
    except BrokenIds as error:
        raise ConfigError(f"{command.target} breaks its own ids: {error}") from error
    finally:
        env.close()
    return 0


def _standing(returns: Sequence[float], env: TextEnv) -> str:
    """Returns the mean return so far beside what is known of the environment."""
    played = f"{len(returns)} episode{'s' if len(returns) > 1 else ''}"
    words = [f"mean return of {played}: {number(sum(returns) / len(returns))}"]
    words += [f"{name} {number(score)}" for name, score in env.scores.items()]
    return " · ".join(words)


class _Game:
    """One environment, played by a person.

    Args:
        env: played bare: no wrapper of Gymnasium's around it.
        show_ids: print a table of ids in place of running text.

    Attributes:
        over: whether no episode is going on.
    """

    def __init__(self, env: TextEnv, *, show_ids: bool) -> None:
        self.over = True
        self._env = env
        self._show_ids = show_ids
        self._pieces = pieces_of(env.tokenizer)
        self._transcript = Transcript(colour=wants_colour(sys.stdout), ids=show_ids)

    def say(self, text: str) -> None:
        """Prints text at once, whatever of it the terminal can show."""
        print(text.encode("utf-8", "replace").decode("utf-8"), flush=True)

    def play(self, seed: int) -> float:
        """Plays one episode and returns its return.

        Raises:
            EOFError: the person left.
            BrokenIds: the environment changed ids within a segment.
        """
        env = self._env
        observation, info = env.reset(seed=seed)
        self.over = False
        self.say(f"\n==== episode of seed {seed}")
        rows = RowBuilder(observation, info["segment"])
        turn = heard = segment = 0
        while not self.over:
            if len(rows.rows) - 1 > segment:
                segment += 1
                self.say(self._transcript.border(segment, _shown(rows.rows[-1], None)))
            self._show_prompt(rows, env.messages[heard:])
            ids, cut = self._reply(info)
            rows.sample(Completion(tuple(ids), None, "stop", trainable="typed"), frozenset(env.stop_ids))
            heard = len(env.messages) + 1
            observation, reward, terminated, truncated, info = env.step(np.array(ids, dtype=np.int32))
            self.over = terminated or truncated
            rows.hear(env.messages, None if self.over else heard)
            row = rows.rows[-1]
            rows.observe(observation, info["segment"], reward=float(reward), ended=self.over, info=info)
            self._show_turn(row, turn, cut)
            turn += 1
        self._show_end(rows.rows, info, truncated)
        return float(sum(turn.reward for row in rows.rows for turn in row.turns))

    def _reply(self, info: dict[str, Any]) -> tuple[list[int], bool]:
        """Asks for a reply and returns its ids, and whether they had to be cut."""
        limit = int(info["max_new_tokens"])
        facts: list[Fact] = [(f"at most {limit} ids", "")]
        if info.get("legal_actions"):
            facts.append((f"legal: {', '.join(map(str, info['legal_actions']))}", ""))
        self.say(f"your turn · {self._transcript.facts(facts)}")
        typed = sys.stdin.isatty()
        lines = [input("> " if typed else "")]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(input("  " if typed else ""))
        if not typed:  # nobody saw it
            self.say("> " + "\n  ".join(lines))
        ids = self._env.renderer.say("\n".join(lines))
        return ids[:limit], len(ids) > limit

    def _show_prompt(self, rows: RowBuilder, messages: Sequence[Message]) -> None:
        """Prints what the policy now reads and has not read before: a prompt or a bridge."""
        row = rows.rows[-1]
        # As if the reply had been empty: then the row can be explained like any other.
        here = len(row.ids)
        reply = Message(role="assistant", content="")
        asked = Row(
            row.ids,
            row.mask,
            row.logprobs,
            [*row.turns, Turn(here, here, 0.0, 0, cut=True)],
            [*row.messages, *messages, reply],
        )
        shown = _shown(asked, row_sources(_episode([*rows.rows[:-1], asked]), self._env.renderer)[-1])
        *_, stretch, _empty = stretches(shown)
        self.say(self._transcript.head(shown, stretch, self._pieces, 0))
        for line in self._transcript.ids(shown, stretch, self._pieces):
            self.say(line)

    def _show_turn(self, row: Row, turn: int, cut: bool) -> None:
        """Prints what became of the reply, and with ``--show-ids`` the reply itself."""
        shown = _shown(row, None)
        stretch = [stretch for stretch in stretches(shown) if stretch.kind == "turn"][len(row.turns) - 1]
        if cut:
            self.say(f"cut to {stretch.end - stretch.start} ids, as a model's reply would be")
        self.say(self._transcript.head(shown, stretch, self._pieces, turn))
        if self._show_ids:
            for line in self._transcript.ids(shown, stretch, self._pieces):
                self.say(line)

    def _show_end(self, rows: Sequence[Row], info: dict[str, Any], truncated: bool) -> None:
        """Prints what was said at the end, and how it ended."""
        facts: list[Fact] = [(str(info.get("end_reason", "ended")), "")]
        if truncated:
            facts.append(("truncated", "bad"))
        if info.get("success") is not None:
            facts.append(("solved", "good") if info["success"] else ("not solved", "bad"))
        facts.append(score_fact(float(sum(turn.reward for row in rows for turn in row.turns)), "return"))
        for message in _after_reply(self._env.messages):
            for line in self._transcript.message(message, "at the end, read by no policy"):
                self.say(line)
        self.say(f"end · {self._transcript.facts(facts)}")


def _shown(row: Row, sources: Sequence[Source] | None) -> ShownRow:
    """Returns a row as it is drawn: what is typed has no logprob and no version."""
    turns = [ShownTurn(turn.start, turn.end, turn.reward, None, turn.cut, turn.info) for turn in row.turns]
    return ShownRow(row.ids, row.mask, None, sources, turns)


def _episode(rows: list[Row]) -> Episode:
    """Returns rows as an episode that is going on."""
    return Episode(rows, [], [], "", None, truncated=False, invalid_turns=0, seed=0, member=0)


def _after_reply(messages: Sequence[Message]) -> list[Message]:
    """Returns what was said behind the last reply."""
    last = max(index for index, message in enumerate(messages) if message["role"] == "assistant")
    return list(messages[last + 1 :])
