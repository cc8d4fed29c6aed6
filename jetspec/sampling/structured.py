"""Constrained output: which tokens a request's schema, pattern or grammar allows next. llguidance does the parsing."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from jetspec.errors import JetSpecError

_BITS = torch.arange(8, dtype=torch.uint8)


@dataclass(frozen=True)
class StructuredOutputsParams:
    """What form an answer must have; exactly one of the first five is given. Names and meanings follow vLLM.

    Args:
        json: a JSON schema, as a mapping or a string, or a class with `model_json_schema()` (a pydantic model).
        regex: a regular expression, in the syntax of Rust's `regex`, that the whole answer matches.
        choice: the possible answers.
        grammar: a context-free grammar in Lark or GBNF syntax.
        json_object: any JSON object.
        disable_any_whitespace: no whitespace between JSON tokens; needs `json` or `json_object`.

    Raises:
        JetSpecError: none or several are given, or one has the wrong type.
    """

    json: Mapping[str, Any] | str | type | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        forms = [f.name for f in fields(self)[:5]]
        given = [name for name in forms if getattr(self, name) is not (False if name == "json_object" else None)]
        if len(given) != 1:
            raise JetSpecError(f"structured_outputs: give exactly one of {', '.join(forms)}, got {given or 'none'}")
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool):
                raise JetSpecError(f"structured_outputs.{name}={getattr(self, name)!r}: must be True or False")
        for name in ("regex", "grammar"):
            text = getattr(self, name)
            if text is not None and (not isinstance(text, str) or not text):
                raise JetSpecError(f"structured_outputs.{name}={text!r}: must be a non-empty string")
        if self.choice is not None and (
            isinstance(self.choice, str)
            or not isinstance(self.choice, Sequence)
            or not self.choice
            or any(not isinstance(text, str) or not text for text in self.choice)
        ):
            raise JetSpecError(f"structured_outputs.choice={self.choice!r}: must be a list of non-empty strings")
        if self.json is not None:
            _schema(self.json)
        if self.disable_any_whitespace and given[0] not in ("json", "json_object"):
            raise JetSpecError("structured_outputs.disable_any_whitespace: needs json or json_object; leave it out")


class Grammar:
    """One answer's way through its grammar. `advance` takes every token of the answer, in order."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def complete(self) -> bool:
        """Whether nothing can follow the tokens so far."""
        return self._matcher.is_stopped()

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
    return Grammar(_compile(tokenizer, frozenset(eos_token_ids), _source(params)).deep_copy())


@lru_cache(maxsize=64)
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
            return library.grammar_from("regex", params.regex)
        if params.choice is not None:
            return library.grammar_from("choice", json.dumps(list(params.choice)))
        if params.grammar is not None:
            return library.grammar_from("grammar", params.grammar)
        schema = {"type": "object"} if params.json is None else _schema(params.json)
        options = {"whitespace_flexible": not params.disable_any_whitespace}
        return library.LLMatcher.grammar_from_json_schema(json.dumps(dict(schema)), defaults=options)
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
    return matcher.get_error().partition("<state>")[0].strip()


def _llguidance() -> Any:
    try:
        import llguidance.hf
    except ImportError:
        raise JetSpecError('structured_outputs needs the package llguidance: pip install "jetspec[grammar]"') from None
    return llguidance
