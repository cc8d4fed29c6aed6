"""Streamed text: whole characters only, and all pieces together are the decoded answer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from jetspec.detokenize import IncrementalDetokenizer, token_texts
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


def bytes_only():
    """Nothing but byte-fallback tokens, as where Llama 2 meets characters it has no pieces for."""
    tokenizer = Tokenizer(
        models.BPE({"<unk>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}}, [], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>")


TOKENIZERS = {"bytes": byte_level(), "merged": byte_level([("ä", "½"), ("ð", "Ł")]), "pieces": sentencepiece_like()}


FALLBACK = {"pieces": TOKENIZERS["pieces"], "bytes only": bytes_only()}
#: The character of GPT-2's alphabet that stands for each byte.
LETTERS = bytes_to_unicode()


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


TEXT_BYTES = st.sampled_from(SAMPLES).map(str.encode)
BYTES = st.lists(TEXT_BYTES | st.binary(max_size=6) | TEXT_BYTES.map(lambda b: b[:-1]), max_size=4).map(b"".join)


@pytest.mark.parametrize("name", FALLBACK)
@given(data=BYTES, cuts=st.lists(st.integers(0, 60), max_size=5))
def test_byte_fallback_reads_like_utf_8(name, data, cuts):
    """Wherever the bytes end, also inside a character, and whatever they spell."""
    tokenizer = FALLBACK[name]
    ids = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in data])
    text = data.decode("utf-8", "replace")
    assert "".join(pieces_of(tokenizer, ids, cuts)) == text.removeprefix(" ")
    if not text.count("\ufffd"):  # what the tokenizer itself cannot decode
        assert text.removeprefix(" ") == tokenizer.decode(ids)


@given(parts=st.lists(BYTES.map(lambda b: b[:5]) | st.sampled_from(["▁", "a", "▁world", "<eos>"]), max_size=8))
def test_byte_fallback_between_pieces(parts):
    """Bytes of no character lose nothing of what follows, and a skipped token does not come between bytes."""
    tokenizer = FALLBACK["pieces"]
    ids, text, pending = [], "", b""
    for part in parts:
        if isinstance(part, bytes):
            ids += tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in part])
            pending += part
            continue
        ids.append(tokenizer.convert_tokens_to_ids(part))
        if part != "<eos>":
            text += pending.decode("utf-8", "replace") + part.replace("▁", " ")
            pending = b""
    text += pending.decode("utf-8", "replace")
    assert "".join(pieces_of(tokenizer, ids)) == text.removeprefix(" ")


@pytest.mark.parametrize("name", FALLBACK)
def test_byte_fallback_shows_a_character_once_it_is_whole(name):
    tokenizer = FALLBACK[name]
    data = "é🙂".encode() + b"\x9f" + b"ok" + "世".encode()[:2]
    ids = tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in data])
    assert pieces_of(tokenizer, ids) == ["", "é", "", "", "", "🙂", "\ufffd", "o", "k", "", "", "\ufffd"]


@given(data=BYTES, cuts=st.lists(st.integers(0, 60), max_size=5))
def test_byte_level_reads_like_utf_8(data, cuts):
    ids = TOKENIZERS["bytes"].convert_tokens_to_ids([LETTERS[byte] for byte in data])
    assert "".join(pieces_of(TOKENIZERS["bytes"], ids, cuts)) == data.decode("utf-8", "replace")


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


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.sampled_from(SAMPLES) | st.text(max_size=12))
def test_texts_of_tokens_make_the_text(name, text):
    """A character belongs to the token that completes it."""
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("a" + text, add_special_tokens=False)
    texts = [token_texts(tokenizer).text(ids[:index], ids[index]) for index in range(len(ids))]
    whole = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    # A leading space of the whole text is the tokenizer's, and stays with its token.
    assert "".join(texts).removeprefix(" " if name == "pieces" else "") == whole


@pytest.mark.parametrize("name", TOKENIZERS)
@given(before=BYTES, data=st.binary(min_size=1, max_size=1))
def test_the_text_of_a_byte_is_the_character_it_completes(name, before, data):
    form = (lambda byte: f"<0x{byte:02X}>") if name == "pieces" else LETTERS.__getitem__
    *ids, token = TOKENIZERS[name].convert_tokens_to_ids([form(byte) for byte in before + data])
    text = token_texts(TOKENIZERS[name]).text(ids, token)
    assert "\ufffd" not in text
    whole = (before + data).decode("utf-8", "replace")
    if data[0] < 0x80:
        assert text == data.decode()
    elif whole.endswith("\ufffd"):
        assert text == ""
    else:
        assert text == whole[-1]


def test_texts_of_tokens_that_hold_more_than_a_part():
    tokenizer = byte_level([("Ġ", "ä"), ("ł", "a"), ("½", "ł"), ("½ł", "a")])
    space_lead, tail, whole_tail = tokenizer.convert_tokens_to_ids(["Ġä", "ła", "½ła"])
    [lead, middle] = byte_ids = tokenizer.convert_tokens_to_ids(["ä", "½"])
    texts = token_texts(tokenizer)
    assert texts.text([], space_lead) == " "
    assert texts.text([space_lead, middle], tail) == "你a"
    assert texts.text([space_lead], whole_tail) == "你a"
    assert texts.text([*byte_ids], tail) == "你a"
    assert texts.text([lead], tail) == texts.text([], whole_tail) == "a"
    assert texts.text([], tokenizer.eos_token_id) == "<eos>"
