"""The records of a benchmark run, one JSON object a line: a header, then groups of answered questions, and failures.

Every figure of a report is computed from these records, so a run can be resumed, reported again and compared. A record
that holds what no run can have measured is refused when it is made and when it is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_args

from pydantic import Field, model_validator
from typing_extensions import Self

from jetspec.config import Config
from jetspec.errors import JetSpecError

#: Ways of decoding that a run can compare.
MethodName = Literal["hf", "plain", "ngram", "draft-model", "eagle", "dflash-chain", "dflash-tree", "jetspec"]
METHODS: tuple[MethodName, ...] = get_args(MethodName)
#: Parts of a round's time, in the order in which they happen.
PARTS = ("draft", "select", "verify", "accept", "commit", "other")
#: Every speed-up is over this one.
BASELINE: MethodName = "plain"


#: Methods that draft nothing, so that no budget applies.
UNDRAFTED: tuple[MethodName, ...] = ("hf", "plain")

Name = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Cell(Config):
    """One entry of a run's table: the data set and how it is answered. ``budget`` is None if a method drafts nothing.

    Raises:
        JetSpecError: a value is out of range, or the method and the budget do not fit.
    """

    dataset: Name
    method: MethodName
    budget: Positive | Literal["auto"] | None
    temperature: Seconds
    batch_size: Positive

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.budget is None) != (self.method in UNDRAFTED):
            raise JetSpecError(
                f"budget={self.budget!r}: must be {'None' if self.method in UNDRAFTED else 'a number of rows or auto'} "
                f"for method {self.method}"
            )
        return self

    @property
    def label(self) -> str:
        """The method with its budget, as in "jetspec 64"."""
        return self.method if self.budget is None else f"{self.method} {self.budget}"


class Answer(Config):
    """One turn of one question.

    Args:
        question: its id, unique within the data set.
        turn: number of the turn, from 0.
        token_ids: tokens of the answer.
        finish_reason: why it ended, such as "stop" or "length".
        correct: whether the answer solves the task; None if that is not known.
    """

    question: str
    turn: Count
    token_ids: list[Count]
    finish_reason: str
    correct: bool | None = None


class Group(Config):
    """``batch_size`` questions of a cell, answered together, with all their turns. Seconds are wall clock.

    Args:
        cell: what the group is a part of.
        index: number of the group within its data set.
        answers: every turn of every question.
        prefill_s: seconds until all prompts are read and the first tokens are there, summed over turns.
        decode_s: seconds of decoding after that.
        tokens: tokens that came in ``decode_s``.
        rounds: number of verify forwards of a sequence by the tokens that they committed, bonus token included:
            {"1": 10, "3": 4}. Empty for "hf".
        rows: rows of these forwards, summed; 1 for a forward without a draft.
        split_s: seconds of the `PARTS` of ``decode_s``.
        peak_bytes: most device memory that was allocated meanwhile; None on a CPU, where the methods share a process.

    Raises:
        JetSpecError: a value is out of range, or the counts contradict each other.
    """

    cell: Cell
    index: Count
    answers: Annotated[list[Answer], Field(min_length=1)]
    prefill_s: Seconds
    decode_s: Seconds
    tokens: Count
    rounds: dict[Annotated[str, Field(pattern="^[1-9][0-9]*$")], Positive] = Field(default_factory=dict)
    rows: Count = 0
    split_s: dict[str, Seconds] = Field(default_factory=dict)
    peak_bytes: Count | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        turns = [(answer.question, answer.turn) for answer in self.answers]
        questions = len({question for question, _ in turns})
        if len(set(turns)) < len(turns):
            raise JetSpecError("answers: two are of the same turn of the same question")
        if questions > self.cell.batch_size:
            raise JetSpecError(f"answers: {questions} questions, more than batch_size={self.cell.batch_size}")
        written = sum(len(answer.token_ids) for answer in self.answers)
        if self.tokens > written:
            raise JetSpecError(f"tokens={self.tokens}: must be at most the {written} tokens of the answers")
        if unknown := set(self.split_s) - set(PARTS):
            raise JetSpecError(f"split_s: {', '.join(sorted(unknown))} is none of {', '.join(PARTS)}")
        self._check_rounds()
        return self

    def _check_rounds(self) -> None:
        forwards = sum(self.rounds.values())
        committed = sum(int(tokens) * count for tokens, count in self.rounds.items())
        if committed not in (0, self.tokens):
            raise JetSpecError(f"rounds: commit {committed} tokens, but tokens={self.tokens}")
        # A forward commits the drafted tokens that it accepts, each of them one of its rows, and one token more.
        if self.rows < committed:
            raise JetSpecError(f"rows={self.rows}: must be at least the {committed} tokens that the rounds commit")
        most = 1 if self.cell.budget is None else self.cell.budget
        if most != "auto" and self.rows > most * forwards:
            raise JetSpecError(f"rows={self.rows}: must be at most {most} for each of {forwards} forwards")


class Failure(Config):
    """A cell that could not be measured, or not completely."""

    cell: Cell
    error: str


class Header(Config):
    """What a run is.

    Args:
        config: the settings that decide the results.
        machine: device, cpu, threads, dtype, and versions of python, torch, transformers and jetspec.
        peak_resident_bytes: most memory that the process had resident. The header is written again at the end for it.
    """

    config: dict[str, Any]
    machine: dict[str, Any]
    peak_resident_bytes: Count | None = None


Record = Header | Group | Failure
R = TypeVar("R")
_KINDS: dict[str, type[Header] | type[Group] | type[Failure]] = {"header": Header, "group": Group, "failure": Failure}


@dataclass(frozen=True)
class Run:
    """All records of a run."""

    header: Header
    groups: list[Group]
    failures: list[Failure]


def to_line(record: Record) -> str:
    """A record as a line of JSON, newline included."""
    kind = next(name for name, cls in _KINDS.items() if isinstance(record, cls))
    return json.dumps({"kind": kind, **record.model_dump()}, ensure_ascii=False, allow_nan=False) + "\n"


def read_run(path: str | Path) -> Run:
    """The records of a results file. A last line that was cut off is left out, because an interrupted run leaves one.

    Raises:
        JetSpecError: the file cannot be read or has no header, or a line is no record, holds values that no run
            measures, or contradicts an earlier line. The message names the file, the line and the field.
    """
    records: list[Record] = []
    seen: dict[Any, str] = {}
    for where, record in read_lines(path, _record):
        records.append(record)
        _check_new(record, seen, where)
    headers = [record for record in records if isinstance(record, Header)]
    if not headers:
        raise JetSpecError(f"{shown(path)}: not a benchmark's results: there is no header")
    if any((header.config, header.machine) != (headers[0].config, headers[0].machine) for header in headers):
        raise JetSpecError(f"{shown(path)}: holds the headers of two runs; keep the lines of one of them")
    groups = [record for record in records if isinstance(record, Group)]
    return Run(headers[-1], groups, [record for record in records if isinstance(record, Failure)])


def read_lines(path: str | Path, record: Callable[[dict[str, Any]], R]) -> Iterator[tuple[str, R]]:
    """Yield (where, record) for each line of a file. A last line that was cut off is left out.

    Args:
        path: a file with a JSON object a line.
        record: makes a record of the object.

    Raises:
        JetSpecError: the file cannot be read, or a line is no record. The message names the file and the line.
    """
    try:
        # Only "\n" ends a line: other characters that do so elsewhere may be in a record. The last line may end inside
        # a character.
        whole, _, _ = Path(path).read_bytes().rpartition(b"\n")
        lines = whole.decode("utf-8").split("\n") if whole else []
    except (OSError, ValueError) as error:
        raise JetSpecError(f"cannot read benchmark results from {shown(path)}: {error}") from error
    for number, line in enumerate(lines, 1):
        where = f"{shown(path)}, line {number}"
        yield where, _parse(line, where, record)


def shown(name: object) -> str:
    """A name as it can be printed: bytes that are not UTF-8 are escaped."""
    return str(name).encode("utf-8", "backslashreplace").decode()


def _check_new(record: Record, seen: dict[Any, str], where: str) -> None:
    """Raise JetSpecError if a record holds a group or a question that an earlier line holds, too."""
    if isinstance(record, Group):
        keys: list[tuple[str, Any]] = [("index", record.index)]
        keys += [("question", answer.question) for answer in record.answers]
        for name, value in keys:
            if (first := seen.setdefault((record.cell, name, value), where)) != where:
                raise JetSpecError(f"{where}: {name}={value!r} of {record.cell.label} is also in {first}")


def _parse(line: str, where: str, record: Callable[[dict[str, Any]], R]) -> R:
    try:
        return record(as_object("record", json.loads(line, parse_constant=_no_number)))
    except RecursionError:
        raise JetSpecError(f"{where}: not a benchmark's record: it is nested too deeply") from None
    except ValueError as error:  # which a JetSpecError is
        raise JetSpecError(f"{where}: not a benchmark's record: {error}") from error


def _record(values: dict[str, Any]) -> Record:
    kind = _KINDS.get(str(values.pop("kind", None)))
    if kind is None:
        raise JetSpecError(f"kind: must be one of {', '.join(_KINDS)}")
    if "cell" in values:
        values["cell"] = Cell(**as_object("cell", values["cell"]))
    if isinstance(values.get("answers"), list):
        values["answers"] = [Answer(**as_object("answers", answer)) for answer in values["answers"]]
    return kind(**values)


def as_object(name: str, value: Any) -> dict[str, Any]:
    """A value that must be a JSON object. JetSpecError, which names it, if it is none."""
    if not isinstance(value, dict):
        raise JetSpecError(f"{name}={value!r:.80}: must be an object")
    return value


def _no_number(name: str) -> NoReturn:
    raise JetSpecError(f"{name} is no number")
