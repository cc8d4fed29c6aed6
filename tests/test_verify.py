"""`jetspec.verify`: passes where decoding is lossless, and finds every way of breaking it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import jetspec.engine.accept as accept_module
from jetspec.attention import KVCache
from jetspec.errors import JetSpecError
from jetspec.head import DraftHead, head_for_target
from jetspec.llm import LLM
from jetspec.models.target import Target
from jetspec.sampling import SamplingParams
from jetspec.verify import Report, next_logits, verify
from jetspec.verify.distribution import OTHER, cell_of, chi_square, partition
from tests.helpers.cli import trusting_next_token
from tests.helpers.tiny import VOCAB_SIZE, tiny_target

# A third of the vocabulary fits in a tree, so that even a random head's drafts are accepted, all over the tree.
BUDGET = 48
LENGTHS = (3, 9, 6)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def head(target: Target) -> DraftHead:
    return head_for_target(target, num_layers=1, block_size=4, num_aux_layers=1, mask_token_id=0, seed=0)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


def run(target: Target, head: DraftHead, prompts: list[list[int]], samples: int = 200) -> Report:
    drafted = LLM(target, head, tree_budget=BUDGET)
    return verify(LLM(target, None), drafted, prompts, max_tokens=16, samples=samples)


def test_lossless_decoding_passes(target: Target, head: DraftHead, prompts: list[list[int]]) -> None:
    report = run(target, head, prompts)
    assert report.passed
    assert [(c.name, c.batch_size) for c in report.token_checks] == [
        ("greedy", 1),
        ("greedy", 3),
        ("seeded sampling", 1),
        ("seeded sampling", 3),
    ]
    assert report.acceptance_length > 1.1  # else the corrupted runs below would show nothing
    assert report.fit.cells > 5
    assert report.to_dict()["passed"] is True


def test_accepting_drafts_unseen_is_found(
    target: Target, head: DraftHead, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accept_module, "next_token", trusting_next_token)
    report = run(target, head, prompts)
    assert not report.passed
    assert not any(check.passed for check in report.token_checks)
    assert not report.fit.passed
    difference = report.token_checks[0].difference
    assert difference.position == 1  # the first token comes with the prompt
    [first] = LLM(target, None).generate([prompts[0]], greedy(1))
    assert difference.context == prompts[0] + first.outputs[0].token_ids
    assert difference.logit_margin > 0


def test_keeping_the_wrong_row_is_found(
    target: Target, head: DraftHead, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KVCache, "move", lambda self, source, destination: None)
    report = run(target, head, prompts, samples=100)
    assert not report.passed
    assert any(not check.passed for check in report.token_checks if check.name == "greedy")


def test_a_wrong_distribution_is_found(
    target: Target, head: DraftHead, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault that plain decoding shares leaves the tokens equal: only the goodness of fit shows it."""
    sample = accept_module.sample
    monkeypatch.setattr(accept_module, "sample", lambda logits, *rest: sample(logits / 1.4, *rest))
    report = run(target, head, prompts, samples=600)
    sampled = [check for check in report.token_checks if check.name == "seeded sampling"]
    assert all(check.passed for check in sampled)
    assert not report.fit.passed
    assert not report.passed


def test_an_early_end_is_a_difference(
    target: Target, head: DraftHead, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafted = LLM(target, head, tree_budget=BUDGET)
    generate = drafted.generate

    def short(batch, params, **options):
        return generate(batch, [p.replace(max_tokens=min(p.max_tokens, 12)) for p in as_list(params, batch)], **options)

    monkeypatch.setattr(drafted, "generate", short)
    report = verify(LLM(target, None), drafted, prompts, max_tokens=16, samples=100)
    difference = report.token_checks[0].difference
    assert difference.position == 12
    assert difference.got is None
    assert difference.logit_margin is None


def as_list(params, batch) -> list[SamplingParams]:
    return [params] * len(batch) if isinstance(params, SamplingParams) else list(params)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens)


def test_next_logits_equal_transformers(target: Target, prompts: list[list[int]]) -> None:
    from tests.helpers.tiny import tiny_llama

    model = tiny_llama(num_hidden_layers=2)
    expected = torch.stack([model(torch.tensor([p])).logits[0, -1] for p in prompts])
    assert torch.allclose(next_logits(target, prompts).float(), expected, atol=1e-4)


def test_next_logits_over_several_forwards(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]
    whole = next_logits(target, contexts)
    monkeypatch.setattr("jetspec.verify.logits.MAX_NUM_BATCHED_TOKENS", 4)
    assert torch.allclose(next_logits(target, contexts), whole, atol=1e-5)


@pytest.mark.parametrize("problem", ["prompts", "temperature=0.0", "samples=50", f"seed={2**64 - 50}: "])
def test_refusals_name_the_field(target: Target, head: DraftHead, prompts: list[list[int]], problem: str) -> None:
    name, _, value = problem.rstrip(": ").partition("=")
    options: dict[str, Any] = {name: float(value) if "." in value else int(value)} if value else {}
    with pytest.raises(JetSpecError, match=f"^{problem}"):
        verify(LLM(target, None), LLM(target, head), prompts[:1] if problem == "prompts" else prompts, **options)


def test_cells_cover_every_continuation() -> None:
    table = torch.tensor([[0.6, 0.3, 0.08, 0.02], [0.1, 0.2, 0.3, 0.4], [0.97, 0.01, 0.01, 0.01], [0.25] * 4])

    def next_probs(prefixes):
        return torch.stack([table[p[-1] if p else 0] for p in prefixes]).double()

    cells = partition(next_probs, 3, samples=100)
    assert sum(cells.values()) == pytest.approx(100)
    totals = dict.fromkeys(cells, 0.0)
    for a in range(4):
        for b in range(4):
            for c in range(4):
                totals[cell_of((a, b, c), cells)] += float(100 * table[0, a] * table[a, b] * table[b, c])
    assert totals == pytest.approx(cells)
    assert all(count >= 5 for cell, count in cells.items() if cell[-1] != OTHER)
    assert cells[0, 0, 0] == pytest.approx(21.6)


@pytest.mark.parametrize(("statistic", "degrees"), [(3.841, 1), (18.307, 10), (67.505, 50)])
def test_p_values_equal_the_printed_tables(statistic: float, degrees: int) -> None:
    """Critical values of the chi-square distribution at 5%."""
    cells = degrees + 1
    # One cell off by d and another by -d, of expectation e, add 2 d^2 / e.
    offset = (statistic * 1e6 / 2) ** 0.5
    observed = [1e6 + offset, 1e6 - offset] + [1e6] * (cells - 2)
    found = chi_square(observed, [1e6] * cells)
    assert found == (pytest.approx(statistic), degrees, pytest.approx(0.05, rel=1e-3))


def test_rare_cells_are_pooled() -> None:
    statistic, degrees, _ = chi_square([50, 46, 2, 1, 1], [50.0, 46.0, 2.0, 1.5, 0.5])
    assert degrees == 1  # the three rare cells expect 4 together, so they join the next larger one
    assert statistic == pytest.approx(0)


def test_one_cell_tells_nothing() -> None:
    assert chi_square([100], [100.0]) == (0.0, 0, 1.0)
