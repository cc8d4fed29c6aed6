"""Whether an answer solves its task."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from jetspec.bench.sandbox import passes

NUMBER = re.compile(r"(?<![\w).])-?\$?(\d[\d,]*(?:\.\d+)?|\.\d+)")
FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
#: Where a bare continuation of a function leaves it.
AFTER_FUNCTION = re.compile(r"^(?:def|class|if|print|assert|#|```|@)", re.MULTILINE)


def score(dataset: str, facts: Mapping[str, Any], answer: str, *, run_code: bool) -> bool | None:
    """Whether `answer` solves a question of `dataset` with these `facts`; None where there is no way to tell.

    With `run_code`, answers to humaneval are executed (see `jetspec.bench.sandbox`); without it they are not scored.
    """
    if dataset == "humaneval" and not run_code:
        return None
    scorer = SCORERS.get(dataset)
    return None if scorer is None else scorer(facts, answer)


def solves_gsm8k(facts: Mapping[str, Any], answer: str) -> bool:
    """Whether the answer's final number is the reference's, as numbers: 1,000 is 1000.0."""
    number = final_number(answer)
    return number is not None and number == final_number(facts["reference"])


def final_number(text: str) -> Decimal | None:
    """The number after the last ####, else in the last \\boxed{}, else the last of the text."""
    boxed = last_boxed(text)
    after_mark = text.rpartition("####")[2] if "####" in text else ""
    first, *_ = [*_numbers(after_mark)[:1], *_numbers(boxed or "")[-1:], *_numbers(text)[-1:], None]
    return first


def _numbers(text: str) -> list[Decimal]:
    found = (match.group().replace("$", "").replace(",", "") for match in NUMBER.finditer(text.replace("\\$", "$")))
    return [Decimal(number) for number in found]


def solves_math(facts: Mapping[str, Any], answer: str) -> bool:
    """Whether the answer's last \\boxed{} holds what the reference's does, up to spelling."""
    given, reference = last_boxed(answer), facts["reference"]
    wanted = last_boxed(reference)
    return given is not None and normalized(given) == normalized(reference if wanted is None else wanted)


def last_boxed(text: str) -> str | None:
    """Content of the last \\boxed{...} (or \\fbox) whose braces are balanced; None where there is none."""
    for match in reversed(list(re.finditer(r"\\f?boxed\s*\{|\\fbox\s*\{", text))):
        depth = 1
        for end in range(match.end(), len(text)):
            escaped = text[end - 1] == "\\" and text[end] in "{}"
            depth += 0 if escaped else (text[end] == "{") - (text[end] == "}")
            if depth == 0:
                return text[match.end() : end]
    return None


def normalized(latex: str) -> str:
    """A formula without what only changes how it looks; equal strings are equal answers, not the other way round."""
    text = re.sub(r"\\(?:left|right|displaystyle|,|!|;|:|quad)(?![a-zA-Z])|\\ |~", "", latex)
    text = re.sub(r"\\(?:text|textbf|mathrm|mathbf|mbox)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\(?:\$|%)|[$%]|\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\(?:degree|circ)(?![a-zA-Z])", "", text)
    text = re.sub(r"\s+", "", text).rstrip(".")
    text = re.sub(r"\\(frac|sqrt)(\d)(?!\d*\})", r"\\\1{\2}", text)
    text = re.sub(r"(\\frac\{[^{}]*\})(\d)", r"\1{\2}", text)
    text = re.sub(r"^[a-zA-Z]=", "", text)
    if re.fullmatch(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?", text):
        text = text.replace(",", "")
    return re.sub(r"(?<!\d)\.(?=\d)", "0.", text)


def solves_humaneval(facts: Mapping[str, Any], answer: str) -> bool:
    """Whether the answer's function passes the task's tests, in processes of their own."""
    prompt, entry_point = facts["prompt"], facts["entry_point"]
    return passes(
        answer_program(prompt, entry_point, answer),
        entry_point=entry_point,
        setup=before_function(prompt, entry_point),
        test=facts["test"],
    )


def answer_program(prompt: str, entry_point: str, answer: str) -> str:
    """The program of an answer, whose function is in a fence or is the answer itself.

    What the prompt has before the function, such as imports, is put in front of it. If the answer continues the
    function of the prompt, the whole prompt is.
    """
    blocks = FENCE.findall(answer)
    signature = _signature(entry_point)
    code = next((block for block in blocks if signature.search(block)), blocks[0] if blocks else answer)
    if signature.search(code):
        return before_function(prompt, entry_point) + "\n" + code
    return prompt.rstrip() + "\n" + _body(code)


def before_function(prompt: str, entry_point: str) -> str:
    """What a prompt has before the function that it asks for: imports and helpers, which the tests may use, too."""
    start = _signature(entry_point).search(prompt)
    return prompt[: start.start()] if start else ""


def _signature(entry_point: str) -> re.Pattern[str]:
    return re.compile(rf"^(?:async )?def {re.escape(entry_point)}\b", re.MULTILINE)


def _body(code: str) -> str:
    """A function's body, indented, up to where it ends."""
    lines = code.strip("\n").splitlines()
    if lines and not lines[0].startswith((" ", "\t")):
        # Answers often lose the indent of their first line, or of all.
        only_first = not lines[0].endswith(":") and all(line[:1] in ("", " ", "\t") for line in lines[1:])
        lines = ["    " + line if number == 0 or not only_first else line for number, line in enumerate(lines)]
    code = "\n".join(lines)
    end = AFTER_FUNCTION.search(code)
    return code[: end.start()] if end else code


SCORERS: dict[str, Callable[[Mapping[str, Any], str], bool]] = {
    "gsm8k": solves_gsm8k,
    "math500": solves_math,
    "humaneval": solves_humaneval,
}
