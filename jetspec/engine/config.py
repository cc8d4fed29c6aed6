"""The settings of an engine."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from jetspec.config import Config, option
from jetspec.engine.budget import Budget
from jetspec.errors import JetSpecError, is_positive_integer


class EngineConfig(Config):
    """How an engine schedules, drafts and computes. Names follow vLLM's where it has one.

    Raises:
        JetSpecError: a field is unknown or out of range.
    """

    tree_budget: int | Literal["auto"] | Budget = option(
        "auto",
        help="Rows of a sequence's verify forward, root included. With auto the engine times some forwards first, then "
        "chooses the rows of all sequences together in every round, so that the expected tokens per second are "
        "highest, down to plain decoding. A Budget of your own decides otherwise.",
    )
    num_blocks: int | None = option(None, help="K/V blocks in the pool; by default what memory allows.", ge=1)
    kv_block_size: int = option(16, help="Tokens that a K/V block holds.", ge=1)
    max_num_batched_tokens: int = option(1024, help="Rows of one target forward, over all sequences.", ge=1)
    max_num_seqs: int = option(64, help="Sequences that run at the same time.", ge=1)
    enable_prefix_caching: bool = option(
        True,
        help="Start requests behind a prefix that other requests left in the cache. Rows of such a prefix do not run, "
        "so an observer does not see them.",
    )
    num_state_snapshots: int = option(
        16,
        help="States that are kept for prefix caching where the target has recurrent layers. A request starts behind "
        "the longest known prefix with such a state.",
        ge=0,
    )
    batch_invariant: bool = option(
        False,
        help="Compute every row with bits that depend on its token and context alone (Target.as_batch_invariant). The "
        "text then equals that of plain decoding in this mode, in every number type, whatever the batch and the draft.",
    )
    compile: bool = option(False, help="Compile the target's layers (Target.as_compiled), which pays on accelerators.")
    seed: int = option(0, help="Where the noise of requests without a seed comes from.")
    target_layer_ids: tuple[int, ...] | None = option(
        None, help="Layers whose outputs the observer is given; by default those that the drafter reads."
    )
    want_hidden: bool = option(False, help="Give the observer the final hidden states, too.")

    @property
    def num_snapshots(self) -> int:
        """States to make room for beside those of running sequences."""
        return self.num_state_snapshots if self.enable_prefix_caching else 0

    @field_validator("tree_budget", mode="before")
    @classmethod
    def _check_tree_budget(cls, value: Any) -> Any:
        if isinstance(value, Budget) or value == "auto" or is_positive_integer(value):
            return value
        raise JetSpecError(f'tree_budget={value!r:.80}: must be an integer of at least 1, "auto", or a Budget')
