"""Constrained output: which tokens a request's schema, pattern or grammar allows next. llguidance does the parsing."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, cast

import torch
from pydantic import SkipValidation, model_validator
from torch import Tensor
from typing_extensions import Self

from jetspec.config import Config, option
from jetspec.errors import JetSpecError

#: Fields of `StructuredOutputsParams` that each say a form.
FORMS = ("json", "regex", "choice", "grammar", "json_object")
#: Compiled grammars that are kept: a call may hold as many prompts with a form of their own, and each is compiled once.
KEPT_GRAMMARS = 1024

_BITS = torch.arange(8, dtype=torch.uint8)


with warnings.catch_warnings():
    # vLLM's name for the field is that of an old method of pydantic's.
    warnings.filterwarnings("ignore", message='Field name "json"')

    class StructuredOutputsParams(Config):
        """The form an answer must have. Names and meanings follow vLLM.

        Exactly one of `json`, `regex`, `choice`, `grammar` and `json_object` is given.

        Raises:
            JetSpecError: none or several are given, or one has the wrong type.
        """

        json: SkipValidation[Mapping[str, Any] | str | type | None] = option(  # type: ignore[assignment]
            None, help="A JSON schema, as a mapping or a text, or a class with model_json_schema() (a pydantic model)."
        )
        regex: SkipValidation[str | None] = option(
            None, help="A regular expression, in the syntax of Rust's regex, that the whole answer matches."
        )
        choice: SkipValidation[Sequence[str] | None] = option(None, help="The possible answers.")
        grammar: SkipValidation[str | None] = option(None, help="A context-free grammar in Lark or GBNF syntax.")
        json_object: SkipValidation[bool] = option(False, help="Any JSON object.")
        disable_any_whitespace: SkipValidation[bool] = option(
            False, help="No whitespace between JSON tokens; needs json or json_object."
        )

        @model_validator(mode="after")
        def _check(self) -> Self:
            _check_form(self)
            return self

        @cached_property
        def source(self) -> str:
            """The grammar in the format of llguidance. JetSpecError if it is invalid or the library is missing."""
            return _source(self)


def _check_form(params: StructuredOutputsParams) -> None:
    given = [name for name in FORMS if getattr(params, name) is not (False if name == "json_object" else None)]
    if len(given) != 1:
        raise JetSpecError(f"structured_outputs: give exactly one of {', '.join(FORMS)}, got {given or 'none'}")
    for name in ("json_object", "disable_any_whitespace"):
        if not isinstance(getattr(params, name), bool):
            raise JetSpecError(f"structured_outputs.{name}={getattr(params, name)!r}: must be True or False")
    for name in ("regex", "grammar"):
        text = getattr(params, name)
        if text is not None and (not isinstance(text, str) or not text):
            raise JetSpecError(f"structured_outputs.{name}={text!r}: must be a non-empty string")
    if params.choice is not None and (
        isinstance(params.choice, str)
        or not isinstance(params.choice, Sequence)
        or not params.choice
        or any(not isinstance(text, str) or not text for text in params.choice)
    ):
        raise JetSpecError(f"structured_outputs.choice={params.choice!r}: must be a list of non-empty strings")
    if params.json is not None:
        _schema(params.json)
    if params.disable_any_whitespace and given[0] not in ("json", "json_object"):
        raise JetSpecError("structured_outputs.disable_any_whitespace: needs json or json_object; leave it out")


class Grammar:
    """One answer's way through its grammar. `advance` takes every token of the answer, in order."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def complete(self) -> bool:
        """Whether nothing can follow the tokens so far."""
        return bool(self._matcher.is_stopped())

    def allowed(self, vocab_size: int, device: torch.device) -> Tensor:
        """Which tokens may come next, [vocab_size] bool; an end-of-text token where the answer may end.

        Ids that the tokenizer does not know, as of a padded vocabulary, are never allowed.

        Raises:
            JetSpecError: the grammar became too complex to follow.
        """
        packed = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8).to(device)
        if self._matcher.is_error():
            raise JetSpecError(f"structured_outputs: {_reason(self._matcher)}")
        bits = ((packed[:, None] >> _BITS.to(device)) & 1).flatten()[:vocab_size].bool()
        return torch.nn.functional.pad(bits, (0, vocab_size - len(bits)))

    def advance(self, token: int) -> None:
        """Take the answer's next token. JetSpecError if it is not allowed."""
        if not self._matcher.consume_token(token):
            raise JetSpecError(
                f"structured_outputs: token {token} is not allowed here; a logits processor must not raise what is -inf"
            )


def new_grammar(tokenizer: Any, eos_token_ids: Collection[int], params: StructuredOutputsParams) -> Grammar:
    """The beginning of an answer that must have the form `params` describe. Compiled grammars are kept.

    Raises:
        JetSpecError: the library is missing, the tokenizer cannot be used, or the grammar is invalid or holds no text.
    """
    if tokenizer is None:
        raise JetSpecError("structured_outputs needs a tokenizer: this target has none")
    return Grammar(_compile(tokenizer, frozenset(eos_token_ids), params.source).deep_copy())


@lru_cache(maxsize=KEPT_GRAMMARS)
def _compile(tokenizer: Any, eos_token_ids: frozenset[int], source: str) -> Any:
    matcher = _llguidance().LLMatcher(_bridge(tokenizer, eos_token_ids), source, log_level=0)
    if matcher.is_error():
        raise JetSpecError(f"structured_outputs: {_reason(matcher)}")
    matcher.compute_bitmask()
    if matcher.is_error():
        raise JetSpecError("structured_outputs: no text satisfies the grammar")
    return matcher


@lru_cache(maxsize=4)
def _bridge(tokenizer: Any, eos_token_ids: frozenset[int]) -> Any:
    """The library's own view of a tokenizer; a second or so to build for a large vocabulary."""
    known = sorted(token for token in eos_token_ids if token < len(tokenizer))
    if not known:
        raise JetSpecError("structured_outputs needs an end-of-text token: this target and its tokenizer name none")
    try:
        return _llguidance().hf.from_tokenizer(tokenizer, eos_token=known)
    except ValueError as error:
        raise JetSpecError(f"structured_outputs: {type(tokenizer).__name__} cannot be used: {error}") from None


def _source(params: StructuredOutputsParams) -> str:
    """The grammar in the library's own format."""
    library = _llguidance()
    try:
        if params.regex is not None:
            return cast(str, library.grammar_from("regex", params.regex))
        if params.choice is not None:
            return cast(str, library.grammar_from("choice", json.dumps(list(params.choice))))
        if params.grammar is not None:
            return cast(str, library.grammar_from("grammar", params.grammar))
        schema = {"type": "object"} if params.json is None else _schema(params.json)
        options = {"whitespace_flexible": not params.disable_any_whitespace}
        return cast(str, library.LLMatcher.grammar_from_json_schema(json.dumps(dict(schema)), defaults=options))
    except (ValueError, TypeError) as error:
        raise JetSpecError(f"structured_outputs: {error}") from None


def _schema(schema: Any) -> Mapping[str, Any]:
    """A JSON schema as a mapping, in whichever of its three forms it came."""
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except json.JSONDecodeError as error:
            raise JetSpecError(f"structured_outputs.json: not valid JSON: {error}") from None
    if not isinstance(schema, Mapping):
        raise JetSpecError(
            f"structured_outputs.json={schema!r:.80}: must be a schema (mapping or JSON text) or a pydantic model class"
        )
    return schema


def _reason(matcher: Any) -> str:
    """What the library says is wrong, without its dump of the parser."""
    return str(matcher.get_error()).partition("<state>")[0].strip()


def _llguidance() -> Any:
    try:
        import llguidance.hf
    except ImportError:
        raise JetSpecError('structured_outputs needs the package llguidance: pip install "jetspec[grammar]"') from None
    return llguidance
