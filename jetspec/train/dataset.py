"""Reading what ``capture`` stored, one sequence at a time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor


@dataclass(frozen=True)
class Captured:
    """One sequence of T tokens and the target's states at all but the last."""

    token_ids: Tensor  # [T] int64
    loss_start: int  # position of the first token of the answer
    aux_hidden_states: Tensor  # [T - 1, aux_layers * hidden]
    hidden: Tensor  # [T - 1, hidden], after the final norm


def find_non_finite(aux_hidden_states: Tensor, hidden: Tensor, target_layer_ids: Sequence[int]) -> str | None:
    """Where NaN or infinity first occurs in a target's states, as words for a message; None where all is finite.

    aux_hidden_states [n, aux_layers * hidden], one part for each of ``target_layer_ids``; hidden [n, hidden].
    """
    layers = aux_hidden_states.chunk(len(target_layer_ids), dim=-1)
    places = {f"layer {layer}": states for layer, states in zip(target_layer_ids, layers, strict=True)}
    for place, states in {**places, "the final norm": hidden}.items():
        if not bool(states.isfinite().all()):
            return f"the target's hidden states are not finite after {place}"
    return None


class CapturedSequences:
    """The sequences of a capture, in prompt order. States stay on disk, mapped, until a sequence is asked for."""

    def __init__(self, folder: str | Path) -> None:
        self.lengths: list[int] = []
        self.loss_starts: list[int] = []
        self._places: list[tuple[Any, int, int]] = []  # file, first token, first row
        self._files: list[Any] = []
        for path in sorted(Path(folder).glob("shard-*.json")):
            shard = json.loads(path.read_text(encoding="utf-8"))
            file = safe_open(path.with_suffix(".safetensors"), framework="pt")
            self._files.append(file)
            starts = [0, *accumulate(shard["lengths"])]
            self._places += [(file, start, start - n) for n, start in enumerate(starts[:-1])]
            self.lengths += shard["lengths"]
            self.loss_starts += shard["loss_starts"]

    def __len__(self) -> int:
        return len(self.lengths)

    def token_ids(self, index: int) -> Tensor:
        """Tokens of sequence ``index``. [T] int64."""
        file, token, _ = self._places[index]
        ids: Tensor = file.get_slice("token_ids")[token : token + self.lengths[index]]
        return ids.long()

    def read(self, index: int, rows: int | None = None) -> Captured:
        """Sequence ``index``, with the aux_hidden_states of its first ``rows`` positions only where given."""
        file, _, row = self._places[index]
        length = self.lengths[index]
        last = length - 1 if rows is None else min(rows, length - 1)
        return Captured(
            self.token_ids(index),
            self.loss_starts[index],
            file.get_slice("aux_hidden_states")[row : row + last],
            file.get_slice("hidden")[row : row + length - 1],
        )

    def distinct_tokens(self) -> Tensor:
        """Ids that occur anywhere in the capture, in order. [n] int64."""
        found = [torch.unique(file.get_tensor("token_ids")) for file in self._files]
        ids: Tensor = torch.unique(torch.cat(found))
        return ids.long()
