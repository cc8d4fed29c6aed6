"""Compares an LLM with a draft to plain decoding of the same target, token by token, and reports the differences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from jetspec.errors import JetSpecError
from jetspec.llm import LLM
from jetspec.models.target import Target
from jetspec.outputs import RequestOutput
from jetspec.sampling import SamplingParams
from jetspec.verify.distribution import FitCheck, fit_check
from jetspec.verify.logits import next_logits

#: Called with a few words about the check that starts.
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Difference:
    """The first token at which a run left plain decoding. A token is None where that run had ended."""

    prompt_index: int
    #: Index of the token in the answer.
    position: int
    #: Token ids of the prompt and of the answer before the token.
    context: list[int]
    expected: int | None
    got: int | None
    #: The target's logit of the expected token minus that of the other one, from a separate forward. About 0 means a
    #: tie that rounding decides; anything larger is a fault.
    logit_margin: float | None = None


@dataclass(frozen=True)
class TokenCheck:
    """Whether a run with the draft gave the tokens of plain decoding."""

    name: str
    batch_size: int
    tokens: int
    difference: Difference | None

    @property
    def passed(self) -> bool:
        """Whether all tokens are the same."""
        return self.difference is None


@dataclass(frozen=True)
class Report:
    """All checks of one target and draft."""

    token_checks: list[TokenCheck]
    fit: FitCheck
    #: Tokens per verify forward of the greedy runs. 1 means that no draft token was ever accepted.
    acceptance_length: float

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
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
    progress: Progress = lambda _: None,
) -> Report:
    """Compare an LLM with a draft to plain decoding of the same target.

    Every prompt runs alone and all of them run together, greedily and with seeded sampling. Then continuations of the
    shortest prompt are sampled and tested against the target's probabilities.

    Args:
        plain: the target without a draft (`draft=None`).
        drafted: the same target with a draft.
        prompts: token ids of at least two prompts.
        max_tokens: tokens of an answer at most.
        temperature: of the sampled checks, above 0.
        seed: first seed of the sampled checks.
        samples: continuations drawn for the test of the distribution, at least 100.
        progress: told what starts.

    Raises:
        JetSpecError: fewer than two prompts, a temperature of zero, fewer than a hundred samples, or a seed too large
            to count up from.
    """
    if len(prompts) < 2:
        raise JetSpecError(f"prompts: {len(prompts)} given; give at least two, which make a batch")
    if temperature <= 0:
        raise JetSpecError(f"temperature={temperature}: must be above 0; greedy decoding is always checked")
    if samples < 100:
        raise JetSpecError(f"samples={samples}: must be at least 100 for a goodness-of-fit test")
    most = 2**64 - max(samples, len(prompts))
    if seed > most:
        raise JetSpecError(f"seed={seed}: must be at most {most}; each sample has a seed of its own, counted from it")
    greedy = [SamplingParams(temperature=0.0, max_tokens=max_tokens)] * len(prompts)
    sampled = [
        SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed + i) for i in range(len(prompts))
    ]
    checks, outputs = _check_tokens("greedy", plain, drafted, prompts, greedy, progress)
    checks += _check_tokens("seeded sampling", plain, drafted, prompts, sampled, progress)[0]
    progress(f"distribution: {samples} samples")
    shortest = min(prompts, key=len)
    fit = fit_check(plain.target, drafted, shortest, temperature=temperature, seed=seed, samples=samples)
    rounds = sum(o.metrics.rounds for o in outputs)
    decoded = sum(o.metrics.decoded_tokens for o in outputs)
    return Report(checks, fit, decoded / rounds if rounds else 0.0)


def _check_tokens(
    name: str,
    plain: LLM,
    drafted: LLM,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
    progress: Progress,
) -> tuple[list[TokenCheck], list[RequestOutput]]:
    """Compare the answers of one kind of decoding, alone and together. Returns the checks and the draft's answers."""
    progress(f"{name}: plain decoding")
    reference = _one_by_one(plain, prompts, params)
    progress(f"{name}: with the draft, one at a time")
    alone = _one_by_one(drafted, prompts, params)
    progress(f"{name}: with the draft, {len(prompts)} together")
    together = drafted.generate(list(prompts), params)
    tokens = sum(len(output.outputs[0].token_ids) for output in reference)
    checks = []
    for batch_size, got in ((1, alone), (len(prompts), together)):
        difference = first_difference(reference, got)
        if difference is not None:
            difference = replace(difference, logit_margin=logit_margin(plain.target, difference))
        checks.append(TokenCheck(name, batch_size, tokens, difference))
    return checks, alone + together


def _one_by_one(llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[RequestOutput]:
    return [llm.generate([prompt], p)[0] for prompt, p in zip(prompts, params, strict=True)]


def first_difference(reference: Sequence[RequestOutput], got: Sequence[RequestOutput]) -> Difference | None:
    """The first token, in order of prompts and positions, in which `got` differs from `reference`."""
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
    """The target's logit of the expected token minus that of the other; None where one of the runs had ended."""
    if difference.expected is None or difference.got is None:
        return None
    logits = next_logits(target, [difference.context])[0]
    return float(logits[difference.expected] - logits[difference.got])
