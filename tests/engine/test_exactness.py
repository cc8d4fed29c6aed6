"""Whatever is drafted and whoever shares the batch, every request gets what plain decoding alone gives it."""

from __future__ import annotations

import pytest

from jetspec.engine import Engine
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
    references,
    run,
)
from tests.helpers.tiny import TINY_MODELS, VOCAB_SIZE

DRAFTS = ["none", "random head", "oracle", "liar"]


def assert_equals_plain_decoding(kind: str, batch: int, draft: str, temperature: float) -> None:
    target = make_target(kind)
    prompts, params = make_prompts(batch), make_params(batch, temperature)
    engine = Engine(
        target,
        make_draft(draft, target, kind, prompts, params),
        tree_budget=12,
        num_blocks=64,
        kv_block_size=4,
        max_num_batched_tokens=64,
    )
    assert run(engine, prompts, params) == references(kind, prompts, params)


@pytest.mark.parametrize("temperature", [0.0, 1.3], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", TINY_MODELS)
def test_answers_end_in_every_way(kind: str, temperature: float) -> None:
    """The comparisons below would miss a stop that is ignored if no answer ended by one before its last token."""
    params = make_params(5, temperature)
    answers = references(kind, make_prompts(5), params)
    ends = [(reason, len(tokens), p.max_tokens) for (tokens, reason), p in zip(answers, params, strict=True)]
    assert any(reason == "stop" and 2 < length < limit for reason, length, limit in ends)
    assert {"stop", "length"} == {reason for _, reason in answers}


@pytest.mark.parametrize("temperature", [0.0, 1.3], ids=["greedy", "sampled"])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("kind", TINY_MODELS)
def test_equals_plain_decoding(kind: str, draft: str, temperature: float) -> None:
    assert_equals_plain_decoding(kind, 5, draft, temperature)


@pytest.mark.parametrize("temperature", [0.0, 1.3], ids=["greedy", "sampled"])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("batch", [1, 2])
def test_small_batches_equal_plain_decoding(batch: int, draft: str, temperature: float) -> None:
    assert_equals_plain_decoding("llama", batch, draft, temperature)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.3], ids=["greedy", "sampled"])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kind", sorted({*TINY_MODELS} - {"llama"}))
def test_small_batches_of_every_architecture(kind: str, batch: int, draft: str, temperature: float) -> None:
    assert_equals_plain_decoding(kind, batch, draft, temperature)


@pytest.mark.parametrize("draft", ["none", "random head", "oracle"])
@pytest.mark.parametrize(("max_num_batched_tokens", "num_blocks"), [(5, 64), (16, 24), (7, 15)])
def test_small_forwards_and_few_blocks_change_nothing(max_num_batched_tokens: int, num_blocks: int, draft: str) -> None:
    target = make_target()
    prompts, params = make_prompts(5), make_params(5, 0.0)
    engine = Engine(
        target,
        make_draft(draft, target, "llama", prompts, params),
        tree_budget=9,
        num_blocks=num_blocks,
        kv_block_size=4,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    assert run(engine, prompts, params) == references("llama", prompts, params)


def greedy(n: int, max_tokens: int | None = 20) -> list[SamplingParams]:
    return [SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)] * n


def test_preemption_happens_and_loses_nothing() -> None:
    prompts, params = make_prompts(5), greedy(5)
    engine = Engine(
        make_target(),
        OracleDrafter(known_answers("llama", prompts, params), VOCAB_SIZE),
        tree_budget=8,
        num_blocks=22,
        kv_block_size=4,
        max_num_batched_tokens=32,
    )
    sequences = finish(engine, prompts, params)
    assert sum(s.metrics.preemptions for s in sequences) > 0
    assert [(s.output_ids, s.finish_reason) for s in sequences] == references("llama", prompts, params)


def test_oracle_tokens_are_accepted() -> None:
    """The suite above would pass with nothing ever accepted; here several tokens a round must be."""
    prompts, params = make_prompts(5), greedy(5)
    drafter = OracleDrafter(known_answers("llama", prompts, params), VOCAB_SIZE, hit=0.9)
    engine = Engine(make_target(), drafter, tree_budget=40, num_blocks=200, kv_block_size=4)
    for s in finish(engine, prompts, params):
        assert s.metrics.acceptance_length > 2
        # The first token came with the prompt; every other one was committed by exactly one round.
        assert s.metrics.decoded_tokens == s.metrics.completion_tokens - 1 == 19


@pytest.mark.parametrize("draft", ["random head", "oracle"])
def test_runs_up_to_the_context_limit(draft: str) -> None:
    target = make_target()
    prompts = [[1 + i % 100 for i in range(length)] for length in (250, 243, 255)]
    params = greedy(3, max_tokens=None)
    truth = references("llama", prompts, params)
    assert [len(o) for o, _ in truth] == [6, 13, 1]
    drafter = make_draft(draft, target, "llama", prompts, params)
    engine = Engine(target, drafter, tree_budget=12, num_blocks=300, kv_block_size=4)
    assert run(engine, prompts, params) == truth


def test_stops_inside_an_accepted_path() -> None:
    """A stop token that the draft holds, in the middle of a path the target would follow, ends the request there."""
    target, prompts = make_target(), make_prompts(1)
    known = known_answers("llama", prompts, greedy(1, 14))
    [long] = known.values()
    for cut in range(1, 8):
        stop = long[cut]
        expected = long[: long.index(stop) + 1]
        params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, stop_token_ids=[stop])
        engine = Engine(target, OracleDrafter(known, VOCAB_SIZE, hit=1.0), tree_budget=30, num_blocks=64)
        assert run(engine, prompts, [params]) == [(expected, "stop")]


def test_stop_wins_over_length() -> None:
    prompts = make_prompts(1)
    known = known_answers("llama", prompts, greedy(1, 8))
    [long] = known.values()
    limit = long.index(long[5]) + 1
    params = SamplingParams(temperature=0, max_tokens=limit, ignore_eos=True, stop_token_ids=[long[5]])
    engine = Engine(make_target(), OracleDrafter(known, VOCAB_SIZE, hit=1.0), tree_budget=30, num_blocks=64)
    assert run(engine, prompts, [params]) == [(long[:limit], "stop")]


def test_seeds_do_not_disturb_each_other() -> None:
    target, prompts = make_target("qwen3"), make_prompts(3)
    params = [SamplingParams(temperature=1.0, seed=s, max_tokens=8) for s in (1, 2, 3)]
    settings = {"num_blocks": 64, "tree_budget": 8}
    together = run(Engine(target, random_head(target), **settings), prompts, params)
    for i in range(3):
        assert run(Engine(target, random_head(target), **settings), [prompts[i]], [params[i]]) == [together[i]]


def test_cancel_frees_blocks_and_leaves_others_alone() -> None:
    target = make_target()
    prompts, params = make_prompts(5), greedy(5, 8)
    engine = Engine(target, random_head(target), tree_budget=8, num_blocks=64, kv_block_size=4)
    sequences = [engine.add(str(i), ids, p) for i, (ids, p) in enumerate(zip(prompts, params, strict=True))]
    for _ in range(3):
        engine.step()
    assert engine.cancel("1") is sequences[1]
    assert sequences[1].finish_reason == "abort"
    assert engine.cancel("1") is None
    engine.run()
    truth = references("llama", prompts, params)
    for i in (0, 2, 3, 4):
        assert (sequences[i].output_ids, sequences[i].finish_reason) == truth[i]
    assert engine.blocks.num_free == 64
