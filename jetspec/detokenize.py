"""Text of token ids: of an answer as its ids arrive, and of single tokens where they stand."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

_REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """Decodes one answer piece by piece; all pieces and `flush()` joined are the text of all ids.

    A token may hold part of a multi-byte character. It waits for the rest, so a piece never ends inside a character.
    Bytes that make no character read as UTF-8 decoding with replacement reads them, also where the tokenizer falls back
    to tokens of single bytes, whose own decoder would lose the text beside them.

    Args:
        tokenizer: a transformers tokenizer.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._byte_tokens = _byte_tokens(tokenizer)
        # The ids decoded together: first those already shown, kept as context because a tokenizer may treat the
        # beginning of a text specially (a leading space), then those that wait.
        self._ids: list[int] = []
        self._shown_ids = 0
        self._shown_text = ""

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete."""
        return "".join([self._push(token) for token in ids])

    def flush(self) -> str:
        """The text still waiting, once no more ids can come; bytes of no character read U+FFFD."""
        return self._show(len(self._ids), self._decode(self._ids))

    def _push(self, token: int) -> str:
        tokens = self._byte_tokens
        if tokens is not None and self._skip and token in tokens.special_ids:
            return ""  # it must not come between the bytes of a character
        self._ids.append(token)
        whole = len(self._ids) - (0 if tokens is None else tokens.num_pending(self._ids))
        text = self._decode(self._ids[:whole])
        waits = tokens is None and text.endswith(_REPLACEMENT)
        if waits or len(text) <= len(self._shown_text):
            return ""
        return self._show(whole, text)

    def _show(self, whole: int, text: str) -> str:
        """What is new in `text`, which the first `whole` ids of the window spell."""
        new = text[len(self._shown_text) :]
        self._ids, self._shown_ids = self._ids[self._shown_ids :], whole - self._shown_ids
        self._shown_text = self._decode(self._ids[: self._shown_ids])
        return new

    def _decode(self, ids: list[int]) -> str:
        return _decode(self._tokenizer, ids, self._skip)


class TokenTexts:
    """Text of single tokens where they stand: what each adds to the text before it. Special tokens are shown.

    A token that ends inside a character adds nothing for it; the one that completes the character adds all of it. Bytes
    that make no character add nothing either. Make it with `token_texts`, which keeps one for each tokenizer.
    """

    #: Tokens before a token that can matter: a character has at most three bytes before its last one.
    CONTEXT = 3

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Goes before every token, because a tokenizer may treat the beginning of a text specially (a leading space).
        self._anchor = list(tokenizer.encode("a", add_special_tokens=False))
        self._anchor_text = _decode(tokenizer, self._anchor, skip_special_tokens=False)
        self._alone: dict[int, str] = {}

    def text(self, before: Sequence[int], token: int) -> str:
        """The text that `token` adds after the ids `before`, of which the last `CONTEXT` suffice."""
        alone = self._alone.get(token)
        if alone is None:
            alone = self._alone[token] = self._decode([token])
        if _REPLACEMENT not in alone:
            return alone
        for count in range(1, min(self.CONTEXT, len(before)) + 1):
            pending = list(before[-count:])
            earlier = self._decode(pending).rstrip(_REPLACEMENT)
            text = self._decode([*pending, token])
            added = text[len(earlier) :]
            if _REPLACEMENT not in earlier and text.startswith(earlier) and not added.startswith(_REPLACEMENT):
                return added.rstrip(_REPLACEMENT)
        return alone.strip(_REPLACEMENT)

    def _decode(self, ids: list[int]) -> str:
        text = _decode(self._tokenizer, [*self._anchor, *ids], skip_special_tokens=False)
        return text[len(self._anchor_text) :]


@lru_cache(maxsize=8)
def token_texts(tokenizer: Any) -> TokenTexts:
    """The `TokenTexts` of a transformers tokenizer."""
    return TokenTexts(tokenizer)


@dataclass(frozen=True)
class _ByteTokens:
    """The tokens of single bytes of a tokenizer with byte fallback, as Llama 2's."""

    byte_of: dict[int, int]
    #: By byte.
    ids: list[int]
    special_ids: frozenset[int]

    def num_pending(self, ids: Sequence[int]) -> int:
        """How many of the last ids are bytes of a character that is not complete."""
        start = len(ids)
        while start and ids[start - 1] in self.byte_of:
            start -= 1
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(bytes(self.byte_of[token] for token in ids[start:]))
        return len(decoder.getstate()[0])

    def repaired(self, ids: Iterable[int]) -> list[int]:
        """The ids with every run of bytes spelling what UTF-8 decoding with replacement makes of it.

        The tokenizer's own decoder makes a replacement character of every byte of a run that is not valid as a whole.
        """
        result: list[int] = []
        for is_bytes, run in groupby(ids, self.byte_of.__contains__):
            if is_bytes:
                text = bytes(self.byte_of[token] for token in run).decode("utf-8", "replace")
                result += [self.ids[byte] for byte in text.encode()]
            else:
                result += run
        return result


@lru_cache(maxsize=8)
def _byte_tokens(tokenizer: Any) -> _ByteTokens | None:
    """The byte tokens of a tokenizer, or None where its decoder knows none."""
    ids = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in range(256)])
    byte_of = {token: byte for byte, token in enumerate(ids)}
    if None in byte_of or len(byte_of) < 256 or tokenizer.decode([ids[ord("A")]]) != "A":
        return None
    added = tokenizer.added_tokens_decoder.items()
    special = {*tokenizer.all_special_ids, *(token for token, content in added if content.special)}
    return _ByteTokens(byte_of, ids, frozenset(special))


def _decode(tokenizer: Any, ids: list[int], skip_special_tokens: bool) -> str:
    byte_tokens = _byte_tokens(tokenizer)
    if byte_tokens is not None:
        if skip_special_tokens:
            ids = [token for token in ids if token not in byte_tokens.special_ids]
        ids = byte_tokens.repaired(ids)
    text: str = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    return text
