"""Answers that training prompts depend on, stored as they come, and the target's engine as one source of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from jetspec.attention.blocks import DEFAULT_KV_BLOCK_SIZE, blocks_needed
from jetspec.engine import Engine, Sequence
from jetspec.errors import JetSpecError
from jetspec.fingerprint import fingerprint
from jetspec.models.target import Target
from jetspec.sampling import SamplingParams
from jetspec.train.prompts import Answer, Ask

#: Told (done, in all, tokens written since the work began).
OnProgress = Callable[[int, int, int], None]


class AnswerStore:
    """Answers in a ``.jsonl`` file under the names of their requests. A line that a kill tore is dropped.

    Raises:
        JetSpecError: the file holds something else.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.known: dict[str, Answer | JetSpecError] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        data = path.read_bytes() if path.exists() else b""
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            with path.open("r+b") as file:
                file.truncate(whole)
        for number, line in enumerate(data[:whole].splitlines(), 1):
            key, answer = _from_line(line, f"{path}, line {number}")
            self.known[key] = answer

    def put(self, key: str, answer: Answer | JetSpecError) -> None:
        """Store an answer, or the error that stands for it."""
        self.known[key] = answer
        with self._path.open("ab") as file:
            file.write(json.dumps({"key": key, **_to_record(answer)}).encode() + b"\n")


@dataclass(frozen=True)
class EngineAnswers:
    """Answers of ``target`` itself. Each is sampled with its own seed, so it does not depend on the others.

    Raises:
        JetSpecError: (when called) a prompt does not fit the target, or the target's logits are not finite.
    """

    target: Target
    store: AnswerStore
    max_tokens: int
    temperature: float
    seed: int
    target_name: str  # tells targets apart
    max_num_seqs: int = 64
    progress: OnProgress | None = None
    sampling: dict[str, Any] = field(default_factory=dict)  # other fields of SamplingParams

    def __call__(self, asks: list[Ask]) -> list[Answer | JetSpecError]:
        """An answer for each of ``asks``, in order."""
        return self.write([(ask.token_ids, 0) for ask in asks])

    def write(self, requests: list[tuple[tuple[int, ...], int]]) -> list[Answer | JetSpecError]:
        """An answer for each request (prompt, number). The same prompt with another number gets another answer."""
        settings = (self.target_name, self.max_tokens, self.temperature, self.seed, self.sampling)
        keys = [fingerprint(*settings, *request) for request in requests]
        missing = {k: ids for k, (ids, _) in zip(keys, requests, strict=True) if k not in self.store.known}
        tokens, done = 0, len(keys) - len(missing)
        for key, sequence in self._decode(missing):
            ids = tuple(sequence.output_ids)
            self.store.put(key, Answer(sequence.text, ids, sequence.finish_reason == "stop"))
            tokens, done = tokens + len(ids), done + 1
            if self.progress is not None:
                self.progress(done, len(keys), tokens)
        return [self.store.known[key] for key in keys]

    @torch.inference_mode()
    def _decode(self, prompts: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, Sequence]]:
        lengths = [len(ids) + self.max_tokens for ids in prompts.values()]
        if not lengths:
            return
        blocks = blocks_needed(lengths, self.max_num_seqs)
        engine = Engine(
            self.target, num_blocks=blocks, kv_block_size=DEFAULT_KV_BLOCK_SIZE, max_num_seqs=self.max_num_seqs
        )
        for key, ids in prompts.items():
            seed = int(key[:15], 16)
            params = SamplingParams(
                max_tokens=self.max_tokens, temperature=self.temperature, seed=seed, **self.sampling
            )
            engine.add(key, ids, params)
        while engine.has_work:
            for output in engine.step():
                if output.sequence.error is not None:
                    raise JetSpecError(f"target: it cannot answer a prompt: {output.sequence.error}")
                if output.finished:
                    yield output.sequence.request_id, output.sequence


def _to_record(answer: Answer | JetSpecError) -> dict[str, Any]:
    if isinstance(answer, JetSpecError):
        return {"error": str(answer)}
    return {"text": answer.text, "token_ids": answer.token_ids, "finished": answer.finished}


def _from_line(line: bytes, where: str) -> tuple[str, Answer | JetSpecError]:
    try:
        record = json.loads(line)
        key = record["key"]
        if "error" in record:
            return key, JetSpecError(record["error"])
        return key, Answer(record["text"], tuple(record["token_ids"]), record["finished"])
    except (ValueError, TypeError, KeyError) as error:
        raise JetSpecError(f"{where}: not an answer ({error}); remove the file") from error
