"""Block accounting and prefix sharing: nothing leaks, nothing in use is handed out, a hit changes nothing."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec.attention.blocks import BlockManager, BlockTable
from jetspec.engine import Engine
from jetspec.sampling import SamplingParams
from tests.helpers.engine import finish, make_target, random_head, references


@settings(max_examples=40)
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_random_lives_of_tables(seed: int, size: int) -> None:
    """Tables come, grow, share, shrink and go; a block found again holds what was written under that content."""
    rng = random.Random(seed)
    manager = BlockManager(12, size)
    held: dict[int, tuple[int, ...]] = {}  # what was last written to a block: all tokens up to its end
    tables: list[tuple[BlockTable, list[int]]] = []
    for _ in range(60):
        if tables and rng.random() < 0.4:
            table, tokens = tables.pop(rng.randrange(len(tables)))
            table.truncate(0)
            continue
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 4 * size))]
        table = BlockTable(manager)
        known = table.match_prefix(tokens)
        for i, block in enumerate(table.blocks):
            assert held[block] == tuple(tokens[: (i + 1) * size])
        if table.growable_to() < len(tokens):
            table.truncate(0)
            continue
        table.reserve(len(tokens))
        in_use = [b for other, _ in tables for b in other.blocks]
        for i in range(known // size, len(table.blocks)):
            assert table.blocks[i] not in in_use
            held[table.blocks[i]] = tuple(tokens[: (i + 1) * size])
        final = rng.randrange(known, len(tokens) + 1)
        table.cache_full_blocks(tokens, final)
        table.truncate(final)
        tables.append((table, tokens))
        assert manager.num_free == 12 - len({b for t, _ in tables for b in t.blocks})
    for table, _ in tables:
        table.truncate(0)
    assert manager.num_free == 12


def test_slots_follow_the_blocks() -> None:
    manager = BlockManager(6, 2)
    first, table = BlockTable(manager), BlockTable(manager)
    first.reserve(2)
    table.reserve(4)
    first.truncate(0)
    table.reserve(5)
    expected = [b * 2 + i for b in table.blocks for i in range(2)]
    assert table.slots(1, 5).tolist() == expected[1:5]
    with pytest.raises(RuntimeError):
        manager.allocate(99)


def test_the_longest_unused_block_is_reused_first() -> None:
    manager = BlockManager(4, 1)
    tables = [BlockTable(manager) for _ in range(3)]
    for token, table in enumerate(tables):
        table.reserve(1)
        table.cache_full_blocks([token], 1)
    for table in (tables[1], tables[0], tables[2]):
        table.truncate(0)
    manager.allocate(2)  # the never used one, then the one freed first
    hits = [BlockTable(manager).match_prefix([token]) for token in range(3)]
    assert hits == [1, 0, 1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_prefix_hit_changes_neither_tokens_nor_acceptance(temperature: float) -> None:
    target = make_target()
    head = random_head(target)
    rng = random.Random(1)
    prompt = [rng.randrange(100) for _ in range(30)]
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=20, ignore_eos=True)

    def answer(engine: Engine, ids: list[int], name: str) -> tuple[list[int], int, int]:
        sequence = engine.add(name, ids, params)
        engine.run()
        return sequence.output_ids, sequence.metrics.rounds, sequence.metrics.cached_prompt_tokens

    settings = {"num_blocks": 64, "kv_block_size": 4, "tree_budget": 12}
    cold = answer(Engine(target, head, enable_prefix_caching=False, **settings), prompt, "a")
    engine = Engine(target, head, **settings)
    first, again = answer(engine, prompt, "a"), answer(engine, prompt, "b")
    assert cold == first
    assert cold[2] == 0
    assert again == (cold[0], cold[1], 28)
    # Another request that shares the beginning and then differs, and one that runs on from the answer.
    for ids in ([*prompt[:17], 1, 2, 3], prompt + cold[0][:11]):
        hit = answer(engine, ids, "c")
        alone = answer(Engine(target, head, enable_prefix_caching=False, **settings), ids, "c")
        assert hit[:2] == alone[:2]
        assert hit[2] == (16 if len(ids) == 20 else 40)
    assert engine.blocks.num_free == 64


def test_the_head_reads_the_same_context_after_a_hit() -> None:
    """A random head accepts next to nothing, so the drafts themselves are compared."""
    target = make_target()
    head = random_head(target)
    prompt = list(range(1, 40))
    engine = Engine(target, head, tree_budget=8, num_blocks=64, kv_block_size=4)
    drafts = []
    propose = engine.drafter.propose

    def spy(sequences, budgets):
        forest = propose(sequences, budgets)
        drafts.append((forest.tokens, forest.log_probs))
        return forest

    engine.drafter.propose = spy
    for name in ("cold", "hit"):
        sequence = engine.add(name, prompt, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        engine.run()
        assert sequence.metrics.cached_prompt_tokens == (0 if name == "cold" else 36)
    half = len(drafts) // 2
    assert half > 0
    for (cold_tokens, cold_probs), (hit_tokens, hit_probs) in zip(drafts[:half], drafts[half:], strict=True):
        assert torch.equal(cold_tokens, hit_tokens)
        assert torch.allclose(cold_probs, hit_probs, atol=1e-4)


def test_prompt_logprobs_are_complete_after_a_hit() -> None:
    engine = Engine(make_target(), num_blocks=64, kv_block_size=4)
    prompt = list(range(1, 20))
    for name in ("a", "b"):
        sequence = engine.add(name, prompt, SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0))
        engine.run()
        assert len(sequence.prompt_logprobs) == len(prompt)


def test_preempted_requests_come_back_behind_their_own_prefix() -> None:
    target = make_target()
    prompts = [[i + 1] * 9 for i in range(5)]
    params = [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)] * 5
    engine = Engine(target, num_blocks=18, kv_block_size=4, max_num_batched_tokens=32)
    sequences = finish(engine, prompts, params)
    assert sum(s.metrics.preemptions for s in sequences) > 0
    assert [(s.output_ids, s.finish_reason) for s in sequences] == references("llama", prompts, params)
