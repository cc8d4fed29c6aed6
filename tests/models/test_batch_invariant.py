"""Exact targets: a row's bits, in any number type, are the same alone, in chunks, in trees and in batches."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from jetspec.attention import batch_invariant
from jetspec.attention.batch_invariant import next_tile, row_independent
from jetspec.engine import Engine
from jetspec.engine import Sequence as EngineSequence
from jetspec.errors import JetSpecError
from jetspec.head import head_for_target
from jetspec.llm import LLM
from jetspec.models.target import Target
from jetspec.sampling import SamplingParams
from tests.helpers.drafters import OracleDrafter
from tests.helpers.forest import Part, Pool, plain_forward, random_ids, random_parents
from tests.helpers.tiny import TINY_MODELS, VOCAB_SIZE, tiny_gemma2, tiny_gpt_oss, tiny_llama, tiny_target

MODELS = {**TINY_MODELS, "gemma2": tiny_gemma2, "gpt_oss": tiny_gpt_oss}
DTYPES = [torch.bfloat16, torch.float32]
LAYERS = (1, 4)
LENGTHS = (70, 20, 75)


def exact_target(kind: str, dtype: torch.dtype) -> Target:
    target = Target.from_model(MODELS[kind]().to(dtype), name=kind)
    target.eos_token_ids = frozenset({5})
    return target.as_batch_invariant()


class Scores:
    """Everything that was computed for the tokens of some sequences, wherever their rows ran."""

    def __init__(self, target: Target, sequences: list[Tensor]) -> None:
        self.pool = Pool(target, len(sequences), blocks_each=32, target_layer_ids=LAYERS)
        self.sequences = sequences
        self.rows: list[list[tuple[Tensor, ...]]] = [[] for _ in sequences]

    def run(self, parts: list[Part], paths: list[list[int]]) -> None:
        """Score the parts in one forward and commit the rows of one path of each."""
        self.pool.poison()
        output = self.pool.forward(parts, final_hidden=True)
        start = 0
        for part, path in zip(parts, paths, strict=True):
            self.rows[part.sequence] += [tuple(x[start + row] for x in output) for row in path]  # type: ignore[index]
            start += len(part.token_ids)
            self.pool.commit(part, path)

    def chunks(self, sizes: dict[int, int]) -> None:
        """Score the next tokens of some sequences as chains, in one forward."""
        done = {s: len(self.pool.committed[s]) for s in sizes}
        parts = [Part.chain(s, self.sequences[s][done[s] : done[s] + n]) for s, n in sizes.items()]
        self.run(parts, [list(range(len(part.token_ids))) for part in parts])

    def tree(self, sequence: int, rows: int, rng: random.Random) -> tuple[Part, list[int]]:
        """A random tree that holds the sequence's next tokens along one path."""
        parents = random_parents(rows, rng)
        path = [rng.randrange(rows // 2, rows)]
        while parents[path[0]] >= 0:
            path.insert(0, int(parents[path[0]]))
        ids = random_ids(rows, rng.randrange(1000))
        done = len(self.pool.committed[sequence])
        path = path[: len(self.sequences[sequence]) - done]
        ids[path] = self.sequences[sequence][done : done + len(path)]
        return Part(sequence, ids, parents), path

    def assert_same(self, expected: Scores, sequences: Sequence[int] = range(len(LENGTHS))) -> None:
        for got, wanted in ((self.rows[s], expected.rows[s]) for s in sequences):
            assert len(got) == len(wanted)
            for position, (ours, theirs) in enumerate(zip(got, wanted)):
                for name, left, right in zip(("logits", "aux_hidden_states", "hidden"), ours, theirs, strict=True):
                    assert torch.equal(left, right), f"{name} of the token at {position}"


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("llama", torch.bfloat16),
        ("gemma2", torch.bfloat16),
        ("llama", torch.float32),
        *(pytest.param(k, torch.bfloat16, marks=pytest.mark.slow) for k in MODELS if k not in ("llama", "gemma2")),
        *(pytest.param(k, torch.float32, marks=pytest.mark.slow) for k in MODELS if k != "llama"),
    ],
    ids=str,
)
def test_bits_do_not_depend_on_the_forward(kind: str, dtype: torch.dtype) -> None:
    target = exact_target(kind, dtype)
    sequences = [random_ids(n, seed) for seed, n in enumerate(LENGTHS)]
    left = dict(enumerate(LENGTHS))
    expected = Scores(target, sequences)
    for sequence, n in left.items():
        expected.chunks({sequence: n})
    if dtype == torch.float32:
        for rows, (logits, aux_hidden_states) in zip(expected.rows, plain_forward(MODELS[kind](), sequences, LAYERS)):
            torch.testing.assert_close(torch.stack([row[0] for row in rows]), logits, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(torch.stack([row[1] for row in rows]), aux_hidden_states, rtol=1e-4, atol=1e-4)

    alone = Scores(target, sequences)
    for _ in range(LENGTHS[1]):
        alone.chunks({1: 1})
    alone.assert_same(expected, [1])

    rng = random.Random(0)
    chunked, trees = Scores(target, sequences), Scores(target, sequences)
    while any(n > len(c) for n, c in zip(LENGTHS, chunked.pool.committed)):
        unfinished = [s for s, n in left.items() if n > len(chunked.pool.committed[s])]
        chosen = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        chunked.chunks({s: rng.choice([1, 2, 7, 16, 19]) for s in chosen})
    chunked.assert_same(expected)

    trees.chunks({0: 50, 1: 3, 2: 61})
    while any(n > len(c) for n, c in zip(LENGTHS, trees.pool.committed)):
        unfinished = [s for s, n in left.items() if n > len(trees.pool.committed[s])]
        chosen = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        parts, paths = zip(*(trees.tree(s, rng.choice([1, 5, 16, 23]), rng) for s in chosen))
        trees.run(list(parts), list(paths))
    trees.assert_same(expected)


def test_chosen_logits_rows() -> None:
    target = exact_target("llama", torch.bfloat16)
    part = Part.chain(0, random_ids(40, 0))
    every = Pool(target).forward([part]).logits
    for rows in ([5, 2, 39, 5], [17], []):
        chosen = torch.tensor(rows, dtype=torch.int64)
        assert torch.equal(Pool(target).forward([part], logits_rows=chosen).logits, every[chosen])


def test_gathering_fewer_keys_at_once_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    target = exact_target("qwen3", torch.bfloat16)
    ids, parents = random_ids(20, 0), random_parents(20, random.Random(0))
    results = []
    for limit in (batch_invariant.MAX_KEYS, 128, 1):
        monkeypatch.setattr(batch_invariant, "MAX_KEYS", limit)
        pool = Pool(target)
        pool.prefill(0, random_ids(70, 1))
        results.append(pool.forward([Part(0, ids, parents)]).logits)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_keys_in_order_of_position() -> None:
    pool = Pool(exact_target("llama", torch.float32), blocks_each=24)
    pool.prefill(0, random_ids(6, 0))
    batch = pool.batch([Part(0, random_ids(4, 1), torch.tensor([-1, 0, 0, 1]))])
    slots, table = pool.tables[0], batch_invariant.RowTile(batch, 1, 4)
    found, counts = table.key_slots(None)
    assert counts.tolist() == [8, 8, 9]
    for row, ancestors in enumerate(([6, 7], [6, 8], [6, 7, 9])):
        assert found[row, : counts[row]].tolist() == slots[[*range(6), *ancestors]].tolist()
    (group,) = batch_invariant.key_groups(found, counts, share_keys=True)
    assert group.slots.shape == group.bias[:, 0, 0].shape == (3, batch_invariant.KEY_MULTIPLE)
    assert (group.slots[0, 8:] == slots[0]).all()
    assert group.bias.isinf().sum((1, 2, 3)).tolist() == [56, 56, 55]
    windowed, counts = table.key_slots(3)
    assert counts.tolist() == [3, 3, 3]
    assert windowed[2].tolist() == slots[[6, 7, 9]].tolist()


@pytest.mark.parametrize("width", [4861, 40000])
@pytest.mark.parametrize("name", ["silu", "gelu", "sigmoid", "tanh"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_elementwise_functions_have_one_code_for_all_places(dtype: torch.dtype, name: str, width: int) -> None:
    function: Any = {
        "silu": functional.silu,
        "gelu": lambda x: functional.gelu(x, approximate="tanh"),
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
    }[name]
    row = torch.randn(width, generator=torch.Generator().manual_seed(0)).to(dtype)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with row_independent(tiny_llama()):
            found = function(row.expand(16, width).contiguous())
            strided = function(row.expand(16, width).t().contiguous().t())
    finally:
        torch.set_num_threads(threads)
    assert (found == found[0]).all()
    torch.testing.assert_close(found[0], function(row))
    assert torch.equal(strided, found)


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that share beginnings, cross a padded length of keys and end at different times; greedy and seeded."""
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(n)] for n in (3, 60, 17)]
    prompts += [[*prompts[1][:50], 9, 8, 7], [6]]
    limits = [12, 10, 14, 9, 6]
    params = [
        SamplingParams(temperature=1.2 * (i % 2), seed=i, max_tokens=n, logprobs=2, ignore_eos=i == 2)
        for i, n in enumerate(limits)
    ]
    return prompts, params


def answers(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[EngineSequence]:
    sequences = [engine.add(str(i), ids, p) for i, (ids, p) in enumerate(zip(prompts, params, strict=True))]
    while engine.has_work:
        engine.step()
    return sequences


def contents(sequence: EngineSequence) -> tuple[list[int], str | None, list]:
    return sequence.output_ids, sequence.finish_reason, sequence.logprobs


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("qwen3_moe", torch.bfloat16),
        pytest.param("gemma3", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("llama", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("qwen3", torch.bfloat16, marks=pytest.mark.slow),
        pytest.param("llama", torch.float32, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_answers_equal_plain_decoding_alone(kind: str, dtype: torch.dtype) -> None:
    target = exact_target(kind, dtype)
    prompts, params = requests()
    truth = [
        contents(answers(Engine(target, num_blocks=64, kv_block_size=4), [ids], [p])[0])
        for ids, p in zip(prompts, params, strict=True)
    ]
    oracle = OracleDrafter({tuple(ids): t[0] for ids, t in zip(prompts, truth)}, VOCAB_SIZE, hit=0.9)
    head = head_for_target(target, num_layers=1, block_size=5, num_aux_layers=2, mask_token_id=VOCAB_SIZE - 1, seed=0)
    for draft, budget, num_blocks, max_num_batched_tokens in (
        (None, 1, 64, 64),
        (oracle, 30, 22, 32),
        (head, 9, 22, 7),
    ):
        engine = Engine(
            target,
            draft,
            tree_budget=budget,
            num_blocks=num_blocks,
            kv_block_size=4,
            max_num_batched_tokens=max_num_batched_tokens,
        )
        for _ in range(2):  # the second time behind prefixes that are still in the cache
            sequences = answers(engine, prompts, params)
            assert [contents(s) for s in sequences] == truth
            if num_blocks == 22:
                assert sum(s.metrics.preemptions for s in sequences) > 0


def test_the_check_names_the_layer_that_mixes_rows() -> None:
    model = tiny_llama().to(torch.bfloat16)
    target = Target.from_model(model, name="mixing")
    model.model.layers[2].mlp.register_forward_hook(lambda _, __, output: output + output.mean(1, keepdim=True))
    with pytest.raises(JetSpecError, match=r"mixing.*bfloat16.*decoder layer 2"):
        Engine(target, batch_invariant=True, num_blocks=4)


@pytest.mark.parametrize("size", [4, 64])
def test_a_tile_size_with_other_bits_is_not_used(size: int) -> None:
    model = tiny_llama()

    def shift(_: Any, __: Any, output: Tensor) -> Tensor:
        return output + (output.shape[1] == size)

    model.model.layers[3].mlp.register_forward_hook(shift)
    sizes = Target.from_model(model).as_batch_invariant().tile_sizes
    assert 16 in sizes
    assert size not in sizes


def test_tiles_are_at_least_half_full() -> None:
    def tiles(rows: int, sizes: tuple[int, ...]) -> list[int]:
        found = []
        while rows > 0:
            found.append(next_tile(rows, sizes))
            rows -= found[-1]
        return found

    assert tiles(1, (4, 16, 64)) == [4]
    assert tiles(5, (4, 16, 64)) == [4, 4]
    assert tiles(8, (4, 16, 64)) == [16]
    assert tiles(17, (4, 16, 64)) == [16, 4]
    assert tiles(64 + 40, (4, 16, 64)) == [64, 64]
    assert tiles(37, (16,)) == [16, 16, 16]


def test_the_check_sees_the_logits() -> None:
    model = tiny_llama()
    target = Target.from_model(model)
    model.lm_head.register_forward_hook(lambda _, __, output: output + output.mean())
    with pytest.raises(JetSpecError, match="the logits"):
        target.as_batch_invariant()


def test_other_engines_on_the_same_target_stay_as_they_are() -> None:
    target = tiny_target("qwen3_moe")
    part = Part.chain(0, random_ids(30, 0))
    experts = target.model.config._experts_implementation
    before = Pool(target).forward([part]).logits
    assert 16 in target.as_batch_invariant().tile_sizes
    assert target.tile_sizes == ()
    assert torch.equal(Pool(target).forward([part]).logits, before)
    with pytest.raises(JetSpecError), row_independent(target.model):
        raise JetSpecError("a forward that fails")
    assert target.model.config._experts_implementation == experts


def test_front_door() -> None:
    target = tiny_target(text=True)
    params = SamplingParams(temperature=0, max_tokens=5)
    llm = LLM(target, None, batch_invariant=True, num_blocks=16)
    assert llm.target.tile_sizes
    assert not LLM(target, None, num_blocks=16).target.tile_sizes
    assert len(llm.generate("What", params)[0].outputs[0].token_ids) == 5
