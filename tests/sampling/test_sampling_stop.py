"""Stop strings: found wherever the text is cut into pieces, and never shown and taken back."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspec.sampling import StopChecker

TEXT = st.text(alphabet="ab", max_size=20)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3)


def reference(text, stops, include):
    """Read character by character: (shown text, stop string or None)."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(text=TEXT, stops=STOPS, include=st.booleans(), cuts=st.lists(st.integers(0, 20), max_size=8))
def test_any_cut_gives_the_same_answer(text, stops, include, cuts):
    checker = StopChecker(stops, include)
    borders = [0, *sorted(cuts), len(text)]
    shown = ""
    for start, end in itertools.pairwise(borders):
        shown += checker.push(text[start:end])
        assert reference(text, stops, include)[0].startswith(shown)
    assert (shown + checker.flush(), checker.matched) == reference(text, stops, include)


def test_across_token_borders():
    checker = StopChecker(["</s>"])
    assert [checker.push(piece) for piece in ("Hi<", "/", "s>more")] == ["Hi", "", ""]
    assert checker.matched == "</s>"
    assert checker.push("again") == ""
    assert checker.flush() == ""


def test_a_false_start_is_shown_after_all():
    checker = StopChecker(["</s>"])
    assert [checker.push(piece) for piece in ("Hi<", "/", "b>")] == ["Hi", "", "</b>"]
    assert checker.matched is None


@pytest.mark.parametrize(("include", "shown"), [(False, "a "), (True, "a STOP")])
def test_included_or_not(include, shown):
    checker = StopChecker(["STOP"], include)
    assert checker.push("a STOP b") == shown


def test_before_min_tokens_stop_strings_do_not_count():
    checker = StopChecker(["ab", "b"])
    assert checker.push("ab", enabled=False) == "ab"
    assert checker.push("xa", enabled=False) == "x"
    assert checker.push("b") == ""  # begun before, complete after: it counts
    assert checker.matched == "ab"


def test_complete_before_min_tokens_does_not_count_later():
    checker = StopChecker(["abc", "b"])
    assert checker.push("ab", enabled=False) == ""  # may become "abc"
    assert checker.push("d") == "abd"
    assert checker.matched is None


def test_without_stop_strings_text_passes_through():
    checker = StopChecker([])
    assert checker.push("anything") == "anything"
    assert checker.flush() == ""
