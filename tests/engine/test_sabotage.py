"""The comparison with plain decoding is worth what it finds: each fault that is put into the engine must show in it.

The faults are those that systems like this one have had.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import jetspec.engine.accept as accept_module
import jetspec.engine.requests as requests_module
from jetspec.attention import KVCache
from jetspec.engine import Engine
from jetspec.engine.batch import ScheduledSequence
from jetspec.engine.sequence import Sequence
from jetspec.errors import JetSpecError
from jetspec.sampling import SamplingParams
from jetspec.tree import Forest
from tests.helpers.drafters import OracleDrafter
from tests.helpers.engine import known_answers, make_params, make_prompts, make_target, references, run
from tests.helpers.tiny import VOCAB_SIZE


def equals_plain_decoding() -> bool:
    """Whether drafted requests, greedy and sampled, crowded and behind cached prefixes, get what they get alone."""
    prompts = make_prompts(5)
    params = [*make_params(3, 0.0), *make_params(5, 1.3)[3:]]
    truth = references("llama", prompts, params)
    # The oracle also knows how each text would go on behind its end.
    longer = [SamplingParams(temperature=p.temperature, seed=p.seed, max_tokens=20, ignore_eos=True) for p in params]
    engine = Engine(
        make_target(),
        OracleDrafter(known_answers("llama", prompts, longer), VOCAB_SIZE, hit=0.95),
        tree_budget=12,
        num_blocks=24,
        kv_block_size=4,
        max_num_batched_tokens=32,
    )
    try:
        return all(run(engine, prompts, params) == truth for _ in range(2))
    except JetSpecError as error:
        # The oracle is asked about a text that is not the true one, and says so.
        if "left the true path" not in str(error):
            raise
        return False


def shift_positions(patch: pytest.MonkeyPatch) -> None:
    """Trees start one place off once a draft was accepted in part."""
    set_tree = ScheduledSequence.set_tree

    def shifted(self: ScheduledSequence, forest: Forest, index: int) -> None:
        set_tree(self, forest, index)
        metrics = self.sequence.metrics
        self.positions = [p + (metrics.decoded_tokens > metrics.rounds) for p in self.positions]

    patch.setattr(ScheduledSequence, "set_tree", shifted)


def drop_the_ancestor_mask(patch: pytest.MonkeyPatch) -> None:
    """Rows of a tree see every row before them."""

    def causal(parents: Tensor) -> Tensor:
        return torch.ones(len(parents), len(parents)).tril().bool()

    patch.setattr("jetspec.attention.rows.ancestor_mask", causal)


def leave_keys_where_they_are(patch: pytest.MonkeyPatch) -> None:
    """The K/V of accepted rows are not moved behind the committed ones."""
    patch.setattr(KVCache, "move", lambda *_: None)


def allow_one_token_more(patch: pytest.MonkeyPatch) -> None:
    check = requests_module.check_request
    patch.setattr(requests_module, "check_request", lambda *args: check(*args) + 1)


def allow_one_token_less(patch: pytest.MonkeyPatch) -> None:
    check = requests_module.check_request
    patch.setattr(requests_module, "check_request", lambda *args: max(1, check(*args) - 1))


def run_past_stops(patch: pytest.MonkeyPatch) -> None:
    """Stop tokens and eos are only seen where a round ends."""
    append = Sequence.append

    def deaf(self: Sequence, token: int) -> bool:
        stops, self._stop_ids = self._stop_ids, frozenset()
        try:
            return append(self, token)
        finally:
            self._stop_ids = stops

    patch.setattr(Sequence, "append", deaf)


def accept_drafts_unseen(patch: pytest.MonkeyPatch) -> None:
    next_token = accept_module.next_token

    def trusting(scheduled: ScheduledSequence, row: int, *logits: Any) -> int:
        parents = scheduled.parents
        return scheduled.token_ids[parents.index(row)] if row in parents else next_token(scheduled, row, *logits)

    patch.setattr(accept_module, "next_token", trusting)


def draw_noise_by_row(patch: pytest.MonkeyPatch) -> None:
    """The noise of a token depends on the round it was sampled in, not on its place in the text."""
    sample = accept_module.sample
    calls = iter(range(1_000_000))
    patch.setattr(accept_module, "sample", lambda logits, params, seed, _: sample(logits, params, seed, next(calls)))


def keep_the_first_rows(patch: pytest.MonkeyPatch) -> None:
    """As many rows are kept as were accepted, but the first ones instead of those of the path."""
    kept = ScheduledSequence.kept_rows.fget
    patch.setattr(ScheduledSequence, "kept_rows", property(lambda self: list(range(len(kept(self))))))


FAULTS = [
    shift_positions,
    drop_the_ancestor_mask,
    leave_keys_where_they_are,
    allow_one_token_more,
    allow_one_token_less,
    run_past_stops,
    accept_drafts_unseen,
    draw_noise_by_row,
    keep_the_first_rows,
]


def test_the_intact_engine_passes() -> None:
    assert equals_plain_decoding()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fault(monkeypatch)
    assert not equals_plain_decoding()
