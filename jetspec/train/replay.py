"""Acceptance without the target's forwards: a drafter drafts along answers that the target has given before.

A round's outcome depends only on the draft tree and on the target's own next tokens. Both are known where an answer
was captured together with the target states that the head reads, so rounds can be replayed with many budgets at the
cost of drafting alone. The lengths are those of the engine, except that captured states are in bfloat16.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq

import torch

from jetspec.attention.blocks import DEFAULT_KV_BLOCK_SIZE, BlockManager, BlockTable
from jetspec.engine import Drafter
from jetspec.engine.drafters import CommittedRows
from jetspec.engine.sequence import Sequence
from jetspec.errors import JetSpecError
from jetspec.models.onednn_linear import pack_linears
from jetspec.models.target import Target
from jetspec.sampling import SamplingParams
from jetspec.train.dataset import Captured
from jetspec.tree import Walk, walk


class Replay:
    """Rounds of `drafter` over captured answers, all at the same time.

    Args:
        target: whose answers they are; its embedding and output layer serve the head, its layers do not run.
        drafter: a new one, which belongs to this replay from now on.
        answers: what was captured, with the aux_hidden_states that the drafter reads.
        temperature: at which the answers were drawn; drafts are made for it.
        max_tokens: most tokens that an answer could have had, which bounds a draft's depth; by default each answer's
            own length.

    Raises:
        JetSpecError: an answer has fewer than two tokens, so that no round takes place.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        answers: Seq[Captured],
        *,
        temperature: float = 0.0,
        max_tokens: int | None = None,
    ) -> None:
        for number, answer in enumerate(answers):
            if len(answer.token_ids) - answer.loss_start < 2:
                raise JetSpecError(f"answers[{number}]: a replay needs answers of at least two tokens")
        self.target, self.drafter, self.answers = target, drafter, answers
        lengths = [len(answer.token_ids) for answer in answers]
        num_blocks = sum(-(-length // DEFAULT_KV_BLOCK_SIZE) for length in lengths)
        blocks = BlockManager(num_blocks, DEFAULT_KV_BLOCK_SIZE)
        pack_linears(target.model)
        drafter.prepare(target, num_blocks, DEFAULT_KV_BLOCK_SIZE)
        self.sequences = []
        for number, answer in enumerate(answers):
            length = max_tokens or len(answer.token_ids) - answer.loss_start
            params = SamplingParams(temperature=temperature, max_tokens=length)
            table = BlockTable(blocks)
            table.reserve(len(answer.token_ids))
            prompt = answer.token_ids[: answer.loss_start].tolist()
            self.sequences.append(Sequence(str(number), prompt, params, 0, frozenset(), length, table))

    @torch.inference_mode()
    def run(self, tree_budget: int) -> Counter[int]:
        """Play all answers from their start: the number of rounds by the tokens they committed, bonus included."""
        for sequence, answer in zip(self.sequences, self.answers, strict=True):
            # The first token of an answer comes with the prompt.
            sequence.token_ids = answer.token_ids[: answer.loss_start + 1].tolist()
            sequence.num_cached = 0
        self._commit([(i, answer.loss_start) for i, answer in enumerate(self.answers)])
        rounds: Counter[int] = Counter()
        while running := [i for i in range(len(self.answers)) if self._left(i)]:
            rounds.update(self._round(running, tree_budget))
        return rounds

    def _round(self, running: list[int], tree_budget: int) -> list[int]:
        """One round of the `running` answers; tokens committed by each."""
        forest = self.drafter.propose([self.sequences[i] for i in running], [tree_budget] * len(running))
        kept, emitted = [], []
        for tree, i in enumerate(running):
            rows = forest.rows(tree)
            walked = self._walk(i, forest.tokens[rows].tolist(), forest.parents[rows].tolist())
            self.sequences[i].token_ids += walked.tokens
            kept.append((i, len(walked.rows)))
            emitted.append(len(walked.tokens))
        self._commit(kept)
        return emitted

    def _walk(self, i: int, tokens: list[int], parents: list[int]) -> Walk:
        """Through a tree along what answer `i` goes on with."""
        return walk(tokens, parents, self.answers[i].token_ids[len(self.sequences[i].token_ids) :].tolist())

    def _left(self, i: int) -> int:
        """Tokens of answer `i` that are still to come."""
        return len(self.answers[i].token_ids) - len(self.sequences[i].token_ids)

    def _commit(self, counts: list[tuple[int, int]]) -> None:
        """Let the drafter learn the next `count` tokens of each answer (index, count)."""
        spans = []
        for i, count in counts:
            sequence = self.sequences[i]
            spans.append((sequence, sequence.num_cached, sequence.num_cached + count))
            sequence.num_cached += count
        device, dtype = self.target.device, self.target.dtype
        positions = torch.cat([torch.arange(start, stop) for _, start, stop in spans]).to(device)
        slots = torch.cat([sequence.table.slots(start, stop) for sequence, start, stop in spans]).to(device)
        aux_hidden_states = None
        if self.drafter.target_layer_ids:
            parts = [
                self.answers[i].aux_hidden_states[start:stop]
                for (i, _), (_, start, stop) in zip(counts, spans, strict=True)
            ]
            aux_hidden_states = torch.cat(parts).to(device, dtype)
        self.drafter.extend(CommittedRows(spans, positions, slots, aux_hidden_states))


def acceptance_length(rounds: Counter[int]) -> float:
    """Mean tokens of a round; 0 where there is none."""
    count = rounds.total()
    return sum(tokens * n for tokens, n in rounds.items()) / count if count else 0.0
