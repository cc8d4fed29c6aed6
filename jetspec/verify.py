"""Proof of losslessness on a user's own target and head: same greedy tokens, same seeded samples, same distribution."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from jetspec.attention import RowBatch
from jetspec.errors import JetSpecError
from jetspec.llm import LLM, RequestOutput
from jetspec.models.target import Target
from jetspec.sampling import SamplingParams

#: A lossless run falls below this once in ten thousand choices of seed.
P_VALUE_THRESHOLD = 1e-4
#: Cells of the goodness-of-fit test that expect fewer samples are pooled, as the chi-square approximation asks.
MIN_EXPECTED = 5.0
#: Rows of one forward when exact probabilities are computed.
MAX_ROWS = 1024

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Difference:
    """The first token at which a run left plain decoding. A token is None where that side had ended."""

    prompt_index: int
    position: int  # in the answer, from 0
    context: list[int]  # prompt and the answer so far
    expected: int | None
    got: int | None
    #: Target logit of the expected token less that of the other one, from a forward of its own: about 0 is a tie that
    #: rounding decides, anything larger a fault.
    logit_margin: float | None = None


@dataclass(frozen=True)
class TokenCheck:
    """Whether a run with the head gave plain decoding's tokens."""

    name: str
    batch_size: int
    tokens: int
    difference: Difference | None

    @property
    def passed(self) -> bool:
        return self.difference is None


@dataclass(frozen=True)
class FitCheck:
    """Chi-square test of sampled continuations of one prompt against the target's exact probabilities."""

    samples: int
    cells: int
    statistic: float
    degrees: int
    p_value: float
    threshold: float
    #: Tokens of the least fitting cell, its expected and its observed count.
    worst_tokens: list[int]
    worst_expected: float
    worst_observed: int

    @property
    def passed(self) -> bool:
        return self.p_value >= self.threshold


@dataclass(frozen=True)
class Report:
    """All checks of one target and head."""

    token_checks: list[TokenCheck]
    fit: FitCheck
    #: Tokens per verify forward of the greedy runs: 1 would mean that no draft was ever used.
    acceptance_length: float

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.token_checks) and self.fit.passed

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        checks = [{**asdict(check), "passed": check.passed} for check in self.token_checks]
        fit = {**asdict(self.fit), "passed": self.fit.passed}
        return {"passed": self.passed, "checks": checks, "fit": fit, "acceptance_length": self.acceptance_length}


def verify(
    plain: LLM,
    drafted: LLM,
    prompts: Sequence[list[int]],
    *,
    max_tokens: int = 64,
    temperature: float = 1.0,
    seed: int = 0,
    samples: int = 1000,
    progress: Progress = lambda message: None,
) -> Report:
    """Compare `drafted`, an LLM with a head, to `plain`, the same target without one, on `prompts` (token ids).

    Every prompt runs alone and all of them run together, greedily and with seeded sampling; then `samples`
    continuations of the shortest prompt are drawn and tested against the target's softmax.

    Raises:
        JetSpecError: fewer than two prompts, a temperature of zero, or fewer than a hundred samples.
    """
    if len(prompts) < 2:
        raise JetSpecError(f"prompts: {len(prompts)} given; a batch takes at least two")
    if temperature <= 0:
        raise JetSpecError(f"temperature={temperature}: sampling is tested above 0, greedy decoding always")
    if samples < 100:
        raise JetSpecError(f"samples={samples}: a goodness-of-fit test takes at least 100")
    target = plain.target
    greedy = [SamplingParams(temperature=0.0, max_tokens=max_tokens)] * len(prompts)
    sampled = [
        SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed + i) for i in range(len(prompts))
    ]
    checks: list[TokenCheck] = []
    outputs: list[RequestOutput] = []
    for name, params in (("greedy", greedy), ("seeded sampling", sampled)):
        progress(f"{name}: plain decoding")
        reference = _one_by_one(plain, prompts, params)
        progress(f"{name}: with the head, one at a time")
        alone = _one_by_one(drafted, prompts, params)
        progress(f"{name}: with the head, {len(prompts)} together")
        together = drafted.generate(list(prompts), params)
        for batch_size, got in ((1, alone), (len(prompts), together)):
            difference = first_difference(reference, got)
            if difference is not None:
                difference = replace(difference, logit_margin=logit_margin(target, difference))
            tokens = sum(len(r.outputs[0].token_ids) for r in reference)
            checks.append(TokenCheck(name, batch_size, tokens, difference))
        if params is greedy:
            outputs = alone + together
    progress(f"distribution: {samples} samples")
    fit = fit_check(target, drafted, min(prompts, key=len), temperature=temperature, seed=seed, samples=samples)
    rounds = sum(o.metrics.rounds for o in outputs)
    decoded = sum(o.metrics.decoded_tokens for o in outputs)
    return Report(checks, fit, decoded / rounds if rounds else 0.0)


def _one_by_one(llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[RequestOutput]:
    return [llm.generate([prompt], p)[0] for prompt, p in zip(prompts, params, strict=True)]


def first_difference(reference: Sequence[RequestOutput], got: Sequence[RequestOutput]) -> Difference | None:
    """The first token, in order of prompts and positions, that `got` does not share with `reference`."""
    for index, (left, right) in enumerate(zip(reference, got, strict=True)):
        expected, actual = left.outputs[0].token_ids, right.outputs[0].token_ids
        if expected == actual:
            continue
        shared = min(len(expected), len(actual))
        position = next((i for i in range(shared) if expected[i] != actual[i]), shared)
        return Difference(
            prompt_index=index,
            position=position,
            context=left.prompt_token_ids + expected[:position],
            expected=expected[position] if position < len(expected) else None,
            got=actual[position] if position < len(actual) else None,
        )
    return None


def logit_margin(target: Target, difference: Difference) -> float | None:
    """How far apart the two tokens of a difference are for the target; None where one side had ended."""
    if difference.expected is None or difference.got is None:
        return None
    logits = next_logits(target, [difference.context])[0]
    return float(logits[difference.expected] - logits[difference.got])


def next_logits(target: Target, contexts: Sequence[list[int]]) -> Tensor:
    """Logits `[len(contexts), vocab]` (float64, CPU) of the token after each context, each a plain chain of rows."""
    rows: list[Tensor] = []
    start = 0
    while start < len(contexts):
        stop = start + 1
        while stop < len(contexts) and sum(map(len, contexts[start : stop + 1])) <= MAX_ROWS:
            stop += 1
        rows.append(_chain_logits(target, contexts[start:stop]))
        start = stop
    return torch.cat(rows)


@torch.inference_mode()
def _chain_logits(target: Target, contexts: Sequence[list[int]]) -> Tensor:
    lengths = [len(c) for c in contexts]
    batch = RowBatch.chains(contexts, torch.arange(sum(lengths)).split(lengths))
    cache = target.new_cache(num_blocks=len(batch), block_size=1)
    last = torch.tensor(lengths).cumsum(0) - 1
    return target.forward(batch, cache, last).logits.double().cpu()


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
    """Draw `samples` continuations of one context, each with its own seed, and test the joint distribution of
    their first `length` tokens.

    The first token of an answer is read off the prompt's own forward. To test what comes out of draft trees only, it is
    held at the target's most probable one, which belongs to the context. One more token is generated than tested, so
    that the trees are as deep as the tested tokens.
    """
    first = int(next_logits(target, [prompt])[0].argmax())
    context = [*prompt, first]

    def hold_first(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] > len(prompt):
            return scores
        held = torch.full_like(scores, -torch.inf)
        held[:, first] = 0.0
        return held

    params = [
        SamplingParams(
            temperature=temperature,
            max_tokens=length + 2,
            seed=seed + i,
            ignore_eos=True,
            logits_processors=[hold_first],
        )
        for i in range(samples)
    ]
    drawn = llm.generate([prompt] * samples, params)
    continuations = [tuple(o.outputs[0].token_ids[1 : 1 + length]) for o in drawn]

    def next_probs(prefixes: Sequence[tuple[int, ...]]) -> Tensor:
        return (next_logits(target, [context + list(p) for p in prefixes]) / temperature).softmax(-1)

    expected = partition(next_probs, length, samples)
    counts = Counter(cell_of(c, expected) for c in continuations)
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


#: Stands, at the end of a cell, for all tokens that have no cell of their own.
OTHER = -1


def partition(
    next_probs: Callable[[Sequence[tuple[int, ...]]], Tensor], length: int, samples: int
) -> dict[tuple[int, ...], float]:
    """Split the continuations of `length` tokens into cells; returns each cell's expected count among `samples`.

    A cell is a continuation that is expected at least `MIN_EXPECTED` times, or a prefix and `OTHER`: everything that
    starts so and has no cell. Every continuation lies in exactly one cell. `next_probs` gives `[prefixes, vocab]`.
    """
    cells: dict[tuple[int, ...], float] = {}
    frontier: dict[tuple[int, ...], float] = {(): float(samples)}
    for _ in range(length):
        grown: dict[tuple[int, ...], float] = {}
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


def cell_of(continuation: tuple[int, ...], cells: dict[tuple[int, ...], float]) -> tuple[int, ...]:
    """The cell of `partition` that a continuation lies in."""
    if continuation in cells:
        return continuation
    # Prefixes that were split further have an OTHER cell; the longest one that matches is the continuation's.
    for end in range(len(continuation) - 1, -1, -1):
        if (*continuation[:end], OTHER) in cells:
            return (*continuation[:end], OTHER)
    raise ValueError(f"no cell holds {continuation}")


def chi_square(observed: Sequence[int], expected: Sequence[float]) -> tuple[float, int, float]:
    """Statistic, degrees of freedom and p-value of Pearson's test; cells that expect too little are pooled."""
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
