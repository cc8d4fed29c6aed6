"""Validated settings: the base of every configuration class, and errors that name the field and the fix."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import PurePath
from types import UnionType
from typing import Any, NoReturn, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from typing_extensions import Self

from jetspec.errors import JetSpecError, is_utf_8

#: What a value must be, by pydantic's type of error; the names in braces come from the error's context.
_REQUIREMENTS = {
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be one of {expected}",
    "finite_number": "must be a finite number",
    "too_short": "must hold at least {min_length}",
    "string_too_short": "must have at least {min_length} characters",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "bool_type": "must be True or False",
    "string_type": "must be text",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping",
    "none_required": "must be None",
}


class Config(BaseModel):
    """Base of the configuration classes: immutable, without unknown fields, and strict about types.

    Strict means that 1 is no boolean, True no integer and "1" no number; an integer passes where a float is asked for.
    A validator of a subclass may raise `JetSpecError` itself, where several fields disagree.

    Raises:
        JetSpecError: a field is unknown, missing, out of range or not valid UTF-8. The message names the
            field, the value and the fix.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, arbitrary_types_allowed=True, protected_namespaces=()
    )

    @field_validator("*", mode="before")
    @classmethod
    def _list_for_tuple(cls, value: Any, info: ValidationInfo) -> Any:
        """A list is taken where a tuple is asked for: JSON and YAML have no tuples."""
        hint = cls.model_fields[info.field_name or ""].annotation
        options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
        takes_tuple = any(get_origin(part) is tuple for part in options)
        return tuple(value) if takes_tuple and isinstance(value, list) else value

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise_config_error(type(self), error)
        for name in type(self).model_fields:
            _check_unicode(name, getattr(self, name))

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, validated like a new one."""
        return type(self)(**{**{name: getattr(self, name) for name in type(self).model_fields}, **changes})


def option(default: Any = ..., *, help: str, group: str | None = None, **constraints: Any) -> Any:
    """A field with a description, which is also its help on the command line.

    Args:
        default: the default value; without one the field is required.
        help: what the field sets, in one or two sentences.
        group: the panel of the command line's help that lists it.
        constraints: those of `pydantic.Field` (`ge`, `gt`, `le`, `lt`, ...), and `flags` (names on the command line,
            by default made of the field's own), `argument` (True for a field that is an argument there and no option),
            `fix` (what an error advises) or any other fact, which `option_extra` reads back.
    """
    known = {
        key: constraints.pop(key)
        for key in ("ge", "gt", "le", "lt", "min_length", "allow_inf_nan")
        if key in constraints
    }
    return Field(default, description=help, json_schema_extra={"group": group, **constraints}, **known)


def option_extra(field: FieldInfo, name: str, default: Any = None) -> Any:
    """A fact that `option` was given about a field, beyond pydantic's own constraints."""
    extra = field.json_schema_extra
    return extra.get(name, default) if isinstance(extra, dict) else default


def flag_of(name: str, field: FieldInfo) -> str:
    """The long name of a field's option, such as ``--max-tokens`` or ``--chat/--raw``."""
    flags: tuple[str, ...] = option_extra(field, "flags", ())
    return next((flag for flag in flags if flag.startswith("--")), f"--{name.replace('_', '-')}")


def _check_unicode(name: str, value: Any) -> None:
    """JetSpecError if a text or path holds bytes that are not UTF-8, which Python keeps as lone surrogates."""
    if isinstance(value, str | PurePath):
        if not is_utf_8(str(value)):
            raise JetSpecError(f"{name}={str(value)!a}: must be valid UTF-8; rename the file or convert the text")
    elif isinstance(value, tuple | list):
        for entry in value:
            _check_unicode(name, entry)
    elif isinstance(value, dict):
        _check_unicode(name, list(value.items()))


def raise_config_error(config: type[BaseModel], error: ValidationError) -> NoReturn:
    """Raise the first of pydantic's findings as a JetSpecError; the others are counted."""
    details = error.errors(include_url=False)
    raised = details[0].get("ctx", {}).get("error")
    if isinstance(raised, JetSpecError):  # by a validator, which said it all
        raise raised from None
    others = f" ({len(details)} fields are wrong)" if len({d["loc"][:1] for d in details}) > 1 else ""
    raise JetSpecError(_describe(config, details[0]) + others) from None


def _describe(config: type[BaseModel], details: ErrorDetails) -> str:
    path = ".".join(str(part) for part in details["loc"] if isinstance(part, int) or part in config.model_fields)
    name = path or ".".join(map(str, details["loc"])) or config.__name__
    if details["type"] == "missing":
        return f"{name}: is required"
    if details["type"] == "extra_forbidden":
        field = str(details["loc"][-1])
        close = get_close_matches(field, config.model_fields, 1)
        return f"{field}: is not a field of {config.__name__}" + (f"; did you mean {close[0]}?" if close else "")
    requirement = _REQUIREMENTS.get(details["type"])
    if requirement is None:
        return f"{name}={details['input']!r:.80}: {details['msg'].removeprefix('Value error, ')}"
    option_field = config.model_fields.get(str(details["loc"][0])) if details["loc"] else None
    fix = None if option_field is None else option_extra(option_field, "fix")
    return f"{name}={details['input']!r:.80}: {requirement.format(**details.get('ctx', {}))}" + (
        f"; {fix}" if fix else ""
    )
