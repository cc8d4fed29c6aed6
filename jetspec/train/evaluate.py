"""The acceptance of a head: how many of its drafts the engine accepts on real prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from jetspec.attention.blocks import DEFAULT_KV_BLOCK_SIZE, blocks_needed
from jetspec.engine import Engine, Observer, RoundRecord
from jetspec.errors import JetSpecError
from jetspec.head import DraftHead
from jetspec.models.target import Target
from jetspec.sampling import SamplingParams
from jetspec.train.processes import Processes

#: Prompts that are answered at the same time.
MAX_NUM_SEQS = 64


@dataclass(frozen=True)
class Measurement:
    """The acceptance with trees of ``tree_budget`` rows; all zero where no prompt needed a round."""

    tree_budget: int
    #: Mean tokens per verify forward, bonus included: 1 plus the sum of ``depths``.
    acceptance_length: float
    #: Share of the rounds that committed at least d drafted tokens and one more, d = 1 .. block size - 1.
    depths: list[float]
    rounds: int


def measure_acceptance(
    target: Target,
    head: DraftHead,
    prompts: Sequence[Sequence[int]],
    *,
    tree_budgets: Sequence[int] = (16,),
    max_tokens: int = 128,
    temperature: float = 0.0,
    processes: Processes | None = None,
) -> tuple[list[Measurement], int]:
    """Answer ``prompts`` (token ids) once with each budget; with sampling, prompt i is seeded with i.

    Several ``processes`` share the prompts and all return the same.

    Returns:
        A measurement for each budget, and the number of prompts whose answers are not the same for all of them: 0
        but for ties of floating-point numbers.

    Raises:
        JetSpecError: the engine failed a request, for instance because the target's logits are not finite.
    """
    processes = processes or Processes()
    was_training = head.training
    head.eval()
    share = range(processes.rank, len(prompts), processes.count)
    counts: list[float] = []
    answers: list[set[tuple[int, ...]]] = [set() for _ in share]
    for budget in tree_budgets:
        committed: Counter[int] = Counter()
        if share:
            params = {i: SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=i) for i in share}
            requests = {i: (prompts[i], params[i]) for i in share}
            committed = _answer(target, head, requests, budget, answers)
        counts += [committed.total()]
        counts += [sum(n for tokens, n in committed.items() if tokens > d) for d in range(1, head.config.block_size)]
    head.train(was_training)
    *sums, differing = processes.sum(*counts, sum(len(texts) > 1 for texts in answers))
    measured = []
    for number, budget in enumerate(tree_budgets):
        rounds, *reached = sums[number * head.config.block_size : (number + 1) * head.config.block_size]
        depths = [count / rounds if rounds else 0.0 for count in reached]
        length = (rounds + sum(reached)) / rounds if rounds else 0.0
        measured.append(Measurement(budget, length, depths, int(rounds)))
    return measured, int(differing)


class _Rounds(Observer):
    """Counts rounds by the tokens they committed."""

    def __init__(self) -> None:
        self.by_tokens: Counter[int] = Counter()

    def round(self, record: RoundRecord) -> None:
        self.by_tokens[len(record.new_tokens)] += 1


@torch.inference_mode()
def _answer(
    target: Target,
    head: DraftHead,
    requests: Mapping[int, tuple[Sequence[int], SamplingParams]],
    budget: int,
    answers: list[set[tuple[int, ...]]],
) -> Counter[int]:
    """Answer the requests, by number, and add what each says to ``answers``; returns rounds by tokens committed.

    Raises:
        JetSpecError: the engine failed a request; names its prompt.
    """
    max_num_seqs = min(MAX_NUM_SEQS, len(requests))
    lengths = [len(ids) + (params.max_tokens or 0) for ids, params in requests.values()]
    rounds = _Rounds()
    engine = Engine(
        target,
        head,
        tree_budget=budget,
        num_blocks=blocks_needed(lengths, max_num_seqs, budget),
        kv_block_size=DEFAULT_KV_BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        observer=rounds,
    )
    sequences = [engine.add(str(i), ids, params) for i, (ids, params) in requests.items()]
    engine.run()
    for number, sequence, texts in zip(requests, sequences, answers, strict=True):
        if sequence.error is not None:
            raise JetSpecError(f"held-out prompt {number + 1}: {sequence.error}")
        texts.add(tuple(sequence.output_ids))
    return rounds.by_tokens
