"""The whole run: prompts, answers, head, training, export."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from jetspec.errors import JetSpecError
from jetspec.files import write_atomically
from jetspec.head import DraftHead, head_for_target, load_head, save_head
from jetspec.head.build import copy_weights
from jetspec.models.loading import load_target
from jetspec.models.target import Target, default_target_layer_ids
from jetspec.train.capture import CaptureSettings, capture
from jetspec.train.card import model_card
from jetspec.train.checkpoint import load_checkpoint
from jetspec.train.config import FILE, TrainConfig
from jetspec.train.data import training_prompts
from jetspec.train.dataset import CapturedSequences
from jetspec.train.display import Display
from jetspec.train.evaluate import Measurement
from jetspec.train.mask_token import choose_mask_token
from jetspec.train.metrics import check_tracker
from jetspec.train.processes import Processes
from jetspec.train.prompts import Prompt
from jetspec.train.trainer import StepInfo, Trainer, Watcher

#: The file that the first process makes when all prompts and answers are written.
READY = "prompts.ready"


@dataclass(frozen=True)
class TrainResult:
    """How a run ended. ``finished`` is False where a signal or ``max_minutes`` stopped it; the same call resumes it."""

    output: Path
    steps: int
    num_steps: int
    exported_step: int
    loss: float  # of the last step
    measured: list[Measurement]  # of the exported weights, for each budget; empty where they were not measured
    finished: bool


def train(
    config: TrainConfig,
    *,
    target: Target | None = None,
    console: Console | None = None,
    watch: Watcher | None = None,
) -> TrainResult:
    """Train a draft head and write it to ``config.output``; a run of the same configuration there is resumed.

    Writes ``config.json``, ``model.safetensors``, ``README.md`` and ``train_config.json`` (loadable by ``load_head``),
    ``metrics.jsonl``, and the working folders ``capture`` and ``checkpoint``. Called by every process that torchrun or
    `accelerate launch` started, it shares the work among them and returns the same on each; ``config.output`` must be
    on a file system that they share.

    Args:
        config: everything that decides the run.
        target: the loaded target; None loads ``config.target`` on ``config.device``.
        console: where progress is shown, by the first process; None shows nothing.
        watch: told about every step, on every process.

    Raises:
        JetSpecError: a file, a value or the target does not fit, the target computes NaN, training diverges, or a
            package is missing; the message names it.
    """
    processes = Processes.start(config.device if target is None else target.device.type)
    check_tracker(config.log_with)
    load_checkpoint(config)  # a run of another configuration is refused before the work starts
    _make_folder(config.folder)
    shown = console if console is not None and processes.is_main else Console(quiet=True)
    if target is None:
        with shown.status(f"loading {config.target}"):
            target = load_target(config.target, device=str(processes.device), dtype=config.target_dtype)
    initial_head(target, config)  # what does not fit is refused before the work starts
    with Display(shown, config.log_every) as display:
        trainer = _trainer(target, config, processes, display)

        def watch_all(info: StepInfo) -> None:
            display.stepped(info)
            if watch is not None:
                watch(info)

        trainer.run(watch_all)
        exported = _export(trainer)
        display.say(f"wrote {config.folder} with the weights of step {exported}")
    progress = trainer.progress
    return TrainResult(
        config.folder,
        progress.step,
        trainer.num_steps,
        exported,
        progress.last_loss,
        progress.measured(exported),
        trainer.finished,
    )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JetSpecError(f"output: cannot make the directory {folder}: {error}; name another one") from error


def _trainer(target: Target, config: TrainConfig, processes: Processes, display: Display) -> Trainer:
    """The trainer of a run, with its data captured and its earlier state loaded."""
    training, held_out = _prompts(target, config, processes, display)
    data = _capture(target, training, config, processes, display)
    head = initial_head(target, config, frozenset(data.distinct_tokens().tolist()))
    trainer = Trainer(target, head, data, [p.token_ids for p in held_out], config, processes)
    if processes.is_main:
        write_atomically(config.folder / FILE, (json.dumps(config.to_dict(), indent=2) + "\n").encode())
    display.say(
        f"{len(data)} sequences, {sum(data.lengths)} tokens; {trainer.num_steps} steps, "
        f"{_parameters(head):,} parameters" + (f"; {processes.count} processes" if processes.count > 1 else "")
    )
    if trainer.progress.step:
        display.say(f"resuming after step {trainer.progress.step}")
    return trainer


def _target_layer_ids(target: Target, config: TrainConfig) -> tuple[int, ...]:
    if config.target_layer_ids is not None:
        return tuple(target.validate_target_layer_ids(config.target_layer_ids))
    return tuple(default_target_layer_ids(target.num_layers, config.num_aux_layers))


def _prompts(
    target: Target, config: TrainConfig, processes: Processes, display: Display
) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts to train on and prompts held out. The first process writes their answers; the others read them."""
    ready = config.folder / READY
    # What the first one does may take much longer than a collective would wait for.
    while not processes.is_main and not ready.exists():
        time.sleep(0.2)
    prompts = training_prompts(target, config, say=display.say, track=display.track)
    if processes.is_main and processes.count > 1:
        write_atomically(ready, b"")
    return prompts


def _capture(
    target: Target, prompts: list[Prompt], config: TrainConfig, processes: Processes, display: Display
) -> CapturedSequences:
    settings = CaptureSettings(
        target_layer_ids=_target_layer_ids(target, config),
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        seed=config.seed,
        shard_sequences=config.shard_sequences,
    )
    folder = config.folder / "capture"
    capture(
        target,
        prompts,
        folder,
        settings,
        max_num_seqs=config.max_num_seqs,
        on_progress=display.track("capturing answers"),
        processes=processes,
    )
    return CapturedSequences(folder)


def initial_head(target: Target, config: TrainConfig, used: frozenset[int] = frozenset()) -> DraftHead:
    """The head that a run of ``config`` starts with. Its mask token is none of ``used``, the ids of the training text.

    Raises:
        JetSpecError: the head does not fit the target, or differs from the trained head that ``init`` names in more
            than what training may add.
    """
    trained = None if config.init in ("target", "random") else load_head(config.init, dtype=torch.float32)
    head = head_for_target(
        target,
        kind=config.kind,
        num_layers=config.num_layers,
        block_size=config.block_size,
        target_layer_ids=_target_layer_ids(target, config),
        mask_token_id=_mask_token(target, used, config, trained),
        causal=config.causal,
        transition_size=config.transition_size or 0,
        init="target" if config.init == "target" else "random",
        seed=config.seed,
    )
    if trained is not None:
        copy_weights(head, trained)
    return head


def _mask_token(target: Target, used: frozenset[int], config: TrainConfig, trained: DraftHead | None) -> int | None:
    if config.kind == "autoregressive":
        return None
    if config.mask_token is None and trained is not None and trained.config.mask_token_id is not None:
        return trained.config.mask_token_id
    rows = target.num_embeddings
    return choose_mask_token(target.tokenizer, rows, used, wanted=config.mask_token)


def _export(trainer: Trainer) -> int:
    """Write the head and its card; returns the step of its weights."""
    config = trainer.config
    head, exported = trainer.choose_weights()
    if trainer.processes.is_main:
        save_head(head, config.folder, dtype=getattr(torch, config.dtype))
        card = model_card(
            config,
            head.config,
            trainer.progress,
            num_steps=trainer.num_steps,
            exported_step=exported,
            parameters=_parameters(head),
            sequences=len(trainer.data),
            tokens=sum(trainer.data.lengths),
        )
        write_atomically(config.folder / "README.md", card.encode())
    trainer.processes.wait()
    return exported


def _parameters(head: DraftHead) -> int:
    return sum(p.numel() for p in head.parameters())
