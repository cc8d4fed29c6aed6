"""A small hand-made run that has everything a report must cope with, and a reader of tables."""

from __future__ import annotations

import re
from typing import Any

from jetspec.bench.records import Answer, Cell, Failure, Group, Header, MethodName, Run, to_line

BYTES = 2_500_000_000


def group(
    cell: Cell,
    index: int,
    decode_s: float,
    *,
    tokens: int = 40,
    rounds: dict[str, int] | None = None,
    answer: int = 7,
    correct: bool | None = None,
    **rest: Any,
) -> Group:
    """A group of `batch_size` questions whose answers repeat one token; half of the time is the target's forwards."""
    token_ids = [answer] * (1 + tokens // cell.batch_size) if tokens else []
    answers = [
        Answer(question=f"q{index}-{n}", turn=0, token_ids=token_ids, finish_reason="stop", correct=correct)
        for n in range(cell.batch_size)
    ]
    parts = {"draft": 0.2, "select": 0.05, "verify": 0.5, "accept": 0.05, "commit": 0.1, "other": 0.1}
    split = {name: share * decode_s for name, share in parts.items()} if rounds else {}
    return Group(
        cell=cell,
        index=index,
        answers=answers,
        prefill_s=0.25,
        decode_s=decode_s,
        tokens=tokens,
        rounds=rounds or {},
        split_s=split,
        **rest,
    )


def cell(
    method: MethodName, budget: Any = None, dataset: str = "gsm8k", temperature: float = 0.0, size: int = 1
) -> Cell:
    return Cell(dataset=dataset, method=method, budget=budget, temperature=temperature, batch_size=size)


def sample_run(*, factor: float = 1.0, **config: Any) -> Run:
    """Two data sets: one with baseline, budgets, a failure and accuracy; one without a baseline, sampled and batched.

    gsm8k, plain: 80 tokens in 4 s. jetspec 16: 80 in 2 s x `factor`. jetspec 64: the same in 1.6 s, one answer of two
    differs. jetspec auto: one group of 40 in 0.8 s. ngram: empty answers. hf: no rounds.
    """
    groups = []
    for index in range(2):
        groups += [
            group(cell("plain"), index, 2.0 + index - 0.5, rounds={"1": 40}, rows=40, correct=index == 0),
            group(cell("hf"), index, 2.5),
            group(cell("jetspec", 64), index, 0.8, rounds={"1": 4, "2": 8, "4": 5}, rows=17 * 64, answer=7 + index),
            group(cell("jetspec", 16), index, factor, rounds={"2": 20}, rows=320, correct=True, peak_bytes=BYTES),
            group(cell("ngram", "auto"), index, 0.0, tokens=0),
        ]
    groups.append(group(cell("jetspec", "auto"), 0, 0.8, rounds={"2": 20}, rows=250))
    other = cell("jetspec", 32, dataset="a<b>|c & d.jsonl", temperature=0.7, size=2)
    groups.append(group(other, 0, 1.0, rounds={"4": 10}, rows=320))
    failures = [
        Failure(cell=cell("eagle", 16), error="shapes <1> & [2|3]\n  do *not* match"),
        Failure(cell=cell("jetspec", "auto"), error="first try"),
        Failure(cell=cell("jetspec", "auto"), error="out of memory"),
    ]
    values = {"target": "model<x>|a&b_*c*", "draft": None, "budgets": [16, 64, "auto"], "num_prompts": 2, **config}
    machine = {"device": "cpu", "threads": 2, "dtype": "float32", "versions": {"torch": "2.13.0"}}
    return Run(Header(config=values, machine=machine, peak_resident_bytes=BYTES), groups, failures)


def write_run(run: Run, path: Any) -> None:
    """The run's results file."""
    lines = [to_line(record) for record in [run.header, *run.groups, *run.failures]]
    path.write_text("".join(lines), encoding="utf-8")


def markdown_tables(text: str) -> list[list[list[str]]]:
    """Tables of a Markdown text, escapes undone."""
    tables: list[list[list[str]]] = [[]]
    for line in text.splitlines():
        if line.startswith("| "):
            cells = re.split(r"(?<!\\) ?\| ?", line)[1:-1]
            tables[-1].append([re.sub(r"\\(.)", r"\1", c) for c in cells])
        elif tables[-1]:
            tables.append([])
    return [[row for row in table if not set("".join(row)) <= set("-:")] for table in tables if table]
