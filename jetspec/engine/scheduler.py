"""Which rows run in the next forward."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from jetspec.engine.blocks import BlockManager
from jetspec.engine.sequence import Sequence


@dataclass
class Grant:
    """Rows a sequence may use this round: a prompt chunk's length, or the largest tree, root included."""

    sequence: Sequence
    rows: int


class Scheduler:
    """Shares `max_num_batched_tokens` and the cache blocks between decoding sequences, prompt chunks and new requests.

    Every decoding sequence gets its root row; what is left goes to prompt chunks in order of arrival and to trees.
    A new request starts behind the longest prefix whose blocks are known. When blocks run out the newest sequence is
    preempted: its blocks are freed and its K/V recomputed later.
    """

    def __init__(
        self, blocks: BlockManager, *, max_num_batched_tokens: int, max_num_seqs: int, enable_prefix_caching: bool
    ) -> None:
        self.blocks = blocks
        self.enable_prefix_caching = enable_prefix_caching
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence and free its blocks, wherever it is."""
        sequence.table.truncate(0)
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def schedule(self, tree_rows: Callable[[list[Sequence]], list[int]]) -> list[Grant]:
        """Grants for the next round, in order of admission; blocks for all granted rows are reserved.

        `tree_rows` says how many rows the trees of these decoding sequences may have.
        """
        self._admit()
        decoding = self._reserve_roots()
        prefilling = [s for s in self.running if not s.is_decoding]
        # While prompts wait, trees leave half of the rows to them.
        rows_for_trees = self.max_num_batched_tokens // 2 if prefilling else self.max_num_batched_tokens
        per_tree = max(1, rows_for_trees // max(1, len(decoding)))
        free_rows = self.max_num_batched_tokens - len(decoding)
        grants: dict[str, int] = {s.request_id: 1 for s in decoding}
        drafting = [s for s in decoding if s.max_depth > 0]
        for sequence, allowed in zip(drafting, tree_rows(drafting), strict=True):
            rows = self._reserve(sequence, min(allowed, per_tree, 1 + free_rows))
            grants[sequence.request_id] = rows
            free_rows -= rows - 1
        for sequence in prefilling:
            wanted = min(len(sequence.token_ids) - sequence.num_cached, free_rows)
            rows = self._reserve(sequence, wanted)
            if rows > 0:
                grants[sequence.request_id] = rows
                free_rows -= rows
        granted = [Grant(s, grants[s.request_id]) for s in self.running if s.request_id in grants]
        if not granted and self.running:
            # Only prompts are running, and none of them can grow: make room from the newest.
            self._preempt(self.running[-1])
            return self.schedule(tree_rows)
        return granted

    def _reserve_roots(self) -> list[Sequence]:
        decoding: list[Sequence] = []
        for sequence in list(self.running):
            if sequence not in self.running or not sequence.is_decoding:
                continue
            while sequence.table.growable_to() < len(sequence.token_ids):
                victim = self.running[-1]
                self._preempt(victim)
                if victim is sequence:
                    break
            else:
                sequence.table.reserve(len(sequence.token_ids))
                decoding.append(sequence)
        return [s for s in decoding if s in self.running]

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            if self.enable_prefix_caching and sequence.params.prompt_logprobs is None:
                # The last token always runs: its row chooses the next one.
                sequence.num_cached = sequence.table.match_prefix(sequence.token_ids[:-1])
            # Room for the whole known text and one more token, so that admission does not cause a preemption at once.
            missing = self.blocks.blocks_for(len(sequence.token_ids) + 1) - len(sequence.table.blocks)
            if missing > self._unclaimed_blocks():
                sequence.table.truncate(0)
                sequence.num_cached = 0
                return
            if sequence.metrics.preemptions == 0:
                sequence.metrics.cached_prompt_tokens = sequence.num_cached
            self.running.append(self.waiting.popleft())

    def _unclaimed_blocks(self) -> int:
        """Free blocks less those that the running prompts still need."""
        missing = sum(self.blocks.blocks_for(len(s.token_ids) + 1) - len(s.table.blocks) for s in self.running)
        return self.blocks.num_free - max(0, missing)

    def _reserve(self, sequence: Sequence, rows: int) -> int:
        """Reserve blocks for up to `rows` rows behind the cached tokens; returns for how many there is room."""
        rows = min(rows, sequence.table.growable_to() - sequence.num_cached)
        if rows > 0:
            sequence.table.reserve(sequence.num_cached + rows)
        return rows

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.table.truncate(0)
        sequence.num_cached = 0
        sequence.metrics.preemptions += 1
        self.waiting.appendleft(sequence)
