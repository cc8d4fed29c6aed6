"""Right and wrong answers of every form."""

from __future__ import annotations

import pytest

from jetspec.bench.scoring import answer_program, before_function, last_boxed, normalized, score


@pytest.mark.parametrize(
    ("answer", "reference", "correct"),
    [
        ("so\n#### 18", "18", True),
        ("#### $1,800.00.", "1800", True),
        ("#### 18 apples, that is 3 bags", "18", True),
        ("first #### 3, no: #### 18", "18", True),
        ("#### none, it is 18", "18", True),
        ("####", "18", False),
        ("we have 20, so \\boxed{18} of 30", "18", True),
        ("\\boxed{x = 3, y = 18}", "18", True),
        ("it costs \\$18.", "18", True),
        ("18 hens and 2 ducks", "18", False),
        ("The change is -$5.", "-5", True),
        ("The change is $-5", "-5", True),
        ("20-2=18", "18", True),
        ("it leaves 18-3", "-3", False),
        ("a share of .5", "0.5", True),
        ("17.9", "18", False),
        ("1,000,000", "1000000", True),
        ("no number", "18", False),
        ("", "18", False),
    ],
)
def test_gsm8k(answer: str, reference: str, correct: bool) -> None:
    facts = {"reference": f"because of 7\n#### {reference}"}
    assert score("gsm8k", facts, answer, run_code=False) is correct


@pytest.mark.parametrize(
    ("answer", "reference", "correct"),
    [
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}", True),
        ("$\\boxed{\\dfrac12}$.", "\\frac{1}{2}", True),
        ("\\boxed{1} then \\boxed{\\tfrac{1}{2}}", "\\frac{1}{2}", True),
        ("\\boxed{2}", "\\frac{1}{2}", False),
        ("\\frac{1}{2}", "\\frac{1}{2}", False),
        ("\\boxed{\\frac{1}{2}", "\\frac{1}{2}", False),
        ("\\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}", "(3,\\frac{\\pi}{2})", True),
        ("\\boxed{90^\\circ}", "90", True),
        ("\\boxed{90^{\\circ}}", "90", True),
        ("\\boxed{\\text{Evelyn}}", "Evelyn", True),
        ("\\boxed{x = 5}", "5", True),
        ("\\boxed{\\$1,250.}", "1250", True),
        ("\\boxed{1,-2}", "1,-2", True),
        ("\\boxed{12}", "1,2", False),
        ("\\boxed{.5}", "0.5", True),
        ("\\boxed{50\\%}", "50", True),
        ("\\boxed{11\\sqrt2}", "11\\sqrt{2}", True),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}", True),
        ("", "1", False),
    ],
)
def test_math(answer: str, reference: str, correct: bool) -> None:
    """The reference is the answer alone, or a solution that boxes it."""
    assert score("math500", {"reference": reference}, answer, run_code=False) is correct
    assert score("math500", {"reference": f"so \\boxed{{{reference}}}."}, answer, run_code=False) is correct


def test_boxes() -> None:
    assert last_boxed("a \\boxed{x} b \\boxed {y{z}} c") == "y{z}"
    assert last_boxed("\\fbox{1}") == "1"
    assert last_boxed("\\boxed{whole} and \\boxed{cut") == "whole"
    assert last_boxed("boxed{x}") is None
    assert normalized("\\leftarrow") != normalized("arrow")


@pytest.mark.parametrize("name", ["mt_bench", "prompts.jsonl"])
def test_what_cannot_be_told_is_none(name: str) -> None:
    assert score(name, {}, "18", run_code=True) is None


PROMPT = 'import math\n\n\ndef helper():\n    return 0\n\n\ndef root(x: float) -> float:\n    """The root."""\n'
TEST = "def check(candidate):\n    assert candidate(9) == 3 + helper()\n"
FACTS = {"prompt": PROMPT, "entry_point": "root", "test": TEST}


@pytest.mark.parametrize(
    ("answer", "correct"),
    [
        ("```python\ndef root(x):\n    return math.sqrt(x)\n```", True),
        ("Here:\n```\ndef root(x):\n    return math.sqrt(x)", True),
        ("```py\nprint('an example')\n```\nand\n```python\ndef root(x):\n    return math.sqrt(x)\n```", True),
        ("def root(x):\n    return math.sqrt(x)", True),
        ("    return math.sqrt(x)\n", True),
        ("return math.sqrt(x)\n", True),
        ("y = math.sqrt(x)\n    return y\n", True),
        ("y = math.sqrt(x)\nreturn y\n", True),
        ("if x:\n    return math.sqrt(x)\n", True),
        ("    return math.sqrt(x)\n\nprint(root('a'))\n", True),
        ("```python\n    return math.sqrt(x)\n```", True),
        ("def root(x):\n    return x", False),
        ("def root(x):\n    return math.sqrt(x", False),
        ("def square(x):\n    return math.sqrt(x)", False),
        ("import sys\ndef root(x):\n    sys.exit(0)", False),
        ("I cannot.", False),
        ("", False),
    ],
)
def test_humaneval(answer: str, correct: bool) -> None:
    assert score("humaneval", FACTS, answer, run_code=True) is correct


def test_code_is_not_run_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jetspec.bench.scoring.passes", lambda *args, **options: pytest.fail("ran"))
    assert score("humaneval", FACTS, "def root(x):\n    return 3", run_code=False) is None


def test_a_program_keeps_what_stands_before_the_function() -> None:
    code = answer_program(PROMPT, "root", "def root(x):\n    return 3")
    assert code.count("def root") == 1
    assert code.index("import math") < code.index("def helper") < code.index("def root")
    assert before_function(PROMPT, "root") == PROMPT[: PROMPT.index("def root")]
    assert before_function(PROMPT, "other") == ""


def test_the_tests_use_the_prompt_s_helpers() -> None:
    answer = "```python\ndef helper():\n    return 6\n\ndef root(x):\n    return x\n```"
    assert score("humaneval", FACTS, answer, run_code=True) is False
