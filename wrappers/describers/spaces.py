"""Any observation in words: its values as JSON, floats with four digits, led by the space's own names.

Discrete actions are named where the simulator itself has names for them.
"""

from __future__ import annotations

import copy
import enum
import json
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from atropos_gym.errors import ConfigError
from atropos_gym.wrappers.describers.base import Describer

__all__ = ["MAX_NUMBERS", "SpaceDescriber", "TerseSpaceDescriber", "say_number"]

MAX_NUMBERS = 1024
"""An observation with more numbers than this is a picture, and has to be put into words by its owner."""

_NUMBER_CHARS = 12
"""Most characters of a number with four digits and the blank or comma after it: ``-1.234e-05, ``."""

_LEAD = "Observation"
"""What stands before values that have no name of their own."""

_TEXT_CHARS = 256
"""Assumed for texts whose space names no length."""


def say_number(value: float) -> int | float:
    """Returns a number as it is said: four digits, whole where it is whole.

    Example:
        >>> say_number(0.0273956), say_number(-2.0), say_number(-1.23456e-05)
        (0.0274, -2, -1.235e-05)
    """
    near = float(f"{value:.4g}")
    return int(near) if near.is_integer() and abs(near) < 1e6 else near


class SpaceDescriber(Describer):
    """Describes by the observation space alone; ``Dict`` entries each on a line of their own.

    Raises:
        ConfigError: the space cannot be put into words: a ``Graph``, a space of one's own whose members are
            no texts or numbers, or a picture.

    Example:
        >>> print(SpaceDescriber(gymnasium.make("CartPole-v1")).describe(np.array([0.02739, -1, 0, 2e-5])))
        Observation: [0.02739, -1, 0, 2e-05]
    """

    def __init__(self, simulator: gymnasium.Env[Any, Any]) -> None:
        spec = simulator.spec
        self._name = type(simulator.unwrapped).__name__ if spec is None else spec.id
        space = simulator.observation_space
        try:
            self._parts = self._entries(space)
            numbers, chars = _size(space)
        except _Unspoken as error:
            raise ConfigError(
                f"the observation space of {self._name} has no words for {error}: give describe=, a function "
                f"from its observation to text, or make it with render_mode='ansi'"
            ) from None
        if numbers > MAX_NUMBERS:
            raise ConfigError(
                f"an observation of {self._name} has {numbers} numbers, more than {MAX_NUMBERS}: give "
                f"describe=, a function from its observation to text, or make it with render_mode='ansi'"
            )
        self.max_chars = chars + sum(len((name or _LEAD).encode()) + 3 for name, _ in self._parts)
        self.names = _own_names(simulator.unwrapped)
        self._texts: dict[Any, str] | None = {} if isinstance(space, spaces.Discrete) else None

    @staticmethod
    def _entries(space: spaces.Space[Any]) -> list[tuple[str, Callable[[Any], Any]]]:
        """Returns the name of each line and what makes plain values of it; one without a name is all."""
        if isinstance(space, spaces.Dict):
            return [(key, _plainer(part)) for key, part in space.spaces.items()]
        return [("", _plainer(space))]

    def rules(self) -> str:
        """Returns which task it is."""
        return f"You act in {self._name}. Each turn you read an observation and answer with an action."

    def describe(self, observation: Any) -> str:
        """Returns the observation's values."""
        if self._texts is None:
            return self._say(observation)
        text = self._texts.get(observation)
        if text is None:
            text = self._say(observation)
            if len(self._texts) < MAX_NUMBERS:
                self._texts[observation] = text
        return text

    def _say(self, observation: Any) -> str:
        lines = []
        for name, plain in self._parts:
            value = plain(observation[name] if name else observation)
            if isinstance(value, str):
                lines.append(f"{name}: {value}" if name else value)
            else:
                lines.append(f"{name or _LEAD}: {_lines(value)}")
        return "\n".join(lines)


class TerseSpaceDescriber(SpaceDescriber):
    """The values alone, the same text in every turn.

    Example:
        >>> TerseSpaceDescriber(gymnasium.make("CartPole-v1")).describe(np.array([0.02739, -1, 0, 0.3]))
        '[0.02739, -1, 0, 0.3]'
    """

    terse = True

    def rules(self) -> str:
        """Returns nothing: the state is all that is said."""
        return ""

    def _say(self, observation: Any) -> str:
        text = super()._say(observation)
        return text.removeprefix(f"{_LEAD}: ") if not self._parts[0][0] else text


def _own_names(simulator: Any) -> tuple[str, ...]:
    """Names that a simulator has for its actions: ``get_action_meanings``, or an enumeration ``actions``."""
    space = simulator.action_space
    if not isinstance(space, spaces.Discrete):
        return ()
    meanings = getattr(simulator, "get_action_meanings", None)
    listed = getattr(simulator, "actions", None)
    names: tuple[str, ...] = ()
    if callable(meanings):
        names = tuple(str(name).lower() for name in meanings())
    elif isinstance(listed, type) and issubclass(listed, enum.IntEnum):
        by_value = {int(member): name.lower() for name, member in listed.__members__.items()}
        names = tuple(by_value.get(int(space.start) + k, "") for k in range(len(by_value)))
    usable = len(names) == space.n == len(set(names)) and all(name.strip() for name in names)
    return names if usable else ()


class _Unspoken(Exception):
    """A space without words; the message names it."""


def _lines(value: Any) -> str:
    """JSON; an array of two or more dimensions with each of its rows on a line."""
    if isinstance(value, list) and value and isinstance(value[0], list):
        return "[" + ",\n ".join(_lines(row).replace("\n", "\n ") for row in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def _plainer(space: spaces.Space[Any]) -> Callable[[Any], Any]:
    """Returns what turns a space's members into lists, dicts, texts and numbers, these as they are said."""
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return lambda value: _said(np.asarray(value).tolist())
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary | spaces.Box):
        return lambda value: np.asarray(value).tolist()
    if isinstance(space, spaces.Text):
        return str
    if isinstance(space, spaces.Tuple):
        parts = [_plainer(part) for part in space.spaces]
        return lambda value: [plain(item) for plain, item in zip(parts, value, strict=True)]
    if isinstance(space, spaces.Dict):
        entries = [(key, _plainer(part)) for key, part in space.spaces.items()]
        return lambda value: {key: plain(value[key]) for key, plain in entries}
    if isinstance(space, spaces.Sequence):
        feature = _plainer(space.feature_space)
        return lambda value: [feature(item) for item in value]
    if isinstance(space, spaces.OneOf):
        choices = [_plainer(part) for part in space.spaces]
        return lambda value: [int(value[0]), choices[int(value[0])](value[1])]
    return _plainer_by_sample(space)


def _plainer_by_sample(space: spaces.Space[Any]) -> Callable[[Any], Any]:
    """Some packages bring spaces of their own; what a member looks like is all there is to know of them."""
    own = copy.deepcopy(space)
    own.seed(0)
    member = own.sample()
    if isinstance(member, str):
        return str
    if isinstance(member, bool | int | float | np.number) or (
        isinstance(member, np.ndarray) and member.dtype.kind in "biuf"
    ):
        return lambda value: _said(np.asarray(value).tolist())
    raise _Unspoken(repr(space))


def _said(value: Any) -> Any:
    if isinstance(value, list):
        return [_said(item) for item in value]
    return say_number(value) if isinstance(value, float) and np.isfinite(value) else value


def _size(space: spaces.Space[Any]) -> tuple[int, int]:
    """Most numbers and characters in what is said of a member; a length that nothing bounds counts once."""
    if isinstance(space, spaces.Text):
        return 0, 4 * space.max_length + 4  # a character takes up to four bytes
    if isinstance(space, spaces.Tuple | spaces.OneOf):
        return _sum([_size(part) for part in space.spaces])
    if isinstance(space, spaces.Dict):
        return _sum([_size(part) for part in space.spaces.values()], sum(map(len, space.spaces)))
    if isinstance(space, spaces.Discrete):
        return 1, max(len(str(space.start)), len(str(space.start + space.n - 1))) + 2
    if isinstance(space, spaces.Box) and not np.issubdtype(space.dtype, np.floating):
        widest = max(len(str(space.low.min(initial=0))), len(str(space.high.max(initial=0))))
        return _numbers(space, widest + 2)
    if isinstance(space, spaces.MultiDiscrete):
        return _numbers(space, len(str(space.nvec.max(initial=1))) + 2)
    if isinstance(space, spaces.MultiBinary):
        return _numbers(space, 3)
    if space.shape is not None and isinstance(space, spaces.Box):
        return _numbers(space, _NUMBER_CHARS)
    return 1, _TEXT_CHARS


def _numbers(space: spaces.Space[Any], chars: int) -> tuple[int, int]:
    """Numbers of an array, and its characters with brackets and line ends."""
    shape = space.shape or ()
    count = int(np.prod(shape, dtype=np.int64))
    rows = int(np.prod(shape[:-1], dtype=np.int64))
    return count, count * chars + rows * (4 + len(shape)) + 2


def _sum(sizes: list[tuple[int, int]], more: int = 0) -> tuple[int, int]:
    return sum(n for n, _ in sizes), sum(c + 6 for _, c in sizes) + more + 2
