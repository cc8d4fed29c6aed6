"""The whole run: prompts, answers, head, training, export."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from jetspec.head import DraftHead, save_head
from jetspec.target import Target, default_tap_layers, load_target
from jetspec.train.capture import CaptureSettings, capture
from jetspec.train.card import model_card
from jetspec.train.checkpoint import load_checkpoint
from jetspec.train.config import TrainConfig
from jetspec.train.data import training_prompts
from jetspec.train.dataset import CapturedSequences
from jetspec.train.display import Display
from jetspec.train.files import write_atomically
from jetspec.train.mask_token import choose_mask_token
from jetspec.train.prompts import Prompt
from jetspec.train.trainer import StepInfo, Trainer, Watcher


@dataclass(frozen=True)
class TrainResult:
    """A run's end. ``finished`` is False where ``max_minutes`` ended it; the same call goes on from there."""

    output: Path
    steps: int
    num_steps: int
    exported_step: int
    loss: float  # of the last step
    acceptance_length: float  # best measured on held-out prompts; 0 where none were held out
    finished: bool


def train(
    config: TrainConfig,
    *,
    target: Target | None = None,
    console: Console | None = None,
    watch: Watcher | None = None,
) -> TrainResult:
    """Train a draft head and write it to ``config.output``, going on where an earlier run of the same config stopped.

    Writes ``config.json``, ``model.safetensors`` and ``README.md`` (loadable by ``load_head``), ``metrics.jsonl``, and
    the working folders ``capture`` and ``checkpoint``.

    Args:
        config: everything that decides the run.
        target: the loaded target; None loads ``config.target``.
        console: where progress is shown; None shows nothing.
        watch: told about every step.

    Raises:
        JetSpecError: a file, a value or the target does not fit; the message names it.
    """
    load_checkpoint(config)  # a run of another configuration is refused before the work starts
    target = load_target(config.target) if target is None else target
    with Display(console or Console(quiet=True), config.log_every) as display:
        training, held_out = training_prompts(target, config, say=display.say, track=display.track)
        data = _capture(target, training, config, display)
        head = _new_head(target, data, config)
        trainer = Trainer(target, head, data, [p.token_ids for p in held_out], config)
        tokens = sum(data.lengths)
        display.say(
            f"{len(data)} sequences, {tokens} tokens; {trainer.num_steps} steps, {_parameters(head):,} parameters"
        )
        if trainer.progress.step:
            display.say(f"going on after step {trainer.progress.step}")

        def watch_all(info: StepInfo) -> None:
            display.stepped(info)
            if watch is not None:
                watch(info)

        trainer.run(watch_all)
        exported = _export(trainer, tokens)
        display.say(f"wrote {config.folder} with the weights of step {exported}")
    progress = trainer.progress
    return TrainResult(
        config.folder,
        progress.step,
        trainer.num_steps,
        exported,
        progress.last_loss,
        progress.best_acceptance,
        trainer.finished,
    )


def _tap_layers(target: Target, config: TrainConfig) -> tuple[int, ...]:
    if config.target_layer_ids is not None:
        return tuple(target.validate_taps(config.target_layer_ids))
    return tuple(default_tap_layers(target.num_layers, config.num_taps))


def _capture(target: Target, prompts: list[Prompt], config: TrainConfig, display: Display) -> CapturedSequences:
    settings = CaptureSettings(
        tap_layers=_tap_layers(target, config),
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
        max_running=config.max_running,
        on_progress=display.track("capturing answers"),
    )
    return CapturedSequences(folder)


def _new_head(target: Target, data: CapturedSequences, config: TrainConfig) -> DraftHead:
    rows = target.model.get_input_embeddings().weight.shape[0]
    used = frozenset(data.distinct_tokens().tolist())
    return DraftHead.from_target(
        target,
        num_layers=config.num_layers,
        block_size=config.block_size,
        target_layer_ids=_tap_layers(target, config),
        mask_token_id=choose_mask_token(target.tokenizer, rows, used, wanted=config.mask_token),
        causal=config.causal,
        init=config.init,
        seed=config.seed,
    )


def _export(trainer: Trainer, tokens: int) -> int:
    config = trainer.config
    exported = trainer.choose_weights()
    save_head(trainer.head, config.folder, dtype=getattr(torch, config.dtype))
    card = model_card(
        config,
        trainer.head.config,
        trainer.progress,
        num_steps=trainer.num_steps,
        exported_step=exported,
        parameters=_parameters(trainer.head),
        sequences=len(trainer.data),
        tokens=tokens,
    )
    write_atomically(config.folder / "README.md", card.encode())
    return exported


def _parameters(head: DraftHead) -> int:
    return sum(p.numel() for p in head.parameters())
