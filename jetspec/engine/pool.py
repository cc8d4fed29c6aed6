"""How much K/V storage a known set of requests needs: an engine sized by the machine would take far more."""

from __future__ import annotations

from collections.abc import Iterable

BLOCK_SIZE = 16


def blocks_for(lengths: Iterable[int], max_num_seqs: int, rows: int = 1) -> int:
    """Blocks that hold the ``max_num_seqs`` longest of ``lengths`` tokens at once, and ``rows`` new rows of each."""
    longest = sorted(lengths, reverse=True)[:max_num_seqs]
    return sum(-(-(length + rows) // BLOCK_SIZE) + 1 for length in longest)
