"""Running code that a model wrote, with limits on what it may use.

That is no protection against malice: the code runs as the user who started the benchmark, may read that user's files
and reach the network.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jetspec.errors import JetSpecError

#: Seconds of wall clock, bytes of address space and of a file that a program may take.
SECONDS = 10.0
MEMORY_BYTES = 1 << 30
FILE_BYTES = 1 << 20
#: Exit status of a program that ran to its end; one that leaves early without intent, as with `sys.exit(0)` before the
#: tests, does not give it.
PASSED = 77

#: Sets the limits, which the program cannot raise again, and runs the program behind them.
LAUNCHER = """
import resource, sys
for name, limit in (("AS", {memory}), ("CPU", {cpu}), ("FSIZE", {file}), ("CORE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
sys.setrecursionlimit(10000)
with open("program.py", encoding="utf-8") as file:
    source = file.read()
exec(compile(source, "program.py", "exec"), {{"__name__": "__main__"}})
sys.exit({passed})
"""


def check_platform() -> None:
    """Raise JetSpecError where the operating system has no limits for processes."""
    if os.name != "posix":
        raise JetSpecError("--run-code: needs the resource limits of a POSIX system; leave the option out")


def passes(program: str, *, seconds: float = SECONDS, memory_bytes: int = MEMORY_BYTES) -> bool:
    """Whether a program runs to its end without an error, within the limits.

    It runs in a Python of its own (`-I`: without the user's packages and settings), in a temporary folder, without
    input, output and environment. Its whole process group is killed at the end.
    """
    limits = {"memory": memory_bytes, "cpu": int(seconds) + 1, "file": FILE_BYTES, "passed": PASSED}
    with _temporary_folder() as folder:
        Path(folder, "program.py").write_text(program, encoding="utf-8", errors="replace")
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", LAUNCHER.format(**limits)],
            cwd=folder,
            env={"PATH": os.defpath},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            return process.wait(timeout=seconds) == PASSED
        except subprocess.TimeoutExpired:
            return False
        finally:
            _kill_group(process)


@contextlib.contextmanager
def _temporary_folder() -> Iterator[str]:
    """A folder for the time of a program, which may have left there what cannot be removed, or moved it away."""
    folder = tempfile.mkdtemp(prefix="jetspec-bench-")
    try:
        yield folder
    finally:
        # Unlike `shutil.rmtree`, it removes folders nested thousands deep, and a link put in the folder's place.
        subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.DEVNULL, check=False)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started, which may outlive it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
