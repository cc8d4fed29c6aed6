"""Stopping on request: SIGINT (Ctrl-C) and SIGTERM (schedulers, torchrun)."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """While entered, the first signal sets ``received``; the next does what it did before. Main thread only."""

    def __init__(self) -> None:
        self.received = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._take) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _take(self, _number: int, _frame: FrameType | None) -> None:
        self.received = True
        self.__exit__()
