"""Which token means "mask"."""

from __future__ import annotations

import pytest

from jetspec.errors import JetSpecError
from jetspec.train.mask_token import choose_mask_token
from tests.helpers.tiny import EOS_TOKEN, tiny_tokenizer


def test_the_order_of_choices() -> None:
    tokenizer = tiny_tokenizer()
    rows = len(tokenizer)
    assert choose_mask_token(tokenizer, rows + 8, wanted=7) == 7
    assert choose_mask_token(tokenizer, rows + 8, wanted=EOS_TOKEN) == tokenizer.eos_token_id
    assert choose_mask_token(tokenizer, rows + 8) == rows
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|a|>", "<|b|>"]})
    a, b = tokenizer.convert_tokens_to_ids(["<|a|>", "<|b|>"])
    assert choose_mask_token(tokenizer, len(tokenizer)) == b
    assert choose_mask_token(tokenizer, len(tokenizer), used={b}) == a
    tokenizer.add_special_tokens({"mask_token": "<|m|>"})
    assert choose_mask_token(tokenizer, len(tokenizer) + 8) == tokenizer.mask_token_id


def test_never_pad_eos_or_a_token_of_the_chat_template() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "<|user|> <|assistant|> <|system|>"
    with pytest.raises(JetSpecError, match="mask_token: this target has no mask token"):
        choose_mask_token(tokenizer, len(tokenizer))
    with pytest.raises(JetSpecError, match="mask_token='<none>'"):
        choose_mask_token(tokenizer, len(tokenizer), wanted="<none>")
    with pytest.raises(JetSpecError, match="no tokenizer"):
        choose_mask_token(None, 9)
