"""The training loop: step, log, measure, checkpoint. On several processes, all of them run it side by side."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from jetspec.errors import JetSpecError
from jetspec.head import DraftHead
from jetspec.models.target import Target
from jetspec.train.blocks import anchor_range
from jetspec.train.checkpoint import (
    FOLDER,
    Progress,
    forget_after,
    load_best,
    load_checkpoint,
    save_best,
    save_checkpoint,
)
from jetspec.train.config import TrainConfig
from jetspec.train.dataset import CapturedSequences
from jetspec.train.evaluate import Measurement, measure_acceptance
from jetspec.train.metrics import MetricsFile, open_tracker
from jetspec.train.parallel import DistributedHead, whole
from jetspec.train.processes import Processes
from jetspec.train.schedule import DataOrder, learning_rate, share_out
from jetspec.train.signals import StopSignals
from jetspec.train.step import GradientStep

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class StepInfo:
    """What one optimizer step did, on all processes together. ``step`` counts from 1.

    ``measured`` holds a measurement for each budget where acceptance was measured, and ``differing`` the number of
    held-out prompts whose answers were not the same for all budgets.
    """

    step: int
    num_steps: int
    epoch: int
    loss: float
    learning_rate: float
    grad_norm: float
    blocks: int
    blocks_per_s: float
    measured: tuple[Measurement, ...] = ()
    differing: int = 0


class Watcher(Protocol):
    """Is told about every step. An exception that it raises ends the run, which can be resumed."""

    def __call__(self, info: StepInfo) -> None:
        """Called after each step."""


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
        processes: Processes,
    ) -> None:
        self.target, self.data, self.eval_prompts, self.config = target, data, eval_prompts, config
        self.processes = processes
        self.block_counts = [
            min(config.blocks_per_sequence, len(anchor_range(length, start)))
            for length, start in zip(data.lengths, data.loss_starts, strict=True)
        ]
        self.order = DataOrder(
            self.block_counts,
            config.blocks_per_step,
            seed=config.seed,
            epochs=config.epochs,
            max_steps=config.max_steps,
        )
        self.parallel = DistributedHead(head, processes, fsdp=config.fsdp)
        self.optimizer = _optimizer(head, config)
        self.gradient_step = GradientStep(target, head, data, config, processes)
        self.folder = config.folder / FOLDER
        self.progress = self._resume()

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.order.num_steps

    @property
    def finished(self) -> bool:
        """Whether the last step was made."""
        return self.progress.step >= self.num_steps

    def run(self, watch: Watcher | None = None) -> None:
        """Train to the last step, or until a signal or ``max_minutes`` ends it. Then the run is checkpointed."""
        if self.finished:
            return
        config, progress = self.config, self.progress
        log = self._open_log() if self.processes.is_main else None
        started = last_saved = time.monotonic()
        seconds_before = progress.train_seconds
        self.parallel.head.train()
        try:
            with StopSignals() as signals:
                stop = False
                while not stop:
                    info = self._step()
                    if self._measures_now():
                        info = self._measure(info)
                    if log is not None:
                        self._log(log, info)
                    now = time.monotonic()
                    progress.train_seconds = seconds_before + now - started
                    out_of_time = config.max_minutes is not None and now - started >= 60 * config.max_minutes
                    due = now - last_saved >= 60 * config.checkpoint_minutes
                    # Clocks and signals differ between processes, what they decide must not.
                    stop, due = self.processes.any(signals.received or out_of_time or self.finished, due)
                    if stop or due or info.measured or progress.step % config.checkpoint_every == 0:
                        self._save()
                        last_saved = now
                    if watch is not None:
                        watch(info)
        finally:
            if log is not None:
                log.close()
            self.parallel.head.eval()

    def choose_weights(self) -> tuple[DraftHead, int]:
        """The head to export and the step of its weights; the best are those measured best. A collective."""
        head = self.parallel.whole_head()
        best = self.progress.best_step
        if self.config.export == "best" and best:
            head.load_state_dict(load_best(self.folder, best))
            return head, best
        return head, self.progress.step

    def _step(self) -> StepInfo:
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
        share = share_out(sequences, self.block_counts, self.processes.count)[self.processes.rank]
        self.parallel.gather()
        loss, blocks = self.processes.sum(*self.gradient_step(progress.step, epoch, share))
        self.parallel.sum_gradients()
        norm = self.parallel.clip_gradients(config.max_grad_norm)
        if not torch.tensor(norm).isfinite():
            raise self._divergence(share)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        speed = blocks / (time.perf_counter() - started)
        progress.step += 1
        progress.last_loss = loss
        return StepInfo(progress.step, self.num_steps, epoch, loss, rate, norm, int(blocks), speed)

    def _divergence(self, sequences: Sequence[int]) -> JetSpecError:
        """Why the gradient is not finite: what the target says of this process's ``sequences``, or the step size."""
        fault = self.gradient_step.find_fault(sequences)
        [target_at_fault] = self.processes.any(fault is not None)
        if target_at_fault:
            fault = fault or "the target's states or logits are not finite in another process's sequences"
            return JetSpecError(f"{fault}; check the target's weights or target_dtype, and give a new output directory")
        rate, step = self.config.learning_rate, self.progress.step + 1
        return JetSpecError(f"learning_rate={rate}: training diverged at step {step}; lower it")

    def _measures_now(self) -> bool:
        every = self.config.eval_every or max(1, -(-self.num_steps // 5))
        return bool(self.eval_prompts) and (self.progress.step % every == 0 or self.finished)

    def _measure(self, info: StepInfo) -> StepInfo:
        progress, config = self.progress, self.config
        head = self.parallel.whole_head()
        measured, differing = measure_acceptance(
            self.target,
            head,
            self.eval_prompts,
            tree_budgets=config.eval_budgets,
            max_tokens=config.eval_max_tokens,
            processes=self.processes,
        )
        progress.last, progress.last_step = measured, progress.step
        if not progress.best or measured[0].acceptance_length > progress.best[0].acceptance_length:
            progress.best, progress.best_step = measured, progress.step
            if self.processes.is_main:
                save_best(self.folder, progress.step, head.state_dict())
        return StepInfo(**{**vars(info), "measured": tuple(measured), "differing": differing})

    def _open_log(self) -> MetricsFile:
        config, progress = self.config, self.progress
        tracker = open_tracker(
            config.log_with, config.folder, config.to_dict(), run_id=progress.run_id, first_step=progress.step + 1
        )
        return MetricsFile(config.folder / METRICS, progress.metrics_bytes, tracker)

    def _log(self, log: MetricsFile, info: StepInfo) -> None:
        window = self.progress.window
        window.append(info.loss)
        values: dict[str, Any] = {}
        if info.step % self.config.log_every == 0 or self.finished:
            values |= {"epoch": info.epoch, "loss": sum(window) / len(window), "learning_rate": info.learning_rate}
            values |= {"grad_norm": info.grad_norm, "blocks_per_s": info.blocks_per_s}
            window.clear()
        if info.measured:
            values["acceptance_length"] = {str(m.tree_budget): m.acceptance_length for m in info.measured}
            values["depths"] = {str(m.tree_budget): m.depths for m in info.measured}
        if values:
            self.progress.metrics_bytes = log.write(info.step, **values)

    def _save(self) -> None:
        head, optimizer = whole(self.parallel.head.state_dict()), whole(self.optimizer.state_dict())
        if self.processes.is_main:
            save_checkpoint(self.config, self.progress, head, optimizer)

    def _resume(self) -> Progress:
        state = load_checkpoint(self.config)
        if state is not None:
            self.parallel.load(state["head"], self.optimizer, state["optimizer"])
        progress: Progress = Progress() if state is None else state["progress"]
        self.processes.wait()  # nobody writes before all have read
        if self.processes.is_main:
            forget_after(self.folder, progress.step)
        return progress


def _optimizer(head: DraftHead, config: TrainConfig) -> torch.optim.Optimizer:
    """AdamW; scales of norms are not decayed."""
    matrices = [p for p in head.parameters() if p.dim() > 1]
    scales = [p for p in head.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": scales, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)
