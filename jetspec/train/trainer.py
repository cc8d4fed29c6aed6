"""The training loop: step, log, measure, checkpoint."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from jetspec.errors import JetSpecError
from jetspec.head import DraftHead
from jetspec.target import Target
from jetspec.train.blocks import anchor_range
from jetspec.train.checkpoint import FOLDER, Progress, load_best, load_checkpoint, save_best, save_checkpoint
from jetspec.train.config import TrainConfig
from jetspec.train.dataset import CapturedSequences
from jetspec.train.evaluate import acceptance_length
from jetspec.train.metrics import MetricsFile
from jetspec.train.schedule import DataOrder, learning_rate
from jetspec.train.step import GradientStep

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class StepInfo:
    """What one optimizer step did. ``step`` counts from 1; ``acceptance_length`` is None where it was not measured."""

    step: int
    num_steps: int
    epoch: int
    loss: float
    learning_rate: float
    blocks: int
    blocks_per_s: float
    acceptance_length: float | None


class Watcher(Protocol):
    """Told about every step. An exception it raises ends the run, which can be resumed."""

    def __call__(self, info: StepInfo) -> None: ...


class Trainer:
    """Trains ``head`` for ``target`` on captured sequences.

    Raises:
        JetSpecError: the output directory holds a run of another configuration, or there is nothing to train on.
    """

    def __init__(
        self,
        target: Target,
        head: DraftHead,
        data: CapturedSequences,
        eval_prompts: Sequence[Sequence[int]],
        config: TrainConfig,
    ) -> None:
        self.target, self.head, self.data, self.eval_prompts, self.config = target, head, data, eval_prompts, config
        counts = [
            min(config.blocks_per_sequence, len(anchor_range(length, start)))
            for length, start in zip(data.lengths, data.loss_starts, strict=True)
        ]
        self.order = DataOrder(
            counts, config.blocks_per_step, seed=config.seed, epochs=config.epochs, max_steps=config.max_steps
        )
        self.optimizer = _optimizer(head, config)
        self.gradient_step = GradientStep(target, head, data, config)
        self.folder = config.folder / FOLDER
        self.progress = self._resume()

    @property
    def num_steps(self) -> int:
        return self.order.num_steps

    @property
    def finished(self) -> bool:
        return self.progress.step >= self.num_steps

    def run(self, watch: Watcher | None = None) -> None:
        """Train to the last step, or until ``max_minutes`` are over. The run is checkpointed when this returns."""
        metrics = MetricsFile(self.config.folder / METRICS, self.progress.metrics_bytes)
        started = last_saved = time.monotonic()
        seconds_before = self.progress.train_seconds
        limit = None if self.config.max_minutes is None else started + 60 * self.config.max_minutes
        self.head.train()
        try:
            while not self.finished:
                info = self._step(metrics)
                now = time.monotonic()
                self.progress.train_seconds = seconds_before + now - started
                stop = self.finished or (limit is not None and now >= limit)
                due = self.progress.step % self.config.checkpoint_every == 0
                due = due or now - last_saved >= 60 * self.config.checkpoint_minutes
                if stop or due or info.acceptance_length is not None:
                    self._save()
                    last_saved = now
                if watch is not None:
                    watch(info)
                if stop:
                    break
        except KeyboardInterrupt:
            self._save()
            raise
        finally:
            metrics.close()
            self.head.eval()

    def choose_weights(self) -> int:
        """Give the head the weights to export; returns their step. The best are those measured best."""
        if self.config.export == "best" and self.progress.best_step:
            self.head.load_state_dict(load_best(self.folder, self.progress.best_step))
            return self.progress.best_step
        return self.progress.step

    def _step(self, metrics: MetricsFile) -> StepInfo:
        config, progress = self.config, self.progress
        started = time.perf_counter()
        rate = learning_rate(
            progress.step,
            self.num_steps,
            peak=config.learning_rate,
            floor=config.min_learning_rate,
            warmup=config.warmup,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        epoch, sequences = self.order.step(progress.step)
        loss, blocks = self.gradient_step(progress.step, epoch, sequences)
        norm = torch.nn.utils.clip_grad_norm_(self.head.parameters(), config.max_grad_norm)
        if not bool(norm.isfinite()):
            raise JetSpecError(
                f"learning_rate={config.learning_rate}: training diverged at step {progress.step + 1}; lower it"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        speed = blocks / (time.perf_counter() - started)
        progress.step += 1
        progress.last_loss = loss
        progress.window.append(loss)
        if progress.step % config.log_every == 0 or self.finished:
            mean = sum(progress.window) / len(progress.window)
            progress.window.clear()
            progress.metrics_bytes = metrics.write(
                step=progress.step,
                epoch=epoch,
                loss=mean,
                learning_rate=rate,
                grad_norm=norm.item(),
                blocks_per_s=speed,
            )
        accepted = self._measure(metrics) if self._measures_now() else None
        return StepInfo(progress.step, self.num_steps, epoch, loss, rate, blocks, speed, accepted)

    def _measures_now(self) -> bool:
        every = self.config.eval_every or max(1, -(-self.num_steps // 5))
        return bool(self.eval_prompts) and (self.progress.step % every == 0 or self.finished)

    def _measure(self, metrics: MetricsFile) -> float:
        progress = self.progress
        accepted = acceptance_length(
            self.target,
            self.head,
            self.eval_prompts,
            tree_budget=self.config.tree_budget,
            max_tokens=self.config.eval_max_tokens,
        )
        progress.last_acceptance = accepted
        progress.metrics_bytes = metrics.write(step=progress.step, acceptance_length=accepted)
        if accepted > progress.best_acceptance:
            progress.best_acceptance, progress.best_step = accepted, progress.step
            save_best(self.folder, progress.step, self.head)
        return accepted

    def _save(self) -> None:
        save_checkpoint(self.config, self.progress, self.head, self.optimizer)

    def _resume(self) -> Progress:
        state = load_checkpoint(self.config)
        if state is None:
            return Progress()
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        progress: Progress = state["progress"]
        return progress


def _optimizer(head: DraftHead, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW; scales of norms are not decayed."""
    matrices = [p for p in head.parameters() if p.dim() > 1]
    scales = [p for p in head.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": scales, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)
