"""Writing files that are whole or absent, also after a kill."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A temporary file beside ``path``. It is flushed to disk and renamed to ``path``, or removed after an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path``, so that a reader never sees a part of it."""
    with atomic_file(path) as file:
        file.write(data)
