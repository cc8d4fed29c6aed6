"""Targets with layers of every kind: whatever is drafted, cut, preempted or shared, requests get plain decoding's text.

The truth is transformers' own forward over the whole text, token by token; `generate` is compared with once.
"""

from __future__ import annotations

import pytest
import torch

from jetspec.engine import Engine
from jetspec.engine.drafters.draft_model import ModelDrafter
from jetspec.errors import JetSpecError
from jetspec.sampling import SamplingParams
from tests.helpers.drafters import OracleDrafter
from tests.helpers.engine import (
    finish,
    known_answers,
    make_draft,
    make_params,
    make_prompts,
    make_target,
    random_head,
    reference_model,
    references,
    run,
)
from tests.helpers.layers import FAMILY_MODELS, RECURRENT
from tests.helpers.tiny import VOCAB_SIZE

#: A gated delta rule, Mamba-2 and a convolution alone; each other family repeats one of them.
FAST = ("qwen3_next", "nemotron_h", "lfm2")
KINDS = [pytest.param(kind, marks=() if kind in FAST else pytest.mark.slow) for kind in FAMILY_MODELS]
#: For tests that decode many tokens.
FEW = [pytest.param(kind, marks=() if kind == "lfm2" else pytest.mark.slow) for kind in FAST]
TEMPERATURES = pytest.mark.parametrize("temperature", [0.0, 1.3], ids=["greedy", "sampled"])


def greedy(n: int, max_tokens: int = 20) -> list[SamplingParams]:
    return [SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)] * n


@TEMPERATURES
@pytest.mark.parametrize(
    "draft", ["oracle", *(pytest.param(name, marks=pytest.mark.slow) for name in ("none", "random head", "liar"))]
)
@pytest.mark.parametrize("batch", [5, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_plain_decoding(kind: str, batch: int, draft: str, temperature: float) -> None:
    """Prompts of 1 to 40 tokens, in chunks where a round has no room for a whole one."""
    target = make_target(kind)
    prompts, params = make_prompts(batch), make_params(batch, temperature)
    drafter = make_draft(draft, target, kind, prompts, params)
    engine = Engine(
        target, drafter, tree_budget=12, num_blocks=64, kv_block_size=4, max_num_batched_tokens=24, max_num_seqs=5
    )
    assert run(engine, prompts, params) == references(kind, prompts, params)
    if kind in RECURRENT:
        assert engine.cache.states.num_free == 5


@pytest.mark.parametrize("kind", KINDS)
def test_equals_generate(kind: str) -> None:
    [prompt] = make_prompts(2)[1:]
    engine = Engine(make_target(kind), tree_budget=1, num_blocks=64)
    [(tokens, _)] = run(engine, [prompt], greedy(1))
    generated = reference_model(kind).generate(
        torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert tokens == generated[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_preemption_loses_nothing(kind: str) -> None:
    prompts, params = make_prompts(5), greedy(5)
    engine = Engine(
        make_target(kind),
        OracleDrafter(known_answers(kind, prompts, params), VOCAB_SIZE),
        tree_budget=8,
        num_blocks=22,
        kv_block_size=4,
        max_num_batched_tokens=32,
    )
    sequences = finish(engine, prompts, params)
    assert sum(s.metrics.preemptions for s in sequences) > 0
    assert [(s.output_ids, s.finish_reason) for s in sequences] == references(kind, prompts, params)
    if kind in RECURRENT:
        assert engine.cache.states.num_free == 64


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAST)
def test_a_chain_longer_than_a_piece_may_be_accepted_in_part(kind: str) -> None:
    """Long drafts are chains, which run in pieces like prompts; the walk may end inside any piece."""
    prompts, params = make_prompts(2), greedy(2, 120)
    known = known_answers(kind, prompts, params)
    for hit in (0.97, 1.0):
        drafter = OracleDrafter(known, VOCAB_SIZE, depth=100, width=1, hit=hit)
        engine = Engine(make_target(kind), drafter, tree_budget=101, num_blocks=200, kv_block_size=4)
        sequences = finish(engine, prompts, params)
        assert [(s.output_ids, s.finish_reason) for s in sequences] == references(kind, prompts, params)
        assert any(s.metrics.acceptance_length > 10 for s in sequences)


@pytest.mark.parametrize("kind", FEW)
def test_requests_start_behind_a_snapshot(kind: str) -> None:
    """The third request with a common start finds the state where the second one left what the first had known."""
    [common, *_] = make_prompts(4)[3:]
    prompts = [[*common, *tail] for tail in ([5, 6, 7, 8, 9], [15, 16, 17], [25], [35, 36])]
    target = make_target(kind)
    engine = Engine(target, random_head(target), tree_budget=6, num_blocks=200, kv_block_size=4, num_state_snapshots=64)
    cached = []
    for prompt in prompts:
        [sequence] = finish(engine, [prompt], greedy(1))
        assert [(sequence.output_ids, sequence.finish_reason)] == references(kind, [prompt], greedy(1))
        cached.append(sequence.metrics.cached_prompt_tokens)
    assert cached == [0, 0, 40, 40]
    # The whole text again, answer included: the state behind its last full block is there.
    again = [*prompts[0], *references(kind, prompts[:1], greedy(1))[0][0]]
    [sequence] = finish(engine, [again], greedy(1))
    assert sequence.metrics.cached_prompt_tokens == (len(again) - 1) // 4 * 4
    assert [(sequence.output_ids, sequence.finish_reason)] == references(kind, [again], greedy(1))


@pytest.mark.parametrize("snapshots", [pytest.param(0, marks=pytest.mark.slow), 1, 2])
def test_few_snapshots_change_nothing(snapshots: int) -> None:
    prompts, params = make_prompts(5), greedy(5)
    engine = Engine(
        make_target("qwen3_next"), num_blocks=64, kv_block_size=4, num_state_snapshots=snapshots, max_num_seqs=3
    )
    for _ in range(2):
        assert run(engine, prompts, params) == references("qwen3_next", prompts, params)


def test_cancel_gives_the_state_back_and_leaves_others_alone() -> None:
    target = make_target("qwen3_next")
    prompts, params = make_prompts(5), greedy(5, 8)
    engine = Engine(target, random_head(target), tree_budget=8, num_blocks=64, kv_block_size=4, max_num_seqs=5)
    sequences = [engine.add(str(i), ids, p) for i, (ids, p) in enumerate(zip(prompts, params, strict=True))]
    for _ in range(3):
        engine.step()
    engine.cancel("1")
    engine.run()
    truth = references("qwen3_next", prompts, params)
    assert [(sequences[i].output_ids, sequences[i].finish_reason) for i in (0, 2, 3, 4)] == [
        truth[i] for i in (0, 2, 3, 4)
    ]
    assert engine.cache.states.num_free == 5


@pytest.mark.slow
def test_the_automatic_budget_measures_and_changes_nothing() -> None:
    target = make_target("qwen3_next")
    prompts, params = make_prompts(3), greedy(3)
    drafter = OracleDrafter(known_answers("qwen3_next", prompts, params), VOCAB_SIZE)
    engine = Engine(target, drafter, num_blocks=64, kv_block_size=4, max_num_batched_tokens=64)
    assert run(engine, prompts, params) == references("qwen3_next", prompts, params)


def test_a_draft_model_with_recurrent_layers_is_refused() -> None:
    with pytest.raises(JetSpecError, match="recurrent layers; use a model with attention"):
        ModelDrafter(make_target("lfm2"))


def test_batch_invariant_mode_is_refused() -> None:
    with pytest.raises(JetSpecError, match="recurrent layers; use batch_invariant=False"):
        Engine(make_target("qwen3_next"), batch_invariant=True, num_blocks=8)
