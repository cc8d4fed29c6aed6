"""From the name a user gives to a drafter."""

from __future__ import annotations

from pathlib import Path

from jetspec.engine.drafters.autoregressive import AutoregressiveDrafter
from jetspec.engine.drafters.base import Drafter, HeadDrafter
from jetspec.engine.drafters.draft_model import ModelDrafter
from jetspec.engine.drafters.ngram import NgramDrafter
from jetspec.engine.drafters.parallel import ParallelDrafter
from jetspec.errors import JetSpecError, is_positive_integer
from jetspec.head import DraftHead, load_head
from jetspec.models.loading import load_target
from jetspec.models.target import Target

#: "tree" and "chain" take a draft head, "model" a small language model, "ngram" nothing.
DRAFT_METHODS = ("tree", "chain", "model", "ngram")

#: The drafter of each kind of head.
HEAD_DRAFTERS: dict[str, type[HeadDrafter]] = {
    "parallel": ParallelDrafter,
    "autoregressive": AutoregressiveDrafter,
}


def head_drafter(head: DraftHead, *, chain: bool = False, window: int | None = None) -> HeadDrafter:
    """The drafter for a head's kind; see `HeadDrafter` for the arguments and errors."""
    return HEAD_DRAFTERS[head.config.kind](head, chain=chain, window=window)


def load_drafter(
    draft: str | Path | DraftHead | Target | Drafter | None,
    target: Target,
    *,
    method: str = "tree",
    head_window: int | None = None,
) -> Drafter | None:
    """The drafter for `target` that `method` makes of `draft`; None (plain decoding) for a tree of no head.

    Args:
        draft: a head, or with "model" a language model: hub id, directory, alias, or loaded. A drafter is given back as
            it is.
        target: what the drafter will draft for; decides device and number type.
        method: one of `DRAFT_METHODS`.
        head_window: committed tokens a head looks back on; None: all.

    Raises:
        JetSpecError: the method is unknown or not one for this draft, or the head or model cannot be loaded.
    """
    if method not in DRAFT_METHODS:
        raise JetSpecError(f"draft_method={method!r}: must be one of {', '.join(DRAFT_METHODS)}")
    if head_window is not None and not is_positive_integer(head_window):
        raise JetSpecError(f"head_window={head_window!r}: must be an integer of at least 1, or None for no bound")
    if not isinstance(draft, str | Path | DraftHead | Target | Drafter | None):
        raise JetSpecError(f"draft={draft!r:.80}: must be a name, a DraftHead, a Target, a Drafter, or None for none")
    if isinstance(draft, Drafter):
        if method != "tree" or head_window is not None:
            raise JetSpecError(
                f"draft_method={method!r}, head_window={head_window}: a {type(draft).__name__} is made already; set "
                "them where you make it"
            )
        return draft
    if head_window is not None and method not in ("tree", "chain"):
        raise JetSpecError(f"head_window={head_window}: bounds a draft head; draft_method={method!r} has none")
    if method == "ngram":
        if draft is not None:
            raise JetSpecError(f"draft={str(draft)!r:.80}: draft_method='ngram' takes no model; leave draft out")
        return NgramDrafter()
    if draft is None and method == "tree" and head_window is None:
        return None
    if draft is None:
        raise JetSpecError(
            f"draft=None: draft_method={method!r} needs a draft {'model' if method == 'model' else 'head'}"
        )
    if method == "model":
        if isinstance(draft, DraftHead):
            raise JetSpecError('draft: draft_method="model" takes a language model, not a DraftHead; use "tree"')
        if not isinstance(draft, Target):
            draft = load_target(str(draft), device=str(target.device), dtype=target.dtype)
        return ModelDrafter(draft)
    if isinstance(draft, Target):
        raise JetSpecError(f'draft: draft_method={method!r} takes a draft head, not a Target; use "model"')
    if not isinstance(draft, DraftHead):
        draft = load_head(draft, device=target.device, dtype=target.dtype)
    return head_drafter(draft, chain=method == "chain", window=head_window)
