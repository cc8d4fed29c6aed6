"""Testing code that a model wrote, in processes of its own and with limits on what it may use.

A wrong answer cannot pass: the tests run in a process that never runs code of the answer (see `jetspec.bench.judge`).
The machine is not protected: the code runs as the user who started the benchmark, may read and change that user's
files, and may use the network.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jetspec.errors import JetSpecError

#: Seconds of wall clock, bytes of address space and bytes of a file that a process may take.
SECONDS = 10.0
MEMORY_BYTES = 1 << 30
FILE_BYTES = 1 << 20
#: Seconds that the judge gets to end what it started, once its time is up.
GRACE_SECONDS = 5.0
_JUDGE = Path(__file__).with_name("judge.py")
#: Exit status of a judge whose tests passed. The judge has its own copy: it needs a POSIX system to be imported.
PASSED = 77


def check_platform() -> None:
    """Raise JetSpecError where the operating system has no limits for processes."""
    if os.name != "posix":
        raise JetSpecError("run_code: needs the resource limits of a POSIX system; leave the option out")


def passes(
    code: str,
    *,
    entry_point: str,
    setup: str,
    test: str,
    seconds: float = SECONDS,
    memory_bytes: int = MEMORY_BYTES,
) -> bool:
    """Whether the function that an answer defines passes the tests of its task, within the limits.

    The answer runs in a Python of its own (`-I`: without the user's packages and settings), in a temporary folder,
    without input, output and environment. All that it started is killed at the end; on systems other than Linux, all
    that did not leave its session.

    Args:
        code: the answer's program.
        entry_point: name of the function.
        setup: code that the tests build on, such as helper functions of the task. It runs apart from the answer.
        test: code that defines `check(candidate)`.
        seconds: time that answer and tests may take together.
        memory_bytes: address space of each process.
    """
    limits = {"AS": memory_bytes, "CPU": int(seconds) + 1, "FSIZE": FILE_BYTES, "CORE": 0}
    with _temporary_folder() as folder:
        job = {"code": code, "entry_point": entry_point, "setup": setup, "test": test}
        job_line = json.dumps({**job, "folder": folder, "limits": limits, "seconds": seconds}).encode()
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_JUDGE), "judge"],
            cwd=os.sep,
            env={"PATH": os.defpath},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.communicate(job_line, timeout=seconds + GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            return False
        finally:
            _end(process)
        return process.returncode == PASSED


@contextlib.contextmanager
def _temporary_folder() -> Iterator[str]:
    """A folder for the time of a program, which may have left there what cannot be removed, or moved it away."""
    folder = tempfile.mkdtemp(prefix="jetspec-bench-")
    try:
        yield folder
    finally:
        # Unlike `shutil.rmtree`, it removes folders nested thousands deep, and a link put in the folder's place.
        subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.DEVNULL, check=False)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the judge, which ends what it started, and whatever is left in its session."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
