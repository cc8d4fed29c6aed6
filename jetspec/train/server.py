"""Answers from an OpenAI-compatible server that runs the target."""

from __future__ import annotations

import http.client
import json
import random
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

from jetspec.errors import JetSpecError
from jetspec.fingerprint import fingerprint
from jetspec.prompts import is_conversation
from jetspec.train.answers import AnswerStore, OnProgress
from jetspec.train.prompts import Answer, Ask
from jetspec.train.render import Renderer

TRIES = 6
TIMEOUT_S = 600
#: HTTP statuses that are worth another try, and those that every request of the run would get.
TRANSIENT = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
FATAL = frozenset({401, 403, 404, 405})


class ServerError(JetSpecError):
    """The server cannot answer any request of the run."""


@dataclass(frozen=True)
class ServerAnswers:
    """Answers of the server at ``url`` (``http://host:port/v1``), each stored as it comes.

    Conversations go to ``chat/completions``, texts and token ids to ``completions``. A request that fails after its
    retries counts as a bad row; ``keep_failures`` also stores it, so that a run that skips such rows skips the same
    ones when it is resumed.

    Raises:
        ServerError: (when called) the server cannot be reached, or refuses the API key.
    """

    url: str
    model: str
    renderer: Renderer
    store: AnswerStore
    max_tokens: int
    temperature: float
    seed: int
    concurrency: int = 16
    api_key: str | None = None
    template_kwargs: dict[str, Any] | None = None
    keep_failures: bool = False
    progress: OnProgress | None = None
    backoff_s: float = 0.5

    def __call__(self, asks: list[Ask]) -> list[Answer | JetSpecError]:
        """An answer for each of ``asks``, in order; an error where a request failed."""
        requests = [self._request(ask) for ask in asks]
        keys = [fingerprint(*request) for request in requests]
        missing = {k: r for k, r in zip(keys, requests, strict=True) if k not in self.store.known}
        failed: dict[str, JetSpecError] = {}
        tokens, done = 0, len(keys) - len(missing)
        pool = ThreadPoolExecutor(self.concurrency)
        try:
            futures = {pool.submit(self._post, *request): key for key, request in missing.items()}
            for future in as_completed(futures):
                key = futures[future]
                try:
                    answer = self._answer(future.result())
                    self.store.put(key, answer)
                    tokens += len(answer.token_ids)
                except ServerError:
                    raise
                except JetSpecError as error:
                    failed[key] = error
                    if self.keep_failures:
                        self.store.put(key, error)
                done += 1
                if self.progress is not None:
                    self.progress(done, len(keys), tokens)
        finally:
            pool.shutdown(cancel_futures=True)
        return [self.store.known.get(key) or failed[key] for key in keys]

    def _request(self, ask: Ask) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {"model": self.model, "max_tokens": self.max_tokens, "temperature": self.temperature}
        if self.temperature > 0:
            body["seed"] = int(fingerprint(self.seed, ask.token_ids)[:7], 16)  # fits the 32 bits that some servers take
        if not is_conversation(ask.prompt):
            return "completions", {**body, "prompt": ask.prompt}
        if self.template_kwargs:
            body["chat_template_kwargs"] = self.template_kwargs
        if ask.tools:
            body["tools"] = ask.tools
        return "chat/completions", {**body, "messages": ask.prompt}

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(f"{self.url.rstrip('/')}/{path}", json.dumps(body).encode(), headers)
        tries = 0
        while True:
            wait_s = self.backoff_s * 2**tries * random.uniform(0.5, 1)
            tries += 1
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
                    return json.load(reply)
            except urllib.error.HTTPError as error:
                says = error.read(300).decode(errors="replace")
                failure = self._error(f"{error.code} {error.reason}: {says}")
                if error.code in FATAL:
                    raise ServerError(str(failure)) from error
                if error.code not in TRANSIENT:
                    raise failure from error
                after = error.headers.get("Retry-After", "")
                wait_s = max(wait_s, float(after) if after.isdecimal() else 0)
            except ValueError as error:
                raise self._error(f"the reply is not JSON: {error}") from error
            except urllib.error.URLError as error:
                failure = ServerError(f"answers_from={self.url}: {error.reason}; start the server, then run again")
            except (OSError, http.client.HTTPException) as error:  # the connection broke, or took too long
                failure = self._error(str(error) or type(error).__name__)
            if tries == TRIES:
                raise failure
            time.sleep(wait_s)

    def _answer(self, reply: Any) -> Answer:
        try:
            choice = reply["choices"][0]
            reason, message = choice["finish_reason"], choice.get("message") or {"content": choice.get("text")}
            text = message["content"]
        except (LookupError, TypeError, AttributeError) as error:
            raise self._error(f"not a completion: {reply!r:.200}") from error
        if message.get("reasoning_content") or message.get("reasoning"):
            raise self._error("the server cuts the reasoning out of the answer; start it without a reasoning parser")
        if reason not in ("stop", "length") or not isinstance(text, str) or not text:
            raise self._error(f"no text (finish_reason {reason!r})")
        finished = reason == "stop"
        return Answer(text, self.renderer.answer(text, finished), finished)

    def _error(self, text: str) -> JetSpecError:
        return JetSpecError(f"answers_from={self.url}: {text}")
