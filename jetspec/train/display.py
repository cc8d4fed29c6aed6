"""Progress of a training run on the console."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from jetspec.train.trainer import StepInfo

#: Weight of the past in the smoothed loss.
SMOOTHING = 0.98


class Display:
    """Progress bars on a terminal; elsewhere a line every ``log_every`` steps."""

    def __init__(self, console: Console, log_every: int) -> None:
        self.console = console
        self._log_every = log_every
        self._smoothed: float | None = None
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Display:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def say(self, text: str) -> None:
        """Print a line."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def track(self, name: str) -> Callable[[int, int, int], None]:
        """A bar for the work ``name``; call it with (items done, items in all, tokens written since it began)."""
        started = time.monotonic()

        def advance(done: int, total: int, tokens: int) -> None:
            speed = f"{tokens / (time.monotonic() - started):.0f} tokens/s" if tokens else ""
            self._advance(name, done, total, speed)
            if not self.console.is_terminal and done == total:
                self.say(f"{name}: {done} {speed}".rstrip())

        return advance

    def stepped(self, info: StepInfo) -> None:
        """Show an optimizer step, and what was measured after it."""
        past = info.loss if self._smoothed is None else self._smoothed
        self._smoothed = SMOOTHING * past + (1 - SMOOTHING) * info.loss
        note = (
            f"loss {info.loss:.3f} (smoothed {self._smoothed:.3f}), lr {info.learning_rate:.2e}, "
            f"{info.blocks_per_s:.0f} blocks/s"
        )
        self._advance("training", info.step, info.num_steps, note)
        if not self.console.is_terminal and info.step % self._log_every == 0:
            self.say(f"step {info.step}/{info.num_steps}: {note}")
        if info.measured:
            lengths = ", ".join(f"{m.acceptance_length:.3f} with {m.tree_budget} rows" for m in info.measured)
            self.say(f"step {info.step}: acceptance length {lengths} on held-out prompts")
        if info.differing:
            self.say(
                f"{info.differing} held-out prompts have different answers with different budgets, by near-ties of "
                "the target"
            )

    def _advance(self, name: str, done: int, total: int, note: str) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(name, total=total, note=note)
        self._bars.update(self._tasks[name], completed=done, total=total, note=note)
