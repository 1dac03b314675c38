"""Progress on stderr: a bar in a terminal, a line now and then elsewhere (a log, CI)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["Show", "Update"]

#: Called as ``update(done, note)``: how much is done, and a note such as the present return.
Update = Callable[..., None]


class Show:
    """Shows what a command is doing.

    Args:
        console: where; None is stderr.
        every: seconds between lines where there is no terminal.

    Example:
        >>> import io
        >>> show = Show(Console(file=io.StringIO()))
        >>> with show.bar("format lesson", 2) as update:
        ...     update(1, "loss 0.5")
        ...     update(2, "loss 0.4")
    """

    def __init__(self, console: Console | None = None, *, every: float = 10.0) -> None:
        self.console = console if console is not None else Console(stderr=True, highlight=False)
        self.every = every

    def say(self, text: str) -> None:
        """Prints one line."""
        self.console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def bar(self, title: str, total: int) -> Iterator[Update]:
        """Shows one piece of work; the bar stays when it is done."""
        if self.console.is_terminal:
            with self._progress() as progress:
                task = progress.add_task(title, total=total, note="")

                def move(done: int, note: str = "") -> None:
                    progress.update(task, completed=done, note=note)

                yield move
            return
        started = last = time.monotonic()
        line = ""

        def update(done: int, note: str = "") -> None:
            nonlocal last, line
            now = time.monotonic()
            line = f"{title}: {done}/{total} {note}".rstrip()
            if now - last >= self.every and done < total:
                last = now
                self.say(f"{line}  ({now - started:.0f} s)")

        yield update
        self.say(f"{line or title}  ({time.monotonic() - started:.1f} s)")

    def _progress(self) -> Progress:
        return Progress(
            TextColumn("{task.description:<24}"),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=self.console,
        )
