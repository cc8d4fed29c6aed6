"""The errors JetSpec raises for input that it cannot honour."""

from typing import Any


class JetSpecError(ValueError):
    """A request, checkpoint or model that cannot be honoured; the message names the field and the fix."""


class EngineError(JetSpecError):
    """The engine was closed or stopped on an error of its own: nothing runs on it any more."""


def is_positive_integer(value: object) -> bool:
    """Whether a user's value counts something: an int, no bool, of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def is_utf_8(text: str) -> bool:
    """Whether a text can be written in UTF-8, which lone surrogates cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class RequestError(JetSpecError):
    """Requests that failed while others ran on; `outputs` holds what every request of the call produced."""

    def __init__(self, message: str, outputs: list[Any]) -> None:
        super().__init__(message)
        self.outputs = outputs
