"""Validated settings: the base of every configuration class, and errors that name the field and the fix."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from typing_extensions import Self

from jetspec.errors import JetSpecError

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
        JetSpecError: a field is unknown, missing or out of range. The message names the field, the value and the fix.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, arbitrary_types_allowed=True, protected_namespaces=()
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise_config_error(type(self), error)

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
            by default made of the field's own), `fix` (what an error advises) or any other fact, which `option_extra`
            reads back.
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
