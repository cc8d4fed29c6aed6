"""Answers from an OpenAI-compatible server, here one in a thread: requests, retries, failures, resuming."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from jetspec.errors import JetSpecError
from jetspec.models.target import Target
from jetspec.train import server as server_module
from jetspec.train.answers import AnswerStore
from jetspec.train.prompts import Answer, Ask
from jetspec.train.render import Renderer
from jetspec.train.server import ServerAnswers, ServerError

Reply = tuple[int, Any]


def chat(text: str | None, reason: str = "stop", **more: Any) -> Reply:
    return 200, {"choices": [{"finish_reason": reason, "message": {"role": "assistant", "content": text, **more}}]}


class Server:
    """``replies`` are given in turn, then ``default`` for ever."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict, str | None]] = []
        self.replies: list[Reply] = []
        self.default: Callable[[dict], Reply] = lambda _body: chat("ok")
        self.running = self.most_running = 0
        lock, outer = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    outer.requests.append((self.path, body, self.headers["Authorization"]))
                    outer.running += 1
                    outer.most_running = max(outer.most_running, outer.running)
                    status, reply = outer.replies.pop(0) if outer.replies else outer.default(body)
                data = reply.encode() if isinstance(reply, str) else json.dumps(reply).encode()
                with lock:
                    outer.running -= 1
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = Server()
    thread = threading.Thread(target=lambda: server.http.serve_forever(poll_interval=0.01))
    thread.start()
    yield server
    server.http.shutdown()
    server.http.server_close()
    thread.join()


def ask(text: str) -> Ask:
    return Ask(tuple(text.encode()), [{"role": "user", "content": text}])


@pytest.fixture
def make(server: Server, target: Target, tmp_path: Path) -> Callable[..., ServerAnswers]:
    def make(**changes: Any) -> ServerAnswers:
        settings: dict[str, Any] = {"max_tokens": 9, "temperature": 0.0, "seed": 0, "backoff_s": 1e-3}
        settings |= {"renderer": Renderer(target), "store": AnswerStore(tmp_path / "answers.jsonl")}
        return ServerAnswers(**{"url": server.url, "model": "tiny", **settings, **changes})

    return make


def test_requests_and_answers(server: Server, target: Target, make: Callable[..., ServerAnswers]) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    server.replies = [chat("yes"), chat("no", "length"), (200, {"choices": [{"finish_reason": "stop", "text": "raw"}]})]
    answers = make(
        concurrency=1,
        temperature=0.5,
        api_key="secret",
        template_kwargs={"enable_thinking": False},
        url=server.url + "/",
    )
    first = Ask((1,), [{"role": "user", "content": "a"}], tools)
    yes, no, raw = answers([first, ask("b"), Ask((5, 6), [5, 6])])
    encode = target.tokenizer.encode
    assert yes == Answer("yes", tuple(encode("yes<|end|>")), True)
    assert no == Answer("no", tuple(encode("no")), False)
    assert raw == Answer("raw", tuple(encode("raw<|end|>")), True)
    (path, body, key), (_, other, _), (raw_path, raw_body, _) = server.requests
    assert (path, raw_path, key) == ("/v1/chat/completions", "/v1/completions", "Bearer secret")
    assert body.pop("seed") != other["seed"]
    assert body == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 9,
        "temperature": 0.5,
        "tools": tools,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert raw_body["prompt"] == [5, 6]
    assert "tools" not in other


def test_order_equal_requests_and_concurrency(server: Server, make: Callable[..., ServerAnswers]) -> None:
    server.default = lambda body: chat(body["messages"][0]["content"].upper())
    told: list[tuple[int, int, int]] = []
    texts = [f"question {i % 30}" for i in range(40)]
    found = make(concurrency=3, progress=lambda *state: told.append(state))([ask(t) for t in texts])
    assert [a.text for a in found] == [t.upper() for t in texts]
    assert len(server.requests) == 30
    assert server.most_running <= 3
    assert told[-1] == (40, 40, sum(len(f"question {i}") + 1 for i in range(30)))


def test_what_may_pass_is_tried_again(server: Server, make: Callable[..., ServerAnswers]) -> None:
    server.replies = [(429, "slow down"), (503, "loading")]
    assert make()([ask("a")])[0].text == "ok"
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("reply", "tries", "message"),
    [
        ((400, "too long"), 1, "400 .*too long"),
        ((500, "oops"), server_module.TRIES, "500 .*oops"),
        ((200, "not json"), 1, "not JSON"),
        ((200, {"error": 1}), 1, "not a completion"),
        (chat(None, "tool_calls"), 1, r"no text \(finish_reason 'tool_calls'\)"),
        (chat("4", reasoning_content="2 + 2"), 1, "without a reasoning parser"),
    ],
)
def test_a_request_that_fails_is_told_of_its_prompt_alone(
    server: Server, make: Callable[..., ServerAnswers], reply: Reply, tries: int, message: str
) -> None:
    server.default = lambda body: reply if body["messages"][0]["content"] == "bad" else chat("ok")
    good, bad = make()([ask("good"), ask("bad")])
    assert good.text == "ok"
    assert isinstance(bad, JetSpecError)
    with pytest.raises(JetSpecError, match=message):
        raise bad
    assert len(server.requests) == tries + 1


@pytest.mark.parametrize("keep", [False, True])
def test_an_interrupted_run_asks_only_for_what_is_missing(
    server: Server, make: Callable[..., ServerAnswers], tmp_path: Path, keep: bool
) -> None:
    server.default = lambda body: (400, "no") if body["messages"][0]["content"] == "bad" else chat("ok")
    answers = make(keep_failures=keep, concurrency=1)
    answers([ask("a"), ask("bad"), ask("b")])
    with (tmp_path / "answers.jsonl").open("a") as file:
        file.write('{"key": "torn')
    server.requests.clear()
    again = make(keep_failures=keep)([ask("b"), ask("a"), ask("bad"), ask("c")])
    assert [isinstance(a, Answer) for a in again] == [True, True, False, True]
    assert {body["messages"][0]["content"] for _, body, _ in server.requests} == ({"c"} if keep else {"bad", "c"})
    server.requests.clear()
    make(max_tokens=8)([ask("a")])
    assert len(server.requests) == 1  # another length is another answer


def test_a_server_of_no_use_ends_the_run(server: Server, make: Callable[..., ServerAnswers], tmp_path: Path) -> None:
    server.replies = [chat("ok"), (401, "who are you")]
    with pytest.raises(ServerError, match=r"401 .*who are you"):
        make(concurrency=1)([ask(str(i)) for i in range(9)])
    assert len(AnswerStore(tmp_path / "answers.jsonl").known) == 1  # what came before is kept
    with pytest.raises(ServerError, match="start the server, then run again"):
        make(url="http://127.0.0.1:9/v1")([ask("a")])


def test_a_store_that_holds_something_else(tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").write_text('{"loss": 3}\n')
    with pytest.raises(JetSpecError, match=r"answers\.jsonl, line 1: not an answer"):
        AnswerStore(tmp_path / "answers.jsonl")
