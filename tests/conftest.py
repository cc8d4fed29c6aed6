"""Settings of the whole test run: reproducible properties, few threads, no network."""

from __future__ import annotations

import os

# Read once by huggingface_hub at import: a test that reaches for the network fails at once instead of waiting.
os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from hypothesis import settings

torch.set_num_threads(1)  # tiny models gain nothing from more, and lose much where cores are shared

settings.register_profile("jetspec", derandomize=True, deadline=None)
settings.load_profile("jetspec")
