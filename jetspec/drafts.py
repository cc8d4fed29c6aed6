"""Makes the drafter that a user names, or the best one that is known for a target."""

from __future__ import annotations

import json
import logging
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from jetspec.engine.drafters import Drafter, ModelDrafter, NgramDrafter, head_drafter
from jetspec.errors import JetSpecError, is_positive_integer
from jetspec.head import DraftHead, load_head, shipped_heads
from jetspec.models.loading import ALIASES, load_target
from jetspec.models.target import Target

logger = logging.getLogger(__name__)

#: The draft that stands for the best one known for the target.
AUTO = "auto"
#: "tree" and "chain" take a draft head, "model" a small language model, "ngram" (prompt lookup) nothing.
DRAFT_METHODS = ("tree", "chain", "model", "ngram")
HEAD_METHODS = ("tree", "chain")


class PublishedHead(NamedTuple):
    """A head on the hub, trained by others for a well-known target."""

    head: str
    causal: bool
    source: str


class KnownHead(NamedTuple):
    """A head that "auto" takes. `causal` is what `load_head` has to be told; None: its configuration says it."""

    name: str
    causal: bool | None
    origin: str


def load_drafter(
    draft: str | Path | DraftHead | Target | Drafter | None,
    target: Target,
    *,
    method: str = "tree",
    head_window: int | None = None,
    head_causal: bool | None = None,
) -> Drafter | None:
    """Load what a user names as a draft.

    Args:
        draft: a draft head, or with the method "model" a small language model: hub id, directory, alias, or loaded.
            "auto" takes the head shipped for the target, else one published for it on the hub, else prompt lookup, and
            logs one line that says which. A `Drafter` is returned as it is. None means no draft.
        target: the model to draft for. It decides device and number type.
        method: one of `DRAFT_METHODS`.
        head_window: number of committed tokens that a head looks back on; None is no bound.
        head_causal: whether the blocks of a head are causal (JetSpec) or bidirectional (DFlash), where the
            configuration of the head to load does not say.

    Returns:
        The drafter, or None to decode plainly.

    Raises:
        JetSpecError: the method is unknown or does not fit the draft, an option does not apply, or the head or model
            cannot be loaded.
    """
    _check_options(draft, method, head_window, head_causal)
    if isinstance(draft, Drafter):
        return draft
    if method == "ngram":
        return NgramDrafter()
    if method == "model":
        return _model_drafter(draft, target)
    if isinstance(draft, Target):
        raise JetSpecError(f'draft: draft_method={method!r} takes a draft head, not a Target; use "model"')
    if draft == AUTO:
        return _auto_drafter(target, method, head_window, head_causal)
    if draft is None:
        if method == "tree" and head_window is None:
            return None
        raise JetSpecError(f"draft=None: draft_method={method!r}, head_window={head_window} needs a draft head")
    if not isinstance(draft, DraftHead):
        draft = load_head(draft, device=target.device, dtype=target.dtype, causal=head_causal)
    return head_drafter(draft, chain=method == "chain", window=head_window)


def published_heads() -> dict[str, PublishedHead]:
    """The heads known on the hub, by the hub id of their target in lower case."""
    text = (resources.files("jetspec") / "data" / "published_heads.json").read_text(encoding="utf-8")
    return {entry.pop("target").lower(): PublishedHead(**entry) for entry in json.loads(text)}


def shipped_head(target: str) -> str | None:
    """The alias of the head that ships for a target, named by its alias or its hub id; None if there is none."""
    names = {alias: {alias, known.hub_id.lower()} for alias, known in ALIASES.items()}
    return next((alias for alias in shipped_heads() if target.lower() in names.get(alias, {alias})), None)


def known_head(target: str) -> KnownHead | None:
    """The head that ships for a target, else the one published for it; None if there is none."""
    shipped, published = shipped_head(target), published_heads().get(target.lower())
    if shipped is not None:
        return KnownHead(shipped, None, "which ships with JetSpec")
    if published is not None:
        return KnownHead(published.head, published.causal, f"published for {target}")
    return None


def _check_options(draft: object, method: str, head_window: int | None, head_causal: bool | None) -> None:
    """Raise JetSpecError for values of a wrong type and for options that contradict each other."""
    if method not in DRAFT_METHODS:
        raise JetSpecError(f"draft_method={method!r}: must be one of {', '.join(DRAFT_METHODS)}")
    if head_window is not None and not is_positive_integer(head_window):
        raise JetSpecError(f"head_window={head_window!r}: must be an integer of at least 1, or None for no bound")
    if not isinstance(head_causal, bool | None):
        raise JetSpecError(
            f"head_causal={head_causal!r}: must be True, False, or None to read the head's configuration"
        )
    if not isinstance(draft, str | Path | DraftHead | Target | Drafter | None):
        raise JetSpecError(
            f'draft={draft!r:.80}: must be "auto", a name, a DraftHead, a Target, a Drafter, or None for no draft'
        )
    if isinstance(draft, Drafter) and (method != "tree" or head_window is not None):
        raise JetSpecError(
            f"draft_method={method!r}, head_window={head_window}: the {type(draft).__name__} is made already; set them "
            "where you make it"
        )
    if head_window is not None and method not in HEAD_METHODS:
        raise JetSpecError(f"head_window={head_window}: draft_method={method!r} has no draft head; leave it out")
    if head_causal is not None and (method not in HEAD_METHODS or not isinstance(draft, str | Path)):
        raise JetSpecError(f"head_causal={head_causal}: applies to a head that is loaded by name; leave it out")
    if method == "ngram" and draft not in (None, AUTO):
        raise JetSpecError(f"draft={str(draft)!r:.80}: draft_method='ngram' takes no model; leave draft out")


def _model_drafter(draft: str | Path | DraftHead | Target | None, target: Target) -> ModelDrafter:
    if draft is None or draft == AUTO:
        raise JetSpecError(f"draft={draft!r}: draft_method='model' needs a small language model; name one")
    if isinstance(draft, DraftHead):
        raise JetSpecError('draft: draft_method="model" takes a language model, not a DraftHead; use "tree"')
    if not isinstance(draft, Target):
        draft = load_target(str(draft), device=str(target.device), dtype=target.dtype)
    return ModelDrafter(draft)


def _auto_drafter(target: Target, method: str, head_window: int | None, head_causal: bool | None) -> Drafter:
    """The best drafter known for a target. Logs what it is; as a warning, where it is none with a head."""
    chain = method == "chain"
    known = known_head(target.name)
    if known is None:
        reason = f"no head is known for {target.name!r}; `jetspec train` makes one"
    else:
        try:
            causal = known.causal if head_causal is None else head_causal
            head = load_head(known.name, device=target.device, dtype=target.dtype, causal=causal)
            head.validate_for(target)
            logger.info("draft: the head %r, %s", known.name, known.origin)
            return head_drafter(head, chain=chain, window=head_window)
        except JetSpecError as error:
            reason = f"the head {known.name!r}, {known.origin}, cannot be used: {' '.join(str(error).split())}"
    logger.warning("draft: prompt lookup, because %s", reason)
    return NgramDrafter(max_matches=1) if chain else NgramDrafter()
