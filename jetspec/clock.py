"""A clock that is right where the host runs ahead of an accelerator."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any

import torch


class Clock:
    """Seconds since it was made, split at `lap`s.

    On an accelerator the host runs ahead, so laps are events in the device's own order of work.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[str, float | torch.cuda.Event]] = [("", self._now())]

    def _now(self) -> float | torch.cuda.Event:
        if self._device.type != "cuda":
            return time.perf_counter()
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def lap(self, name: str) -> None:
        """What passed since the last lap belongs to `name`."""
        self._marks.append((name, self._now()))

    def seconds(self) -> dict[str, float]:
        """Seconds by lap, 0 for a lap that was not made; waits for the device to reach the last one."""
        last = self._marks[-1][1]
        if not isinstance(last, float):
            last.synchronize()
        seconds: defaultdict[str, float] = defaultdict(float)
        for (_, begin), (name, end) in zip(self._marks[:-1], self._marks[1:], strict=True):
            seconds[name] += _between(begin, end)
        return seconds


def _between(begin: Any, end: Any) -> float:
    """Seconds between two marks of one kind."""
    return float(end - begin) if isinstance(begin, float) else float(begin.elapsed_time(end)) / 1e3
