"""Batch-invariant targets: the bits of a row depend on its own inputs alone, whoever shares the forward.

Kernels sum in another order when a product has another number of rows. A batch-invariant target therefore runs its rows
in padded tiles of a few sizes, those that were found to give the same bits, and no operation of the model ever sees
another shape. That leaves operations whose bits depend on a row's place, which `row_independent` replaces, and
attention: every row is its own batch element, its keys lie in order of position, padded to a length that its own
position decides, so the kernel sees the same problem for a row wherever it runs. Attention is computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from jetspec.attention.cache import KVCache
from jetspec.attention.rows import RowBatch, Segment, Window

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


#: Keys are padded to a multiple of this many.
KEY_MULTIPLE = 64
#: Keys of all rows that are gathered at once, which bounds the memory of long contexts.
MAX_KEYS = 1 << 15
# Operands are padded to these multiples: the last bits of a BLAS product depend on whether its operands, and the
# buffers between the two products, begin on a boundary of 64 bytes.
WIDTH_MULTIPLE = 16
QUERY_MULTIPLE = 8


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

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
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


class KeyGroup(NamedTuple):
    """Rows of a tile with keys of one padded length L."""

    rows: Tensor  # [m] int64, counted within the tile
    slots: Tensor  # [m, L] int64, or [1, L] where the rows read the same list to different lengths
    bias: Tensor  # [m, 1, 1, L] float32 added to the scores: -inf at the padding


class RowTile:
    """Rows `start` to `stop` of a batch whose earlier rows have been scored.

    With `share_keys` rows that read the same list of keys to different lengths share it: what lies behind a row's own
    keys is masked. That takes rows that are finite.
    """

    def __init__(self, batch: RowBatch, start: int, stop: int, *, share_keys: bool = True) -> None:
        self.batch, self.start, self.stop, self.share_keys = batch, start, stop, share_keys
        self._groups: dict[Window, list[KeyGroup]] = {}

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def slot_mapping(self) -> Tensor:
        """[rows] int64: the pool slot each row's K/V is written to."""
        return self.batch.slot_mapping[self.start : self.stop]

    def groups(self, window: Window) -> list[KeyGroup]:
        """The rows by length of their keys, built once and shared by all layers of one window size."""
        if window not in self._groups:
            self._groups[window] = key_groups(*self.key_slots(window), self.share_keys)
        return self._groups[window]

    def key_slots(self, window: Window) -> tuple[Tensor, Tensor]:
        """Where the keys of each row are.

        Returns:
            Slots [rows, longest] int64 of a row's keys in order of position, with anything behind them, and how many
            keys a row has, [rows] int64.
        """
        tables, counts = [], []
        for index, segment in enumerate(self.batch.segments):
            first, last = max(self.start, segment.start), min(self.stop, segment.stop)
            if first >= last:
                continue
            # Parents come before their children, so the visible columns are in order of position.
            visible = self.batch.mask(index, window)[first - segment.start : last - segment.start]
            count = visible.sum(1)
            columns = visible.byte().argsort(dim=1, descending=True, stable=True)[:, : int(count.max())]
            tables.append(segment.slots.to(columns.device)[columns])
            counts.append(count)
        longest = max(table.shape[1] for table in tables)
        return torch.cat([functional.pad(table, (0, longest - table.shape[1])) for table in tables]), torch.cat(counts)


def key_groups(slots: Tensor, counts: Tensor, share_keys: bool) -> list[KeyGroup]:
    """Sort rows by the padded length of their keys; slots [rows, longest], counts [rows] as `RowTile.key_slots`."""
    groups = []
    lengths = (counts + KEY_MULTIPLE - 1) // KEY_MULTIPLE * KEY_MULTIPLE
    for length in torch.unique(lengths).tolist():
        rows = (lengths == length).nonzero().flatten()
        columns = torch.arange(length, device=slots.device)
        beyond = columns >= counts[rows, None]
        # Padding reads the row's first key: other slots may hold anything, and a weight of 0 does not silence NaN.
        table = torch.where(beyond, slots[rows, :1], slots[rows][:, columns.clamp(max=slots.shape[1] - 1)])
        longest = table[counts[rows].argmax(), None]
        bias = torch.zeros(beyond.shape, device=slots.device).masked_fill_(beyond, float("-inf"))[:, None, None]
        if share_keys and bool((beyond | (table == longest)).all()):
            groups.append(KeyGroup(rows, longest, bias))
            continue
        pieces = [x.split(max(1, MAX_KEYS // length)) for x in (rows, table, bias)]
        groups += [KeyGroup(*piece) for piece in zip(*pieces, strict=True)]
    return groups


def batch_invariant_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tile: RowTile,
    cache: KVCache,
    layer: int,
    scaling: float,
    window: Window = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`row_attention` for the rows of a tile, which q, k and v may be longer than: what follows is padding.

    q [n, heads, head_dim]; k, v [n, kv_heads, head_dim]. Returns [n, heads, head_dim], zero at the padding.
    """
    cache.write(layer, tile.slot_mapping, k[: len(tile)], v[: len(tile)])
    output = q.new_zeros(*q.shape[:2], v.shape[-1])
    for rows, slots, bias in tile.groups(window):
        keys, values = (x.view(*slots.shape, *x.shape[1:]) for x in cache.read(layer, slots.flatten()))
        output[rows] = attend_apart(q[rows], keys, values, bias, scaling, softcap, sinks).to(q.dtype)
    return output


def attend_apart(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scaling: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention of m queries, each over keys of its own, with the same bits for a query whatever the others are.

    q [m, heads, head_dim]; k, v [m or 1, keys, kv_heads, head_dim], one for all queries where it is 1; bias
    [m, 1, 1, keys]; keys a multiple of KEY_MULTIPLE; sinks [heads]. Returns [m, heads, head_dim] float32.
    """
    m, heads, head_dim = q.shape
    kv_heads, value_dim = v.shape[2:]
    group = heads // kv_heads
    # The heads that share a key head are the queries of one product.
    q = functional.pad(
        q.float().reshape(m, kv_heads, group, head_dim), (0, -head_dim % WIDTH_MULTIPLE, 0, -group % QUERY_MULTIPLE)
    )
    k, v = (pad_width(x.float()).transpose(1, 2).expand(m, -1, -1, -1) for x in (k, v))
    if softcap is None and sinks is None:
        output = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scaling)
    else:
        output = torch.matmul(capped_softmax(torch.matmul(q, k.mT) * scaling, bias, group, softcap, sinks), v)
    return output[:, :, :group, :value_dim].reshape(m, heads, value_dim)


def pad_width(x: Tensor) -> Tensor:
    """Zeros behind the last dimension up to a multiple of WIDTH_MULTIPLE."""
    missing = -x.shape[-1] % WIDTH_MULTIPLE
    return functional.pad(x, (0, missing)) if missing else x


def capped_softmax(scores: Tensor, bias: Tensor, group: int, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """Softmax of scores [m, kv_heads, group and padding, keys], which a cap bends and sinks take a share of."""
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + bias
    if sinks is None:
        return scores.softmax(-1)
    sinks = functional.pad(sinks.float().view(scores.shape[1], group, 1), (0, 0, 0, scores.shape[2] - group))
    scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    return scores.softmax(-1)[..., :-1].contiguous()
