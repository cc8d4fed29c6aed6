"""Goodness of fit: whether sampled continuations follow the target's own probabilities.

The continuations of one context are split into cells with known probabilities. The counts of many samples in the cells
are compared to the expected counts with Pearson's chi-square test.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jetspec.llm import LLM
from jetspec.models.target import Target
from jetspec.sampling import SamplingParams
from jetspec.verify.logits import next_logits

#: An exact decoder falls below this p-value for one seed in ten thousand.
P_VALUE_THRESHOLD = 1e-4
#: Cells that expect fewer samples than this are pooled: the chi-square approximation needs about as many in each.
MIN_EXPECTED = 5.0
#: The last token of a cell that stands for all tokens without a cell of their own.
OTHER = -1

Cell = tuple[int, ...]
NextProbs = Callable[[Sequence[Cell]], Tensor]


@dataclass(frozen=True)
class FitCheck:
    """Result of the chi-square test of sampled continuations of one prompt."""

    samples: int
    cells: int
    statistic: float
    degrees: int
    p_value: float
    threshold: float
    #: Tokens of the cell that fits least; its expected and its observed count.
    worst_tokens: list[int]
    worst_expected: float
    worst_observed: int

    @property
    def passed(self) -> bool:
        """Whether the samples may come from the target's distribution."""
        return self.p_value >= self.threshold


def fit_check(
    target: Target,
    llm: LLM,
    prompt: list[int],
    *,
    temperature: float,
    seed: int,
    samples: int,
    length: int = 2,
    threshold: float = P_VALUE_THRESHOLD,
) -> FitCheck:
    """Test the joint distribution of the first tokens that an LLM samples after a prompt.

    The first token of an answer comes from the prompt's own forward, without a draft. It is therefore held at the
    target's most probable token and counts as context; the `length` tokens after it are tested.

    Args:
        target: computes the exact probabilities.
        llm: draws the samples, on the same target with a draft.
        prompt: token ids.
        temperature: of the samples, above 0.
        seed: seed of the first sample; each has its own.
        samples: number of samples.
        length: number of tokens tested together.
        threshold: p-value below which the check fails.
    """
    first = int(next_logits(target, [prompt])[0].argmax())
    context = [*prompt, first]

    def next_probs(prefixes: Sequence[Cell]) -> Tensor:
        return (next_logits(target, [context + list(p) for p in prefixes]) / temperature).softmax(-1)

    drawn = _draw(llm, prompt, first, temperature=temperature, seed=seed, samples=samples, length=length)
    expected = partition(next_probs, length, samples)
    counts = Counter(cell_of(continuation, expected) for continuation in drawn)
    cells = list(expected)
    statistic, degrees, p_value = chi_square([counts[c] for c in cells], [expected[c] for c in cells])
    worst = max(cells, key=lambda c: (counts[c] - expected[c]) ** 2 / max(expected[c], MIN_EXPECTED))
    return FitCheck(
        samples=samples,
        cells=degrees + 1,
        statistic=statistic,
        degrees=degrees,
        p_value=p_value,
        threshold=threshold,
        worst_tokens=[t for t in worst if t != OTHER],
        worst_expected=expected[worst],
        worst_observed=counts[worst],
    )


def _draw(
    llm: LLM, prompt: list[int], first: int, *, temperature: float, seed: int, samples: int, length: int
) -> list[Cell]:
    """Sampled continuations of `prompt` and the token `first`, of `length` tokens each."""

    def hold_first(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] > len(prompt):
            return scores
        held = torch.full_like(scores, -torch.inf)
        held[:, first] = 0.0
        return held

    params = [
        SamplingParams(
            temperature=temperature,
            max_tokens=length + 2,  # one more than is tested, so that trees are as deep as the tested tokens
            seed=seed + i,
            ignore_eos=True,
            logits_processors=[hold_first],
        )
        for i in range(samples)
    ]
    return [tuple(o.outputs[0].token_ids[1 : 1 + length]) for o in llm.generate([prompt] * samples, params)]


def partition(next_probs: NextProbs, length: int, samples: int) -> dict[Cell, float]:
    """Split the continuations of `length` tokens into cells.

    A cell is a continuation that is expected at least `MIN_EXPECTED` times, or a prefix and `OTHER`: all continuations
    that start with the prefix and have no cell of their own. Every continuation lies in exactly one cell.

    Args:
        next_probs: the probabilities of the token after each prefix, `[prefixes, vocab]`.
        length: tokens of a continuation.
        samples: number of samples.

    Returns:
        Each cell's expected count among the samples.
    """
    cells: dict[Cell, float] = {}
    frontier: dict[Cell, float] = {(): float(samples)}
    for _ in range(length):
        grown: dict[Cell, float] = {}
        if not frontier:
            break
        for (prefix, mass), probs in zip(frontier.items(), next_probs(list(frontier)), strict=True):
            counts = mass * probs
            tokens = (counts >= MIN_EXPECTED).nonzero().flatten().tolist()
            grown.update({(*prefix, t): float(counts[t]) for t in tokens})
            rest = (*prefix, OTHER)
            cells[rest] = float(counts.sum() - counts[tokens].sum())
        frontier = grown
    return {**cells, **frontier}


def cell_of(continuation: Cell, cells: dict[Cell, float]) -> Cell:
    """The cell of `partition` in which a continuation lies."""
    if continuation in cells:
        return continuation
    # Every prefix that was split further has an OTHER cell; the continuation lies in that of its longest such prefix.
    for end in range(len(continuation) - 1, -1, -1):
        rest = (*continuation[:end], OTHER)
        if rest in cells:
            return rest
    raise ValueError(f"no cell holds {continuation}")


def chi_square(observed: Sequence[int], expected: Sequence[float]) -> tuple[float, int, float]:
    """Pearson's chi-square test, with cells that expect too few samples pooled.

    Returns:
        The statistic, the degrees of freedom and the p-value.
    """
    pairs = sorted(zip(expected, observed, strict=True))
    pooled_expected, pooled_observed = 0.0, 0
    while pairs and (pairs[0][0] < MIN_EXPECTED or 0 < pooled_expected < MIN_EXPECTED):
        e, o = pairs.pop(0)
        pooled_expected, pooled_observed = pooled_expected + e, pooled_observed + o
    if pooled_expected > 0:
        pairs.append((pooled_expected, pooled_observed))
    statistic = sum((o - e) ** 2 / e for e, o in pairs)
    degrees = len(pairs) - 1
    if degrees == 0:
        return statistic, 0, 1.0
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return statistic, degrees, float(torch.special.gammaincc(half[0], half[1]))
