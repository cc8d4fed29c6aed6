"""From the name a user gives to a drafter."""

from __future__ import annotations

from pathlib import Path

from jetspec.engine.drafters.base import Drafter
from jetspec.engine.drafters.head import HeadDrafter
from jetspec.engine.drafters.model import ModelDrafter
from jetspec.engine.drafters.ngram import NgramDrafter
from jetspec.errors import JetSpecError
from jetspec.head import load_head
from jetspec.target import Target, load_target

#: "tree" and "chain" take a draft head, "model" a small language model, "ngram" nothing.
DRAFT_METHODS = ("tree", "chain", "model", "ngram")


def load_drafter(
    draft: str | Path | None, target: Target, *, method: str = "tree", head_window: int | None = None
) -> Drafter | None:
    """The drafter for `target` that `method` makes of a name; None (plain decoding) for a tree of no head.

    Args:
        draft: a head's, or with "model" a language model's, hub id, directory or alias.
        target: what the drafter will draft for; decides device and number type.
        method: one of `DRAFT_METHODS`.
        head_window: committed tokens a head looks back on; None: all.

    Raises:
        JetSpecError: the method is unknown, or the head or model cannot be loaded.
    """
    if method not in DRAFT_METHODS:
        raise JetSpecError(f"draft_method={method!r}: must be one of {', '.join(DRAFT_METHODS)}")
    if head_window is not None and method not in ("tree", "chain"):
        raise JetSpecError(f"head_window={head_window}: bounds a draft head; draft_method={method!r} has none")
    if method == "ngram":
        if draft is not None:
            raise JetSpecError(f"draft={str(draft)!r}: draft_method='ngram' takes no model; leave draft out")
        return NgramDrafter()
    if draft is None and method == "tree" and head_window is None:
        return None
    if draft is None:
        raise JetSpecError(
            f"draft=None: draft_method={method!r} needs a draft {'model' if method == 'model' else 'head'}"
        )
    if method == "model":
        return ModelDrafter(load_target(str(draft), device=str(target.device), dtype=target.dtype))
    head = load_head(draft, device=target.device, dtype=target.dtype)
    return HeadDrafter(head, chain=method == "chain", window=head_window)
