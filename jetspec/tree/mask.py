"""Which rows of a tree see which: a row attends to its ancestors and to itself."""

import torch
from torch import Tensor

from jetspec.errors import JetSpecError


def ancestor_mask(parents: Tensor) -> Tensor:
    """mask[i, j] is True where j is i or an ancestor of i: parents [n] (-1: no parent) -> Bool [n, n].

    Raises JetSpecError where a parent does not come before its child.
    """
    n = len(parents)
    if bool((parents >= torch.arange(n, device=parents.device)).any()) or bool((parents < -1).any()):
        raise JetSpecError(f"parents must be -1 or the index of an earlier row, got {parents.tolist()}")
    # Pointer doubling: when mask holds each row's nearest 2^s ancestors (itself counted), `jump` is the next one.
    # Row n stands for "no ancestor".
    jump = torch.cat([torch.where(parents < 0, n, parents), parents.new_tensor([n])])
    mask = torch.eye(n + 1, n, dtype=torch.bool, device=parents.device)
    for _ in range(n.bit_length()):
        mask |= mask[jump]
        jump = jump[jump]
    return mask[:n]


def chain_parents(n: int) -> Tensor:
    """Parents [n] of a chain of n rows that continues the committed prefix: -1, 0, 1, ..."""
    return torch.arange(-1, n - 1)
