"""Every value out of range is refused by an error that names the field and the value."""

import pickle

import numpy as np
import pytest
from pydantic import ValidationError

from jetspec.errors import JetSpecError
from jetspec.sampling import SamplingParams

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("n", v) for v in (0, -1, 1.0, True, None)],
        *[("temperature", v) for v in (-0.1, NAN, INF, 10**400, -(10**400), "1", None)],
        *[("top_p", v) for v in (0, -0.5, 1.01, NAN, 10**400)],
        *[("top_k", v) for v in (-2, 1.5, None)],
        *[("min_p", v) for v in (-0.1, 1.1, NAN)],
        *[("repetition_penalty", v) for v in (0, -1, INF)],
        *[("frequency_penalty", v) for v in (-2.1, 2.1, NAN)],
        *[("presence_penalty", v) for v in (-2.1, 2.1, NAN)],
        *[("seed", v) for v in (1.5, "1", 2**64, -(2**63) - 1, True)],
        *[("stop", v) for v in ("", ["a", ""], [1], 5)],
        *[("stop_token_ids", v) for v in (5, ["a"], [-1], [1.0])],
        *[("bad_words", v) for v in ("word", [""], ["  "], [3])],
        *[("max_tokens", v) for v in (0, -1, 2.5)],
        *[("min_tokens", v) for v in (-1, 1.5, 17)],
        *[("logprobs", v) for v in (-2, 1.5, True)],
        *[("prompt_logprobs", v) for v in (-2, 1.5, True)],
        *[("logit_bias", v) for v in ([1], {"1": 2.0}, {-1: 2.0}, {1: NAN}, {1: INF}, {1: 10**400}, {1: "x"})],
        *[("logits_processors", v) for v in ([3], len)],
    ],
    ids=lambda value: repr(value)[:30],
)
def test_out_of_range_is_refused(field, value):
    with pytest.raises(JetSpecError, match=rf"^{field}=.*(must|use)"):
        SamplingParams(**{field: value})


def test_numbers_of_numpy_are_numbers():
    params = SamplingParams(n=np.int64(2), temperature=np.float32(0.5), seed=np.int32(7), stop_token_ids=[np.int64(3)])
    assert params == SamplingParams(n=2, temperature=0.5, seed=7, stop_token_ids=[3])
    assert (type(params.n), type(params.temperature), type(params.seed)) == (int, float, int)


def test_greedy_answers_are_all_the_same():
    with pytest.raises(JetSpecError, match="n=2: greedy"):
        SamplingParams(n=2, temperature=0)


def test_extreme_values_that_are_fine():
    SamplingParams(
        n=3, temperature=50, top_p=1e-9, top_k=-1, min_p=1, seed=2**64 - 1, max_tokens=None, min_tokens=10**6
    )
    SamplingParams(seed=-(2**63), logprobs=-1, prompt_logprobs=0, logit_bias={0: -INF}, stop=[], min_tokens=16)


def test_defaults_change_nothing():
    params = SamplingParams()
    assert not params.greedy
    assert not params.has_processors
    assert not params.has_filters
    assert params.stop_strings == ()
    assert params.max_tokens == 16


@pytest.mark.parametrize(
    "changes",
    [
        {"repetition_penalty": 1.1},
        {"frequency_penalty": -0.1},
        {"presence_penalty": 0.1},
        {"logit_bias": {0: 1.0}},
        {"bad_words": ["x"]},
        {"min_tokens": 1},
        {"logits_processors": [lambda ids, scores: scores]},
    ],
)
def test_what_can_change_the_argmax(changes):
    assert SamplingParams(**changes).has_processors


@pytest.mark.parametrize("changes", [{"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_filters_leave_the_argmax_alone(changes):
    params = SamplingParams(**changes)
    assert params.has_filters
    assert not params.has_processors


def test_greedy_and_stop_strings():
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=1e-6).greedy
    assert SamplingParams(stop="a").stop_strings == ("a",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")


def test_frozen():
    with pytest.raises(ValidationError, match="frozen"):
        SamplingParams().temperature = 0.5


@pytest.mark.parametrize("changes", [{"logit_bias": {3: 1.0, 10: 1.0}}, {"stop_token_ids": [10]}])
def test_tokens_outside_the_vocabulary_are_refused(changes):
    params = SamplingParams(**changes)
    params.check_vocabulary(11)
    with pytest.raises(JetSpecError, match=rf"{next(iter(changes))} holds token ids \[10\]"):
        params.check_vocabulary(10)


@pytest.mark.parametrize(
    ("field", "value", "fix"),
    [
        ("temperature", -1, "use 0 for greedy decoding"),
        ("top_p", 0, "use 1 to keep all tokens"),
        ("seed", 2**64, "use None for no seed"),
        ("max_tokens", 0, "use None for as many"),
        ("max_tokens", "5", "an integer; use None for as many"),
    ],
)
def test_errors_say_what_to_do(field, value, fix):
    with pytest.raises(JetSpecError, match=f"^{field}=.*: must be .*{fix}"):
        SamplingParams(**{field: value})


def test_unknown_fields_are_refused_with_a_suggestion():
    with pytest.raises(JetSpecError, match="max_token: is not a field of SamplingParams; did you mean max_tokens"):
        SamplingParams(max_token=3)


def test_copies_with_changes_are_checked_anew():
    params = SamplingParams(temperature=0.5, stop=["a"])
    assert params.stop_strings == ("a",)
    assert not params.greedy
    changed = params.replace(temperature=0, stop="b")
    assert changed.greedy
    assert changed.stop_strings == ("b",)
    assert (params.temperature, params.stop) == (0.5, ["a"])
    with pytest.raises(JetSpecError, match="top_k=-2"):
        params.replace(top_k=-2)


def test_derived_values_are_no_part_of_equality_and_survive_pickling():
    params, same = SamplingParams(seed=1, temperature=0), SamplingParams(seed=1, temperature=0)
    assert params.greedy
    assert not params.has_filters
    assert params == same == pickle.loads(pickle.dumps(params))
    assert {"greedy", "has_filters"} <= set(vars(params))  # so that the hot loop reads plain attributes


def test_lists_and_processors_are_kept_as_they_are():
    processors, bias = [lambda ids, scores: scores], {3: 1}
    params = SamplingParams(logits_processors=processors, logit_bias=bias)
    assert params.logits_processors is processors
    assert params.logit_bias is bias
