"""The engine loop: schedule, draft, verify, accept, commit, for every running sequence at once."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from jetspec.attention import KVCache
from jetspec.attention.blocks import BlockManager
from jetspec.clock import Clock
from jetspec.engine.accept import accept, score_prompt
from jetspec.engine.batch import Allocation, Round, ScheduledSequence, batch_of
from jetspec.engine.budget import AutoBudget, Budget, FixedBudget
from jetspec.engine.config import EngineConfig
from jetspec.engine.drafters import CommittedRows, Drafter, head_drafter
from jetspec.engine.observer import Committed, EngineStep, Observer, RoundRecord
from jetspec.engine.requests import new_sequence
from jetspec.engine.scheduler import Scheduler
from jetspec.engine.sequence import Sequence
from jetspec.errors import JetSpecError, is_positive_integer
from jetspec.head import DraftHead
from jetspec.models.cost import measure
from jetspec.models.onednn_linear import pack_linears
from jetspec.models.target import Target
from jetspec.recurrent.states import StateWrite
from jetspec.sampling import SamplingParams, child_seed
from jetspec.tree import Forest

#: Bytes of K/V storage on a CPU where `num_blocks` is not given; pages are only touched when used.
DEFAULT_CPU_CACHE_BYTES = 4 << 30
#: Share of the free device memory that K/V storage takes where `num_blocks` is not given.
DEFAULT_GPU_CACHE_SHARE = 0.8


@dataclass
class StepOutput:
    """What one round produced for one request. `sequence` carries its whole state, `sequence.error` why it failed."""

    sequence: Sequence
    new_token_ids: list[int]
    new_text: str

    @property
    def finished(self) -> bool:
        """Whether the request has ended."""
        return self.sequence.finished


class Engine:
    """Runs any number of requests on one target, each exactly as plain decoding would.

    Args:
        target: the frozen model.
        draft: a draft head or another drafter; None decodes plainly.
        observer: watches commits and rounds.
        options: the fields of `EngineConfig`.

    Raises:
        JetSpecError: an option is unknown or out of range, the head does not fit the target, or the target cannot be
            batch-invariant or compiled.
    """

    def __init__(
        self,
        target: Target,
        draft: DraftHead | Drafter | None = None,
        *,
        observer: Observer | None = None,
        **options: Any,
    ) -> None:
        self.config = config = EngineConfig(**options)
        if not isinstance(target, Target):
            raise JetSpecError(f"target={target!r:.80}: must be a Target; load_target makes one, LLM takes its name")
        if not isinstance(draft, DraftHead | Drafter | None):
            raise JetSpecError(f"draft={draft!r:.80}: must be a DraftHead, a Drafter, or None to decode plainly")
        if not isinstance(observer, Observer | None):
            raise JetSpecError(f"observer={observer!r:.80}: must be an Observer, or None to watch nothing")
        self.drafter: Drafter | None = head_drafter(draft) if isinstance(draft, DraftHead) else draft
        self.target = _prepared_target(target, config)
        num_blocks = config.num_blocks or _default_num_blocks(self.target, self.drafter, config)
        # Before the list of blocks, which would fill the memory where `num_blocks` is far too large.
        self.cache = _new_cache(self.target, num_blocks, config)
        self.blocks = BlockManager(num_blocks, config.kv_block_size, self.cache.states)
        if self.drafter is not None:
            self.drafter.prepare(self.target, num_blocks, config.kv_block_size)
        self.scheduler = Scheduler(
            self.blocks,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self.target_layer_ids = _target_layer_ids(self.drafter, config)
        self.budget = self._new_budget()
        self.observer = observer
        self._unseeded = count()
        self._sequences: dict[str, Sequence] = {}

    def _new_budget(self) -> Budget:
        tree_budget = self.config.tree_budget
        if self.drafter is None:
            return FixedBudget(1)
        if isinstance(tree_budget, Budget):
            return tree_budget
        if isinstance(tree_budget, int):
            return FixedBudget(tree_budget)
        return AutoBudget(measure(self.target, self.cache, self.config.max_num_batched_tokens, self.target_layer_ids))

    @property
    def has_work(self) -> bool:
        """Whether requests are running or waiting."""
        return bool(self._sequences)

    def check(self, prompt_ids: Seq[int], params: SamplingParams) -> int:
        """Tokens the request may generate at most. Raises JetSpecError as `new_sequence` does."""
        return new_sequence("", prompt_ids, params, target=self.target, blocks=self.blocks).max_new_tokens

    def add(self, request_id: str, prompt_ids: Seq[int], params: SamplingParams) -> Sequence:
        """Queue a request.

        Raises:
            JetSpecError: the id is in use, `params.n` is above 1, or `check` refuses the request.
        """
        sequence = new_sequence(request_id, prompt_ids, params, target=self.target, blocks=self.blocks)
        if request_id in self._sequences:
            raise JetSpecError(f"request_id={request_id!r} is already running: give each request its own id")
        if params.n > 1:
            raise JetSpecError(
                f"n={params.n}: the engine gives one answer a request; use LLM, or add a request for each"
            )
        if params.seed is None:
            sequence.seed = child_seed(self.config.seed, 1 + next(self._unseeded))
        self._sequences[request_id] = sequence
        self.scheduler.add(sequence)
        return sequence

    def cancel(self, request_id: str) -> Sequence | None:
        """Stop a request and free what it holds; returns its state, or None if it is not running."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            sequence.finish("abort")
            self.scheduler.release(sequence)
        return sequence

    def run(self) -> None:
        """Run rounds until every request has ended."""
        while self.has_work:
            self.step()

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Run one round; returns the requests that got tokens or ended, in order of admission."""
        current = self._schedule()
        if current is None:
            return []
        self._draft(current)
        self._verify(current)
        outputs = self._accept(current)
        self._commit(current)
        self._observe(current, outputs)
        return outputs

    def _schedule(self) -> Round | None:
        clock = Clock(self.target.device)
        scheduled = self.scheduler.schedule(self._allocate)
        clock.lap("schedule")
        return None if scheduled is None else Round(*scheduled, clock)

    def _allocate(self, sequences: list[Sequence]) -> Allocation:
        allocation = self.budget.allocate(sequences)
        rows = allocation.rows
        if len(rows) != len(sequences) or not all(map(is_positive_integer, rows)):
            raise JetSpecError(
                f"tree_budget: {type(self.budget).__name__}.allocate gave rows {rows!r:.80} for {len(sequences)} "
                "sequences, must give an integer of at least 1 for each"
            )
        return allocation

    def _draft(self, current: Round) -> None:
        """Give every sequence its rows: a tree where it drafts, a chain of known tokens elsewhere."""
        drafted = current.drafted
        if drafted:
            forest = self._propose(current.allocation)
            current.clock.lap("draft")
            current.selection = self.budget.select(current.allocation, forest)
            for index, scheduled in enumerate(drafted):
                scheduled.set_tree(current.selection.forest, index)
        for scheduled in current.scheduled:
            if not scheduled.drafts:
                scheduled.set_chain()
        current.batch = batch_of(current.scheduled).to(self.target.device)
        current.clock.lap("select")

    def _propose(self, allocation: Allocation) -> Forest:
        assert self.drafter is not None
        name = type(self.drafter).__name__
        sequences, rows = allocation.sequences, allocation.rows
        try:
            forest = self.drafter.propose(sequences, rows)
        except Exception as error:
            raise JetSpecError(f"drafter {name} failed: {error!r}") from error
        fault = forest.fault(
            [s.anchor for s in sequences], rows, [s.max_depth for s in sequences], self.target.num_embeddings
        )
        if fault is not None:
            raise JetSpecError(f"drafter {name} proposed no valid trees: {fault}")
        return forest

    def _verify(self, current: Round) -> None:
        """The target's forward, with logits only for rows that choose a token or that the request asks to see."""
        assert current.batch is not None
        rows: list[int] = []
        for scheduled, segment in zip(current.scheduled, current.batch.segments, strict=True):
            first = 0 if scheduled.scores_prompt else scheduled.num_known
            scheduled.logits_start = len(rows) + scheduled.num_known - first
            rows.extend(range(segment.start + first, segment.stop))
        current.output = self.target.forward(
            current.batch,
            self.cache,
            torch.tensor(rows, dtype=torch.int64, device=self.target.device),
            target_layer_ids=self.target_layer_ids,
            final_hidden=self.config.want_hidden,
        )
        logits = current.output.logits
        if len(logits):
            choices = logits.argmax(-1, keepdim=True)
            # A NaN in a row is its largest value.
            finite = logits.gather(-1, choices).isfinite()
            current.choices = torch.where(finite, choices, -1).flatten().tolist()
        current.clock.lap("verify")

    def _accept(self, current: Round) -> list[StepOutput]:
        """Append to every sequence the target's own tokens along its tree."""
        assert current.output is not None
        outputs: list[StepOutput] = []
        for scheduled in current.scheduled:
            sequence, known = scheduled.sequence, len(scheduled.sequence.token_ids)
            if scheduled.scores_prompt:
                score_prompt(scheduled, current.output.logits, current.choices)
            if scheduled.has_tree and not sequence.finished:
                accept(scheduled, current.output.logits, current.choices)
            if scheduled.has_tree or sequence.finished:
                outputs.append(StepOutput(sequence, sequence.token_ids[known:], sequence.take_text()))
            if self.observer is not None and scheduled.decodes and scheduled.walk is not None:
                self.observer.round(
                    RoundRecord(
                        sequence.request_id,
                        scheduled.token_ids,
                        scheduled.parents,
                        scheduled.log_probs,
                        scheduled.walk.rows,
                        scheduled.walk.tokens,
                    )
                )
        current.clock.lap("accept")
        return outputs

    def _commit(self, current: Round) -> None:
        """Keep the accepted rows' K/V in consecutive slots, let the drafter learn them, free the rest."""
        assert current.batch is not None
        kept: list[int] = []
        spans: list[tuple[Sequence, int, int]] = []
        sources, slots = [], []
        writes: list[StateWrite] = []
        for scheduled, segment in zip(current.scheduled, current.batch.segments, strict=True):
            sequence, rows = scheduled.sequence, scheduled.kept_rows
            new_slots = segment.slots[scheduled.context_len :]
            sources.append(new_slots[rows])
            slots.append(new_slots[: len(rows)])
            accepted = [segment.start + row for row in rows]
            kept += accepted
            sequence.num_cached += len(rows)
            spans.append((sequence, scheduled.context_len, sequence.num_cached))
            sequence.table.truncate(sequence.num_cached + 1)
            sequence.table.cache_full_blocks(sequence.token_ids, sequence.num_cached)
            writes += sequence.table.state_writes(segment.state, accepted, scheduled.context_len)
            if self.observer is not None:
                self.observer.committed(self._committed(current, scheduled, segment.start))
        source, destination = torch.cat(sources), torch.cat(slots)
        moved = source != destination
        device = self.target.device
        if moved.any():
            self.cache.move(source[moved].to(device), destination[moved].to(device))
        if self.cache.states is not None:
            self.cache.states.commit(writes)
        if self.drafter is not None:
            index = torch.tensor(kept, dtype=torch.int64, device=device)
            assert current.output is not None
            states = current.output.aux_hidden_states
            states = None if states is None else states[index]
            self.drafter.extend(CommittedRows(spans, current.batch.positions[index], destination.to(device), states))
        for scheduled in current.scheduled:
            if scheduled.sequence.finished:
                self.scheduler.release(scheduled.sequence)
                del self._sequences[scheduled.sequence.request_id]
        current.clock.lap("commit")

    def _committed(self, current: Round, scheduled: ScheduledSequence, start: int) -> Committed:
        assert current.output is not None
        rows, output = scheduled.kept_rows, current.output
        kept = [start + row for row in rows]
        return Committed(
            scheduled.sequence.request_id,
            scheduled.context_len,
            [scheduled.token_ids[row] for row in rows],
            None if output.aux_hidden_states is None else output.aux_hidden_states[kept],
            None if output.hidden is None else output.hidden[kept],
        )

    def _observe(self, current: Round, outputs: list[StepOutput]) -> None:
        """Tell the budget and the observer what the round took and brought."""
        current.seconds = seconds = current.clock.seconds()
        self.budget.observe(current)
        if self.observer is None:
            return
        selection = current.selection
        self.observer.step(
            EngineStep(
                rows=current.rows,
                decoding=sum(s.decodes for s in current.scheduled),
                drafted=len(current.drafted),
                new_tokens=sum(len(output.new_token_ids) for output in outputs),
                draft_s=seconds["draft"],
                select_s=seconds["select"],
                verify_s=seconds["verify"],
                accept_s=seconds["accept"],
                commit_s=seconds["commit"],
                total_s=current.total_s,
                expected_tokens=None if selection is None else selection.expected_tokens,
                expected_s=None if selection is None else selection.expected_seconds,
            )
        )


def _prepared_target(target: Target, config: EngineConfig) -> Target:
    if not config.compile:  # a compiler would take every packed layer for a program of its own
        pack_linears(target.model)
    target = target.as_batch_invariant() if config.batch_invariant else target
    return target.as_compiled() if config.compile else target


def _new_cache(target: Target, num_blocks: int, config: EngineConfig) -> KVCache:
    try:
        return target.new_cache(num_blocks, config.kv_block_size, config.max_num_seqs, config.num_snapshots)
    except (RuntimeError, TypeError) as error:  # no memory; a size beyond 64 bits
        size = target.cache_bytes_per_token * num_blocks * config.kv_block_size
        states = target.state_bytes * (config.max_num_seqs + config.num_snapshots)
        fields = f"num_blocks={num_blocks}, kv_block_size={config.kv_block_size}"
        if states:
            fields += f", max_num_seqs={config.max_num_seqs}, num_state_snapshots={config.num_state_snapshots}"
        total = (size + states) / 2**30
        raise JetSpecError(f"{fields}: a cache of {total:.3g} GiB cannot be allocated; lower them") from error


def _target_layer_ids(drafter: Drafter | None, config: EngineConfig) -> tuple[int, ...]:
    """The layers whose outputs a forward returns: the drafter's, or else those that the observer is to see."""
    read = () if drafter is None else tuple(drafter.target_layer_ids)
    if read and config.target_layer_ids is not None and config.target_layer_ids != read:
        raise JetSpecError(f"target_layer_ids={config.target_layer_ids}: the drafter already reads {read}")
    return read or config.target_layer_ids or ()


def _default_num_blocks(target: Target, drafter: Drafter | None, config: EngineConfig) -> int:
    """Blocks for `max_num_seqs` full contexts, or as many as memory allows."""
    per_token = target.cache_bytes_per_token + (0 if drafter is None else drafter.cache_bytes_per_token)
    if target.device.type == "cuda":
        available = int(torch.cuda.mem_get_info(target.device)[0] * DEFAULT_GPU_CACHE_SHARE)
    else:
        available = DEFAULT_CPU_CACHE_BYTES
    available -= target.state_bytes * (1 + config.max_num_seqs + config.num_snapshots)
    needed = -(-target.max_context // config.kv_block_size) * config.max_num_seqs
    return max(1, min(needed, available // (per_token * config.kv_block_size)))
