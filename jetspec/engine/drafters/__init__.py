"""Drafters: what proposes the trees that the target verifies."""

from jetspec.engine.drafters.autoregressive import AutoregressiveDrafter
from jetspec.engine.drafters.base import CommittedRows, Drafter, HeadDrafter
from jetspec.engine.drafters.draft_model import ModelDrafter
from jetspec.engine.drafters.ngram import NgramDrafter
from jetspec.engine.drafters.parallel import ParallelDrafter
from jetspec.head import DraftHead

__all__ = ["CommittedRows", "Drafter", "HeadDrafter", "ModelDrafter", "NgramDrafter", "head_drafter"]

#: The drafter of each kind of head.
HEAD_DRAFTERS: dict[str, type[HeadDrafter]] = {
    "parallel": ParallelDrafter,
    "autoregressive": AutoregressiveDrafter,
    "eagle3": AutoregressiveDrafter,
}


def head_drafter(head: DraftHead, *, chain: bool = False, window: int | None = None) -> HeadDrafter:
    """The drafter for a head's kind; see `HeadDrafter` for the arguments and errors."""
    return HEAD_DRAFTERS[head.config.kind](head, chain=chain, window=window)
