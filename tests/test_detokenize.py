"""Streamed text: whole characters only, and all pieces together are the decoded answer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jetspec.detokenize import IncrementalDetokenizer
from jetspec.sampling import encode_bad_words

SAMPLES = ["Hello, world", "naïve café", "你好，世界", "👩‍👩‍👧‍👦 family 🇪🇺", "a😀b🚀", "  spaces  ", "ключ", "\n\ttabs"]


def byte_level(merges=()):
    """Every byte is a token; `merges` adds longer ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def sentencepiece_like():
    """Words carry their leading space, other characters fall back to bytes, as in Llama 2."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdelowrH,", "▁world", "▁Hello"]
    tokenizer = Tokenizer(models.Unigram([(piece, -len(pieces) + i) for i, piece in enumerate(pieces)], 0, True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>")


TOKENIZERS = {"bytes": byte_level(), "merged": byte_level([("ä", "½"), ("ð", "Ł")]), "pieces": sentencepiece_like()}


def pieces_of(tokenizer, ids, cuts=None, skip=True):
    detokenizer = IncrementalDetokenizer(tokenizer, skip)
    borders = range(len(ids) + 1) if cuts is None else [0, *sorted(cuts), len(ids)]
    pieces = [detokenizer.push(ids[a:b]) for a, b in zip(borders, list(borders)[1:], strict=False)]
    return [*pieces, detokenizer.flush()]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=30)
@given(text=st.sampled_from(SAMPLES) | st.text(max_size=12), cuts=st.lists(st.integers(0, 60), max_size=6))
def test_pieces_make_the_text(name, text, cuts):
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    expected = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert "".join(pieces_of(tokenizer, ids, cuts)) == expected


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", SAMPLES)
def test_no_piece_cuts_a_character(name, text):
    """Fault 17."""
    tokenizer = TOKENIZERS[name]
    pieces = pieces_of(tokenizer, tokenizer.encode(text, add_special_tokens=False))
    assert not any("\ufffd" in piece for piece in pieces)
    if name == "bytes":
        assert [piece for piece in pieces if piece] == list(text)


@settings(max_examples=30)
@given(ids=st.lists(st.integers(0, 255), max_size=30), cuts=st.lists(st.integers(0, 30), max_size=5))
def test_bytes_of_no_character_are_shown_in_the_end(ids, cuts):
    tokenizer = TOKENIZERS["bytes"]
    assert "".join(pieces_of(tokenizer, ids, cuts)) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def test_an_answer_cut_inside_a_character():
    tokenizer = TOKENIZERS["bytes"]
    ids = tokenizer.encode("a😀")[:-1]
    assert pieces_of(tokenizer, ids) == ["a", "", "", "", "\ufffd"]


@pytest.mark.parametrize(("skip", "expected"), [(True, "ab"), (False, "a<eos>b<eos>")])
def test_special_tokens(skip, expected):
    tokenizer = TOKENIZERS["bytes"]
    a, b = tokenizer.encode("ab")
    eos = tokenizer.eos_token_id
    assert "".join(pieces_of(tokenizer, [a, eos, b, eos], skip=skip)) == expected


def test_spaces_before_punctuation_stay():
    tokenizer = TOKENIZERS["bytes"]
    assert "".join(pieces_of(tokenizer, tokenizer.encode("a . b , do n't"))) == "a . b , do n't"


def test_bad_words_are_banned_with_and_without_a_leading_space():
    tokenizer = byte_level([("Ġ", "d"), ("d", "o"), ("Ġd", "o")])
    do, spaced = tokenizer.encode("do"), tokenizer.encode(" do")
    assert len(do) == len(spaced) == 1
    assert encode_bad_words(tokenizer, ["do", " do", "xy"]) == [do, spaced, do, spaced, tokenizer.encode("xy")]
