"""The two processes that test an answer to a programming task. `jetspec.bench.sandbox` starts this file as a script.

The judge runs the task's tests and never runs code of the answer. The worker, its child, runs the answer: it is sent
the arguments of each call and sends back the result. Values cross as JSON and are rebuilt as plain values, so the
answer cannot send an object that takes part in a comparison, and the expected values are in a process that it cannot
read. Only the judge's exit status is the verdict.

The file imports the standard library alone: the judge runs without the installed packages.
"""

from __future__ import annotations

import ctypes
import json
import numbers
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import IO, Any, NoReturn

#: Exit status of a judge whose tests passed.
PASSED = 77
#: Options of Linux's prctl, and the capability to read other processes.
PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER = 4, 24, 36
CAP_SYS_PTRACE = 19

#: How a value that JSON lacks is rebuilt from its encoded content.
REBUILD: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda content: tuple(_items(content)),
    "set": lambda content: set(_items(content)),
    "frozenset": lambda content: frozenset(_items(content)),
    "dict": lambda content: dict(_items(content)),
    "bytes": bytes.fromhex,
    "complex": lambda content: complex(*content),
    "Decimal": Decimal,
    "Fraction": lambda content: Fraction(*content),
}


class Stopped(BaseException):
    """The time is up, or the worker has ended. No `except Exception` of the tests catches it."""


class CandidateError(Exception):
    """The answer raised an error in a call."""


def encode(value: Any) -> Any:
    """A value as JSON holds it. An object of a subclass becomes one of the plain type, and so does a NumPy scalar.

    Raises:
        TypeError: the value is of another type, or holds one that is.
    """
    if value is None or isinstance(value, bool | float | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, list):
        return [encode(item) for item in value]
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [encode(pair) for pair in value.items()]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, Decimal):
        return {"Decimal": str(value)}
    if isinstance(value, Fraction):
        return {"Fraction": [value.numerator, value.denominator]}
    if hasattr(value, "item"):
        return encode(value.item())
    raise TypeError(f"the tests cannot compare a value of type {type(value).__name__}")


def decode(data: Any) -> Any:
    """The value that `encode` gave as `data`.

    Raises:
        Exception: of some type, because `data` is not what `encode` gives.
    """
    if isinstance(data, list):
        return [decode(item) for item in data]
    if isinstance(data, dict):
        [(kind, content)] = data.items()
        return REBUILD[kind](content)
    return data


def _items(content: Any) -> list[Any]:
    if not isinstance(content, list):
        raise TypeError("not a list")
    return [decode(item) for item in content]


class Worker:
    """The process that runs the answer, as the judge sees it."""

    def __init__(self, folder: str, code: str, entry_point: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__, "worker"],
            cwd=folder,
            env={"PATH": os.defpath},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        if self._exchange({"code": code, "entry_point": entry_point}) != {"result": True}:
            raise Stopped("the answer holds no such function")

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call the answer's function with copies of the arguments. Returns its result, as plain values.

        Raises:
            Stopped: the worker has ended.
            CandidateError: the function raised an error, or returned what the tests cannot compare.
        """
        reply = self._exchange([encode(args), encode(kwargs)])
        if not isinstance(reply, dict) or set(reply) != {"result"}:
            raise CandidateError(ascii(reply))
        return decode(reply["result"])

    def _exchange(self, message: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            _write(self._process.stdin, message)
        except OSError as error:
            raise Stopped("the worker does not read") from error
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise Stopped("the worker has ended")
        return json.loads(line)

    def kill(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def judge() -> bool:
    """Whether the answer passes the tests that stand on standard input as one JSON object."""
    job = json.load(sys.stdin)
    _set_limits(job["limits"])
    _protect()
    for number in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, _stop)
    signal.setitimer(signal.ITIMER_REAL, job["seconds"])
    worker = None
    try:
        worker = Worker(job["folder"], job["code"], job["entry_point"])
        namespace: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(job["setup"], "setup.py", "exec"), namespace)
        exec(compile(job["test"], "test.py", "exec"), namespace)
        namespace[job["entry_point"]] = worker.call
        namespace["check"](worker.call)
    except BaseException:
        return False
    else:
        return True
    finally:
        for number in (signal.SIGALRM, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        if worker is not None:
            worker.kill()
        _kill_children()


def work() -> None:
    """Run the code of an answer, then call its function as often as the judge asks for it.

    The streams to the judge leave descriptors 0 and 1, so that the answer reads nothing and prints nowhere.
    """
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    sys.setrecursionlimit(10000)
    job = json.loads(requests.readline())
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(job["code"], "answer.py", "exec"), namespace)
    function = namespace.get(job["entry_point"])
    _write(replies, {"result": callable(function)})
    for line in requests:
        args, kwargs = map(decode, json.loads(line))
        try:
            reply = {"result": encode(function(*args, **kwargs))}  # type: ignore[misc]
        except Exception as error:
            reply = {"error": type(error).__name__}
        _write(replies, reply)


def _write(stream: IO[bytes], message: Any) -> None:
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


def _set_limits(limits: dict[str, int]) -> None:
    """Set limits on this process and on those that it starts, which cannot raise them again."""
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))


def _protect() -> None:
    """On Linux, close this process to the worker, and become the parent of what outlives the worker's processes."""
    if sys.platform == "linux":
        prctl = ctypes.CDLL(None).prctl
        prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        prctl(PR_CAPBSET_DROP, CAP_SYS_PTRACE, 0, 0, 0)  # which only root has
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _kill_children() -> None:
    """End all processes below this one. Where a parent is killed, its children become ours."""
    listing = Path(f"/proc/self/task/{os.getpid()}/children")
    while listing.exists() and (children := listing.read_text(encoding="ascii").split()):
        for child in map(int, children):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _stop(number: int, frame: object) -> NoReturn:
    raise Stopped("the time is up")


if __name__ == "__main__":
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    if sys.argv[1] == "worker":
        work()
    else:
        os._exit(PASSED if judge() else 1)
