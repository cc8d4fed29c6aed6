"""Telling weights and files apart: a loaded model has no other identity."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import nn

#: Bytes that are read at each end of a file.
SAMPLED_BYTES = 1 << 20


def fingerprint(chunks: Iterable[bytes]) -> str:
    """32 hex digits of some bytes; how they are cut into chunks does not matter."""
    state = hashlib.blake2b(digest_size=16)
    for chunk in chunks:
        state.update(chunk)
    return state.hexdigest()


def weights_fingerprint(module: nn.Module) -> str:
    """The fingerprint of the names, the shapes and a sample of all weights."""
    return fingerprint(_weights(module))


def file_fingerprint(file: Path, *, salt: str = "") -> str:
    """The fingerprint of a file's size and both of its ends: enough to tell checkpoints apart, in no time.

    Args:
        file: the file.
        salt: what else to tell apart, such as the version of what is made of the file.
    """
    return fingerprint(_ends(file, salt))


def _weights(module: nn.Module) -> Iterator[bytes]:
    for name, weight in module.state_dict().items():
        flat = weight.detach().flatten()
        yield f"{name} {tuple(weight.shape)}".encode()
        yield flat[:: max(1, flat.numel() // 256)].float().cpu().numpy().tobytes()


def _ends(file: Path, salt: str) -> Iterator[bytes]:
    size = file.stat().st_size
    yield f"{salt} {size} ".encode()
    with file.open("rb") as stream:
        yield stream.read(SAMPLED_BYTES)
        stream.seek(max(0, size - SAMPLED_BYTES))
        yield stream.read(SAMPLED_BYTES)
