"""The engine loop: draft, verify, accept, commit, for every running sequence at once."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import count

import torch

from jetspec.attention import KVCache, RowBatch, Segment
from jetspec.detokenize import IncrementalDetokenizer
from jetspec.engine.blocks import BlockManager, BlockTable
from jetspec.engine.draft import Drafter, HeadDrafter
from jetspec.engine.observer import Committed, Observer, Round
from jetspec.engine.scheduler import Grant, Scheduler
from jetspec.engine.sequence import Sequence
from jetspec.errors import JetSpecError
from jetspec.head import DraftHead
from jetspec.packing import pack_linears
from jetspec.sampling import SamplingParams, child_seed, encode_bad_words, process, sample, top_logprobs
from jetspec.target import Target, TargetOutput
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


@dataclass
class _Part:
    """One sequence's rows in a round: `known` tokens as a chain, then a tree whose root follows them.

    A prompt chunk that is not the last has no tree; the last one has a root alone; a decoding sequence has no `known`
    rows but the tree, its root being the newest token.
    """

    sequence: Sequence
    known: list[int]
    tokens: list[int]
    parents: list[int]
    depths: list[int]
    log_probs: list[float]
    is_round: bool

    @property
    def scores_prompt(self) -> bool:
        """Whether the rows before the root need logits."""
        sequence = self.sequence
        return sequence.params.prompt_logprobs is not None and sequence.num_cached < len(sequence.prompt_ids)

    @property
    def row_tokens(self) -> list[int]:
        return self.known + self.tokens

    @property
    def row_parents(self) -> list[int]:
        """Parents within the segment: the root hangs on the last known row."""
        n = len(self.known)
        return list(range(-1, n - 1)) + [n + p if p >= 0 else n - 1 for p in self.parents]

    @property
    def row_positions(self) -> list[int]:
        first = self.sequence.num_cached
        root = first + len(self.known)
        return list(range(first, root)) + [root + d for d in self.depths]


class Engine:
    """Runs any number of requests on one target, each exactly as plain decoding would.

    Args:
        target: the frozen model.
        draft: a draft head or another drafter; None decodes plainly.
        tree_budget: rows of a sequence's verify forward, root included.
        num_blocks: K/V blocks in the pool; by default what memory allows.
        block_size: tokens a K/V block holds.
        max_rows: rows of one target forward, over all sequences.
        max_running: sequences that decode at the same time.
        share_prefixes: start requests behind a prefix that other requests left in the cache. Rows of such a prefix do
            not run, so `observer` does not see them.
        seed: where the noise of requests without a seed comes from.
        tap_layers: layers whose outputs `observer` is given; by default the head's.
        want_hidden: also give `observer` the final hidden states.
        observer: watches commits and rounds.

    Raises:
        JetSpecError: an argument is out of range, or the head does not fit the target.
    """

    def __init__(
        self,
        target: Target,
        draft: DraftHead | Drafter | None = None,
        *,
        tree_budget: int = 16,
        num_blocks: int | None = None,
        block_size: int = 16,
        max_rows: int = 1024,
        max_running: int = 64,
        share_prefixes: bool = True,
        seed: int = 0,
        tap_layers: Seq[int] | None = None,
        want_hidden: bool = False,
        observer: Observer | None = None,
    ) -> None:
        for name, value in {
            "tree_budget": tree_budget,
            "num_blocks": num_blocks,
            "block_size": block_size,
            "max_rows": max_rows,
            "max_running": max_running,
        }.items():
            if value is not None and (not isinstance(value, int) or value < 1):
                raise JetSpecError(f"{name}={value!r}: must be an integer of at least 1")
        self.target = target
        pack_linears(target.model)
        if num_blocks is None:
            head = draft if isinstance(draft, DraftHead) else None
            num_blocks = _default_num_blocks(target, head, block_size, max_running)
        self.blocks = BlockManager(num_blocks, block_size)
        self.cache: KVCache = target.new_cache(num_blocks, block_size)
        self.drafter: Drafter | None = (
            HeadDrafter(draft, target, num_blocks, block_size) if isinstance(draft, DraftHead) else draft
        )
        self.scheduler = Scheduler(
            self.blocks,
            tree_budget=1 if draft is None else tree_budget,
            max_rows=max_rows,
            max_running=max_running,
            share_prefixes=share_prefixes,
        )
        drafter_taps = self.drafter.tap_layers if self.drafter is not None else ()
        if drafter_taps and tap_layers is not None and tuple(tap_layers) != tuple(drafter_taps):
            raise JetSpecError(f"tap_layers={tuple(tap_layers)}: the drafter already taps {tuple(drafter_taps)}")
        self.tap_layers = tuple(drafter_taps or tap_layers or ())
        self.want_hidden = want_hidden
        self.observer = observer
        self._seed = seed
        self._unseeded = count()
        self._sequences: dict[str, Sequence] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def check(self, prompt_ids: Seq[int], params: SamplingParams) -> int:
        """Tokens the request may generate at most.

        Raises:
            JetSpecError: the prompt is empty, holds an id outside the vocabulary, or does not fit context or cache.
        """
        if not prompt_ids:
            raise JetSpecError("prompt is empty: give at least one token (a chat template or a bos token adds some)")
        bad = [t for t in prompt_ids if not isinstance(t, int) or not 0 <= t < self.target.num_embeddings]
        if bad:
            raise JetSpecError(
                f"prompt holds token id {bad[0]!r}: ids of this target are 0 .. {self.target.num_embeddings - 1}"
            )
        params.check_vocabulary(self.target.vocab_size)
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
        tokenizer = self.target.tokenizer
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
        grants = self.scheduler.schedule()
        if not grants:
            return []
        parts = self._draft(grants)
        batch = self._batch(parts)
        output, logits_start = self._verify(parts, batch)
        greedy = output.logits.argmax(-1).tolist() if output.logits.shape[0] else []
        outputs: list[StepOutput] = []
        walks: list[Walk | None] = []
        for part, start in zip(parts, logits_start, strict=True):
            if part.scores_prompt:
                _score_prompt(part, output.logits, start)
            if not part.tokens:
                walks.append(None)
                continue
            known = len(part.sequence.token_ids)
            walks.append(self._accept(part, output.logits, greedy, start))
            new_ids = part.sequence.token_ids[known:]
            outputs.append(StepOutput(part.sequence, new_ids, part.sequence.take_text()))
        self._commit(parts, batch, walks, output)
        for done in [o.sequence for o in outputs if o.finished]:
            self.scheduler.release(done)
            del self._sequences[done.request_id]
        return outputs

    def _draft(self, grants: list[Grant]) -> list[_Part]:
        drafting = [g for g in grants if g.sequence.is_decoding and g.rows > 1]
        trees: dict[str, _Part] = {}
        if self.drafter is not None and drafting:
            sequences = [g.sequence for g in drafting]
            forest = self.drafter.propose(sequences, [g.rows for g in drafting])
            for index, sequence in enumerate(sequences):
                rows = forest.rows(index)
                trees[sequence.request_id] = _Part(
                    sequence,
                    known=[],
                    tokens=forest.tokens[rows].tolist(),
                    parents=forest.parents[rows].tolist(),
                    depths=forest.depths[rows].tolist(),
                    log_probs=forest.log_probs[rows].tolist(),
                    is_round=True,
                )
        return [trees.get(g.sequence.request_id) or _chain(g) for g in grants]

    def _batch(self, parts: list[_Part]) -> RowBatch:
        segments: list[Segment] = []
        row = 0
        for part in parts:
            n, cached = len(part.known) + len(part.tokens), part.sequence.num_cached
            segments.append(Segment(row, row + n, cached, part.sequence.table.slots(0, cached + n)))
            row += n
        return RowBatch(
            token_ids=torch.tensor([t for p in parts for t in p.row_tokens]),
            positions=torch.tensor([i for p in parts for i in p.row_positions]),
            parents=torch.tensor([i for p in parts for i in p.row_parents]),
            segments=segments,
        ).to(self.target.device)

    def _verify(self, parts: list[_Part], batch: RowBatch) -> tuple[TargetOutput, list[int]]:
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
            taps=self.tap_layers,
            final_hidden=self.want_hidden,
        )
        return output, starts

    def _accept(self, part: _Part, logits: torch.Tensor, greedy: list[int], start: int) -> Walk | None:
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
        except Exception as error:  # a user's processor may raise anything; the other requests run on
            sequence.fail(error)
            return None
        if part.is_round:
            sequence.metrics.rounds += 1
            sequence.metrics.tree_rows += len(part.tokens)
            sequence.metrics.decoded_tokens += len(walked.tokens)
            if self.observer is not None:
                self.observer.round(
                    Round(sequence.request_id, part.tokens, part.parents, part.log_probs, walked.rows, walked.tokens)
                )
        return walked

    def _commit(self, parts: list[_Part], batch: RowBatch, walks: list[Walk | None], output: TargetOutput) -> None:
        """Keep the accepted rows' K/V in consecutive slots, hand their taps to the head, free the rest."""
        kept_rows: list[int] = []
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
            sequence.table.trim(sequence.num_cached + 1)
            sequence.table.publish(sequence.token_ids, sequence.num_cached)
            if self.observer is not None:
                tokens = part.row_tokens
                self.observer.committed(
                    Committed(
                        sequence.request_id,
                        start,
                        [tokens[r] for r in rows],
                        None if output.taps is None else output.taps[kept],
                        None if output.hidden is None else output.hidden[kept],
                    )
                )
        source, destination = torch.cat(sources), torch.cat(slots)
        moved = source != destination
        device = self.target.device
        if moved.any():
            self.cache.move(source[moved].to(device), destination[moved].to(device))
        if self.drafter is not None and self.drafter.tap_layers:
            assert output.taps is not None
            index = torch.tensor(kept_rows, dtype=torch.int64, device=device)
            self.drafter.extend(output.taps[index], batch.positions[index], destination.to(device))


def choose(sequence: Sequence, logits: torch.Tensor) -> int:
    """The target's next token for `sequence`: a draw from its processed distribution, or the argmax when greedy."""
    params = sequence.params
    processed = process(
        logits, params, sequence.prompt_ids, sequence.output_ids, sequence.eos_token_ids, sequence.bad_words
    )
    return sample(processed, params, sequence.seed, len(sequence.token_ids))


def _score_prompt(part: _Part, logits: torch.Tensor, root: int) -> None:
    """Record the log probabilities of the prompt tokens that follow the part's rows."""
    sequence = part.sequence
    first = sequence.num_cached + 1
    scored = sequence.prompt_ids[first : first + len(part.row_tokens)]
    # After a preemption rows are scored again; what is known stays.
    new = scored[len(sequence.prompt_logprobs) - first :]
    if new:
        offset = root - len(part.known) + len(scored) - len(new)
        rows = logits[offset : offset + len(new)]
        assert sequence.params.prompt_logprobs is not None
        sequence.prompt_logprobs += top_logprobs(rows, new, sequence.params.prompt_logprobs)


def _chain(grant: Grant) -> _Part:
    """Known tokens as rows: a prompt chunk, or the lone root of plain decoding."""
    sequence = grant.sequence
    is_round = sequence.is_decoding
    rows = 1 if is_round else grant.rows
    stop = sequence.num_cached + rows
    tokens = sequence.token_ids[sequence.num_cached : stop]
    if stop < len(sequence.token_ids):
        return _Part(sequence, tokens, [], [], [], [], False)
    return _Part(sequence, tokens[:-1], tokens[-1:], [-1], [0], [0.0], is_round)


def _default_num_blocks(target: Target, head: DraftHead | None, block_size: int, max_running: int) -> int:
    """Blocks for `max_running` full contexts, or as many as memory allows."""
    per_block = target.cache_bytes_per_token * block_size
    if head is not None:
        per_block += head.cache_bytes_per_token * block_size
    if target.device.type == "cuda":
        available = int(torch.cuda.mem_get_info(target.device)[0] * DEFAULT_GPU_CACHE_SHARE)
    else:
        available = DEFAULT_CPU_CACHE_BYTES
    needed = -(-target.max_context // block_size) * max_running
    return max(1, min(needed, available // per_block))
