"""Questions from both forms of the data sets, and how they are chosen and asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import jetspec.prompts
from jetspec.bench.datasets import DATASETS, load_questions, spread
from jetspec.errors import JetSpecError

#: Rows as the hub has them, beside those of the local copies, where fields have other names.
HUB: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": "Q?", "answer": "so\n#### 2"},
    "math500": {"problem": "P?", "solution": "\\boxed{3}", "answer": "3", "subject": "Algebra", "unique_id": "test/1"},
    "humaneval": {
        "task_id": "HumanEval/7",
        "prompt": "def f():\n",
        "canonical_solution": "    return 1\n",
        "test": "def check(c): pass",
        "entry_point": "f",
    },
    "mt_bench": {"prompt": ["One?", "Two?"], "category": "math", "prompt_id": 111, "reference": []},
}
LOCAL: dict[str, dict[str, Any]] = {
    "gsm8k": HUB["gsm8k"],
    "math500": {"problem": "P?", "solution": "\\boxed{3}\n#### 3"},
    "humaneval": HUB["humaneval"],
    "mt_bench": {"question_id": 111, "category": "math", "turns": ["One?", "Two?"]},
}
IDS = {"gsm8k": ("0", "0"), "math500": ("test/1", "0"), "humaneval": ("HumanEval/7",) * 2, "mt_bench": ("111",) * 2}
TURNS = {
    "gsm8k": ("Q?\n\nThink step by step and end with the answer as a number after ####.",),
    "math500": ("P?\n\nThink step by step and put the answer in \\boxed{}.",),
    "humaneval": (
        "Complete this function. Answer with the whole function in a block of code.\n\n```python\ndef f():\n```",
    ),
    "mt_bench": ("One?", "Two?"),
}


@pytest.mark.parametrize("name", DATASETS)
def test_both_forms_ask_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def entries(source: str) -> list[tuple[str, Any]]:
        asked.append(source)
        return [("row 0", HUB[name])]

    monkeypatch.setattr(jetspec.prompts, "_hub_entries", entries)
    (tmp_path / DATASETS[name].file).write_text(json.dumps(LOCAL[name]) + "\n")
    [hub], [local] = load_questions(name), load_questions(name, data=tmp_path)
    assert asked == [DATASETS[name].hub]
    assert (hub.id, local.id) == IDS[name]
    assert hub.turns == local.turns == TURNS[name]
    assert hub.facts.keys() == local.facts.keys()


def test_facts_are_what_scoring_needs(data: Path) -> None:
    facts = load_questions("humaneval", data=data)[0].facts
    assert set(facts) == {"prompt", "test", "entry_point"}
    assert facts["prompt"].startswith("import math")
    assert load_questions("gsm8k", data=data)[0].facts["reference"].endswith("#### 6")


def test_an_answer_of_its_own_is_taken_before_a_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jetspec.prompts, "_hub_entries", lambda source: [("row 0", HUB["math500"])])
    assert load_questions("math500")[0].facts == {"reference": "3"}


@pytest.mark.parametrize(
    ("n", "total", "chosen"), [(3, 9, [0, 3, 6]), (2, 5, [0, 2]), (5, 5, [0, 1, 2, 3, 4]), (9, 2, [0, 1]), (1, 7, [0])]
)
def test_questions_are_spread_evenly(n: int, total: int, chosen: list[int]) -> None:
    assert spread(range(total), n) == chosen
    assert spread(range(total), None) == list(range(total))


def test_a_chosen_question_keeps_its_number(data: Path) -> None:
    assert [q.number for q in load_questions("gsm8k", data=data, num_prompts=2)] == [0, 2]


def test_eight_questions_of_mt_bench_are_of_eight_categories(tmp_path: Path) -> None:
    rows = [{"question_id": i, "category": i // 10, "turns": ["a", "b"]} for i in range(80)]
    (tmp_path / "mt_bench.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chosen = load_questions("mt_bench", data=tmp_path, num_prompts=8)
    assert [int(q.id) // 10 for q in chosen] == list(range(8))


def test_a_later_turn_stands_behind_the_answers(data: Path) -> None:
    question = load_questions("mt_bench", data=data)[0]
    assert question.prompt([]) == "Say writing."
    assert question.prompt(["writing"]) == [
        {"role": "user", "content": "Say writing."},
        {"role": "assistant", "content": "writing"},
        {"role": "user", "content": "Again."},
    ]


def test_any_prompt_source(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    path.write_text(f'{{"prompt": "one"}}\n{json.dumps({"messages": turns})}\n{{"prompt_token_ids": [1, 2]}}\n')
    questions = load_questions(str(path))
    assert [(q.id, q.turns) for q in questions] == [("0", ("one",)), ("1", (turns[:1],)), ("2", ([1, 2],))]
    assert questions[0].facts == {}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "Q?"}, "line 1: no field answer; there are question"),
        ({"question": "", "answer": "1"}, "line 1: question: must be texts"),
        ({"question": "Q?", "answer": 18}, "line 1: answer: must be text, not 18"),
        ([], "line 1: not a JSON object"),
    ],
)
def test_rows_that_lack_something_are_refused(tmp_path: Path, row: Any, message: str) -> None:
    (tmp_path / "gsm8k_test.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(JetSpecError, match=message):
        load_questions("gsm8k", data=tmp_path)


def test_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(JetSpecError, match="gsm8k_test"):
        load_questions("gsm8k", data=tmp_path)
    with pytest.raises(JetSpecError, match="datasets='gsm9k': no such data set or file; give one of gsm8k, math500"):
        load_questions("gsm9k")


def test_answers_of_two_rows_with_one_id_would_be_mixed_up(tmp_path: Path) -> None:
    (tmp_path / "mt_bench.jsonl").write_text(2 * (json.dumps(LOCAL["mt_bench"]) + "\n"))
    with pytest.raises(JetSpecError, match="line 2: id '111' is also that of an earlier row"):
        load_questions("mt_bench", data=tmp_path)
