"""What the machine is, as far as the system tells it."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any


def cpu_name() -> str:
    """The name of the processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def client_machine() -> dict[str, Any]:
    """The facts about the machine that sends requests which the figures depend on."""
    from jetspec import __version__

    versions = {"python": platform.python_version(), "jetspec": __version__}
    return {"cpu": cpu_name(), "cores": os.cpu_count(), "versions": versions}
