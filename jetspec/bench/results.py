"""The file that a run writes, and what it needs to know of it to go on where it stopped."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

from jetspec.bench.records import Cell, Failure, Group, Header, Record, read_run, to_line
from jetspec.errors import JetSpecError
from jetspec.files import write_atomically

RESULTS = "results.jsonl"


class Results:
    """Records of a run, each written through as it comes. A context: it closes the file.

    What an earlier call of the same run measured stays; its failures are dropped, to be tried again.

    Raises:
        JetSpecError: the folder holds the results of another run, or of something else, or cannot be written to.
    """

    def __init__(self, folder: Path, header: Header) -> None:
        self.path = folder / RESULTS
        self.header = header
        groups: list[Group] = []
        if self.path.exists():
            run = read_run(self.path)
            check_same(run.header, header, folder)
            groups = run.groups
            self.header = header.replace(peak_resident_bytes=run.header.peak_resident_bytes)
        self.known: set[tuple[Cell, int]] = {(group.cell, group.index) for group in groups}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            rewrite(self.path, [self.header, *groups])
            self._file = self.path.open("a", encoding="utf-8")
        except OSError as error:
            raise JetSpecError(f"--output {folder}: cannot be written to: {error}; name another folder") from error

    def __enter__(self) -> Results:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        peaks = [peak for peak in (self.header.peak_resident_bytes, peak_resident_bytes()) if peak is not None]
        self.write(self.header.replace(peak_resident_bytes=max(peaks, default=None)))
        self._file.close()

    def write(self, record: Group | Failure | Header) -> None:
        self._file.write(to_line(record))
        self._file.flush()


def check_config(folder: Path, config: dict[str, Any]) -> None:
    """JetSpecError where a folder holds the results of another configuration: before anything is loaded."""
    path = folder / RESULTS
    if path.exists():
        header = read_run(path).header
        check_same(header, header.replace(config={**header.config, **config}), folder)


def check_same(before: Header, now: Header, folder: Path) -> None:
    """JetSpecError, naming what differs, unless two headers are of the same run."""
    for part in ("config", "machine"):
        old, new = (flat(getattr(header, part)) for header in (before, now))
        for name in {**old, **new}:
            if old.get(name) != new.get(name):
                raise JetSpecError(
                    f"--output {folder}: holds a run with {name}={old.get(name)!r}, this one has {new.get(name)!r}; "
                    "give another folder, or the same settings to go on"
                )


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested names joined by dots."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found.update(flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value})
    return found


def rewrite(path: Path, records: Iterable[Record]) -> None:
    """Write all records to a file, which is replaced as a whole."""
    write_atomically(path, "".join(map(to_line, records)).encode())


def peak_resident_bytes() -> int | None:
    """Most memory this process had resident; None where the system does not tell."""
    if os.name != "posix":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
