"""The head's forward with its cache, against the slow reference and against transformers' own Qwen3."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config, Qwen3Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from jetspec.errors import JetSpecError
from jetspec.head import DraftHead
from jetspec.head.layers import Rotary
from tests.helpers.reference_head import reference_hidden
from tests.helpers.tiny_head import WINDOWED, random_aux_hidden_states, tiny_config, tiny_head

BLOCK = 5
KINDS = [
    pytest.param({"causal": True}, id="causal"),
    pytest.param({"causal": False}, id="bidirectional"),
    pytest.param(dict(causal=True, **WINDOWED), id="causal-windowed"),
    pytest.param(dict(causal=False, **WINDOWED), id="bidirectional-windowed"),
]


class Simulation:
    """Sequences that commit random numbers of tokens, with context in shuffled blocks of 4 slots."""

    def __init__(self, head: DraftHead, sequences: int, seed: int) -> None:
        self.head = head
        self.generator = torch.Generator().manual_seed(seed)
        self.cache = head.new_cache(num_blocks=16 * sequences, block_size=4)
        blocks = torch.randperm(16 * sequences, generator=self.generator).view(sequences, 16)
        self.tables = [(table[:, None] * 4 + torch.arange(4)).flatten() for table in blocks]
        self.aux_hidden_states = [random_aux_hidden_states(head, 0, self.generator) for _ in range(sequences)]

    def random(self, low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=self.generator))

    def commit(self, counts: list[int]) -> None:
        """Extend the context of all sequences in one call; a sequence may commit nothing."""
        aux_hidden_states, positions, slots = [], [], []
        for s, count in enumerate(counts):
            start = len(self.aux_hidden_states[s])
            aux_hidden_states.append(random_aux_hidden_states(self.head, count, self.generator))
            positions.append(torch.arange(start, start + count))
            slots.append(self.tables[s][start : start + count])
            self.aux_hidden_states[s] = torch.cat((self.aux_hidden_states[s], aux_hidden_states[-1]))
        self.head.extend(torch.cat(aux_hidden_states), torch.cat(positions), torch.cat(slots), self.cache)

    def embeds(self) -> torch.Tensor:
        return torch.randn(len(self.aux_hidden_states), BLOCK, self.head.config.hidden_size, generator=self.generator)

    def draft(self, embeds: torch.Tensor, shift: int = 0) -> torch.Tensor:
        lengths = torch.tensor([len(aux_hidden_states) for aux_hidden_states in self.aux_hidden_states])
        positions = lengths[:, None] + torch.arange(BLOCK) + shift
        slots = [table[:length] for table, length in zip(self.tables, lengths)]
        return self.head.forward_blocks(embeds, positions, slots, self.cache)

    def expected(self, embeds: torch.Tensor) -> torch.Tensor:
        weights = dict(self.head.state_dict())
        rows = zip(self.aux_hidden_states, embeds)
        return torch.stack([reference_hidden(self.head.config, weights, t, e, len(t)) for t, e in rows])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_equals_reference_after_ragged_partial_acceptance(kind, seed):
    simulation = Simulation(tiny_head(seed, **kind), sequences=3, seed=seed)
    simulation.commit([1, 7, 4])
    for _ in range(4):
        embeds = simulation.embeds()
        assert torch.allclose(simulation.draft(embeds), simulation.expected(embeds), atol=1e-4)
        simulation.commit([simulation.random(0, BLOCK + 1) for _ in range(3)])


@pytest.mark.parametrize("kind", KINDS)
def test_equals_reference_without_cache(kind):
    head = tiny_head(4, **kind)
    generator = torch.Generator().manual_seed(4)
    aux_hidden_states, embeds = (
        random_aux_hidden_states(head, 9, generator),
        torch.randn(1, BLOCK, 32, generator=generator),
    )
    with torch.no_grad():
        hidden = head.forward_train(head.context(aux_hidden_states), embeds, torch.tensor([9]))
    assert torch.allclose(
        hidden[0], reference_hidden(head.config, head.state_dict(), aux_hidden_states, embeds[0], 9), atol=1e-4
    )


def test_logits_equal_reference():
    """What is drafted is logits: a large lm_head must not blow the difference up."""
    simulation = Simulation(tiny_head(5), sequences=2, seed=5)
    simulation.commit([3, 8])
    embeds, lm_head = simulation.embeds(), torch.randn(64, 32, generator=simulation.generator)
    assert torch.allclose(simulation.draft(embeds) @ lm_head.T, simulation.expected(embeds) @ lm_head.T, atol=1e-4)


@pytest.mark.parametrize("shift", [-1, 1])
def test_positions_shifted_by_one_give_other_drafts(shift):
    """The comparison with the reference can see a block that starts one place off after a partial acceptance."""
    simulation = Simulation(tiny_head(6), sequences=2, seed=6)
    simulation.commit([4, 6])
    simulation.commit([2, 3])
    embeds = simulation.embeds()
    assert (simulation.draft(embeds, shift) - simulation.expected(embeds)).abs().amax((1, 2)).min() > 1e-2


def test_context_keys_depend_on_positions_given_not_on_order():
    head = tiny_head(7)
    aux_hidden_states = random_aux_hidden_states(head, 6, torch.Generator().manual_seed(7))
    context = head.context(aux_hidden_states)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    plain, shuffled = head.context_kv(context, torch.arange(6)), head.context_kv(context[order], order)
    for (k, v), (other_k, other_v) in zip(plain, shuffled):
        assert torch.allclose(k[order], other_k, atol=1e-5)
        assert torch.allclose(v[order], other_v, atol=1e-5)
        assert not torch.allclose(k, head.context_kv(context, torch.arange(6) + 1)[0][0], atol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_sequence_alone_equals_sequence_in_batch(kind):
    simulation = Simulation(tiny_head(8, **kind), sequences=4, seed=8)
    simulation.commit([2, 11, 0, 5])
    embeds = simulation.embeds()
    together = simulation.draft(embeds)
    for s in range(4):
        length = len(simulation.aux_hidden_states[s])
        positions = length + torch.arange(BLOCK)
        alone = simulation.head.forward_blocks(
            embeds[s : s + 1], positions[None], [simulation.tables[s][:length]], simulation.cache
        )
        assert torch.allclose(alone[0], together[s], atol=1e-5)


def test_drafting_leaves_the_cache_as_it_was():
    simulation = Simulation(tiny_head(9), sequences=2, seed=9)
    simulation.commit([5, 3])
    before = [t.clone() for t in simulation.cache.keys + simulation.cache.values]
    simulation.draft(simulation.embeds())
    assert all(torch.equal(a, b) for a, b in zip(before, simulation.cache.keys + simulation.cache.values))


def test_only_named_slots_are_read():
    """Rejected rows may leave anything in other slots."""
    simulation = Simulation(tiny_head(10), sequences=2, seed=10)
    simulation.commit([5, 3])
    embeds = simulation.embeds()
    before = simulation.draft(embeds)
    used = torch.cat(
        [
            table[: len(aux_hidden_states)]
            for table, aux_hidden_states in zip(simulation.tables, simulation.aux_hidden_states)
        ]
    )
    free = torch.ones(simulation.cache.num_slots, dtype=torch.bool)
    free[used] = False
    for pool in simulation.cache.keys + simulation.cache.values:
        pool[free] = float("nan")
    assert torch.equal(simulation.draft(embeds), before)


@pytest.mark.parametrize("causal", [True, False])
def test_block_tokens_see_back_always_and_ahead_only_when_bidirectional(causal):
    simulation = Simulation(tiny_head(11, causal=causal), sequences=1, seed=11)
    simulation.commit([6])
    embeds = simulation.embeds()
    before = simulation.draft(embeds)[0]
    for j in range(1, BLOCK):
        changed = embeds.clone()
        changed[0, j] += 1
        after = simulation.draft(changed)[0]
        same = [torch.equal(before[i], after[i]) for i in range(BLOCK)]
        assert same == [causal and i < j for i in range(BLOCK)]


def test_causal_block_without_context_is_a_qwen3_model():
    head = tiny_head(12)
    config = Qwen3Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        rms_norm_eps=1e-5,
        vocab_size=64,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
    )
    model = Qwen3Model(config).eval()
    names = {k: v for k, v in head.state_dict().items() if not k.startswith(("fc.", "hidden_norm."))}
    result = model.load_state_dict(names, strict=False)
    assert result.missing_keys == ["embed_tokens.weight"]
    assert not result.unexpected_keys
    embeds = torch.randn(2, BLOCK, 32, generator=torch.Generator().manual_seed(12))
    cache, empty = head.new_cache(1, 4), torch.zeros(0, dtype=torch.int64)
    hidden = head.forward_blocks(embeds, torch.arange(BLOCK).repeat(2, 1), [empty, empty], cache)
    with torch.no_grad():
        assert torch.allclose(hidden, model(inputs_embeds=embeds).last_hidden_state, atol=1e-4)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_rotary_angles_equal_transformers(rope):
    rope = {**rope, "rope_theta": 10000.0}
    positions = torch.tensor([0, 1, 17, 200])
    cos, sin = Rotary(tiny_config(rope_parameters=rope))(positions, torch.float32)
    config = Qwen3Config(hidden_size=32, head_dim=8, max_position_embeddings=256, rope_parameters=dict(rope))
    wanted_cos, wanted_sin = Qwen3RotaryEmbedding(config)(torch.zeros(1), positions[None])
    assert torch.equal(cos[:, 0], wanted_cos[0])
    assert torch.equal(sin[:, 0], wanted_sin[0])


def test_rotary_frequencies_survive_a_cast_to_half():
    head = tiny_head(13).to(torch.bfloat16)
    cos, _ = head.rotary(torch.tensor([201]), torch.float32)
    assert torch.equal(cos, tiny_head(13).rotary(torch.tensor([201]), torch.float32)[0])


def test_half_precision_head_takes_and_gives_the_targets_dtype():
    simulation = Simulation(tiny_head(14).to(torch.bfloat16), sequences=1, seed=14)
    simulation.commit([6])
    embeds = simulation.embeds()
    hidden = simulation.draft(embeds)
    assert hidden.dtype == torch.float32
    assert torch.allclose(hidden, simulation.expected(embeds), atol=0.2)


def test_cache_bytes_per_token_is_what_the_cache_takes():
    head = tiny_head()
    cache = head.new_cache(2, 4)
    assert head.cache_bytes_per_token * 2 * 4 == sum(pool.nbytes for pool in cache.keys + cache.values)


def test_shapes_that_do_not_fit_are_refused():
    head = tiny_head()
    cache, empty = head.new_cache(1, 4), torch.zeros(0, dtype=torch.int64)
    with pytest.raises(JetSpecError, match="context_slots"):
        head.forward_blocks(torch.zeros(2, BLOCK, 32), torch.zeros(2, BLOCK, dtype=torch.int64), [empty], cache)
    with pytest.raises(JetSpecError, match="positions"):
        head.forward_blocks(torch.zeros(1, BLOCK, 32), torch.zeros(1, 2, dtype=torch.int64), [empty], cache)
