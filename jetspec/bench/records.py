"""What a benchmark run writes down, one JSON object a line: a header, then groups of questions answered, and failures.

Everything that a report says is computed from these records, so a run can be resumed, reported anew and compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from jetspec.errors import JetSpecError

#: Ways of decoding that a run can compare.
MethodName = Literal["hf", "plain", "ngram", "draft-model", "eagle", "dflash-chain", "dflash-tree", "jetspec"]
METHODS: tuple[MethodName, ...] = get_args(MethodName)
#: Parts of a round's time, in the order in which they happen.
PARTS = ("draft", "select", "verify", "accept", "commit", "other")
#: Every speed-up is over this one.
BASELINE: MethodName = "plain"


@dataclass(frozen=True)
class Cell:
    """One entry of a run's table: what is answered, and how. `budget` is None where a method drafts nothing."""

    dataset: str
    method: MethodName
    budget: int | Literal["auto"] | None
    temperature: float
    batch_size: int

    @property
    def label(self) -> str:
        """The method with its budget, as in "jetspec 64"."""
        return self.method if self.budget is None else f"{self.method} {self.budget}"


@dataclass(frozen=True)
class Answer:
    """One turn of one question."""

    question: str  # id, unique within the data set
    turn: int  # from 0
    token_ids: list[int]
    finish_reason: str
    #: Whether the answer solves the task; None where there is no way to tell.
    correct: bool | None = None


@dataclass(frozen=True)
class Group:
    """`batch_size` questions of a cell, answered together. Seconds are wall clock.

    A multi-turn question's turns are all in the group; seconds and counts are sums over them.
    """

    cell: Cell
    index: int  # number of the group within its data set
    answers: list[Answer]
    prefill_s: float  # until all prompts are read and the first tokens are there
    decode_s: float
    tokens: int  # tokens that came in `decode_s`
    #: Verify forwards of a sequence by the tokens they committed, bonus included: {"1": 10, "3": 4}. Empty for "hf".
    rounds: dict[str, int] = field(default_factory=dict)
    #: Rows of these forwards, summed: 1 a forward where nothing was drafted.
    rows: int = 0
    #: Parts of `decode_s`: draft (head forwards), build (trees), verify (target forward), accept, commit, other.
    split_s: dict[str, float] = field(default_factory=dict)
    #: Most device memory that was allocated meanwhile; None on a CPU, where all methods share one process.
    peak_bytes: int | None = None


@dataclass(frozen=True)
class Failure:
    """A cell that could not be measured, or not to its end."""

    cell: Cell
    error: str


@dataclass(frozen=True)
class Header:
    """What a run is: its configuration and the machine."""

    config: dict[str, Any]
    machine: dict[str, Any]  # device, cpu, threads, dtype, versions of python, torch, transformers and jetspec
    #: Most memory the process had resident, in bytes; written again at the end.
    peak_resident_bytes: int | None = None


Record = Header | Group | Failure
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
    return json.dumps({"kind": kind, **asdict(record)}, ensure_ascii=False) + "\n"


def read_run(path: str | Path) -> Run:
    """The records of a results file. A last line that was cut off is left out, as an interrupted run writes it.

    Raises:
        JetSpecError: the file cannot be read, a line is none of ours, or there is no header.
    """
    try:
        # Other characters that end lines stand in records as they are. The last line may end inside a character.
        whole, _, _ = Path(path).read_bytes().rpartition(b"\n")
        lines = whole.decode("utf-8").split("\n") if whole else []
    except (OSError, UnicodeDecodeError) as error:
        raise JetSpecError(f"cannot read benchmark results from {path}: {error}") from error
    records = _parse(path, lines)
    headers = [r for r in records if isinstance(r, Header)]
    if not headers:
        raise JetSpecError(f"{path}: not a benchmark's results: there is no header")
    return Run(
        headers[-1], [r for r in records if isinstance(r, Group)], [r for r in records if isinstance(r, Failure)]
    )


def _parse(path: str | Path, lines: Iterable[str]) -> list[Record]:
    records: list[Record] = []
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
            kind = _KINDS[values.pop("kind")]
            if kind is not Header:
                values["cell"] = Cell(**values["cell"])
            if kind is Group:
                values["answers"] = [Answer(**a) for a in values["answers"]]
            records.append(kind(**values))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise JetSpecError(f"{path}, line {number}: not a benchmark's record: {error!r}") from error
    return records
