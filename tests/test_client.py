"""The client of OpenAI-compatible servers: what it sends, what it reads, and which errors it tells apart."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from jetspec.client import CHAT, COMPLETIONS, Delta, OpenAIClient, ServerError, Usage, base_url
from jetspec.errors import JetSpecError
from tests.helpers.openai_server import BREAK, ROLE, WAIT, FakeServer, delta, fake_server, finish, usage

BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as fake:
        yield fake


def read(url: str, path: str = CHAT, body: dict[str, Any] = BODY, **options: Any) -> list[Delta]:
    async def run() -> list[Delta]:
        async with OpenAIClient(url, **options) as client:
            return [delta async for delta in client.stream(path, body)]

    return asyncio.run(run())


def test_a_stream_is_read_to_its_usage(server: FakeServer) -> None:
    server.answer = lambda body: [
        ROLE,
        delta("", reasoning="Hm."),
        delta("Gr\u00fc\u00dfe"),
        finish("length"),
        usage(3, 5, rounds=2, decoded_tokens=4),
    ]
    found = read(server.url, api_key="secret")
    assert [d.text for d in found] == ["", "", "Gr\u00fc\u00dfe", "", ""]
    assert [d.reasoning for d in found] == ["", "Hm.", "", "", ""]
    assert [d.has_tokens for d in found] == [False, True, True, True, False]
    assert found[3].finish_reason == "length"
    assert found[4].usage == Usage(3, 5, rounds=2, decoded_tokens=4)
    assert found[4].usage.acceptance_length == 2.0
    assert server.keys == ["Bearer secret"]
    assert server.paths == ["/v1/chat/completions"]
    assert server.requests == [{**BODY, "stream": True, "stream_options": {"include_usage": True}}]


def test_completions_hold_text(server: FakeServer) -> None:
    server.answer = lambda body: [{"choices": [{"text": "Hello", "finish_reason": "stop"}]}, usage(1, 1)]
    found = read(server.url, COMPLETIONS, {"model": "tiny", "prompt": [1, 2]})
    assert found == [Delta("Hello", finish_reason="stop"), Delta(usage=Usage(1, 1))]
    assert found[1].usage.acceptance_length is None
    assert server.paths == ["/v1/completions"]


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        ((401, {"error": {"message": "wrong key"}}), "HTTP 401", "401 Unauthorized: wrong key"),
        ((500, "out of\norder"), "HTTP 500", "out of order"),
        ([delta("a"), BREAK], "connection", "check the address and the server"),
        ([delta("a"), '{"error": {"message": "engine died"}}'], "error event", "engine died"),
        ([delta("a"), "no json"], "reply", "not an event of a completion: no json"),
        (["[1]"], "reply", "not an event of a completion"),
        ([delta("a"), {"choices": [], "usage": {"prompt_tokens": 1}}], "reply", "not an event"),
        ((200, {"choices": []}), "connection", "text/event-stream"),
    ],
)
def test_errors_have_kinds(server: FakeServer, answer: Any, kind: str, message: str) -> None:
    server.answer = lambda body: answer
    with pytest.raises(ServerError, match=message) as error:
        read(server.url)
    assert error.value.kind == kind
    assert server.url in str(error.value)


def test_silence_ends_in_a_timeout(server: FakeServer) -> None:
    server.answer = lambda body: [delta("a"), WAIT]
    with pytest.raises(ServerError) as error:
        read(server.url, timeout_s=0.2)
    assert error.value.kind == "timeout"


def test_a_server_that_is_not_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ServerError, match=f"127.0.0.1:{port}/v1/chat/completions.*check the address") as error:
        read(f"http://127.0.0.1:{port}")
    assert error.value.kind == "connection"


def test_whoever_leaves_closes_the_connection(server: FakeServer) -> None:
    server.answer = lambda body: [delta("a"), WAIT]

    async def leave() -> None:
        async with OpenAIClient(server.url) as client:
            stream = client.stream(CHAT, BODY)
            assert (await anext(stream)).text == "a"
            await stream.aclose()
            await asyncio.get_running_loop().run_in_executor(None, server.left.wait, 10)

    asyncio.run(leave())
    assert server.left.is_set()


def test_proxies_of_the_environment_are_not_used(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert read(server.url)


def test_the_only_model_needs_no_name(server: FakeServer) -> None:
    async def model(name: str | None) -> str:
        async with OpenAIClient(server.url) as client:
            return await client.model(name)

    assert asyncio.run(model(None)) == "tiny"
    assert asyncio.run(model("other")) == "other"
    server.models = ["a", "b"]
    with pytest.raises(JetSpecError, match="has these models: a, b; name one with --model"):
        asyncio.run(model(None))


def test_base_urls() -> None:
    assert base_url("http://localhost:8000") == base_url("http://localhost:8000/") == "http://localhost:8000/v1"
    assert base_url("https://api.host/openai/v1/") == "https://api.host/openai/v1"


@pytest.mark.parametrize(
    "url", ["localhost:8000", "ftp://host/v1", "http://", "http://host:port/v1", "http://[::1", "http://h/v1?x=1", ""]
)
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(JetSpecError, match="url="):
        base_url(url)
    with pytest.raises(JetSpecError, match="must not hold a user name"):
        base_url("http://me:word@host/v1")
