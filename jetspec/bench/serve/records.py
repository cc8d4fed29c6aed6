"""The records of a load test, one JSON object a line: a header, then a level for each rate.

A level is written when all of its requests have ended, so a run that was interrupted starts its last level again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator
from typing_extensions import Self

from jetspec.bench.records import Count, Header, Name, Seconds, as_object, read_lines, shown
from jetspec.config import Config
from jetspec.errors import JetSpecError

#: The file of a load test in its folder.
LEVELS = "levels.jsonl"


class Answered(Config):
    """One request. Times are seconds since the start of its level.

    Args:
        question: id of the question in its data set.
        arrival_s: when it was to be sent; drawn before the level started.
        sent_s: when it was sent. Later than ``arrival_s`` by what it waited for a free place.
        first_token_s: when the first text came; None if none did.
        last_token_s: when the last text or the end of the answer came; None if the request failed.
        end_s: when the request had ended, in whichever way.
        prompt_tokens, completion_tokens: the server's counts; None if the request failed.
        rounds, decoded_tokens: verify forwards that decoded for the request, and the tokens that they committed; None
            if the server does not report them.
        error: the cause in a few words, if the request failed.

    Raises:
        JetSpecError: a value is out of range, or times or counts contradict each other.
    """

    question: str
    arrival_s: Seconds
    sent_s: Seconds
    first_token_s: Seconds | None = None
    last_token_s: Seconds | None = None
    end_s: Seconds
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    rounds: Count | None = None
    decoded_tokens: Count | None = None
    error: Name | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = ("arrival_s", "sent_s", "first_token_s", "last_token_s", "end_s")
        times = [(name, getattr(self, name)) for name in names if getattr(self, name) is not None]
        for (before, early), (after, late) in pairwise(times):
            if late < early:
                raise JetSpecError(f"{after}={late}: must be at least {before}={early}")
        if self.error is None:
            for name in ("first_token_s", "last_token_s", "prompt_tokens", "completion_tokens"):
                if getattr(self, name) is None:
                    raise JetSpecError(f"{name}: is required of a request without an error")
        return self


class Level(Config):
    """All requests at one rate.

    Args:
        rate: mean requests a second.
        requests: in the order of their arrival.
    """

    rate: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    requests: Annotated[list[Answered], Field(min_length=1)]


@dataclass(frozen=True)
class LoadTest:
    """All records of a load test."""

    header: Header
    levels: list[Level]


def to_line(record: Header | Level) -> str:
    """A record as a line of JSON, newline included."""
    kind = "header" if isinstance(record, Header) else "level"
    return json.dumps({"kind": kind, **record.model_dump()}, ensure_ascii=False, allow_nan=False) + "\n"


def read_load_test(path: Path) -> LoadTest:
    """The records of a file. A last line that was cut off is left out.

    Raises:
        JetSpecError: the file cannot be read or does not start with a header, or a line is no record, or repeats a
            rate. The message names the file, the line and the field.
    """
    records: list[Header | Level] = []
    for _, record in read_lines(path, _record):
        records.append(record)
    if not records or not isinstance(records[0], Header):
        raise JetSpecError(f"{shown(path)}: not the results of a load test: it does not start with a header")
    levels = [record for record in records if isinstance(record, Level)]
    rates = [level.rate for level in levels]
    if len(levels) < len(records) - 1 or len(set(rates)) < len(rates):
        raise JetSpecError(f"{shown(path)}: holds two headers, or two levels of one rate; keep the lines of one run")
    return LoadTest(records[0], levels)


def _record(values: dict[str, Any]) -> Header | Level:
    kind = values.pop("kind", None)
    if kind == "header":
        return Header(**values)
    if kind != "level":
        raise JetSpecError("kind: must be one of header, level")
    if isinstance(values.get("requests"), list):
        values["requests"] = [Answered(**as_object("requests", entry)) for entry in values["requests"]]
    return Level(**values)
