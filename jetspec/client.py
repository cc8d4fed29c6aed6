"""A client of OpenAI-compatible servers: answers as streams, for a chat or for many requests at once."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from jetspec.errors import JetSpecError

CHAT, COMPLETIONS = "chat/completions", "completions"
#: Characters of a server's error message that are shown.
SHOWN = 300


class ServerError(JetSpecError):
    """A request that a server did not answer. ``kind`` names the cause in one or two words, to be counted."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class Usage:
    """What a request cost, as the server counts it.

    Args:
        prompt_tokens: tokens of the prompt.
        completion_tokens: tokens of the answer.
        rounds: verify forwards that decoded for the request; None if the server does not report speculation.
        decoded_tokens: tokens that those forwards committed; None likewise.
    """

    prompt_tokens: int
    completion_tokens: int
    rounds: int | None = None
    decoded_tokens: int | None = None

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per verify forward; None if the server does not report it or nothing was decoded in a round."""
        return self.decoded_tokens / self.rounds if self.rounds and self.decoded_tokens is not None else None


@dataclass(frozen=True)
class Delta:
    """What one event of a stream adds to an answer. The usage comes last."""

    text: str = ""
    #: Text that a server sets apart from the answer, because a reasoning parser found it.
    reasoning: str = ""
    finish_reason: str | None = None
    usage: Usage | None = None

    @property
    def has_tokens(self) -> bool:
        """Whether the event brings text, or tells that there will be no more."""
        return bool(self.text or self.reasoning or self.finish_reason)


class OpenAIClient:
    """Streams answers of the server at ``url``. Any number of requests may run at a time. A context manager.

    It takes no proxies or keys from environment variables.

    Args:
        url: the base of the API, as ``http://host:port/v1``. ``/v1`` is added to an address without a path.
        api_key: sent as a bearer token.
        timeout_s: seconds without any data, after which a request fails.

    Raises:
        JetSpecError: the address is no http or https URL, or the library is missing.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        try:
            import httpx2
        except ImportError as error:
            raise JetSpecError("the client of servers needs httpx2: pip install 'jetspec[chat]'") from error
        self.url = base_url(url)
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._errors = httpx2.HTTPError, httpx2.TimeoutException
        self._events = httpx2.EventSource
        limits = httpx2.Limits(max_connections=None)
        self._http = httpx2.AsyncClient(headers=headers, timeout=timeout_s, limits=limits, trust_env=False)

    async def __aenter__(self) -> OpenAIClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def models(self) -> list[str]:
        """The names of the models that the server lists.

        Raises:
            ServerError: it cannot be reached, or answers something else.
        """
        async with self._reported("models"):
            reply = await self._http.get(f"{self.url}/models")
            self._check_status(reply.status_code, reply.reason_phrase, reply.text)
            try:
                return [str(entry["id"]) for entry in reply.json()["data"]]
            except (ValueError, LookupError, TypeError) as error:
                raise ServerError("reply", f"{self.url}/models: not a list of models: {reply.text[:SHOWN]}") from error

    async def model(self, name: str | None) -> str:
        """``name``, or the only model of the server. JetSpecError if it lists none or several."""
        if name is not None:
            return name
        names = await self.models()
        if len(names) != 1:
            listed = ", ".join(names) or "none"
            raise JetSpecError(f"model: the server at {self.url} has these models: {listed}; name one with --model")
        return names[0]

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Delta, None]:
        """Send a request and yield what its answer adds, event by event. Leaving the iteration closes the connection.

        Args:
            path: `CHAT` or `COMPLETIONS`.
            body: the request. Fields that ask for a stream with its usage are added.

        Raises:
            ServerError: the server cannot be reached, refuses the request, or breaks the stream off.
        """
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        finished = False
        async with self._reported(path), self._http.stream("POST", f"{self.url}/{path}", json=body) as response:
            if response.is_error:
                await response.aread()
                self._check_status(response.status_code, response.reason_phrase, response.text)
            async for event in self._events(response):
                if event.data.strip() == "[DONE]":
                    return
                delta = self._delta(event.data)
                finished = finished or delta.finish_reason is not None
                yield delta
        if not finished:
            raise ServerError("broken stream", f"{self.url}: the stream ended before the answer did")

    @asynccontextmanager
    async def _reported(self, path: str) -> AsyncIterator[None]:
        """Turn the library's errors into a ServerError."""
        http, timeout = self._errors
        try:
            yield
        except timeout as error:
            raise ServerError("timeout", f"{self.url}/{path}: no data for too long ({type(error).__name__})") from error
        except http as error:
            says = str(error) or type(error).__name__
            raise ServerError("connection", f"{self.url}/{path}: {says}; check the address and the server") from error

    def _check_status(self, status: int, reason: str, text: str) -> None:
        if status >= 400:
            raise ServerError(f"HTTP {status}", f"{self.url}: {status} {reason}: {_message(text)[:SHOWN]}")

    def _delta(self, data: str) -> Delta:
        try:
            event = json.loads(data)
            if event.get("error"):
                raise ServerError("error event", f"{self.url}: {_message(data)[:SHOWN]}")
            choice = event["choices"][0] if event.get("choices") else {}
            part = choice.get("delta") or {"content": choice.get("text")}
            return Delta(
                text=part.get("content") or "",
                reasoning=part.get("reasoning_content") or part.get("reasoning") or "",
                finish_reason=choice.get("finish_reason"),
                usage=_usage(event),
            )
        except ServerError:
            raise
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ServerError("reply", f"{self.url}: not an event of a completion: {data[:SHOWN]}") from error


def base_url(url: str) -> str:
    """The base of an API, without a slash at its end.

    Raises:
        JetSpecError: it is no http or https URL, or holds a user name or password.
    """
    try:
        parts = urlsplit(url)
        host = parts.hostname if parts.port != 0 else None
    except ValueError:
        host = None
    if not host or parts.scheme not in ("http", "https"):
        raise JetSpecError(f"url={url!r}: must be the address of a server, like http://localhost:8000/v1")
    if parts.username or parts.password:
        raise JetSpecError("url: must not hold a user name or password; give --api-key")
    if parts.query or parts.fragment:
        raise JetSpecError(f"url={url!r}: must end with its path, like http://localhost:8000/v1")
    return url.rstrip("/") + ("" if parts.path.strip("/") else "/v1")


def _usage(event: Mapping[str, Any]) -> Usage | None:
    counts = event.get("usage")
    if not counts:
        return None
    speculation = event.get("jetspec")
    rounds, decoded = (_count(speculation, name) for name in ("rounds", "decoded_tokens"))
    return Usage(int(counts["prompt_tokens"]), int(counts["completion_tokens"]), rounds, decoded)


def _count(facts: Any, name: str) -> int | None:
    """A number among facts that a server need not give."""
    value = facts.get(name) if isinstance(facts, dict) else None
    return value if isinstance(value, int) and value >= 0 else None


def _message(text: str) -> str:
    """What an error's JSON says, or the text itself, on one line."""
    try:
        found = json.loads(text)
        error = found.get("error", found)
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        pass
    return " ".join(text.split())
