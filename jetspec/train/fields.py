"""Fields of a configuration: what each may hold, said once for Python, files and the command line."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from jetspec.errors import JetSpecError

HINT = "option"


@dataclass(frozen=True)
class Option:
    """What is known of a field beside its type and default. ``least`` and ``most`` are allowed, ``above`` is not."""

    help: str
    group: str | None = None
    least: float | None = None
    most: float | None = None
    above: float | None = None
    #: Names on the command line; by default the field's own.
    flags: tuple[str, ...] = ()
    #: Whether a resumed run may change it, because it changes neither what is trained nor in which order.
    free: bool = False


def option(default: Any = MISSING, *, help: str, group: str | None = None, **limits: Any) -> Any:
    """A dataclass field with an ``Option``; without a default it must be given."""
    return dataclasses.field(default=default, metadata={HINT: Option(help, group, **limits)})


def option_of(field: dataclasses.Field[Any]) -> Option:
    found: Option = field.metadata[HINT]
    return found


def flag_of(name: str) -> str:
    """The command line's name of a field that has no other."""
    return f"--{name.replace('_', '-')}"


@dataclass(frozen=True)
class Kind:
    """A field's type, taken apart."""

    types: tuple[type, ...]
    choices: tuple[str, ...] = ()
    optional: bool = False
    #: Type of the entries, where the field is a tuple.
    entries: type | None = None


def kinds(config: type) -> dict[str, Kind]:
    """The type of every field of a dataclass, by name."""
    return {name: _kind(hint) for name, hint in get_type_hints(config).items()}


def _kind(hint: Any) -> Kind:
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    plain = [part for part in parts if part is not type(None)]
    optional = len(plain) < len(parts)
    [first, *_] = plain
    if get_origin(first) is Literal:
        return Kind((str,), get_args(first), optional)
    if get_origin(first) is tuple:
        return Kind((tuple,), (), optional, get_args(first)[0])
    return Kind(tuple(plain), (), optional)


def check_names(names: Mapping[str, Any], config: type, where: str) -> None:
    """JetSpecError where ``names`` holds one that is no field of ``config``; names the closest that is."""
    known = [field.name for field in dataclasses.fields(config)]
    for name in names:
        if name not in known:
            close = get_close_matches(str(name), known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(known)}"
            raise JetSpecError(f"{where}: unknown field {name!r}; {hint}")


def checked(name: str, value: Any, kind: Kind, option: Option) -> Any:
    """``value`` as the field ``name`` holds it: text is read, lists become tuples.

    Raises:
        JetSpecError: another type or out of range.
    """
    if value is None and kind.optional:
        return None
    value = _typed(name, value, kind)
    if kind.choices and value not in kind.choices:
        raise JetSpecError(f"{name}={value!r}: one of {', '.join(kind.choices)}")
    for number in value if isinstance(value, tuple) else (value,):
        if option.least is not None and number < option.least:
            raise JetSpecError(f"{name}={number}: must be at least {option.least}")
        if option.most is not None and number > option.most:
            raise JetSpecError(f"{name}={number}: must be at most {option.most}")
        if option.above is not None and not number > option.above:
            raise JetSpecError(f"{name}={number}: must be above {option.above}")
    return value


def _typed(name: str, value: Any, kind: Kind) -> Any:
    if kind.entries is not None:
        entries = value.split(",") if isinstance(value, str) else value
        if not isinstance(entries, (list, tuple)) or not entries:
            raise JetSpecError(f"{name}={value!r}: give a list like {_EXAMPLES[kind.entries]}")
        return tuple(_scalar(name, entry, (kind.entries,)) for entry in entries)
    return _scalar(name, value, kind.types)


def _scalar(name: str, value: Any, wanted: tuple[type, ...]) -> Any:
    if type(value) in wanted or (Path in wanted and isinstance(value, Path)):
        # An id may be written as text where text is allowed as well.
        return int(value) if int in wanted and isinstance(value, str) and value.isdecimal() else value
    if dict in wanted and isinstance(value, str):
        try:
            return _scalar(name, json.loads(value), wanted)
        except ValueError as error:
            raise JetSpecError(f"{name}={value}: not valid JSON: {error}") from error
    if float in wanted and type(value) is int:
        return float(value)
    if isinstance(value, str) and bool not in wanted:
        for convert in (int, float):
            if convert in wanted:
                try:
                    return convert(value)
                except ValueError:
                    continue
    raise JetSpecError(f"{name}={value!r}: must be {' or '.join(_NAMES.get(t, t.__name__) for t in wanted)}")


_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    dict: "an object",
}
_EXAMPLES = {int: "1,8,15", str: "a,b"}
