"""A small OpenAI-compatible server whose answers tests choose. It listens on this machine only."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

#: What comes in one event of the stream, or what happens instead.
Event = dict[str, Any] | str


def delta(text: str, reasoning: str | None = None) -> Event:
    """An event with text."""
    part = {"content": text} if reasoning is None else {"reasoning_content": reasoning}
    return {"choices": [{"index": 0, "delta": part, "finish_reason": None}]}


def finish(reason: str = "stop") -> Event:
    return {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}


def usage(prompt: int, completion: int, **speculation: Any) -> Event:
    """The last event; `speculation` as a JetSpec server reports it."""
    event: dict[str, Any] = {
        "choices": [],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        },
    }
    return {**event, "jetspec": speculation} if speculation else event


ROLE: Event = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
#: Hangs until the client is gone or the test has ended; ends the connection without an end of the stream.
WAIT, BREAK = "wait", "break"


def echo(body: dict[str, Any]) -> list[Event]:
    """An answer of four tokens in two events: the last word said, and how many messages there were."""
    said = body["messages"][-1]["content"].split()[-1] if "messages" in body else str(body["prompt"])
    count = len(body.get("messages", []))
    return [ROLE, delta("You said "), delta(f"{said} ({count})."), finish(), usage(7, 4, rounds=2, decoded_tokens=3)]


@dataclass
class FakeServer:
    """What a test sees of the server.

    `answer` maps the body of a request to the events of the stream, or to a status and a body of an error. `requests`
    are the bodies, `keys` the authorization headers, in the order in which they came.
    """

    url: str
    answer: Callable[[dict[str, Any]], list[Event] | tuple[int, Any]] = echo
    models: list[str] = field(default_factory=lambda: ["tiny"])
    requests: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    #: Set when a client has left a stream that waits.
    left: threading.Event = field(default_factory=threading.Event)
    closing: threading.Event = field(default_factory=threading.Event)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fake: FakeServer

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._whole(200, {"data": [{"id": name} for name in self.fake.models]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.fake.requests.append(body)
        self.fake.paths.append(self.path)
        self.fake.keys.append(self.headers["Authorization"])
        answer = self.fake.answer(body)
        if isinstance(answer, tuple):
            self._whole(*answer)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for event in [*answer, "[DONE]"]:
            if event == BREAK:
                self.close_connection = True
                return
            if event == WAIT:
                self._wait()
                return
            self._chunk(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode())
        self._chunk(b"")

    def _wait(self) -> None:
        self.connection.settimeout(0.05)
        while not self.fake.closing.is_set():
            try:
                if not self.connection.recv(1):
                    self.fake.left.set()
                    break
            except TimeoutError:
                continue
            except OSError:
                self.fake.left.set()
                break
        self.close_connection = True

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _whole(self, status: int, body: Any) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    """Run a server while the context is open."""
    handler = type("Handler", (_Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    fake = FakeServer(f"http://127.0.0.1:{server.server_port}/v1")
    handler.fake = fake
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        fake.closing.set()
        server.shutdown()
        server.server_close()
        thread.join()
