"""Whatever is drafted and whoever shares the batch, every request gets what plain decoding alone gives it."""

from __future__ import annotations

import random

import pytest

from jetspec.engine import Drafter, Engine
from jetspec.head import DraftHead, head_for_target
from jetspec.models.target import Target
from jetspec.sampling import SamplingParams
from tests.helpers.decoding import decode
from tests.helpers.drafters import OracleDrafter
from tests.helpers.tiny import TINY_MODELS, VOCAB_SIZE

EOS = 5
LENGTHS = [3, 17, 1, 40, 9]


def make_target(kind: str) -> Target:
    target = Target.from_model(TINY_MODELS[kind](attn="sdpa"), name=kind)
    target.eos_token_ids = frozenset({EOS})
    return target


def make_prompts(n: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in LENGTHS[:n]]


def make_params(n: int, temperature: float) -> list[SamplingParams]:
    limits = [24, 31, 1, 40, 2]
    return [
        SamplingParams(
            temperature=temperature,
            seed=100 + i,
            max_tokens=limits[i],
            ignore_eos=i == 3,
            stop_token_ids=[7] if i == 1 else None,
        )
        for i in range(n)
    ]


def references(kind: str, prompts: list[list[int]], params: list[SamplingParams]) -> list[tuple[list[int], str]]:
    model = TINY_MODELS[kind](attn="eager")
    return [decode(model, ids, p, frozenset({EOS}), p.seed) for ids, p in zip(prompts, params, strict=True)]


def random_head(target: Target, seed: int = 0) -> DraftHead:
    return head_for_target(
        target, num_layers=2, block_size=5, num_aux_layers=2, mask_token_id=VOCAB_SIZE - 1, seed=seed
    )


def run(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[tuple[list[int], str]]:
    sequences = [engine.add(str(i), ids, p) for i, (ids, p) in enumerate(zip(prompts, params, strict=True))]
    free = engine.blocks.num_blocks
    while engine.has_work:
        engine.step()
    assert engine.blocks.num_free == free, "blocks leaked"
    return [(s.output_ids, s.finish_reason) for s in sequences]


def make_draft(
    name: str, target: Target, prompts: list[list[int]], truth: list[tuple[list[int], str]]
) -> DraftHead | Drafter | None:
    if name == "none":
        return None
    if name == "random head":
        return random_head(target)
    known = {tuple(ids): output for ids, (output, _) in zip(prompts, truth, strict=True)}
    return OracleDrafter(known, VOCAB_SIZE, hit={"oracle": 0.9, "liar": 0.0}[name])


@pytest.mark.parametrize("temperature", [0.0, 1.3], ids=["greedy", "sampled"])
@pytest.mark.parametrize("draft", ["none", "random head", "oracle", "liar"])
@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("kind", TINY_MODELS)
def test_equals_plain_decoding(kind: str, batch: int, draft: str, temperature: float) -> None:
    target = make_target(kind)
    prompts, params = make_prompts(batch), make_params(batch, temperature)
    truth = references(kind, prompts, params)
    engine = Engine(
        target,
        make_draft(draft, target, prompts, truth),
        tree_budget=12,
        num_blocks=64,
        kv_block_size=4,
        max_num_batched_tokens=64,
    )
    assert run(engine, prompts, params) == truth


@pytest.mark.parametrize(("max_num_batched_tokens", "num_blocks"), [(5, 64), (16, 24), (7, 23)])
def test_small_forwards_and_few_blocks_change_nothing(max_num_batched_tokens: int, num_blocks: int) -> None:
    target = make_target("llama")
    prompts, params = make_prompts(5), make_params(5, 0.0)
    truth = references("llama", prompts, params)
    for draft in ("none", "random head", "oracle"):
        engine = Engine(
            target,
            make_draft(draft, target, prompts, truth),
            tree_budget=9,
            num_blocks=num_blocks,
            kv_block_size=4,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        assert run(engine, prompts, params) == truth


def test_preemption_happens_and_loses_nothing() -> None:
    target = make_target("llama")
    prompts = make_prompts(5)
    params = [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)] * 5
    truth = references_greedy(prompts, params)
    engine = Engine(
        target,
        make_draft("oracle", target, prompts, truth),
        tree_budget=8,
        num_blocks=30,
        kv_block_size=4,
        max_num_batched_tokens=32,
    )
    sequences = [engine.add(str(i), ids, p) for i, (ids, p) in enumerate(zip(prompts, params, strict=True))]
    while engine.has_work:
        engine.step()
    assert sum(s.metrics.preemptions for s in sequences) > 0
    assert [(s.output_ids, s.finish_reason) for s in sequences] == truth
    assert engine.blocks.num_free == 30


def references_greedy(prompts: list[list[int]], params: list[SamplingParams]) -> list[tuple[list[int], str]]:
    model = TINY_MODELS["llama"](attn="eager")
    return [decode(model, ids, p, frozenset({EOS}), 0) for ids, p in zip(prompts, params, strict=True)]


def test_oracle_tokens_are_accepted() -> None:
    """The suite above would pass with nothing ever accepted; here several tokens a round must be."""
    target = make_target("llama")
    prompts = make_prompts(5)
    params = [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)] * 5
    truth = references_greedy(prompts, params)
    engine = Engine(
        target, make_draft("oracle", target, prompts, truth), tree_budget=40, num_blocks=200, kv_block_size=4
    )
    sequences = [engine.add(str(i), ids, p) for i, (ids, p) in enumerate(zip(prompts, params, strict=True))]
    while engine.has_work:
        engine.step()
    for s in sequences:
        assert s.metrics.acceptance_length > 2
        # The first token came with the prompt; every other one was committed by exactly one round.
        assert s.metrics.decoded_tokens == s.metrics.completion_tokens - 1 == 39


def test_runs_up_to_the_context_limit() -> None:
    target = make_target("llama")
    prompts = [[1 + i % 100 for i in range(length)] for length in (250, 243, 255)]
    params = [SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)] * 3
    truth = references_greedy(prompts, params)
    assert [len(o) for o, _ in truth] == [6, 13, 1]
    for draft in ("random head", "oracle"):
        engine = Engine(
            target, make_draft(draft, target, prompts, truth), tree_budget=12, num_blocks=300, kv_block_size=4
        )
        assert run(engine, prompts, params) == truth


def test_stops_inside_an_accepted_path() -> None:
    """A stop token that the draft holds, in the middle of a path the target would follow, ends the request there."""
    target = make_target("llama")
    prompt = make_prompts(1)[0]
    plain = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    ((long, _),) = references_greedy([prompt], [plain])
    for cut in range(1, 12):
        stop = long[cut]
        expected = long[: long.index(stop) + 1]
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=[stop])
        engine = Engine(
            target, OracleDrafter({tuple(prompt): long}, VOCAB_SIZE, hit=1.0), tree_budget=30, num_blocks=64
        )
        assert run(engine, [prompt], [params]) == [(expected, "stop")]


def test_stop_wins_over_length() -> None:
    target = make_target("llama")
    prompt = make_prompts(1)[0]
    ((long, _),) = references_greedy([prompt], [SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)])
    limit = long.index(long[5]) + 1
    params = SamplingParams(temperature=0, max_tokens=limit, ignore_eos=True, stop_token_ids=[long[5]])
    engine = Engine(target, OracleDrafter({tuple(prompt): long}, VOCAB_SIZE, hit=1.0), tree_budget=30, num_blocks=64)
    assert run(engine, [prompt], [params]) == [(long[:limit], "stop")]


def test_seeds_do_not_disturb_each_other() -> None:
    target = make_target("qwen3")
    prompts = make_prompts(3)
    params = [SamplingParams(temperature=1.0, seed=s, max_tokens=15) for s in (1, 2, 3)]
    together = run(Engine(target, random_head(target), num_blocks=64), prompts, params)
    for i in range(3):
        assert run(Engine(target, random_head(target), num_blocks=64), [prompts[i]], [params[i]]) == [together[i]]


def test_cancel_frees_blocks_and_leaves_others_alone() -> None:
    target = make_target("llama")
    prompts, params = make_prompts(5), [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)] * 5
    truth = references_greedy(prompts, params)
    engine = Engine(target, random_head(target), num_blocks=64, kv_block_size=4)
    sequences = [engine.add(str(i), ids, p) for i, (ids, p) in enumerate(zip(prompts, params, strict=True))]
    for _ in range(3):
        engine.step()
    assert engine.cancel("1") is sequences[1]
    assert sequences[1].finish_reason == "abort"
    assert engine.cancel("1") is None
    while engine.has_work:
        engine.step()
    assert [(s.output_ids, s.finish_reason) for i, s in enumerate(sequences) if i != 1] == [
        t for i, t in enumerate(truth) if i != 1
    ]
    assert engine.blocks.num_free == 64
