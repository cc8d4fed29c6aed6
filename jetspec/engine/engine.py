"""The engine loop: draft, verify, accept, commit, for every running sequence at once."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import count
from typing import Literal

import torch

from jetspec.attention import KVCache, RowBatch
from jetspec.detokenize import IncrementalDetokenizer
from jetspec.engine.blocks import BlockManager, BlockTable
from jetspec.engine.budget import AutoBudget, Budget, FixedBudget, Load, Plan
from jetspec.engine.cost import measure
from jetspec.engine.drafters import CommittedRows, Drafter, HeadDrafter
from jetspec.engine.observer import Committed, EngineStep, Observer, RoundRecord
from jetspec.engine.part import Part, batch_of
from jetspec.engine.scheduler import Grant, Scheduler
from jetspec.engine.sequence import Sequence
from jetspec.errors import JetSpecError, is_positive_integer
from jetspec.head import DraftHead
from jetspec.models.onednn_linear import pack_linears
from jetspec.models.target import Target, TargetOutput
from jetspec.sampling import SamplingParams, child_seed, encode_bad_words, new_grammar, process, sample, top_logprobs
from jetspec.tree import Walk, walk

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
        return self.sequence.finished


class Engine:
    """Runs any number of requests on one target, each exactly as plain decoding would.

    Args:
        target: the frozen model.
        draft: a draft head or another drafter; None decodes plainly.
        tree_budget: rows of a sequence's verify forward, root included. "auto" chooses them anew every round, for all
            sequences together, so that the expected tokens per second are highest, down to plain decoding; for that
            the engine times some forwards first. A `Budget` of your own decides otherwise.
        num_blocks: K/V blocks in the pool; by default what memory allows.
        kv_block_size: tokens a K/V block holds.
        max_num_batched_tokens: rows of one target forward, over all sequences.
        max_num_seqs: sequences that decode at the same time.
        enable_prefix_caching: start requests behind a prefix that other requests left in the cache. Rows of such a
            prefix do not run, so `observer` does not see them.
        batch_invariant: compute every row with bits that depend on its token and context alone
            (`Target.as_batch_invariant`). The text then equals that of plain decoding in this mode, to the last near-tie
            in every number type, whatever the batch and the draft.
        compile: compile the target's layers (`Target.as_compiled`), which pays on accelerators.
        seed: where the noise of requests without a seed comes from.
        target_layer_ids: layers whose outputs `observer` is given; by default the head's.
        want_hidden: also give `observer` the final hidden states.
        observer: watches commits and rounds.

    Raises:
        JetSpecError: an argument is out of range, the head does not fit the target, or the target cannot be
            batch-invariant or compiled.
    """

    def __init__(
        self,
        target: Target,
        draft: DraftHead | Drafter | None = None,
        *,
        tree_budget: int | Literal["auto"] | Budget = "auto",
        num_blocks: int | None = None,
        kv_block_size: int = 16,
        max_num_batched_tokens: int = 1024,
        max_num_seqs: int = 64,
        enable_prefix_caching: bool = True,
        batch_invariant: bool = False,
        compile: bool = False,
        seed: int = 0,
        target_layer_ids: Seq[int] | None = None,
        want_hidden: bool = False,
        observer: Observer | None = None,
    ) -> None:
        for name, value in {
            "num_blocks": num_blocks,
            "kv_block_size": kv_block_size,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_num_seqs": max_num_seqs,
        }.items():
            if value is not None and not is_positive_integer(value):
                raise JetSpecError(f"{name}={value!r}: must be an integer of at least 1")
        for name, flag in {
            "enable_prefix_caching": enable_prefix_caching,
            "batch_invariant": batch_invariant,
            "compile": compile,
        }.items():
            if not isinstance(flag, bool):
                raise JetSpecError(f"{name}={flag!r}: must be True or False")
        if not isinstance(seed, int):
            raise JetSpecError(f"seed={seed!r}: must be an integer")
        if not isinstance(draft, DraftHead | Drafter | None):
            raise JetSpecError(f"draft={draft!r:.80}: must be a DraftHead, a Drafter, or None to decode plainly")
        if not (isinstance(tree_budget, Budget) or tree_budget == "auto" or is_positive_integer(tree_budget)):
            raise JetSpecError(
                f'tree_budget={tree_budget!r:.80}: must be an integer of at least 1, "auto", or a Budget'
            )
        if not compile:  # a compiler would take every packed layer for a program of its own
            pack_linears(target.model)
        target = target.as_batch_invariant() if batch_invariant else target
        self.target = target = target.as_compiled() if compile else target
        self.drafter: Drafter | None = HeadDrafter(draft) if isinstance(draft, DraftHead) else draft
        if num_blocks is None:
            num_blocks = _default_num_blocks(target, self.drafter, kv_block_size, max_num_seqs)
        self.blocks = BlockManager(num_blocks, kv_block_size)
        self.cache: KVCache = target.new_cache(num_blocks, kv_block_size)
        if self.drafter is not None:
            self.drafter.take()
            self.drafter.prepare(target, num_blocks, kv_block_size)
        self.scheduler = Scheduler(
            self.blocks,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            enable_prefix_caching=enable_prefix_caching,
        )
        drafter_layers = self.drafter.target_layer_ids if self.drafter is not None else ()
        if drafter_layers and target_layer_ids is not None and tuple(target_layer_ids) != tuple(drafter_layers):
            raise JetSpecError(
                f"target_layer_ids={tuple(target_layer_ids)}: the drafter already reads {tuple(drafter_layers)}"
            )
        self.target_layer_ids = tuple(drafter_layers or target_layer_ids or ())
        self.want_hidden = want_hidden
        self.observer = observer
        self.budget: Budget
        if self.drafter is None:
            self.budget = FixedBudget(1)
        elif isinstance(tree_budget, Budget):
            self.budget = tree_budget
        elif isinstance(tree_budget, int):
            self.budget = FixedBudget(tree_budget)
        else:
            self.budget = AutoBudget(measure(target, self.cache, max_num_batched_tokens, self.target_layer_ids))
        self._seed = seed
        self._unseeded = count()
        self._sequences: dict[str, Sequence] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def check(self, prompt_ids: Seq[int], params: SamplingParams) -> int:
        """Tokens the request may generate at most.

        Raises:
            JetSpecError: the prompt is empty, holds an id outside the vocabulary, or does not fit context or cache; or
                the parameters ask for what the target cannot give.
        """
        if not prompt_ids:
            raise JetSpecError("prompt is empty: give at least one token (a chat template or a bos token adds some)")
        bad = [t for t in prompt_ids if not isinstance(t, int) or not 0 <= t < self.target.num_embeddings]
        if bad:
            raise JetSpecError(
                f"prompt holds token id {bad[0]!r}: ids of this target are 0 .. {self.target.num_embeddings - 1}"
            )
        params.check_vocabulary(self.target.vocab_size)
        if params.structured_outputs is not None:
            new_grammar(self.target.tokenizer, self.target.eos_token_ids, params.structured_outputs)
        if (params.stop_strings or params.bad_words) and self.target.tokenizer is None:
            raise JetSpecError(
                "stop and bad_words need a tokenizer: this target has none, use stop_token_ids or logit_bias"
            )
        limit = self.target.max_context
        if len(prompt_ids) >= limit:
            raise JetSpecError(
                f"prompt has {len(prompt_ids)} tokens, the target's context holds {limit} with the answer: "
                "shorten the prompt"
            )
        room = limit - len(prompt_ids)
        max_new = room if params.max_tokens is None else min(params.max_tokens, room)
        slots = self.blocks.num_blocks * self.blocks.block_size
        if len(prompt_ids) + max_new > slots:
            raise JetSpecError(
                f"prompt of {len(prompt_ids)} and {max_new} new tokens need more than the K/V cache's {slots} slots: "
                "lower max_tokens or raise num_blocks"
            )
        return max_new

    def add(self, request_id: str, prompt_ids: Seq[int], params: SamplingParams) -> Sequence:
        """Queue a request.

        Raises:
            JetSpecError: the id is in use, or `check` refuses the request.
        """
        if request_id in self._sequences:
            raise JetSpecError(f"request_id={request_id!r} is already running: give each request its own id")
        max_new = self.check(prompt_ids, params)
        seed = params.seed if params.seed is not None else child_seed(self._seed, 1 + next(self._unseeded))
        tokenizer, structured = self.target.tokenizer, params.structured_outputs
        sequence = Sequence(
            request_id=request_id,
            prompt_ids=list(prompt_ids),
            params=params,
            seed=seed,
            eos_token_ids=self.target.eos_token_ids,
            max_new_tokens=max_new,
            table=BlockTable(self.blocks),
            detokenizer=None if tokenizer is None else IncrementalDetokenizer(tokenizer, params.skip_special_tokens),
            bad_words=encode_bad_words(tokenizer, params.bad_words or ()),
            grammar=None if structured is None else new_grammar(tokenizer, self.target.eos_token_ids, structured),
        )
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

    @torch.inference_mode()
    def step(self) -> list[StepOutput]:
        """Run one round; returns the requests that got tokens, in order of admission."""
        clock = _Clock()
        grants = self.scheduler.schedule(self._tree_rows)
        if not grants:
            return []
        parts, drafted, plan = self._draft(grants, clock)
        batch = batch_of(parts).to(self.target.device)
        output, logits_start = self._verify(parts, batch)
        greedy = output.logits.argmax(-1).tolist() if output.logits.shape[0] else []
        clock.lap("verify")
        outputs: list[StepOutput] = []
        walks: list[Walk | None] = []
        for part, start in zip(parts, logits_start, strict=True):
            if part.scores_prompt:
                part.score_prompt(output.logits, start)
            if not part.tokens:
                walks.append(None)
                continue
            known = len(part.sequence.token_ids)
            walks.append(self._accept(part, output.logits, greedy, start))
            new_ids = part.sequence.token_ids[known:]
            outputs.append(StepOutput(part.sequence, new_ids, part.sequence.take_text()))
        clock.lap("accept")
        keys = sum(part.keys for part in parts)
        self._commit(parts, batch, walks, output)
        for done in [o.sequence for o in outputs if o.finished]:
            self.scheduler.release(done)
            del self._sequences[done.request_id]
        clock.lap("commit")
        self._learn(parts, walks, keys, drafted, plan, clock, sum(len(o.new_token_ids) for o in outputs))
        return outputs

    def run(self) -> None:
        """Run rounds until no request is left."""
        while self.has_work:
            self.step()

    def _tree_rows(self, sequences: list[Sequence]) -> list[int]:
        rows = list(self.budget.rows(sequences))
        if len(rows) != len(sequences) or not all(map(is_positive_integer, rows)):
            raise JetSpecError(
                f"tree_budget: {type(self.budget).__name__}.rows returned {rows!r:.80} for {len(sequences)} sequences, "
                "must return an integer of at least 1 for each"
            )
        return rows

    def _draft(self, grants: list[Grant], clock: _Clock) -> tuple[list[Part], list[Sequence], Plan | None]:
        """The round's parts, the sequences that were drafted for, and the plan of their trees."""
        drafting = [g for g in grants if g.sequence.is_decoding and g.rows > 1]
        sequences = [g.sequence for g in drafting]
        if self.drafter is None or not drafting:
            return [Part.chain(g) for g in grants], [], None
        clock.lap("schedule")
        rows = [g.rows for g in drafting]
        name = type(self.drafter).__name__
        try:
            forest = self.drafter.propose(sequences, rows)
        except Exception as error:
            raise JetSpecError(f"drafter {name} failed: {error!r}") from error
        fault = forest.fault(
            [s.anchor for s in sequences], rows, [s.max_depth for s in sequences], self.target.num_embeddings
        )
        if fault is not None:
            raise JetSpecError(f"drafter {name} proposed no valid trees: {fault}")
        clock.lap("draft")
        index = {s.request_id: i for i, s in enumerate(sequences)}
        others = [Part.chain(g) for g in grants if g.sequence.request_id not in index]
        plan = self.budget.plan(forest, sequences, _load(sequences, others))
        trees = [Part.tree(s, plan.forest, i) for i, s in enumerate(sequences)]
        by_id = {part.sequence.request_id: part for part in trees + others}
        clock.lap("build")
        return [by_id[g.sequence.request_id] for g in grants], sequences, plan

    def _verify(self, parts: list[Part], batch: RowBatch) -> tuple[TargetOutput, list[int]]:
        """The target's forward, with logits only for rows that choose a token or that the request asks to see.

        Returns, beside the output, where in the logits each part's tree starts.
        """
        rows: list[int] = []
        starts: list[int] = []
        for part, segment in zip(parts, batch.segments, strict=True):
            first = 0 if part.scores_prompt else len(part.known)
            # Offset of the tree's root, whether or not rows before it are scored, too.
            starts.append(len(rows) + len(part.known) - first)
            rows.extend(range(segment.start + first, segment.stop))
        output = self.target.forward(
            batch,
            self.cache,
            torch.tensor(rows, dtype=torch.int64, device=self.target.device),
            target_layer_ids=self.target_layer_ids,
            final_hidden=self.want_hidden,
        )
        return output, starts

    def _accept(self, part: Part, logits: torch.Tensor, greedy: list[int], start: int) -> Walk | None:
        """Walk the part's tree with the target's own choices, which become its sequence's tokens; None if it fails."""
        sequence = part.sequence
        plain_greedy = sequence.params.greedy and not sequence.params.has_processors

        def pick(row: int) -> int:
            token = greedy[start + row] if plain_greedy else choose(sequence, logits[start + row])
            if sequence.params.logprobs is not None:
                row_logits = logits[start + row : start + row + 1]
                sequence.logprobs += top_logprobs(row_logits, [token], sequence.params.logprobs)
            return token

        try:
            walked = walk(part.tokens, part.parents, pick, stop=sequence.append)
        except Exception as error:  # of this request's own; the others run on
            del sequence.logprobs[sequence.num_output :]  # of a token that was refused
            sequence.fail(error)
            return None
        if part.is_round:
            sequence.metrics.rounds += 1
            sequence.metrics.tree_rows += len(part.tokens)
            sequence.metrics.decoded_tokens += len(walked.tokens)
            if self.observer is not None:
                self.observer.round(
                    RoundRecord(
                        sequence.request_id, part.tokens, part.parents, part.log_probs, walked.rows, walked.tokens
                    )
                )
        return walked

    def _commit(self, parts: list[Part], batch: RowBatch, walks: list[Walk | None], output: TargetOutput) -> None:
        """Keep the accepted rows' K/V in consecutive slots, hand their aux_hidden_states to the head, free the rest."""
        kept_rows: list[int] = []
        spans: list[tuple[Sequence, int, int]] = []
        sources: list[torch.Tensor] = []
        slots: list[torch.Tensor] = []
        for part, segment, walked in zip(parts, batch.segments, walks, strict=True):
            sequence = part.sequence
            start, num_known = sequence.num_cached, len(part.known)
            rows = list(range(num_known)) + [num_known + r for r in (walked.rows if walked is not None else [])]
            new_slots = segment.slots[start:]
            sources.append(new_slots[rows])
            slots.append(new_slots[: len(rows)])
            kept = [segment.start + r for r in rows]
            kept_rows += kept
            sequence.num_cached += len(rows)
            spans.append((sequence, start, sequence.num_cached))
            sequence.table.truncate(sequence.num_cached + 1)
            sequence.table.publish(sequence.token_ids, sequence.num_cached)
            if self.observer is not None:
                tokens = part.row_tokens
                self.observer.committed(
                    Committed(
                        sequence.request_id,
                        start,
                        [tokens[r] for r in rows],
                        None if output.aux_hidden_states is None else output.aux_hidden_states[kept],
                        None if output.hidden is None else output.hidden[kept],
                    )
                )
        source, destination = torch.cat(sources), torch.cat(slots)
        moved = source != destination
        device = self.target.device
        if moved.any():
            self.cache.move(source[moved].to(device), destination[moved].to(device))
        if self.drafter is not None:
            index = torch.tensor(kept_rows, dtype=torch.int64, device=device)
            aux_hidden_states = None if output.aux_hidden_states is None else output.aux_hidden_states[index]
            self.drafter.extend(CommittedRows(spans, batch.positions[index], destination.to(device), aux_hidden_states))

    def _learn(
        self,
        parts: list[Part],
        walks: list[Walk | None],
        keys: int,
        drafted: list[Sequence],
        plan: Plan | None,
        clock: _Clock,
        new_tokens: int,
    ) -> None:
        """Tell budget and observer what the round took and brought."""
        rows = sum(map(len, parts))
        total, draft_s = clock.total, clock.seconds["draft"]
        self.budget.observe_times(rows, keys, len(drafted), draft_s, total - draft_s)
        if plan is not None:
            by_id = {part.sequence.request_id: walked for part, walked in zip(parts, walks, strict=True)}
            # A request that failed on the way says nothing about its draft.
            walked_trees = [by_id[s.request_id] for s in drafted]
            if all(walked is not None for walked in walked_trees):
                self.budget.observe_plan(plan, drafted, [w for w in walked_trees if w is not None])
        if self.observer is not None:
            tree_s = self.drafter.tree_s if self.drafter is not None and drafted else 0.0
            self.observer.step(
                EngineStep(
                    rows=rows,
                    decoding=sum(part.is_round for part in parts),
                    drafted=len(drafted),
                    new_tokens=new_tokens,
                    draft_s=draft_s - tree_s,
                    build_s=tree_s + clock.seconds["build"],
                    verify_s=clock.seconds["verify"],
                    accept_s=clock.seconds["accept"],
                    commit_s=clock.seconds["commit"],
                    total_s=total,
                    expected_tokens=None if plan is None else plan.expected_tokens,
                    expected_s=None if plan is None else plan.expected_seconds,
                )
            )


def choose(sequence: Sequence, logits: torch.Tensor) -> int:
    """The target's next token for `sequence`: a draw from its processed distribution, or the argmax when greedy."""
    params = sequence.params
    processed = process(
        logits,
        params,
        sequence.prompt_ids,
        sequence.output_ids,
        sequence.eos_token_ids,
        sequence.bad_words,
        sequence.grammar,
    )
    return sample(processed, params, sequence.seed, len(sequence.token_ids))


class _Clock:
    """Seconds of a round, split at `lap`s."""

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def lap(self, name: str) -> None:
        """What passed since the last lap belongs to `name`."""
        now = time.perf_counter()
        self.seconds[name] += now - self._last
        self._last = now

    @property
    def total(self) -> float:
        """Up to the last lap."""
        return self._last - self._start


def _load(drafted: list[Sequence], others: list[Part]) -> Load:
    """What the round runs beside the trees of `drafted`."""
    context = sum(s.num_cached for s in drafted)
    return Load(
        rows=len(drafted) + sum(map(len, others)),
        keys=context + sum(part.keys for part in others),
        tokens=len(drafted) + sum(bool(part.tokens) for part in others),
        context=context / len(drafted),
    )


def _default_num_blocks(target: Target, drafter: Drafter | None, block_size: int, max_num_seqs: int) -> int:
    """Blocks for `max_num_seqs` full contexts, or as many as memory allows."""
    per_block = target.cache_bytes_per_token * block_size
    if drafter is not None:
        per_block += drafter.cache_bytes_per_token * block_size
    if target.device.type == "cuda":
        available = int(torch.cuda.mem_get_info(target.device)[0] * DEFAULT_GPU_CACHE_SHARE)
    else:
        available = DEFAULT_CPU_CACHE_BYTES
    needed = -(-target.max_context // block_size) * max_num_seqs
    return max(1, min(needed, available // per_block))
