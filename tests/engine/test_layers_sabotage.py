"""Faults in the handling of recurrent states: the comparison with plain decoding must find each of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from jetspec.attention.blocks import BlockTable
from jetspec.engine import Engine
from jetspec.errors import JetSpecError
from jetspec.recurrent import linear, plan
from jetspec.recurrent.states import EMPTY_STATE, RecurrentStates, StateWrite
from jetspec.sampling import SamplingParams
from tests.helpers.drafters import OracleDrafter
from tests.helpers.engine import finish, known_answers, make_prompts, make_target, references
from tests.helpers.tiny import VOCAB_SIZE


def equals_plain_decoding(kind: str) -> bool:
    """Whether drafted requests, crowded so that some are preempted, get what they get alone."""
    prompts = make_prompts(5)
    params = [SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)] * 5
    engine = Engine(
        make_target(kind),
        OracleDrafter(known_answers(kind, prompts, params), VOCAB_SIZE, hit=0.9),
        tree_budget=12,
        num_blocks=18,
        kv_block_size=4,
        max_num_batched_tokens=32,
        num_state_snapshots=0,
    )
    try:
        sequences = finish(engine, prompts, params)
    except (AssertionError, JetSpecError) as error:
        if "left the true path" not in str(error):
            raise
        return False
    assert sum(s.metrics.preemptions for s in sequences) > 0
    return [(s.output_ids, s.finish_reason) for s in sequences] == references(kind, prompts, params)


def drop_the_ancestor_mask(patch: pytest.MonkeyPatch) -> None:
    """A row's state takes in every row of the tree before it."""

    def causal(rows: linear.Rows, visible: Tensor, state: Tensor) -> Any:
        return scan(rows, torch.ones_like(visible).tril(), state)

    scan = linear.scan
    patch.setattr("jetspec.models.recurrent.scan", causal)


def commit_another_node(patch: pytest.MonkeyPatch) -> None:
    """As many rows are committed as were accepted, but the first ones instead of those of the path."""
    commit = RecurrentStates.commit

    def first_rows(self: RecurrentStates, writes: list[StateWrite]) -> None:
        commit(self, [w._replace(rows=list(range(w.rows[0], w.rows[0] + len(w.rows)))) for w in writes])

    patch.setattr(RecurrentStates, "commit", first_rows)


def convolve_over_the_row_before(patch: pytest.MonkeyPatch) -> None:
    """A convolution reads the rows before a row, as in a chain, instead of its ancestors."""
    patch.setattr(plan, "_is_chain", lambda _: True)


def keep_the_state_on_preemption(patch: pytest.MonkeyPatch) -> None:
    """A sequence that starts again at its first token starts with the state that it had."""
    truncate = BlockTable.truncate

    def keeping(self: BlockTable, num_tokens: int) -> None:
        state, self.state = self.state, EMPTY_STATE
        truncate(self, num_tokens)
        self.state = state

    patch.setattr(BlockTable, "truncate", keeping)


FAULTS = [
    ("qwen3_next", drop_the_ancestor_mask),
    ("nemotron_h", drop_the_ancestor_mask),
    ("qwen3_next", commit_another_node),
    ("nemotron_h", commit_another_node),
    ("lfm2", commit_another_node),
    ("qwen3_next", convolve_over_the_row_before),
    ("lfm2", convolve_over_the_row_before),
    ("qwen3_next", keep_the_state_on_preemption),
]


@pytest.mark.parametrize("kind", ["qwen3_next", "nemotron_h", "lfm2"])
def test_the_intact_engine_passes(kind: str) -> None:
    assert equals_plain_decoding(kind)


@pytest.mark.parametrize(("kind", "fault"), FAULTS)
def test_a_fault_is_found(kind: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    assert not equals_plain_decoding(kind)
