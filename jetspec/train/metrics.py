"""The run's log, one JSON object a line; a resumed run cuts off what was written after its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class MetricsFile:
    """Appends to ``path`` after its first ``size`` bytes."""

    def __init__(self, path: Path, size: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")
        self._file.truncate(size)

    def write(self, **values: Any) -> int:
        """Write a line; returns the length of the file."""
        self._file.write(json.dumps(values).encode() + b"\n")
        self._file.flush()
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
