"""Settings of the whole test run: reproducible properties, few threads, no network."""

from __future__ import annotations

import os

# Read once by huggingface_hub at import: a test that reaches for the network fails at once instead of waiting.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)  # tiny models gain nothing from more, and lose much where cores are shared

settings.register_profile("jetspec", derandomize=True, deadline=None)
settings.load_profile("jetspec")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--workloads", type=int, default=50, help="random workloads an architecture, in the slow tests (default: 50)"
    )


@pytest.fixture(scope="session")
def workloads(request: pytest.FixtureRequest) -> int:
    """Random workloads to run for each architecture."""
    return request.config.getoption("--workloads")
