"""Grammars alone: what they allow after which tokens, and what is refused before anything runs."""

from __future__ import annotations

import builtins
import json

import pytest
import torch

from jetspec.errors import JetSpecError
from jetspec.sampling import Grammar, SamplingParams, StructuredOutputsParams, new_grammar, process, sample
from tests.helpers.tiny import EOS_TOKEN, TEXT_VOCAB_SIZE, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.convert_tokens_to_ids(EOS_TOKEN)
CPU = torch.device("cpu")
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "tag": {"enum": ["a", "b"]}},
    "required": ["x", "tag"],
    "additionalProperties": False,
}


def grammar(**form) -> Grammar:
    return new_grammar(TOKENIZER, {EOS}, StructuredOutputsParams(**form))


def allowed_text(state: Grammar, vocab_size: int = TEXT_VOCAB_SIZE) -> list[str]:
    """Tokens allowed next, decoded and sorted."""
    mask = state.allowed(vocab_size, CPU)
    assert mask.shape == (vocab_size,)
    return sorted(TOKENIZER.decode([i]) for i in mask.nonzero().flatten().tolist())


def after(state: Grammar, text: str) -> Grammar:
    for token in TOKENIZER.encode(text):
        assert state.allowed(TEXT_VOCAB_SIZE, CPU)[token], (text, token)
        state.advance(token)
    return state


def accepts(state: Grammar, text: str) -> bool:
    """Whether `text` is a whole answer."""
    for token in TOKENIZER.encode(text):
        if not state.allowed(TEXT_VOCAB_SIZE, CPU)[token]:
            return False
        state.advance(token)
    return bool(state.allowed(TEXT_VOCAB_SIZE, CPU)[EOS])


def test_a_regex_allows_its_own_characters_and_the_end_where_it_may_end() -> None:
    state = grammar(regex="ab?")
    assert allowed_text(state) == ["a"]
    after(state, "a")
    assert allowed_text(state) == [EOS_TOKEN, "b"]
    assert not state.complete
    after(state, "b")
    assert state.complete
    assert allowed_text(state) == [EOS_TOKEN]


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        ({"regex": r"\d{2}-[xy]+"}, ["12-x", "00-yxy"], ["1-x", "12-", "12-z"]),
        (
            {"choice": ["yes", "no", 'sa"y\n', "日本", "😀"]},
            ["yes", "no", 'sa"y\n', "日本", "😀"],
            ["ye", "日", "maybe"],
        ),
        ({"grammar": 'start: "(" start ")" | "x"'}, ["x", "(x)", "((x))"], ["(x", "()"]),
        ({"grammar": 'root ::= "a" root "b" | "c"'}, ["c", "acb", "aacbb"], ["acbb", "ab"]),
        ({"json": POINT}, ['{"x":1,"tag":"a"}', '{ "x": -20,\n"tag": "b" }'], ['{"x":1}', '{"x":"1"', "[]"]),
        ({"json": json.dumps(POINT)}, ['{"x":1,"tag":"a"}'], ['{"tag":"a"']),
        ({"json": POINT, "disable_any_whitespace": True}, ['{"x":1,"tag":"a"}'], ['{"x": 1,"tag":"a"}']),
        ({"json_object": True}, ["{}", '{"a": [1, null, {"b": "c"}]}'], ["[]", "1", '{"a"}']),
    ],
)
def test_forms(form: dict, good: list[str], bad: list[str]) -> None:
    assert [text for text in good if not accepts(grammar(**form), text)] == []
    assert [text for text in bad if accepts(grammar(**form), text)] == []


def test_json_takes_a_model_class() -> None:
    class Point:
        @classmethod
        def model_json_schema(cls) -> dict:
            return POINT

    assert accepts(grammar(json=Point), '{"x":1,"tag":"a"}')
    assert not accepts(grammar(json=Point), "{}")


def test_grammars_of_the_same_form_do_not_share_their_place() -> None:
    first, second = grammar(regex="abc"), grammar(regex="abc")
    after(first, "ab")
    assert allowed_text(second) == ["a"]


def test_ids_the_tokenizer_lacks_are_never_allowed() -> None:
    anything = grammar(regex=r"(.|\n)*")
    assert not anything.allowed(4000, CPU)[len(TOKENIZER) :].any()
    assert "a" in allowed_text(anything, 4000)
    assert "a" in allowed_text(anything, 100)  # narrower logits, too: just those


def test_every_end_token_the_tokenizer_knows_may_end_an_answer() -> None:
    state = new_grammar(TOKENIZER, {EOS, EOS + 1, 4000}, StructuredOutputsParams(choice=["x"]))
    after(state, "x")
    assert state.allowed(TEXT_VOCAB_SIZE, CPU).nonzero().flatten().tolist() == [EOS, EOS + 1]


def test_a_token_outside_the_grammar_is_an_error() -> None:
    with pytest.raises(JetSpecError, match="structured_outputs: token"):
        grammar(regex="abc").advance(TOKENIZER.encode("b")[0])


def test_a_grammar_that_leads_nowhere_is_an_error() -> None:
    state = after(grammar(grammar='start: "a" b\nb: b "x"'), "a")
    with pytest.raises(JetSpecError, match=r"structured_outputs: .+") as caught:
        state.allowed(TEXT_VOCAB_SIZE, CPU)
    assert "<state>" not in str(caught.value)


def test_the_mask_comes_after_the_bias_and_before_the_filters() -> None:
    a, b, z = TOKENIZER.encode("abz")
    logits = torch.zeros(TEXT_VOCAB_SIZE)
    logits[b] = 1
    bias = {z: 50.0, a: 5.0}
    form = StructuredOutputsParams(regex="[ab]")
    for settings, left in (({"temperature": 0}, [a, b]), ({"top_k": 1}, [a]), ({"top_p": 0.999}, [a, b])):
        params = SamplingParams(logit_bias=bias, structured_outputs=form, **settings)
        scores = process(logits, params, [], [], grammar=new_grammar(TOKENIZER, {EOS}, form))
        assert sorted((scores > -torch.inf).nonzero().flatten().tolist()) == sorted(left)
        assert sample(scores, params, 0, 0) == a
    assert SamplingParams(temperature=0, structured_outputs=form).has_processors
    with pytest.raises(JetSpecError, match="structured_outputs"):
        process(logits, params, [], [])


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({}, "exactly one"),
        ({"regex": "a", "choice": ["b"]}, "exactly one"),
        ({"json": POINT, "json_object": True}, "exactly one"),
        ({"json_object": False}, "exactly one"),
        ({"json_object": "yes"}, "json_object"),
        ({"json": 3}, "json=3"),
        ({"json": "{"}, "json: not valid JSON"),
        ({"json": "[1]"}, "json="),
        ({"json": int}, "json="),
        ({"regex": ""}, "regex"),
        ({"regex": 3}, "regex"),
        ({"grammar": ["x"]}, "grammar"),
        ({"choice": []}, "choice"),
        ({"choice": "ab"}, "choice"),
        ({"choice": ["a", 1]}, "choice"),
        ({"choice": [""]}, "choice"),
        ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace"),
        ({"json": POINT, "disable_any_whitespace": 1}, "disable_any_whitespace"),
    ],
)
def test_parameters_are_checked(form: dict, message: str) -> None:
    with pytest.raises(JetSpecError, match=rf"structured_outputs.*{message}"):
        StructuredOutputsParams(**form)


def test_sampling_params_take_nothing_else() -> None:
    with pytest.raises(JetSpecError, match=r"structured_outputs=.*StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"regex": "("}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": r"[^\s\S]"}, "no text satisfies"),
        ({"json": {"type": "objectt"}}, "objectt"),
        ({"json": {"$ref": "#/nowhere"}}, "nowhere"),
        ({"json": {"enum": []}}, "Unsatisfiable"),
        ({"json": {"a": {1, 2}}}, "JSON"),
        ({"grammar": "start: nowhere"}, "nowhere"),
        ({"grammar": 'start: start "x"'}, "no text satisfies"),
        ({"grammar": 'root ::= "a" ('}, "GBNF"),
    ],
)
def test_grammars_that_cannot_be_followed_are_refused(form: dict, message: str) -> None:
    with pytest.raises(JetSpecError, match=f"structured_outputs: (.|\n)*{message}") as caught:
        grammar(**form)
    assert "<state>" not in str(caught.value)


def test_what_a_target_must_have() -> None:
    form = StructuredOutputsParams(regex="a")
    with pytest.raises(JetSpecError, match="structured_outputs needs a tokenizer"):
        new_grammar(None, {EOS}, form)
    for ids in (set(), {4000}):
        with pytest.raises(JetSpecError, match="structured_outputs needs an end-of-text token"):
            new_grammar(TOKENIZER, ids, form)


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args, **kwargs):
        if name.startswith("llguidance"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(JetSpecError, match=r'pip install "jetspec\[grammar\]"'):
        grammar(regex="a")


def test_every_grammar_of_a_call_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many prompts are checked before the first one starts."""
    import llguidance

    real, compiled = llguidance.LLMatcher, []

    def counting(tokenizer: object, source: str, **options) -> object:
        compiled.append(source)
        return real(tokenizer, source, **options)

    forms = [StructuredOutputsParams(regex=f"once {index}") for index in range(150)]
    counting.grammar_from_json_schema = real.grammar_from_json_schema
    monkeypatch.setattr(llguidance, "LLMatcher", counting)
    for _ in range(2):
        for form in forms:
            new_grammar(TOKENIZER, {EOS}, form)
    assert len(compiled) == 150


def test_copies_compare_and_change() -> None:
    form = StructuredOutputsParams(regex="a")
    assert form.replace(regex="b").source != form.source
    assert form == StructuredOutputsParams(regex="a")
    with pytest.raises(JetSpecError, match="regexx: is not a field of StructuredOutputsParams; did you mean regex"):
        StructuredOutputsParams(regexx="a")
