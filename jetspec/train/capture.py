"""Capture: the target answers the prompts, and the hidden states that the draft head reads are stored.

Prompts are taken ``shard_sequences`` at a time. A shard is written when all of its sequences are finished, so memory
holds at most one shard, and a killed capture resumes after the last whole shard. A shard's content depends on its
prompts alone, not on where the capture was interrupted or which process wrote it. A shard is complete when its index
exists: ``shard-00000.json`` beside ``shard-00000.safetensors``.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from jetspec.attention.blocks import DEFAULT_KV_BLOCK_SIZE, blocks_needed
from jetspec.engine import Committed, Engine, Observer
from jetspec.errors import JetSpecError
from jetspec.files import write_atomically
from jetspec.fingerprint import fingerprint, weights_fingerprint
from jetspec.models.target import Target
from jetspec.sampling import SamplingParams
from jetspec.train.dataset import find_non_finite
from jetspec.train.processes import Processes
from jetspec.train.prompts import Prompt

INDEX = "index.json"
FIX = "; check the target's weights, or run it in another number type with target_dtype"


@dataclass(frozen=True)
class CaptureSettings:
    """The settings on which the content of a capture depends, beside target and prompts."""

    target_layer_ids: tuple[int, ...]
    max_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0
    shard_sequences: int = 128


def capture(
    target: Target,
    prompts: Sequence[Prompt],
    folder: str | Path,
    settings: CaptureSettings,
    *,
    max_num_seqs: int = 64,
    on_progress: Callable[[int, int, int], None] | None = None,
    processes: Processes | None = None,
) -> None:
    """Fill ``folder`` with the shards of ``prompts``. Shards that an earlier call wrote are kept.

    Several ``processes`` share the shards; all return when all shards exist.
    ``on_progress`` is called with (sequences done, sequences in all, tokens written by this call).

    Raises:
        JetSpecError: ``folder`` holds a capture of another target, other prompts or other settings; a prompt does not
            fit the target; the target computes NaN or infinity; ``folder`` is not shared by all processes.
    """
    folder = Path(folder)
    processes = processes or Processes()
    _open_folder(folder, _fingerprint(target, prompts, settings), processes)
    _check_prompts(target, prompts)
    size = settings.shard_sequences
    shards = [folder / f"shard-{number:05d}.json" for number in range(-(-len(prompts) // size))]
    written = 0
    for number in range(processes.rank, len(shards), processes.count):
        if shards[number].exists():
            continue
        first = number * size
        if on_progress is not None:
            on_progress(first, len(prompts), written)

        def report(done: int, tokens: int, first: int = first, before: int = written) -> None:
            if on_progress is not None:
                on_progress(first + done, len(prompts), before + tokens)

        recorded = _run(target, prompts[first : first + size], first, settings, max_num_seqs, report)
        written += sum(len(r.token_ids) - r.loss_start for r in recorded)
        write_atomically(shards[number].with_suffix(".safetensors"), save(_pack(recorded)))
        index = {"lengths": [len(r.token_ids) for r in recorded], "loss_starts": [r.loss_start for r in recorded]}
        write_atomically(shards[number], json.dumps(index).encode())
    # The others may need much longer, which a collective would not wait for.
    while not all(shard.exists() for shard in shards):
        time.sleep(0.2)
    processes.wait()
    if on_progress is not None:
        on_progress(len(prompts), len(prompts), written)


@dataclass
class _Recorded:
    """One finished sequence; the last token has no row, as nothing follows it."""

    token_ids: list[int]  # [T]
    loss_start: int
    aux_hidden_states: Tensor  # [T - 1, aux_layers * hidden] bfloat16
    hidden: Tensor  # [T - 1, hidden] bfloat16


class _Recorder(Observer):
    """Collects the rows of each request as they become final; rows that are computed twice are kept once."""

    def __init__(self, target_layer_ids: Sequence[int]) -> None:
        self._layers = target_layer_ids
        self._rows: dict[str, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        self._count: dict[str, int] = defaultdict(int)

    def committed(self, rows: Committed) -> None:
        assert rows.aux_hidden_states is not None
        assert rows.hidden is not None
        known = self._count[rows.request_id]
        assert rows.start <= known, "rows are missing"
        aux_hidden_states, hidden = rows.aux_hidden_states[known - rows.start :], rows.hidden[known - rows.start :]
        if len(aux_hidden_states):
            self._rows[rows.request_id].append(
                (aux_hidden_states.to("cpu", torch.bfloat16), hidden.to("cpu", torch.bfloat16))
            )
            self._count[rows.request_id] += len(aux_hidden_states)

    def find_fault(self, request_id: str) -> str | None:
        """What is not finite in the rows of a request, in words."""
        parts = self._rows[request_id]
        faults = (find_non_finite(aux_hidden_states, hidden, self._layers) for aux_hidden_states, hidden in parts)
        return next((fault for fault in faults if fault is not None), None)

    def take(self, request_id: str, token_ids: list[int], loss_start: int) -> _Recorded:
        aux_hidden_states, hidden = (torch.cat(parts) for parts in zip(*self._rows.pop(request_id), strict=True))
        rows = len(token_ids) - 1
        assert len(aux_hidden_states) >= rows, "rows are missing"
        return _Recorded(token_ids, loss_start, aux_hidden_states[:rows], hidden[:rows])


@torch.inference_mode()
def _run(
    target: Target,
    prompts: Sequence[Prompt],
    first: int,
    settings: CaptureSettings,
    max_num_seqs: int,
    report: Callable[[int, int], None],
) -> list[_Recorded]:
    """Answer ``prompts``, whose numbers start at ``first``, and return them in order.

    ``report`` is called with (sequences done, tokens of their answers).

    Raises:
        JetSpecError: the target's states are not finite, or the engine failed the request; names the prompt.
    """
    recorder = _Recorder(settings.target_layer_ids)
    lengths = [
        len(p.token_ids) + (settings.max_tokens if p.response_ids is None else len(p.response_ids)) for p in prompts
    ]
    engine = Engine(
        target,
        num_blocks=blocks_needed(lengths, max_num_seqs),
        kv_block_size=DEFAULT_KV_BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        enable_prefix_caching=False,  # rows behind a shared prefix would not run, and not be seen
        target_layer_ids=settings.target_layer_ids,
        want_hidden=True,
        observer=recorder,
    )
    done: dict[int, _Recorded] = {}
    for number, prompt in enumerate(prompts):
        if prompt.response_ids is None:
            seed = first + number + (settings.seed << 32)
            params = SamplingParams(temperature=settings.temperature, max_tokens=settings.max_tokens, seed=seed)
            engine.add(str(number), prompt.token_ids, params)
        else:
            # The answer is known: one pass over it, and the token that the engine adds is not kept.
            known = prompt.token_ids + prompt.response_ids
            engine.add(str(number), known[: target.max_context - 1], SamplingParams(temperature=0.0, max_tokens=1))
    while engine.has_work:
        finished = [output.sequence for output in engine.step() if output.finished]
        for sequence in finished:
            number = int(sequence.request_id)
            prompt = prompts[number]
            where = f"training prompt {first + number + 1}"
            fault = recorder.find_fault(sequence.request_id)
            if fault is not None:
                raise JetSpecError(f"{where}: {fault}{FIX}")
            if sequence.error is not None:
                raise JetSpecError(f"{where}: {sequence.error}")
            token_ids = sequence.token_ids if prompt.response_ids is None else sequence.prompt_ids
            done[number] = recorder.take(sequence.request_id, list(token_ids), len(prompt.token_ids))
        if finished:
            report(len(done), sum(len(r.token_ids) - r.loss_start for r in done.values()))
    return [done[number] for number in range(len(prompts))]


def _pack(recorded: list[_Recorded]) -> dict[str, Tensor]:
    """Sequences laid end to end; where one starts follows from the lengths in the index."""
    return {
        "token_ids": torch.tensor([t for r in recorded for t in r.token_ids], dtype=torch.int32),
        "aux_hidden_states": torch.cat([r.aux_hidden_states for r in recorded]),
        "hidden": torch.cat([r.hidden for r in recorded]),
    }


def _check_prompts(target: Target, prompts: Sequence[Prompt]) -> None:
    for number, prompt in enumerate(prompts, 1):
        ids = (*prompt.token_ids, *(prompt.response_ids or ()))
        if not ids or max(ids) >= target.vocab_size:
            raise JetSpecError(
                f"training prompt {number}: holds ids outside the target's vocabulary of {target.vocab_size}"
            )
        if len(prompt.token_ids) > target.max_context - 2:
            raise JetSpecError(
                f"training prompt {number}: {len(prompt.token_ids)} tokens, the target's context holds "
                f"{target.max_context} with an answer; shorten or remove it"
            )


def _open_folder(folder: Path, wanted: dict[str, str], processes: Processes) -> None:
    """Write into the folder what it holds, or check that it holds what is ``wanted``."""
    path = folder / INDEX
    if processes.is_main and not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"fingerprint": wanted}).encode())
    processes.wait()
    if not path.exists():
        raise JetSpecError(f"output: {folder} must be on a file system that all processes share")
    found: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["fingerprint"]
    for name, value in wanted.items():
        if found.get(name) != value:
            raise JetSpecError(f"{folder} holds a capture with another {name}; give a new output directory")


def _fingerprint(target: Target, prompts: Sequence[Prompt], settings: CaptureSettings) -> dict[str, str]:
    """What a capture depends on, by name: fingerprints of the target and the prompts, and the settings themselves."""
    return {
        "target": weights_fingerprint(target.model),
        "prompts": fingerprint([(p.token_ids, p.response_ids) for p in prompts]),
        **{name: repr(value) for name, value in vars(settings).items()},
    }
