"""Exact targets: a row's bits depend on its own inputs alone. What that takes, and a check that it holds.

Kernels sum in another order when a product has another number of rows. An exact target therefore runs its rows in
padded tiles of a few sizes, those that were found to give the same bits, and no operation of the model ever sees
another shape. That leaves attention, which `jetspec.attention.exact` computes, and operations whose bits depend on a
row's place, which are replaced here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from jetspec.attention import RowBatch, Segment

#: Elementwise functions that have one code for whole vectors and another, with other last bits, for what is left over.
APPROXIMATED = {"cos", "erf", "exp", "gelu", "log", "mish", "sigmoid", "silu", "sin", "softplus", "tanh"}
#: Elements up to which torch runs every elementwise function in one thread; gelu has the lowest bound.
THREAD_GRAIN = 1 << 14
#: A multiple of every vector length.
VECTOR_MULTIPLE = 64
#: Rows of a tile. The sizes that give the bits of `base_tile` are used.
TILE_SIZES = (4, 16, 64)
#: Tokens of the check: enough for keys of two padded lengths.
CHECKED_TOKENS = 70
SLOTS_NEEDED = CHECKED_TOKENS + 2 * TILE_SIZES[-1]


def base_tile(device: torch.device, dtype: torch.dtype) -> int:
    """The tile size that is always used: as many rows as take little longer than one."""
    is_wide = device.type != "cpu" or (dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported())
    return 64 if is_wide else 16


def next_tile(rows: int, sizes: Sequence[int]) -> int:
    """The size, of some in ascending order, to begin with: it holds all rows unless it were more than half empty."""
    fitting = [size for size in sizes if size >= rows]
    below = [size for size in sizes if size < rows]
    return fitting[0] if fitting and (fitting[0] <= 2 * rows or not below) else below[-1]


class _WholeVectors(TorchFunctionMode):
    """Computes approximated elementwise functions in pieces of whole rows.

    Threads share an elementwise operation out in runs of elements, and a run may end anywhere in a row; the elements
    behind its last whole vector are computed by other code.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", None) not in APPROXIMATED or not isinstance(args[0], Tensor):
            return func(*args, **kwargs)
        x, *others = args
        width = max(1, x.shape[-1] if x.dim() else 1)
        rows = 1 if width % VECTOR_MULTIPLE else max(1, THREAD_GRAIN // width)
        pieces = [func(piece, *others, **kwargs) for piece in x.reshape(-1, width).contiguous().split(rows)]
        return torch.cat(pieces).view(x.shape)


@contextmanager
def row_independent(model: PreTrainedModel) -> Iterator[None]:
    """While open, operations of `model` on tiles of rows give a row the same bits at every place.

    Mixtures of experts compute every pair of row and expert apart, as a product of its own; on an accelerator nothing
    else is replaced.
    """
    experts = model.config._experts_implementation
    model.set_experts_implementation("batched_mm")
    try:
        if model.device.type == "cpu":
            with _WholeVectors():
                yield
        else:
            yield
    finally:
        model.set_experts_implementation(experts)


def first_differences(
    score: Callable[[RowBatch, int], list[Tensor]], base: int, max_context: int, num_ids: int
) -> dict[int, int | None]:
    """Score the same tokens in tiles of every size; which output differs first from the base size's, None if none does.

    `score` gives outputs [rows, width] of a batch run in tiles of a size; its slots lie below SLOTS_NEEDED. Tokens are
    scored as a chain in tiles of the base size, and apart, at every place of every tile, each beside another token at
    the same position.
    """
    generator = torch.Generator().manual_seed(0)
    n = min(CHECKED_TOKENS, max_context)
    tokens = torch.randint(num_ids, (n,), generator=generator)
    expected = score(RowBatch.chains([tokens], [torch.arange(n)]), base)
    differing: dict[int, int | None] = {}
    for size in TILE_SIZES:
        positions = torch.linspace(0, n - 1, size).long()[torch.randperm(size, generator=generator)]
        pairs = torch.stack([tokens[positions], torch.randint(num_ids, (size,), generator=generator)], dim=1)
        places = 2 * torch.arange(size)
        # Even places of one tile, odd places of the next.
        pairs[size // 2 :] = pairs[size // 2 :].flip(1)
        places[size // 2 :] += 1
        outputs = score(apart(pairs.flatten(), positions.repeat_interleave(2), first_slot=n), size)
        same = [torch.equal(a[places], b[positions]) for a, b in zip(outputs, expected, strict=True)]
        differing[size] = same.index(False) if False in same else None
    return differing


def apart(tokens: Tensor, positions: Tensor, first_slot: int) -> RowBatch:
    """Each row a sequence of its own behind the start of one chain, which lies in slots 0, 1, ..."""
    segments = [
        Segment(row, row + 1, position, torch.cat([torch.arange(position), torch.tensor([first_slot + row])]))
        for row, position in enumerate(positions.tolist())
    ]
    return RowBatch(tokens, positions, torch.full_like(positions, -1), segments)
