"""Drafters: prompt lookup, chains, bounded heads and small models propose what they should, and change no token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec.drafts import load_drafter
from jetspec.engine import Drafter, Engine, HeadDrafter, ModelDrafter, NgramDrafter, Sequence, head_drafter
from jetspec.engine.drafters.parallel import ParallelDrafter, last_of_each
from jetspec.errors import JetSpecError
from jetspec.head import DraftHead, head_for_target
from jetspec.models.target import Target
from jetspec.sampling import SamplingParams
from jetspec.tree import Forest
from jetspec.tree.trie import find_continuations, trie
from tests.head.test_transition import conditioned_head
from tests.helpers.engine import (
    finish,
    make_model,
    make_params,
    make_prompts,
    make_target,
    random_head,
    references,
    run,
)
from tests.helpers.tiny import TINY_MODELS, VOCAB_SIZE, tiny_target

POOL = {"num_blocks": 64, "kv_block_size": 4}


def small_model(kind: str = "llama", seed: int = 7, **settings: object) -> Target:
    return Target.from_model(TINY_MODELS[kind](seed=seed, num_hidden_layers=1, **settings), name="small")


def autoregressive_head(target: Target, num_layers: int = 1, seed: int = 0) -> DraftHead:
    return head_for_target(
        target, kind="autoregressive", num_layers=num_layers, block_size=5, target_layer_ids=(0, 1), seed=seed
    )


def make_drafter(name: str, target: Target) -> Drafter:
    if name == "ngram":
        return NgramDrafter(min_ngram=1, max_ngram=3)
    if name == "chain":
        return head_drafter(random_head(target), chain=True)
    if name == "transition":
        return head_drafter(conditioned_head(target, num_aux_layers=None, target_layer_ids=(0, 1)))
    if name == "chain of paths":
        return head_drafter(conditioned_head(target, num_aux_layers=None, target_layer_ids=(0, 1)), chain=True)
    if name == "autoregressive":
        return head_drafter(autoregressive_head(target))
    if name == "autoregressive chain":
        return head_drafter(autoregressive_head(target, num_layers=2), chain=True, window=6)
    if name == "window":
        return head_drafter(random_head(target), window=4)
    if name == "own model":
        return ModelDrafter(make_target(), depth=3)
    return ModelDrafter(small_model(), depth=3)


DRAFTERS = [
    "ngram",
    "chain",
    "transition",
    "chain of paths",
    "autoregressive",
    "autoregressive chain",
    "window",
    "small model",
    "own model",
]


@pytest.mark.parametrize(
    ("max_num_batched_tokens", "num_blocks", "temperature"),
    [
        pytest.param(64, 64, 0.0, id="greedy-roomy"),
        pytest.param(7, 15, 1.3, id="sampled-tight"),
        pytest.param(64, 64, 1.3, id="sampled-roomy", marks=pytest.mark.slow),
        pytest.param(7, 15, 0.0, id="greedy-tight", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", DRAFTERS)
def test_no_drafter_changes_a_token(
    name: str, max_num_batched_tokens: int, num_blocks: int, temperature: float
) -> None:
    target = make_target()
    prompts, params = make_prompts(5), make_params(5, temperature)
    truth = references("llama", prompts, params)
    engine = Engine(
        target,
        make_drafter(name, target),
        tree_budget=9,
        num_blocks=num_blocks,
        kv_block_size=4,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    assert run(engine, prompts, params) == truth
    # Again, behind the prefixes that the first run left in the cache.
    assert run(engine, prompts, params) == truth


class Spy(Drafter):
    """Passes everything on and keeps what was proposed."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.target_layer_ids = inner.target_layer_ids
        self.prepare, self.extend = inner.prepare, inner.extend  # type: ignore[method-assign]
        self.forests: list[Forest] = []

    def propose(self, sequences, budgets) -> Forest:
        self.forests.append(self.inner.propose(sequences, budgets))
        return self.forests[-1]


def proposals(target: Target, drafter: Drafter, prompt: list[int], max_tokens: int, **settings: object) -> list[Forest]:
    spy = Spy(drafter)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    run(Engine(target, spy, tree_budget=9, **{**POOL, **settings}), [prompt], [params])
    return spy.forests


# Prompt lookup


def naive_continuations(tokens: list[int], low: int, high: int) -> list[int]:
    for n in range(high, low - 1, -1):
        if n < len(tokens):
            found = [i for i in range(n, len(tokens)) if tokens[i - n : i] == tokens[-n:]]
            if found:
                return found
    return []


@settings(max_examples=50)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(1, 3), st.integers(0, 3))
def test_continuations_of_the_longest_suffix(tokens: list[int], low: int, more: int) -> None:
    expected = naive_continuations(tokens, low, low + more)
    assert find_continuations(np.array(tokens), low, low + more).tolist() == expected


@settings(max_examples=50)
@given(st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=8), st.integers(1, 30))
def test_trie_holds_the_most_frequent_prefixes(ways: list[list[int]], budget: int) -> None:
    tokens, parents, log_probs = trie(99, ways, budget)
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*paths[parent], token) if parent >= 0 else ())
    assert (tokens[0], parents[0], log_probs[0]) == (99, -1, 0.0)
    assert [len(p) for p in paths] == sorted(len(p) for p in paths)

    def probability(path: tuple[int, ...]) -> float:
        product = 1.0
        for d in range(len(path)):
            above = sum(tuple(w[:d]) == path[:d] for w in ways)
            product *= sum(tuple(w[: d + 1]) == path[: d + 1] for w in ways) / (above + 1)
        return product

    every = {tuple(w[:d]) for w in ways for d in range(len(w) + 1)} | {()}
    best = sorted((probability(p) for p in every), reverse=True)[:budget]
    assert np.exp(sorted(log_probs, reverse=True)) == pytest.approx(best)
    assert len(set(paths)) == len(paths)


def test_lookup_speeds_up_repetition() -> None:
    """A text that goes round in circles is drafted right nearly all the time."""
    target = make_target()
    prompt = make_prompts(1)[0]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logit_bias=dict.fromkeys((3, 4), 50.0))
    engine = Engine(target, NgramDrafter(), tree_budget=9, **POOL)
    [sequence] = finish(engine, [prompt], [params])
    assert sequence.metrics.acceptance_length > 2


@pytest.mark.parametrize(
    "arguments", [{"min_ngram": 0}, {"min_ngram": 5}, {"max_ngram": 1}, {"depth": 0}, {"max_matches": 0}]
)
def test_bad_lookup_settings_are_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(JetSpecError, match=next(iter(arguments))):
        NgramDrafter(**arguments)


# Heads


@pytest.mark.parametrize("make_head", [random_head, autoregressive_head])
def test_a_chain_is_the_first_path_of_the_tree(make_head) -> None:
    """Round for round: a head accepts next to nothing, so trees and chains are drafted after the same texts."""
    target = make_target("qwen3")
    prompt = make_prompts(2)[1]
    chains = proposals(target, head_drafter(make_head(target), chain=True), prompt, 8)
    trees = proposals(target, head_drafter(make_head(target)), prompt, 8)
    lengths = set()
    for chain, tree in zip(chains, trees, strict=True):
        assert chain.parents.tolist() == list(range(-1, len(chain.parents) - 1))
        path = [0]  # the most probable child of each node; its rank is 0 among its siblings
        first = (tree.sibling_ranks() == 0).tolist()
        parents = tree.parents.tolist()
        while (node := next((n for n, p in enumerate(parents) if p == path[-1] and first[n]), None)) is not None:
            path.append(node)
        assert len(path) > 1
        length = min(len(path), len(chain.tokens))
        assert chain.tokens[:length].tolist() == tree.tokens[path[:length]].tolist()
        torch.testing.assert_close(chain.log_probs[:length], tree.log_probs[path[:length]])
        lengths.add(len(chain.tokens))
    assert max(lengths) > 2
    assert len(lengths) > 1, "the chain shortens towards the end of the answer"


@pytest.mark.parametrize(
    "make_head", [random_head, autoregressive_head, lambda target: autoregressive_head(target, num_layers=2)]
)
def test_a_window_hides_what_lies_before_it(make_head) -> None:
    """A window as long as the text changes nothing; a short one does, and what was written before it is not read."""
    target = make_target()
    prompt = make_prompts(4)[3]
    full = proposals(target, head_drafter(make_head(target)), prompt, 4)
    wide = proposals(target, head_drafter(make_head(target), window=1000), prompt, 4)
    short = proposals(target, head_drafter(make_head(target), window=3), prompt, 4)
    assert all(torch.equal(a.log_probs, b.log_probs) for a, b in zip(full, wide, strict=True))
    assert not torch.equal(full[0].log_probs, short[0].log_probs)
    # The head sees the last three committed tokens only: what was written for the others does not matter.
    drafter = head_drafter(make_head(target), window=3)
    inner = drafter.propose

    def disturbed(sequences: list[Sequence], budgets: list[int]) -> Forest:
        if isinstance(drafter, ParallelDrafter):
            drafter.write_pending()
        slots = sequences[0].table.slots(0, sequences[0].num_cached - 3)
        for pool in drafter.cache.keys + drafter.cache.values:
            pool[slots] = 1e3
        return inner(sequences, budgets)

    drafter.propose = disturbed  # type: ignore[method-assign]
    cut = proposals(target, drafter, prompt, 4)
    assert all(torch.equal(a.log_probs, b.log_probs) for a, b in zip(short, cut, strict=True))


def test_context_written_late_is_the_same_context() -> None:
    """Rows that wait for a draft while blocks change hands end up as if they had been written at once."""
    target = make_target()
    prompts = make_prompts(5)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

    def drafts(at_once: bool) -> list[Forest]:
        drafter = head_drafter(random_head(target))
        if at_once:
            collect = drafter.extend
            drafter.extend = lambda rows: (collect(rows), drafter.write_pending())  # type: ignore[method-assign, assignment]
        spy = Spy(drafter)
        engine = Engine(target, spy, tree_budget=1, num_blocks=14, kv_block_size=4, enable_prefix_caching=False)
        # Plain rounds first: their rows wait. The small pool hands their blocks to the next request.
        for i, prompt in enumerate(prompts[:4]):
            engine.add(str(i), prompt, params)
            while engine.has_work:
                engine.step()
        engine.budget.tree_budget = 6  # type: ignore[attr-defined]
        run(engine, [prompts[4]], [params])
        return spy.forests

    late, early = drafts(False), drafts(True)
    assert late
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(late, early, strict=True))
    assert all(torch.allclose(a.log_probs, b.log_probs, atol=1e-4) for a, b in zip(late, early, strict=True))


@settings(max_examples=50)
@given(st.lists(st.integers(0, 5), max_size=20))
def test_last_of_each(values: list[int]) -> None:
    expected = sorted({v: i for i, v in enumerate(values)}.values())
    assert last_of_each(torch.tensor(values, dtype=torch.int64)).tolist() == expected


# Small models


def test_the_target_as_its_own_drafter_is_always_right() -> None:
    target = make_target()
    prompts = make_prompts(3)
    params = [SamplingParams(temperature=0, max_tokens=21, ignore_eos=True)] * 3
    # Room for every sibling, so that no deeper node of the path gives way to one.
    engine = Engine(target, ModelDrafter(make_target(), depth=3), tree_budget=1 + 3 * VOCAB_SIZE, num_blocks=200)
    sequences = finish(engine, prompts, params)
    # The first token comes with the prompt, then rounds of three drafted tokens and the bonus.
    assert [s.metrics.rounds for s in sequences] == [5, 5, 5]


def test_a_model_of_a_shorter_context_stops_drafting() -> None:
    target = make_target()
    prompt = make_prompts(4)[3]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    short = small_model(max_position_embeddings=50)
    truth = run(Engine(target, **POOL), [prompt], [params])
    assert run(Engine(target, ModelDrafter(short), tree_budget=8, **POOL), [prompt], [params]) == truth


def test_padded_vocabularies_do_not_matter() -> None:
    target = make_target()
    prompts, params = make_prompts(2), make_params(2, 0.0)
    truth = references("llama", prompts, params)
    wide = small_model(vocab_size=VOCAB_SIZE + 64)
    assert (
        run(Engine(target, ModelDrafter(wide), tree_budget=200, **POOL, max_num_batched_tokens=256), prompts, params)
        == truth
    )


def test_other_vocabularies_are_refused() -> None:
    with pytest.raises(JetSpecError, match="vocabulary"):
        Engine(make_target(), ModelDrafter(small_model(vocab_size=VOCAB_SIZE - 1)), **POOL)
    target, other = tiny_target(text=True), tiny_target(text=True, seed=1)
    vocabulary = other.tokenizer.get_vocab()
    other.tokenizer.get_vocab = lambda: {**vocabulary, "a": 5}
    with pytest.raises(JetSpecError, match="vocabular"):
        Engine(target, ModelDrafter(other), **POOL)


@pytest.mark.parametrize(
    "make", [lambda: ModelDrafter(small_model(), depth=0), lambda: ParallelDrafter(None, window=0)]
)
def test_bad_depth_and_window_are_refused(make) -> None:
    with pytest.raises(JetSpecError, match=r"depth|window"):
        make()


def test_a_conditioned_head_drafts_in_half_precision() -> None:
    target = make_target()
    half = Target.from_model(make_model("llama", "sdpa").to(torch.bfloat16), name="half")
    drafter = head_drafter(conditioned_head(target, num_aux_layers=None, target_layer_ids=(0, 1)).to(torch.bfloat16))
    forests = proposals(half, drafter, [1, 2, 3, 4], 12)
    assert any(len(forest.tokens) > 1 for forest in forests)


# Loading


def test_names_of_drafters(tmp_path) -> None:
    target = make_target()
    from jetspec.head import save_head

    save_head(random_head(target), tmp_path / "head")
    tree = load_drafter(tmp_path / "head", target)
    chain = load_drafter(tmp_path / "head", target, method="chain", head_window=64)
    assert isinstance(tree, HeadDrafter)
    assert (tree.chain, tree.window) == (False, None)
    assert isinstance(chain, HeadDrafter)
    assert (chain.chain, chain.window) == (True, 64)
    small_model().model.save_pretrained(tmp_path / "model")
    assert isinstance(load_drafter(None, target, method="ngram"), NgramDrafter)
    assert load_drafter(None, target) is None


@pytest.mark.parametrize(
    ("draft", "options", "message"),
    [
        ("x", {"method": "magic"}, "draft_method"),
        ("x", {"method": "ngram"}, "draft="),
        (None, {"method": "ngram", "head_window": 5}, "head_window"),
        ("x", {"method": "model", "head_window": 5}, "head_window"),
        (None, {"method": "model"}, "draft"),
        (None, {"method": "chain"}, "draft"),
    ],
)
def test_bad_names_are_refused(draft: str | None, options: dict, message: str) -> None:
    with pytest.raises(JetSpecError, match=message):
        load_drafter(draft, make_target(), **options)


# Drafters that break the rules


class Broken(Drafter):
    """Proposes a root and one child, spoiled in one way."""

    def __init__(self, spoil) -> None:
        self.spoil = spoil

    def propose(self, sequences, _) -> Forest:
        parts = {
            "tokens": torch.tensor([sequences[0].anchor, 3]),
            "parents": torch.tensor([-1, 0]),
            "depths": torch.tensor([0, 1]),
            "log_probs": torch.tensor([0.0, -1.0]),
            "offsets": [0, 2],
        }
        return Forest(**{**parts, **self.spoil})


def drain(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ({"tokens": torch.tensor([9, 3])}, "root"),
        ({"tokens": torch.tensor([1, 9999])}, "outside"),
        ({"parents": torch.tensor([-1, 1])}, "parent"),
        ({"parents": torch.tensor([-1, -1])}, "parent"),
        ({"depths": torch.tensor([0, 5])}, "depths"),
        ({"depths": torch.tensor([1, 2])}, "depths"),
        ({"offsets": [0, 1, 2]}, "trees"),
        ({"offsets": [0, 1]}, "trees"),
        ({"log_probs": torch.tensor([0.0, float("nan")])}, "log prob"),
        ({"log_probs": torch.tensor([0.0, 0.5])}, "log prob"),
        ({"log_probs": torch.tensor([0.0, -float("inf")])}, "log prob"),
    ],
)
def test_trees_that_break_the_rules_are_refused(spoil: dict, message: str) -> None:
    """Rows at wrong places would become final and be shared with other requests."""
    target = make_target()
    engine = Engine(target, Broken(spoil), tree_budget=4, **POOL)
    engine.add("a", [5, 6, 1], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logit_bias={1: 100.0}))
    with pytest.raises(JetSpecError, match=rf"Broken.*{message}"):
        drain(engine)
    engine.cancel("a")
    assert engine.blocks.num_free == engine.blocks.num_blocks


def test_trees_above_their_budget_are_refused() -> None:
    forest = Forest(torch.tensor([1, 3]), torch.tensor([-1, 0]), torch.tensor([0, 1]), torch.zeros(2), [0, 2])
    assert "budget" in str(forest.fault([1], [1], [5], 10))
    assert "max_depth" in str(forest.fault([1], [2], [0], 10))
    assert forest.fault([1], [2], [1], 10) is None
