"""Answers that try to pass without solving their task, and answers that use more than they may."""

from __future__ import annotations

import ast
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from jetspec.bench import judge, sandbox
from jetspec.bench.sandbox import passes
from jetspec.errors import JetSpecError

#: Nothing that returns one constant solves it.
TEST = """
def check(candidate):
    assert candidate(9) == 3
    assert candidate(16) == 4
    assert candidate(25) == 5
"""
WRONG = "def root(x):\n    return x\n"
RIGHT = "def root(x):\n    return x ** 0.5\n"


def passed(code: str, *, test: str = TEST, setup: str = "", seconds: float = 10.0) -> bool:
    return passes(code, entry_point="root", setup=setup, test=test, seconds=seconds)


def inside(statement: str) -> str:
    """A function that runs a statement at its first call, and gives wrong answers."""
    return f"import atexit, os, signal, sys\ndef root(x):\n    {statement}\n    return x\n"


FORGERIES = {
    "status 77": "import os; os._exit(77)",
    "status 0": "import os; os._exit(0)",
    "every status": "import os, itertools\nfor n in range(256):\n    os.fork() or os._exit(n)\n" + WRONG,
    "sys.exit": "import sys; sys.exit(77)",
    "SystemExit": "raise SystemExit(77)",
    "exit in a call": inside("os._exit(77)"),
    "SystemExit in a call": inside("sys.exit(77)"),
    "SystemExit that is an object": inside("raise SystemExit(None)"),
    "KeyboardInterrupt": inside("raise KeyboardInterrupt"),
    "GeneratorExit": inside("raise GeneratorExit"),
    "atexit": "import atexit, os\natexit.register(os._exit, 77)\n" + WRONG,
    "atexit in a call": inside("atexit.register(os._exit, 77); sys.exit()"),
    "excepthook": "import sys, os\nsys.excepthook = lambda *a: os._exit(77)\n1 / 0",
    "a thread that ends the process": "import os, threading\nthreading.Timer(0.0, os._exit, [77]).start()\n" + WRONG,
    "a signal handler": inside("signal.signal(signal.SIGTERM, lambda *a: os._exit(77)); os.kill(0, signal.SIGTERM)"),
    "marker printed": "print('77'); print('PASSED'); print('{\"result\": 3}')\n" + WRONG,
    "written to every descriptor": (
        "import os\n"
        "def root(x):\n"
        "    for fd in range(64):\n"
        '        try: os.write(fd, b\'PASSED\\n77\\n{"result": true}\\n{"passed": true}\\n\')\n'
        "        except OSError: pass\n"
        "    return x\n"
    ),
    "replies ahead of the calls": (
        "import os\nfor fd in range(64):\n"
        "    try: os.write(fd, b'{\"result\": 3}\\n' * 9)\n"
        "    except OSError: pass\n" + WRONG
    ),
    "closed descriptors": inside("os.closerange(0, 64); os._exit(77)"),
    "the judge killed": inside("os.kill(os.getppid(), signal.SIGKILL)"),
    "the judge asked to end": inside("os.kill(os.getppid(), signal.SIGTERM)"),
    "the judge alarmed": inside("os.kill(os.getppid(), signal.SIGALRM)"),
    "the group killed": inside("os.killpg(0, signal.SIGKILL)"),
    "the worker killed": inside("os.kill(os.getpid(), signal.SIGKILL)"),
    "fork": inside("os.fork() and os._exit(77)"),
    "fork, both reply": inside("os.fork()"),
    "exec": inside("os.execv(sys.executable, [sys.executable, '-c', 'import os; os._exit(77)'])"),
    "AssertionError is no error": "import builtins\n"
    "builtins.AssertionError = type('E', (BaseException,), {})\n" + WRONG,
    "builtins replaced": (
        "import builtins\nbuiltins.exec = builtins.compile = builtins.__import__ = builtins.isinstance = "
        "lambda *a, **k: True\n" + WRONG
    ),
    "check redefined": "def check(candidate): pass\n" + WRONG + "check = lambda candidate: None\n",
    "the tests' names": "candidate = root = lambda x: x\ncheck = print\n",
    "json replaced": "import json\njson.dumps = lambda *a, **k: '{\"result\": 3}'\n" + WRONG,
    "modules replaced": "import sys\nfor name in list(sys.modules): sys.modules[name] = None\n" + WRONG,
    "always equal": "class E:\n    def __eq__(self, other): return True\ndef root(x): return E()\n",
    "an integer that is always equal": (
        "class E(int):\n    def __eq__(self, other): return True\n    __hash__ = int.__hash__\n"
        "def root(x): return E(7)\n"
    ),
    "a list that is always equal": "class E(list):\n    __eq__ = lambda *a: True\ndef root(x): return E()\n",
    "objects of its own": "class E:\n    def __reduce__(self): return (exit, (77,))\ndef root(x): return E()\n",
    "unpickled code": "import pickle\nroot = lambda x: pickle.dumps(exit)\n",
    "frames above": (
        "import sys\n"
        "def root(x):\n"
        "    frame = sys._getframe()\n"
        "    while frame:\n"
        "        for name in list(frame.f_globals):\n"
        "            if name.startswith(('check', 'PASS', 'pass')): frame.f_globals[name] = lambda *a, **k: True\n"
        "        frame = frame.f_back\n"
        "    return x\n"
    ),
    "every object that can be reached": (
        "import gc\n"
        "def root(x):\n"
        "    found = [o for o in gc.get_objects() if isinstance(o, dict) and ('test' in o or 'check' in o)]\n"
        "    return [o for o in found if 'assert' in str(o)][0]['expected']\n"
    ),
    "a trace function": "import sys\nsys.settrace(lambda *a: sys.exit(77))\n" + WRONG,
    "no function": "x = 1\n",
    "no callable": "root = 3\n",
    "an attribute": "class root:\n    def __new__(cls, x): return cls\n    __eq__ = classmethod(lambda *a: True)\n",
    "a function that raises": inside("1 / 0"),
    "an error named by the tests": inside("raise AssertionError"),
    "what is no Python": "1 +",
    "nothing": "",
}


@pytest.mark.parametrize("code", FORGERIES.values(), ids=FORGERIES)
def test_an_answer_that_is_wrong_cannot_pass(code: str) -> None:
    assert not passed(code, seconds=4.0)


@pytest.mark.parametrize(
    "lines",
    [
        b'{"result": 3',
        b'{"result": 3, "error": 1}',
        b'{"passed": true}',
        b"[]",
        b"3",
        b"\xff",
        b'{"result": {"object": [3]}}',
        b'{"result": {"tuple": 3}}',
        b'{"result": {"dict": [[[], 1]]}}',
        b'{"result": ' + b"[" * 100_000,
        b'{"result": {"exit": [77]}}',
    ],
)
def test_replies_that_are_none_do_not_pass(lines: bytes) -> None:
    """The worker is the answer's: it may send what it likes."""
    write = f"try: os.write(fd, {lines + bytes([10])!r})"
    code = f"import os\nfor fd in range(3, 16):\n    {write}\n    except OSError: pass\n"
    assert not passed(code + WRONG, test="def check(candidate):\n    candidate(9)\n    assert candidate(9) == 3\n")


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("file", ["mem", "fd/0"])
def test_the_judge_s_memory_and_files_are_closed_to_the_worker(file: str) -> None:
    """The function is right where it may not open them, so that what fails here is no forgery by chance."""
    code = f"""
import os
def root(x):
    try: os.close(os.open("/proc/%d/{file}" % os.getppid(), os.O_RDONLY))
    except PermissionError: return x ** 0.5
"""
    assert passed(code)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 0, -7, 1 << 70, 10**4000, 0.1, float("inf"), "", "a\n\u2028\ud800", b"\x00\xff", 1 + 2j),
        *([], [1, [2.0, "x"]], (), (1, (2,)), {1, 2}, frozenset({(1,)}), {}, {1: "a", "b": {(1, 2): [None]}}),
    ],
    ids=lambda value: f"{type(value).__name__}{len(ascii(value))}",
)
def test_plain_values_cross_as_they_are(value: Any) -> None:
    got = judge.decode(json.loads(json.dumps(judge.encode(value))))
    assert (got, type(got)) == (value, type(value))


def test_values_of_libraries_cross_as_what_they_equal() -> None:
    from collections import Counter, OrderedDict, namedtuple
    from decimal import Decimal
    from fractions import Fraction

    import numpy as np

    pair = namedtuple("pair", "a b")
    for value in (np.int64(3), np.float32(0.5), np.bool_(True), Decimal("0.5"), Fraction(1, 3), pair(1, 2)):
        got = judge.decode(judge.encode(value))
        assert got == value
        assert type(got).__module__ in ("builtins", "decimal", "fractions")
    assert judge.decode(judge.encode(Counter("aa"))) == {"a": 2}
    assert judge.decode(judge.encode(OrderedDict(a=1))) == {"a": 1}
    with pytest.raises(TypeError, match="range"):
        judge.encode(range(3))


@pytest.mark.parametrize(
    ("code", "test"),
    [
        (RIGHT, TEST),
        ("count = 0\ndef root(x):\n    global count\n    count += 1\n    return count + 2\n", TEST),
        (RIGHT + "print('x' * 100_000)\n", TEST),
        ("import sys\n" + RIGHT + "assert sys.stdin.read() == ''\n", TEST),
        (RIGHT, "def check(candidate):\n    assert candidate(x=9) == root(9) == 3\n"),
        ("root = lambda x: {x: (x, {x})}", "def check(candidate):\n    assert candidate(1) == {1: (1, {1})}\n"),
        ("root = lambda x: 10 ** x", "def check(candidate):\n    assert candidate(9000) == 10 ** 9000\n"),
        (
            "def root(x): raise KeyError(x)",
            "def check(candidate):\n    try: candidate(1)\n    except Exception: return\n    assert False\n",
        ),
        (RIGHT, "def check(candidate):\n    assert candidate(helper()) == 3\n"),
    ],
)
def test_an_answer_that_is_right_passes(code: str, test: str) -> None:
    assert passed(code, test=test, setup="def helper():\n    return 9\n")


def test_helpers_of_the_tests_are_not_the_answer_s() -> None:
    test = "def check(candidate):\n    assert candidate(helper(9)) == 3\n"
    assert not passed("helper = lambda x: 3\nroot = lambda x: 3 if x == 3 else 0\n", setup="helper = abs\n", test=test)


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "x = bytearray(1 << 31)",
        "x = [0]\nwhile True: x += x",
        "with open('big', 'wb') as f:\n    for _ in range(64): f.write(bytes(1 << 20))",
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))\n"
        "with open('big', 'wb') as f:\n    for _ in range(64): f.write(bytes(1 << 20))",
        "def f(): f()\nf()",
    ],
)
@pytest.mark.parametrize("when", [pytest.param("at once", marks=pytest.mark.slow), "in a call"])
def test_limits(program: str, when: str) -> None:
    """The same function without the program in front of it is right."""
    body = "\n    ".join(program.splitlines())
    code = f"{program}\n{RIGHT}" if when == "at once" else f"def root(x):\n    {body}\n    return x ** 0.5\n"
    assert not passed(code, seconds=1.5)


def test_tests_without_an_end_are_stopped() -> None:
    assert not passed(RIGHT, test="def check(candidate):\n    while True: pass\n", seconds=1.0)


@pytest.mark.parametrize(
    "program",
    [
        "import os\nfor _ in range(600):\n    os.mkdir('d')\n    os.chdir('d')",
        "import os\nhere = os.getcwd()\nos.rename(here, here + '-moved')\nos.symlink(os.sep, here)",
    ],
)
def test_what_a_program_leaves_behind_is_no_error(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(tmp_path))
    assert passed(f"{program}\n{RIGHT}")


def test_a_program_sees_nothing_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "x")
    before = set(Path.cwd().iterdir())
    program = """
import os, sys
assert "SECRET" not in os.environ
assert sys.flags.isolated
assert os.listdir() == []
open("left", "w").write("x")
"""
    assert passed(program + RIGHT)
    assert set(Path.cwd().iterdir()) == before


@pytest.mark.parametrize(
    "session",
    [pytest.param(False, marks=pytest.mark.slow, id="same session"), pytest.param(True, id="session of its own")],
)
@pytest.mark.parametrize("end", ["passes", "fails", "runs out of time"])
def test_what_a_program_starts_ends_with_it(tmp_path: Path, session: bool, end: str) -> None:
    if session and sys.platform != "linux":
        pytest.skip("only Linux finds processes that left their session")
    file = tmp_path / "pid"
    start = f"subprocess.Popen(['sleep', '60'], start_new_session={session})"
    body = {"passes": "return x ** 0.5", "fails": "return x", "runs out of time": "while True: pass"}[end]
    code = f"import subprocess\nopen({str(file)!r}, 'w').write(str({start}.pid))\ndef root(x):\n    {body}\n"
    assert passed(code, seconds=3.0) is (end == "passes")
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)


def test_an_interrupt_ends_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = []

    def interrupt(process: Any, *args: Any, **options: Any) -> Any:
        processes.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(sandbox.subprocess.Popen, "communicate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        passed(RIGHT, seconds=60)
    assert processes[0].poll() is not None


def test_the_judge_imports_only_the_standard_library() -> None:
    """It runs without the packages that are installed."""
    tree = ast.parse(Path(judge.__file__).read_text(encoding="utf-8"))
    names = [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    names += [alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names]
    assert {name.partition(".")[0] for name in names} <= sys.stdlib_module_names


def test_only_posix_runs_code(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox.check_platform()
    monkeypatch.setattr(sandbox.os, "name", "nt")
    with pytest.raises(JetSpecError, match="run_code"):
        sandbox.check_platform()
