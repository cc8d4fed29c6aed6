"""What answers in a chat: a model in this process, or a server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Protocol

from jetspec.client import CHAT, Delta, OpenAIClient, Usage
from jetspec.prompts import Message

if TYPE_CHECKING:
    from jetspec.async_llm import AsyncLLM, RequestHandle
    from jetspec.sampling import SamplingParams


class Backend(Protocol):
    """Answers conversations, one at a time. Errors are JetSpecErrors."""

    def stream(self, messages: Sequence[Message]) -> AsyncGenerator[Delta, None]:
        """Yield the answer as it is written. Leaving the iteration ends it."""

    async def usage(self) -> Usage | None:
        """What the last answer cost; None if that is not known."""

    async def close(self) -> None:
        """Free what the backend holds."""


class LocalBackend:
    """Answers of an `AsyncLLM`, which is closed with the backend."""

    def __init__(
        self, llm: AsyncLLM, params: SamplingParams, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        self._llm = llm
        self._params = params
        self._kwargs = chat_template_kwargs
        self._last: RequestHandle | None = None

    async def stream(self, messages: Sequence[Message]) -> AsyncGenerator[Delta, None]:
        """Yield the answer as it is written."""
        self._last = None
        handle = await self._llm.submit_chat(messages, self._params, chat_template_kwargs=self._kwargs)
        self._last = handle
        try:
            async for piece in handle:
                yield Delta(piece.text, finish_reason=piece.finish_reason)
        finally:
            handle.cancel()

    async def usage(self) -> Usage | None:
        """What the last answer cost, also if it was stopped."""
        if self._last is None:
            return None
        metrics = (await self._last.result()).metrics
        return Usage(metrics.prompt_tokens, metrics.completion_tokens, metrics.rounds, metrics.decoded_tokens)

    async def close(self) -> None:
        """End the engine."""
        await self._llm.close()


class ServerBackend:
    """Answers of a model on a server, whose client is closed with the backend.

    Args:
        client: the client of the server.
        settings: the fields of every request beside its messages.
    """

    def __init__(self, client: OpenAIClient, settings: Mapping[str, Any]) -> None:
        self._client = client
        self._settings = settings
        self._usage: Usage | None = None

    async def stream(self, messages: Sequence[Message]) -> AsyncGenerator[Delta, None]:
        """Yield the answer as it comes."""
        self._usage = None
        async with aclosing(self._client.stream(CHAT, {**self._settings, "messages": list(messages)})) as stream:
            async for delta in stream:
                self._usage = delta.usage or self._usage
                yield delta

    async def usage(self) -> Usage | None:
        """What the server says that the last answer cost. Nothing is known of one that was stopped."""
        return self._usage

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()
