"""Which rows run in the next forward."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from jetspec.attention.blocks import BlockManager
from jetspec.engine.batch import Allocation, ScheduledSequence
from jetspec.engine.sequence import Sequence


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
        """Put a sequence at the end of the waiting queue."""
        self.waiting.append(sequence)

    def release(self, sequence: Sequence) -> None:
        """Forget a sequence and free its blocks, wherever it is."""
        sequence.table.truncate(0)
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def schedule(
        self, allocate: Callable[[list[Sequence]], Allocation]
    ) -> tuple[list[ScheduledSequence], Allocation] | None:
        """The next round's sequences in order of admission, their rows reserved; None where nothing runs.

        `allocate` says how many rows the trees of these decoding sequences may have. The allocation that is returned
        holds what they were granted.
        """
        while True:
            self._admit()
            decoding = self._reserve_roots()
            allocation = allocate([s for s in decoding if s.max_depth > 0])
            granted = self._grant(decoding, allocation)
            scheduled = [
                ScheduledSequence(s, granted[s.request_id], s.num_cached, s.is_decoding)
                for s in self.running
                if s.request_id in granted
            ]
            if scheduled:
                return scheduled, allocation.granted(scheduled)
            if not self.running:
                return None
            # Only prompts are running, and none of them can grow: make room from the newest.
            self._preempt(self.running[-1])

    def _grant(self, decoding: list[Sequence], allocation: Allocation) -> dict[str, int]:
        """Rows by request: roots of all decoding sequences, then trees, then prompt chunks as far as there is room."""
        prefilling = [s for s in self.running if not s.is_decoding]
        # While prompts wait, trees leave half of the rows to them.
        rows_for_trees = self.max_num_batched_tokens // 2 if prefilling else self.max_num_batched_tokens
        per_tree = max(1, rows_for_trees // max(1, len(decoding)))
        free_rows = self.max_num_batched_tokens - len(decoding)
        granted = {s.request_id: 1 for s in decoding}
        for sequence, allowed in zip(allocation.sequences, allocation.rows, strict=True):
            rows = self._reserve(sequence, min(allowed, per_tree, 1 + free_rows))
            granted[sequence.request_id] = rows
            free_rows -= rows - 1
        for sequence in prefilling:
            rows = self._reserve(sequence, min(len(sequence.token_ids) - sequence.num_cached, free_rows))
            if rows > 0:
                granted[sequence.request_id] = rows
                free_rows -= rows
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
            missing = self.blocks.blocks_needed(len(sequence.token_ids) + 1) - len(sequence.table.blocks)
            if missing > self._unclaimed_blocks():
                sequence.table.truncate(0)
                sequence.num_cached = 0
                return
            if sequence.metrics.preemptions == 0:
                sequence.metrics.cached_prompt_tokens = sequence.num_cached
            self.running.append(self.waiting.popleft())

    def _unclaimed_blocks(self) -> int:
        """Free blocks less those that the running prompts still need."""
        missing = sum(self.blocks.blocks_needed(len(s.token_ids) + 1) - len(s.table.blocks) for s in self.running)
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
