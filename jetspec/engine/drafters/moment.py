"""Telling the parts of a draft apart in time, also where the host runs ahead of an accelerator."""

from __future__ import annotations

import time

import torch


class Moment:
    """When all work queued on a device so far is done: on a CPU, now."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))
        self._seconds = time.perf_counter()

    def since(self, earlier: Moment) -> float:
        """Seconds from `earlier`, a moment of the same device; waits until this one has come."""
        if self._event is None or earlier._event is None:
            return self._seconds - earlier._seconds
        self._event.synchronize()
        return earlier._event.elapsed_time(self._event) / 1e3
