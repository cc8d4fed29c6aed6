"""Bad words as token ids."""

from collections.abc import Sequence
from typing import Any


def encode_bad_words(tokenizer: Any, words: Sequence[str]) -> list[list[int]]:
    """Token sequences that spell `words`, each as it begins a text and, where that differs, as it follows a space."""
    sequences: list[list[int]] = []
    for word in words:
        bare, spaced = (
            list(tokenizer.encode(text, add_special_tokens=False)) for text in (word.lstrip(), " " + word.lstrip())
        )
        sequences.append(bare)
        # Only a form with a token of its own for "space + word": a lone space token in front changes nothing.
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            sequences.append(spaced)
    return sequences
