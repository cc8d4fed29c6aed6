"""The file that a run writes its records into, and the checks before a run is resumed there."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from jetspec.bench.records import Cell, Failure, Group, Header, Record, read_run, to_line
from jetspec.errors import JetSpecError
from jetspec.files import write_atomically

RESULTS = "results.jsonl"
LOCK = ".lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other runs from writing into a folder, which is created if there is none.

    The lock ends with the process, also if it is killed. Systems without ``flock`` have no lock.

    Raises:
        JetSpecError: another run holds the lock, or the folder cannot be written to.
    """
    path = folder / LOCK
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = _lock(path)
    except OSError as error:
        raise not_writable(folder, error) from error
    if file is None:
        holder = path.read_text(encoding="ascii", errors="replace") if path.exists() else ""
        raise JetSpecError(
            f"output={folder}: another run (process {holder or 'unknown'}) is writing into it; wait for its end, or "
            "name another folder"
        )
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        file.close()


def _lock(path: Path) -> TextIO | None:
    """The locked file at a path, which holds this process's id; None if another holder has it."""
    while True:
        file = path.open("a", encoding="ascii")
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            return file
        except BlockingIOError:
            file.close()
            return None
        # The holder before may have removed the file after it was opened here.
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            return file
        file.close()


class Results:
    """The records of a run, each written to the file when it comes. A context manager that closes the file.

    The groups that an earlier call of the same run measured stay. Its failures are dropped, because they are tried
    again.

    Raises:
        JetSpecError: the folder holds the results of another run or something else, or cannot be written to.
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
            raise not_writable(folder, error) from error

    def __enter__(self) -> Results:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        peaks = [peak for peak in (self.header.peak_resident_bytes, peak_resident_bytes()) if peak is not None]
        self.write(self.header.replace(peak_resident_bytes=max(peaks, default=None)))
        self._file.close()

    def write(self, record: Group | Failure | Header) -> None:
        """Write a record through to the file."""
        self._file.write(to_line(record))
        self._file.flush()


def check_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Raise JetSpecError if a folder holds the results of other settings. Needs no model, so it comes first."""
    path = folder / RESULTS
    if path.exists():
        header = read_run(path).header
        check_same(header, header.replace(config={**header.config, **settings}), folder)


def check_same(before: Header, now: Header, folder: Path) -> None:
    """Raise JetSpecError, which names every difference, unless two headers are of the same run."""
    old, new = ({**flat(header.config), **flat(header.machine)} for header in (before, now))
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    if names:
        there, here = (", ".join(f"{name}={values.get(name)!r}" for name in names) for values in (old, new))
        raise JetSpecError(
            f"output={folder}: holds a run with {there}; this one has {here}. Name another folder, or give the same "
            "settings to resume the run"
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
    """Most memory that this process had resident; None if the system does not tell."""
    if os.name != "posix":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def not_writable(folder: Path, error: OSError) -> JetSpecError:
    """The error for a folder that cannot be written to."""
    return JetSpecError(f"output={folder}: cannot be written to: {error}; name another folder")
