"""Short names that tell values apart: weights, prompts, settings, files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from torch import nn

#: Bytes that are read at each end of a file.
SAMPLED_BYTES = 1 << 20


def fingerprint(*parts: Any) -> str:
    """32 hex digits that are the same where all ``parts`` are: JSON values, and bytes among them."""
    data = json.dumps(parts, sort_keys=True, default=bytes.hex).encode()
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def weights_fingerprint(module: nn.Module) -> str:
    """The fingerprint of a module: of the name, the shape and a sample of every weight.

    A loaded model has no other identity.
    """
    parts = []
    for name, weight in module.state_dict().items():
        flat = weight.detach().flatten()
        sample = flat[:: max(1, flat.numel() // 256)].float().cpu()
        parts.append([name, list(weight.shape), sample.numpy().tobytes()])
    return fingerprint(*parts)


def file_fingerprint(file: Path, *, salt: str = "") -> str:
    """The fingerprint of a file's size and both of its ends: enough to tell checkpoints apart, in no time.

    Args:
        file: the file.
        salt: what else to tell apart, such as the version of what is made of the file.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        first = stream.read(SAMPLED_BYTES)
        stream.seek(max(0, size - SAMPLED_BYTES))
        return fingerprint(salt, size, first, stream.read(SAMPLED_BYTES))
