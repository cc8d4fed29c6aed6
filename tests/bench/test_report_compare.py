"""Runs side by side."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jetspec.bench.records import Run
from jetspec.bench.report import compare
from jetspec.errors import JetSpecError
from tests.helpers.bench_records import cell, group, markdown_tables, sample_run

COLUMNS = ["method", "budget", "run", "speed-up", "tokens/s", "over old", "acceptance length", "accuracy"]


def without(run: Run, label: str) -> Run:
    return replace(run, groups=[g for g in run.groups if g.cell.label != label])


def test_cells_side_by_side() -> None:
    text = compare([("old", sample_run()), ("new", sample_run(factor=0.8))])
    assert text.startswith("# Comparison of old and new\n\nConfigurations and machines are the same.")
    gsm8k, other = markdown_tables(text)
    assert gsm8k[0] == COLUMNS
    rows = [row for row in gsm8k if row[:2] == ["jetspec", "16"]]
    assert rows == [
        ["jetspec", "16", "old", "2.00× (1.50–2.50)", "40.0", "1.00×", "2.00", "100.0% (2)"],
        # 80 tokens in 1.6 s over 80 in 2 s, the same in both groups.
        ["jetspec", "16", "new", "2.50× (1.88–3.12)", "50.0", "1.25× (1.25–1.25)", "2.00", "100.0% (2)"],
    ]
    assert [row[5] for row in gsm8k if row[0] == "ngram"] == ["–", "–"]
    assert [row[:4] for row in other[1:]] == [["jetspec", "32", "old", "–"], ["jetspec", "32", "new", "–"]]
    assert "## a\\<b\\>\\|c \\& d.jsonl, temperature 0.7, batch size 2" in text


def test_differences_are_named() -> None:
    new = sample_run(num_prompts=3, draft="head|<2>")
    new = replace(new, header=new.header.replace(machine={**new.header.machine, "versions": {"torch": "2.14"}}))
    text = compare([("old", sample_run()), ("n|w", new)])
    assert markdown_tables(text)[0] == [
        ["setting", "old", "n|w"],
        ["draft", "–", "head|<2>"],
        ["num_prompts", "2", "3"],
        ["machine.versions.torch", "2.13.0", "2.14"],
    ]
    assert text.index("num_prompts") < text.index("## ")


def test_cells_of_one_run_are_listed_apart() -> None:
    text = compare([("old", without(sample_run(), "jetspec 64")), ("new", without(sample_run(), "hf"))])
    gsm8k, _, alone = markdown_tables(text)
    assert "hf" not in [row[0] for row in gsm8k]
    assert ["jetspec", "64"] not in [row[:2] for row in gsm8k]
    setting = "gsm8k, temperature 0, batch size 1"
    assert alone[1:] == [["old", setting, "hf", "–"], ["new", setting, "jetspec", "64"]]


def test_two_of_three_runs_are_enough_and_the_first_may_lack_it() -> None:
    runs = [("a", without(sample_run(), "hf")), ("b", sample_run()), ("c", sample_run())]
    rows = [row for row in markdown_tables(compare(runs))[0] if row[0] == "hf"]
    assert [(row[2], row[4], row[5]) for row in rows] == [("b", "16.0", "–"), ("c", "16.0", "–")]


def test_the_ratio_is_over_questions_that_both_answered() -> None:
    def run(numbers: list[int], seconds: list[float]) -> Run:
        groups = [group(cell("plain"), n, s, rounds={"1": 40}, rows=40) for n, s in zip(numbers, seconds)]
        return replace(sample_run(), groups=groups, failures=[])

    # Question 1 took 2 s and 1 s. All questions together would be 80 / 5 against 80 / 5.
    old, new = run([0, 1], [3.0, 2.0]), run([1, 2], [1.0, 4.0])
    rows = markdown_tables(compare([("old", old), ("new", new)]))[-1][1:]
    assert [(row[4], row[5]) for row in rows] == [("16.0", "1.00×"), ("16.0", "2.00×")]
    # No question is shared.
    rows = markdown_tables(compare([("old", old), ("new", run([5], [1.0]))]))[-1][1:]
    assert [row[5] for row in rows] == ["1.00×", "–"]


def test_nothing_to_compare_is_an_error() -> None:
    run = sample_run()
    plain = replace(run, groups=[g for g in run.groups if g.cell.label == "plain"])
    with pytest.raises(JetSpecError, match="nothing to compare in old, new"):
        compare([("old", plain), ("new", without(run, "plain"))])
    with pytest.raises(JetSpecError, match="at least two"):
        compare([("old", run)])
