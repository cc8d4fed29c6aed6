"""Faults that systems like this one have had, each with a test that would find it here."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch

from jetspec.attention import RowBatch, Segment
from jetspec.engine import Committed, Engine, Observer, RoundRecord, Sequence
from jetspec.errors import JetSpecError
from jetspec.head import AutoregressiveHead, DraftHead, ParallelHead
from jetspec.models.target import Target
from jetspec.sampling import SamplingParams
from jetspec.tree import Forest, chain_parents, forest_of, top_candidates
from tests.helpers.drafters import OracleDrafter
from tests.helpers.engine import finish, known_answers, make_model, make_prompts, make_target, random_head
from tests.helpers.tiny import TEXT_VOCAB_SIZE, TINY_MODELS, VOCAB_SIZE, tiny_target
from tests.helpers.tiny_head import tiny_head
from tests.helpers.trees import build_forest

GREEDY = {"temperature": 0, "ignore_eos": True}


def oracle(prompts: list[list[int]], length: int, **settings) -> OracleDrafter:
    """Knows the greedy answers of the tiny llama."""
    params = [SamplingParams(**GREEDY, max_tokens=length)] * len(prompts)
    return OracleDrafter(known_answers("llama", prompts, params), VOCAB_SIZE, **settings)


@pytest.mark.parametrize("kind", TINY_MODELS)
def test_rows_never_committed_are_never_read(kind: str) -> None:
    """Before every round all slots but those of committed tokens are filled with keys that would drown the others."""
    prompts = make_prompts(5)
    params = [SamplingParams(**GREEDY, max_tokens=14, logprobs=0, prompt_logprobs=0)] * 5
    expected = []
    for prompt, p in zip(prompts, params, strict=True):
        engine = Engine(make_target(kind), num_blocks=64)
        expected.append(engine.add("alone", prompt, p))
        engine.run()
    truth = {tuple(s.prompt_ids): s.output_ids for s in expected}
    engine = Engine(
        make_target(kind),
        OracleDrafter(truth, VOCAB_SIZE, hit=0.8),
        tree_budget=14,
        num_blocks=50,
        kv_block_size=4,
        max_num_batched_tokens=50,
        enable_prefix_caching=False,
    )
    sequences = [engine.add(str(i), ids, p) for i, (ids, p) in enumerate(zip(prompts, params, strict=True))]
    while engine.has_work:
        final = [s.table.slots(0, s.num_cached) for s in sequences if not s.finished]
        poisoned = torch.ones(engine.cache.num_slots, dtype=torch.bool)
        poisoned[torch.cat(final)] = False
        for pool in engine.cache.keys + engine.cache.values:
            pool[poisoned] = 1e4
        engine.step()
    assert max(s.metrics.acceptance_length for s in sequences) > 1.5
    for got, want in zip(sequences, expected, strict=True):
        assert got.output_ids == want.output_ids
        for rows, wanted in ((got.logprobs, want.logprobs), (got.prompt_logprobs[1:], want.prompt_logprobs[1:])):
            values = [[entry.logprob for entry in row.values()] for row in rows]
            assert values == [pytest.approx([entry.logprob for entry in row.values()], abs=1e-4) for row in wanted]


@dataclass
class Draft:
    """What a head drafted, and the text it drafted for."""

    token_ids: list[int]
    budget: int
    max_depth: int
    forest: Forest
    index: int
    is_hit: bool


def head_engine(target: Target, head: DraftHead, acting: OracleDrafter, **settings) -> tuple[Engine, list[Draft]]:
    """An engine that asks the head for drafts, and then takes the oracle's, so that some are accepted."""
    engine = Engine(target, head, **settings)
    drafts: list[Draft] = []
    propose = engine.drafter.propose

    def record(sequences: Seq[Sequence], budgets: Seq[int]) -> Forest:
        forest = propose(sequences, budgets)
        for index, (s, budget) in enumerate(zip(sequences, budgets, strict=True)):
            drafts.append(
                Draft(list(s.token_ids), budget, s.max_depth, forest, index, s.metrics.cached_prompt_tokens > 0)
            )
        return acting.propose(sequences, budgets)

    engine.drafter.propose = record
    return engine, drafts


@torch.inference_mode()
def assert_drafts_follow_the_text(target: Target, head: DraftHead, drafts: list[Draft]) -> None:
    """Each draft is what head and target make of the text alone: one chunk, one block, caches of their own."""
    drafted = autoregressive_tree if head.config.kind == "autoregressive" else parallel_tree
    for draft in drafts:
        context = draft.token_ids[:-1]
        t = len(context)
        slots = torch.arange(t)
        batch = RowBatch(torch.tensor(context), torch.arange(t), chain_parents(t), [Segment(0, t, 0, slots)])
        output = target.forward(batch, target.new_cache(1, t), target_layer_ids=head.config.target_layer_ids)
        expected = drafted(target, head, draft, output.aux_hidden_states)
        rows = draft.forest.rows(draft.index)
        assert draft.forest.tokens[rows].tolist() == expected.tokens.tolist(), draft.token_ids
        torch.testing.assert_close(draft.forest.log_probs[rows], expected.log_probs, atol=1e-4, rtol=0)


def parallel_tree(target: Target, head: ParallelHead, draft: Draft, aux_hidden_states: torch.Tensor) -> Forest:
    *context, anchor = draft.token_ids
    t = len(context)
    slots, cache = torch.arange(t), head.new_cache(1, t)
    head.extend(aux_hidden_states, torch.arange(t), slots, cache)
    masks = [head.config.mask_token_id] * (head.config.block_size - 1)
    positions = torch.arange(t, t + head.config.block_size)[None]
    hidden = head.forward_blocks(target.embed(torch.tensor([[anchor, *masks]])), positions, [slots], cache)
    candidates = top_candidates(target.lm_head(hidden[:, 1:]).float(), draft.budget)
    return build_forest(torch.tensor([anchor]), *candidates, [draft.budget], [draft.max_depth])


def autoregressive_tree(
    target: Target, head: AutoregressiveHead, draft: Draft, aux_hidden_states: torch.Tensor
) -> Forest:
    """The same nodes; the training forward over the text scores those on the way to three leaves anew."""
    rows = draft.forest.rows(draft.index)
    tokens, parents = draft.forest.tokens[rows].tolist(), draft.forest.parents[rows].tolist()
    log_probs = draft.forest.log_probs[rows].tolist()
    leaves = sorted(set(range(len(tokens))) - set(parents))
    for leaf in random.Random(len(draft.token_ids)).sample(leaves, min(3, len(leaves))):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        text = torch.tensor(draft.token_ids[:-1] + [tokens[node] for node in path])
        [hidden] = head.forward_text(aux_hidden_states, text, torch.tensor([len(aux_hidden_states)]), target.embed)
        scores = target.lm_head(hidden).float().log_softmax(-1)
        for depth, (parent, node) in enumerate(pairwise(path)):
            log_probs[node] = log_probs[parent] + scores[depth, tokens[node]].item()
    return forest_of([(tokens, parents, log_probs)])


def sharp_head(kind: str = "parallel") -> DraftHead:
    """A head whose drafts depend on context and positions."""
    return tiny_head(
        kind=kind,
        hidden_size=48,
        vocab_size=VOCAB_SIZE,
        mask_token_id=VOCAB_SIZE - 1 if kind == "parallel" else None,
        num_target_layers=2,
        target_layer_ids=(0, 1),
    )


@pytest.mark.parametrize("kind", ["parallel", "autoregressive"])
def test_drafts_follow_the_text_after_partial_acceptance(kind: str) -> None:
    target, head, prompts = make_target(), sharp_head(kind), make_prompts(4)
    accepted: Counter[int] = Counter()

    class Count(Observer):
        def round(self, record: RoundRecord) -> None:
            accepted[len(record.accepted_rows)] += 1

    engine, drafts = head_engine(
        target,
        head,
        oracle(prompts, 16, hit=0.95),
        tree_budget=20,
        num_blocks=64,
        kv_block_size=4,
        max_num_batched_tokens=60,
        observer=Count(),
    )
    for i, prompt in enumerate(prompts):
        engine.add(str(i), prompt, SamplingParams(**GREEDY, max_tokens=16))
    engine.run()
    assert len(accepted) > 3, "hardly anything was accepted"
    assert len(drafts) > 12
    assert_drafts_follow_the_text(target, head, drafts)


@pytest.mark.parametrize("kind", ["parallel", pytest.param("autoregressive", marks=pytest.mark.slow)])
def test_drafts_are_the_same_after_a_hit_and_after_preemption(kind: str) -> None:
    target, head = make_target(), sharp_head(kind)
    shared = make_prompts(4)[3]
    prompts = [shared, [*shared[:20], 7], [*shared[:30], 8, 9], [*shared[:13], 1]]
    settings = {"tree_budget": 10, "kv_block_size": 4, "max_num_batched_tokens": 40}
    drafter = oracle(prompts, 30)
    engine, drafts = head_engine(target, head, drafter, num_blocks=32, **settings)
    params = SamplingParams(**GREEDY, max_tokens=30)
    sequences = [engine.add(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    engine.run()
    sequences.append(engine.add("again", prompts[0], params))
    engine.step()
    # This one leaves the running one where a block ends: the tokens behind the slots they share differ.
    sequences.append(engine.add("leaving", prompts[1], params))
    engine.run()
    assert sum(s.metrics.preemptions for s in sequences) > 0
    assert [s.metrics.cached_prompt_tokens for s in sequences[-2:]] == [28, 20]
    # Scoring every path anew is slow: some of the crowded rounds, and all of those behind a hit.
    hits = [d for d in drafts if d.is_hit]
    assert_drafts_follow_the_text(target, head, drafts[::6] + hits[:12])


def test_observed_hidden_states_are_those_of_the_layers_named() -> None:
    """Of committed rows alone, in order, also where they were accepted out of a tree."""
    aux_hidden_states: list[torch.Tensor] = []
    tokens: list[int] = []

    class Keep(Observer):
        def committed(self, rows: Committed) -> None:
            assert rows.start == len(tokens)
            tokens.extend(rows.token_ids)
            aux_hidden_states.append(rows.aux_hidden_states)

    [prompt] = make_prompts(1)
    target = make_target(num_layers=3)
    params = SamplingParams(**GREEDY, max_tokens=20)
    [truth] = finish(Engine(target, num_blocks=64), [prompt], [params])
    engine = Engine(
        target,
        OracleDrafter({tuple(prompt): truth.output_ids}, VOCAB_SIZE),
        tree_budget=14,
        num_blocks=64,
        target_layer_ids=(1, 0),
        observer=Keep(),
    )
    sequence = engine.add("a", prompt, params)
    engine.run()
    assert sequence.metrics.acceptance_length > 1.5
    # The last token was never fed; where it was drafted its row was still not needed.
    assert tokens == sequence.token_ids[:-1]
    states = make_model("llama", "eager", num_layers=3)(
        torch.tensor([tokens]), output_hidden_states=True, use_cache=False
    ).hidden_states
    torch.testing.assert_close(
        torch.cat(aux_hidden_states), torch.cat([states[2][0], states[1][0]], -1), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 8])
def test_exactly_max_tokens_are_emitted_and_counted(max_tokens: int) -> None:
    """The oracle knows more than may be emitted, and always drafts as far as it can."""
    prompts = make_prompts(3)
    rounds: list[RoundRecord] = []

    class Keep(Observer):
        def round(self, record: RoundRecord) -> None:
            rounds.append(record)

    engine = Engine(make_target(), oracle(prompts, 20, hit=1.0), tree_budget=30, num_blocks=64, observer=Keep())
    sequences = [
        engine.add(str(i), prompt, SamplingParams(**GREEDY, max_tokens=max_tokens)) for i, prompt in enumerate(prompts)
    ]
    emitted: Counter[str] = Counter()
    while engine.has_work:
        for output in engine.step():
            emitted[output.sequence.request_id] += len(output.new_token_ids)
    for s in sequences:
        own = [r for r in rounds if r.request_id == s.request_id]
        assert s.num_output == emitted[s.request_id] == s.metrics.completion_tokens == max_tokens
        assert s.finish_reason == "length"
        assert s.metrics.rounds == len(own)
        # The first token came with the prompt; a round emits its accepted drafts and one token more.
        assert s.metrics.decoded_tokens == sum(len(r.accepted_rows) for r in own) == max_tokens - 1
        assert [t for r in own for t in r.new_tokens] == s.output_ids[1:]
        assert s.metrics.tree_rows == sum(len(r.tokens) for r in own)


def test_drafts_end_where_the_answer_must() -> None:
    """No row lies past the last position, and none that could not be emitted is scored."""
    prompts = [[1 + i % 100 for i in range(length)] for length in (250, 243, 255, 100)]
    room_left: list[int] = []

    class Check(Observer):
        def round(self, record: RoundRecord) -> None:
            depth = [0] * len(record.parents)
            for row, parent in enumerate(record.parents[1:], start=1):
                depth[row] = depth[parent] + 1
            s = sequences[int(record.request_id)]
            known = s.num_output - len(record.new_tokens)
            room_left.append(s.max_new_tokens - known - max(depth))

    engine = Engine(make_target(), oracle(prompts, 12), tree_budget=14, num_blocks=300, observer=Check())
    sequences = [engine.add(str(i), p, SamplingParams(**GREEDY, max_tokens=12)) for i, p in enumerate(prompts)]
    engine.run()
    assert [s.num_output for s in sequences] == [6, 12, 1, 12]
    # The deepest row needs room for the token that it chooses, and drafts go as far as there is any.
    assert min(room_left) == 1


def test_unseeded_requests_take_no_noise_from_seeded_ones() -> None:
    target, prompts = make_target(), make_prompts(4)

    def answers(seeds: list[int | None]) -> list[list[int]]:
        engine = Engine(target, random_head(target), num_blocks=64, tree_budget=6)
        sequences = [
            engine.add(str(i), prompts[i], SamplingParams(seed=seed, max_tokens=12, ignore_eos=True))
            for i, seed in enumerate(seeds)
        ]
        engine.run()
        return [s.output_ids for s in sequences]

    first, second = answers([None, 5, None, 6]), answers([None, 7, None, 6])
    assert [first[i] for i in (0, 2, 3)] == [second[i] for i in (0, 2, 3)]
    assert first[1] != second[1]


def test_a_hundred_rounds_of_random_lives_leave_the_blocks_free() -> None:
    target, rng = make_target(), random.Random(0)
    engine = Engine(
        target, sharp_head(), tree_budget=6, num_blocks=24, kv_block_size=4, max_num_batched_tokens=40, max_num_seqs=6
    )
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(20)]
    lives: Counter[str] = Counter()
    sequences: list[Sequence] = []

    def fail(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] % 7 == 0:
            raise RuntimeError("boom")
        return scores

    for _ in range(100):
        while sum(not s.finished for s in sequences) < 6:
            params = SamplingParams(
                seed=len(sequences),
                max_tokens=rng.randrange(1, 60),
                logits_processors=[fail] if rng.random() < 0.3 else None,
            )
            prompt = [*shared[: rng.randrange(1, 20)], rng.randrange(VOCAB_SIZE)]
            sequences.append(engine.add(str(len(sequences)), prompt, params))
        engine.step()
        if rng.random() < 0.2:
            engine.cancel(rng.choice([s for s in sequences if not s.finished]).request_id)
        held = {block for s in sequences for block in s.table.blocks}
        assert engine.blocks.num_free == 24 - len(held)
    for s in sequences:
        engine.cancel(s.request_id)
        lives[str(s.finish_reason)] += 1
        lives["preempted"] += s.metrics.preemptions
        lives["hit"] += s.metrics.cached_prompt_tokens
    assert min(lives[name] for name in ("stop", "length", "abort", "error", "preempted", "hit")) > 0, lives
    assert not engine.has_work
    assert engine.blocks.num_free == 24


def test_an_error_of_the_engine_leaks_nothing() -> None:
    """An error that is no request's own reaches the caller, who cancels; the engine is as good as new."""
    prompts = make_prompts(3)
    params = SamplingParams(**GREEDY, max_tokens=12)
    drafter = oracle(prompts, 12)
    engine = Engine(make_target(), drafter, tree_budget=8, num_blocks=40, kv_block_size=4)
    propose = drafter.propose

    def fail(*_: object) -> Forest:
        raise RuntimeError("out of memory")

    for i, prompt in enumerate(prompts):
        engine.add(str(i), prompt, params)
    engine.step()
    engine.step()
    drafter.propose = fail
    with pytest.raises(JetSpecError, match=r"OracleDrafter failed: .*out of memory"):
        engine.step()
    for i in range(3):
        engine.cancel(str(i))
    assert engine.blocks.num_free == 40
    drafter.propose = propose
    sequence = engine.add("again", prompts[1], params)
    engine.run()
    assert sequence.output_ids == drafter.truth[tuple(prompts[1])]
    assert engine.blocks.num_free == 40


def test_streams_of_accepted_paths_cut_no_character() -> None:
    """A processor dictates a text whose characters have one to four bytes, a token each; the oracle drafts it."""
    target = tiny_target(text=True)
    text = "né 🙂 ü→é 日本語 ok 🙂🙂 done"
    answer = target.tokenizer.encode(text)
    prompt = target.tokenizer.encode("say")

    def dictate(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        wanted = answer[ids.shape[1] - len(prompt)]
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([wanted]), 0.0)

    drafter = OracleDrafter({tuple(prompt): answer}, TEXT_VOCAB_SIZE, hit=0.85)
    engine = Engine(target, drafter, tree_budget=12, num_blocks=64)
    params = SamplingParams(temperature=0, max_tokens=len(answer), logits_processors=[dictate])
    sequence = engine.add("a", prompt, params)
    pieces: list[str] = []
    sizes: set[int] = set()
    while engine.has_work:
        for output in engine.step():
            pieces.append(output.new_text)
            sizes.add(len(output.new_token_ids))
    assert len(sizes) > 2
    assert "".join(pieces) == sequence.text == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_nothing_asks_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise AssertionError("a GPU was asked for")

    model = make_model("llama", "sdpa")
    for name, value in list(vars(torch.cuda).items()):
        if callable(value) and not name.startswith("_") and not isinstance(value, type):
            monkeypatch.setattr(torch.cuda, name, missing)
    monkeypatch.setattr(torch.cuda, "_lazy_init", missing)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    engine = Engine(Target.from_model(model), sharp_head())
    sequence = engine.add("a", [1, 2, 3], SamplingParams(seed=1, max_tokens=5, ignore_eos=True))
    engine.run()
    assert sequence.num_output == 5
