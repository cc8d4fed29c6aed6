"""Row attention whose bits for a row depend on that row's query and keys alone, whoever shares the forward.

Every row is its own batch element. Its keys lie in order of position, padded to a length that its own position
decides, so the kernel sees the same problem for a row wherever it runs. All is computed in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from jetspec.attention.cache import KVCache
from jetspec.attention.rows import RowBatch

#: Keys are padded to a multiple of this many.
KEY_MULTIPLE = 64
#: Keys of all rows that are gathered at once, which bounds the memory of long contexts.
MAX_KEYS = 1 << 15
# Operands are padded to these multiples: the last bits of a BLAS product depend on whether its operands, and the
# buffers between the two products, begin on a boundary of 64 bytes.
WIDTH_MULTIPLE = 16
QUERY_MULTIPLE = 8


class KeyGroup(NamedTuple):
    """Rows of a tile with keys of one padded length L."""

    rows: Tensor  # [m] int64, counted within the tile
    slots: Tensor  # [m, L] int64, or [1, L] where the rows read the same list to different lengths
    bias: Tensor  # [m, 1, 1, L] float32 added to the scores: -inf at the padding


class RowTile:
    """Rows `start` to `stop` of a batch whose earlier rows have been scored."""

    def __init__(self, batch: RowBatch, start: int, stop: int) -> None:
        self.batch, self.start, self.stop = batch, start, stop
        self._groups: dict[int | None, list[KeyGroup]] = {}

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def slot_mapping(self) -> Tensor:
        """[rows] int64: the pool slot each row's K/V is written to."""
        return self.batch.slot_mapping[self.start : self.stop]

    def groups(self, window: int | None) -> list[KeyGroup]:
        """The rows by length of their keys, built once and shared by all layers of one window size."""
        if window not in self._groups:
            self._groups[window] = key_groups(*self.key_slots(window))
        return self._groups[window]

    def key_slots(self, window: int | None) -> tuple[Tensor, Tensor]:
        """Slots [rows, longest] int64 of each row's keys in order of position, with anything behind them; and how many
        keys each row has [rows] int64.
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
        return torch.cat([F.pad(table, (0, longest - table.shape[1])) for table in tables]), torch.cat(counts)


def key_groups(slots: Tensor, counts: Tensor) -> list[KeyGroup]:
    """Sort rows by the padded length of their keys; slots [rows, longest], counts [rows] as `RowTile.key_slots`."""
    groups = []
    lengths = (counts + KEY_MULTIPLE - 1) // KEY_MULTIPLE * KEY_MULTIPLE
    for length in lengths.unique().tolist():
        rows = (lengths == length).nonzero().flatten()
        columns = torch.arange(length, device=slots.device)
        beyond = columns >= counts[rows, None]
        # Padding reads the row's first key: other slots may hold anything, and a weight of 0 does not silence NaN.
        table = torch.where(beyond, slots[rows, :1], slots[rows][:, columns.clamp(max=slots.shape[1] - 1)])
        longest = table[counts[rows].argmax(), None]
        bias = torch.zeros(beyond.shape, device=slots.device).masked_fill_(beyond, float("-inf"))[:, None, None]
        if bool((beyond | (table == longest)).all()):
            groups.append(KeyGroup(rows, longest, bias))
            continue
        pieces = [x.split(max(1, MAX_KEYS // length)) for x in (rows, table, bias)]
        groups += [KeyGroup(*piece) for piece in zip(*pieces, strict=True)]
    return groups


def exact_row_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tile: RowTile,
    cache: KVCache,
    layer: int,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`row_attention` for the rows of a tile, which q, k and v may be longer than: what follows is padding.

    q [n, heads, head_dim]; k, v [n, kv_heads, head_dim]. Returns [n, heads, head_dim], zero at the padding.
    """
    cache.write(layer, tile.slot_mapping, k[: len(tile)], v[: len(tile)])
    output = torch.zeros_like(q)
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
    kv_heads = k.shape[2]
    group = heads // kv_heads
    # The heads that share a key head are the queries of one product.
    q = F.pad(
        q.float().reshape(m, kv_heads, group, head_dim), (0, -head_dim % WIDTH_MULTIPLE, 0, -group % QUERY_MULTIPLE)
    )
    k, v = (pad_width(x.float()).transpose(1, 2).expand(m, -1, -1, -1) for x in (k, v))
    if softcap is None and sinks is None:
        output = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scaling)
    else:
        output = torch.matmul(capped_softmax(torch.matmul(q, k.mT) * scaling, bias, group, softcap, sinks), v)
    return output[:, :, :group, :head_dim].reshape(m, heads, head_dim)


def pad_width(x: Tensor) -> Tensor:
    """Zeros behind the last dimension up to a multiple of WIDTH_MULTIPLE."""
    missing = -x.shape[-1] % WIDTH_MULTIPLE
    return F.pad(x, (0, missing)) if missing else x


def capped_softmax(scores: Tensor, bias: Tensor, group: int, softcap: float | None, sinks: Tensor | None) -> Tensor:
    """Softmax of scores [m, kv_heads, group and padding, keys], which a cap bends and sinks take a share of."""
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + bias
    if sinks is None:
        return scores.softmax(-1)
    sinks = F.pad(sinks.float().view(scores.shape[1], group, 1), (0, 0, 0, scores.shape[2] - group))
    scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    return scores.softmax(-1)[..., :-1].contiguous()
