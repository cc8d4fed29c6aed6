"""The base of the configuration classes: what it accepts, and how it names a fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import model_validator

from jetspec.config import Config, flag_of, option, option_extra
from jetspec.errors import JetSpecError


class Settings(Config):
    """One field of each type."""

    depth: int = option(4, help="Depth.", group="Shape", ge=2, flags=("--deep",))
    rate: float = option(0.5, help="Rate.", gt=0, le=1)
    kind: Literal["tree", "chain"] = option("tree", help="Kind.")
    causal: bool = option(True, help="Causal.")
    name: str | None = option(None, help="Name.")
    sizes: tuple[int, ...] = option((1,), help="Sizes.", min_length=1)
    layers: tuple[int, ...] | None = option(None, help="Layers.")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"depth": 1}, "depth=1: must be at least 2"),
        ({"depth": True}, "depth=True: must be an integer"),
        ({"depth": "3"}, "depth='3': must be an integer"),
        ({"depth": 2.5}, r"depth=2\.5: must be an integer"),
        ({"rate": 0}, "rate=0: must be above 0"),
        ({"rate": 1.5}, r"rate=1\.5: must be at most 1"),
        ({"rate": "x"}, "rate='x': must be a number"),
        ({"kind": "bush"}, "kind='bush': must be one of 'tree' or 'chain'"),
        ({"causal": 1}, "causal=1: must be True or False"),
        ({"name": 3}, "name=3: must be text"),
        ({"sizes": 3}, "sizes=3: must be a list"),
        ({"sizes": [1, "2"]}, r"sizes\.1='2': must be an integer"),
        ({"sizes": []}, r"sizes=\(\): must hold at least 1"),
        ({"layers": "1"}, "layers='1': must be a list"),
        ({"dept": 3}, "dept: is not a field of Settings; did you mean depth"),
        ({"depth": 1, "rate": 0}, r"depth=1.*\(2 fields are wrong\)"),
    ],
)
def test_a_wrong_field_is_named_with_its_value_and_the_fix(values: dict[str, Any], message: str) -> None:
    with pytest.raises(JetSpecError, match=message):
        Settings(**values)


class Pair(Config):
    """Two fields that must agree."""

    low: int
    high: int

    @model_validator(mode="after")
    def _in_order(self) -> Pair:
        if self.low > self.high:
            raise JetSpecError(f"low={self.low}: must not be above high={self.high}")
        return self


def test_a_validators_own_error_is_raised_as_it_is() -> None:
    with pytest.raises(JetSpecError, match=r"^low=2: must not be above high=1$"):
        Pair(low=2, high=1)
    with pytest.raises(JetSpecError, match=r"^high: is required$"):
        Pair(low=2)  # type: ignore[call-arg]


def test_an_integer_passes_as_a_float_and_a_copy_is_validated() -> None:
    settings = Settings(rate=1)
    assert settings.rate == 1.0
    assert settings.replace(depth=7).depth == 7
    with pytest.raises(JetSpecError, match="depth=0"):
        settings.replace(depth=0)


def test_facts_of_an_option_are_read_back() -> None:
    field = Settings.model_fields["depth"]
    assert option_extra(field, "flags") == ("--deep",)
    assert option_extra(field, "group") == "Shape"
    assert option_extra(field, "free", False) is False


def test_lists_are_taken_for_tuples() -> None:
    assert Settings(sizes=[4, 8], layers=[2]) == Settings(sizes=(4, 8), layers=(2,))
    assert Settings(name="[1]").name == "[1]"


def test_a_field_has_the_flag_it_names_or_one_made_of_its_name() -> None:
    class Named(Config):
        max_tokens: int = option(1, help="Tokens.")
        chat: bool = option(True, help="Chat.", flags=("-c", "--chat/--raw"))

    assert {name: flag_of(name, field) for name, field in Named.model_fields.items()} == {
        "max_tokens": "--max-tokens",
        "chat": "--chat/--raw",
    }


def test_errors_advise_the_fix_of_an_option() -> None:
    class Dial(Config):
        heat: float | None = option(None, help="Heat.", ge=0, allow_inf_nan=False, fix="use None for none")

    for value in (-1.0, float("nan"), float("inf"), "x"):
        with pytest.raises(JetSpecError, match=r"^heat=.*: must be .*; use None for none$"):
            Dial(heat=value)


class Texts(Config):
    """Fields that hold text, directly and inside."""

    name: str | None = None
    path: Path | None = None
    names: tuple[str, ...] = ()
    mapping: dict[str, Any] | None = None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", "a\udcff"),
        ("path", Path("a\udcff")),
        ("names", ("b", "a\udcff")),
        ("mapping", {"a\udcff": 1}),
        ("mapping", {"a": [{"b": "a\udcff"}]}),
    ],
)
def test_text_that_is_not_utf_8_is_refused(field: str, value: Any) -> None:
    with pytest.raises(
        JetSpecError, match=rf"^{field}='a\\udcff': must be valid UTF-8; rename the file or convert the text$"
    ):
        Texts(**{field: value})


def test_a_field_named_self_is_unknown() -> None:
    with pytest.raises(JetSpecError, match=r"^self: is not a field of Texts"):
        Texts(**{"self": 1})
