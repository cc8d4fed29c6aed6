"""The token that stands for "to be drafted" in a block."""

from __future__ import annotations

from collections.abc import Collection

from transformers import PreTrainedTokenizerBase

from jetspec.errors import JetSpecError


def choose_mask_token(
    tokenizer: PreTrainedTokenizerBase | None,
    embedding_rows: int,
    used: Collection[int] = (),
    *,
    wanted: int | str | None = None,
) -> int:
    """Id of a token that text never holds, so that it can mean "mask" alone.

    In this order: ``wanted`` (an id or a token's text); the tokenizer's own mask token; the first padded row of the
    embedding, which belongs to no token; an added special token that is neither bos, eos, pad nor unk, does not occur
    in the chat template and is not ``used``, the ids of the training data (the last of these). Never pad or eos.

    Raises:
        JetSpecError: ``wanted`` is no token of this target, or there is no such token.
    """
    if wanted is not None:
        return _wanted(tokenizer, embedding_rows, wanted)
    if tokenizer is None:
        raise JetSpecError(
            "mask_token: the target has no tokenizer to choose one from; name an id that text never holds"
        )
    if tokenizer.mask_token_id is not None:
        return int(tokenizer.mask_token_id)
    if len(tokenizer) < embedding_rows:
        return len(tokenizer)
    roles = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id}
    template = str(getattr(tokenizer, "chat_template", None) or "")
    for token_id, token in sorted(tokenizer.added_tokens_decoder.items(), reverse=True):
        free = token_id not in roles and token_id not in used and token.content not in template
        if token.special and free and token_id < embedding_rows:
            return int(token_id)
    raise JetSpecError(
        "mask_token: this target has no mask token, no padded embedding row and no spare special token; "
        "name the id of a token that text never holds"
    )


def _wanted(tokenizer: PreTrainedTokenizerBase | None, embedding_rows: int, wanted: int | str) -> int:
    token_id: int | None
    if isinstance(wanted, int):
        token_id = wanted
    else:
        vocabulary = {} if tokenizer is None else tokenizer.get_vocab()
        token_id = vocabulary.get(wanted, int(wanted) if wanted.isdecimal() else None)
    if token_id is None or not 0 <= token_id < embedding_rows:
        raise JetSpecError(f"mask_token={wanted!r}: no token of this target, which embeds {embedding_rows}")
    return token_id
