"""Text of token ids as they arrive."""

from collections.abc import Iterable
from typing import Any

_REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """Decodes one answer piece by piece; all pieces and `flush()` joined are the text of all ids.

    A token may hold part of a multi-byte character. It waits for the rest, so a piece never ends inside a character.

    Args:
        tokenizer: a transformers tokenizer.
        skip_special_tokens: leave special tokens out of the text.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
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
        return self._show(self._decode(self._ids))

    def _push(self, token: int) -> str:
        self._ids.append(token)
        text = self._decode(self._ids)
        if text.endswith(_REPLACEMENT) or len(text) <= len(self._shown_text):
            return ""
        return self._show(text)

    def _show(self, text: str) -> str:
        new = text[len(self._shown_text) :]
        self._ids = self._ids[self._shown_ids :]
        self._shown_ids = len(self._ids)
        self._shown_text = self._decode(self._ids)
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False)
