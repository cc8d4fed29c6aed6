"""One optimizer step's loss and gradient, as far as this process's sequences make them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from jetspec.head import DraftHead
from jetspec.models.target import Target
from jetspec.train.blocks import Blocks, keyed_generator, make_blocks, sample_anchors
from jetspec.train.config import TrainConfig
from jetspec.train.dataset import CapturedSequences, find_non_finite
from jetspec.train.loss import OutputLayer, output_layer, row_losses, teach
from jetspec.train.processes import Processes


class GradientStep:
    """Adds the gradient of a step's loss to a head's parameters, one sequence at a time, so memory stays small.

    The loss is the mean over the rows that carry loss, by their weights, of the whole step: of all processes.
    """

    def __init__(
        self,
        target: Target,
        head: DraftHead,
        data: CapturedSequences,
        config: TrainConfig,
        processes: Processes | None = None,
    ) -> None:
        self.target = target
        self.head = head
        self.data = data
        self.config = config
        self.processes = processes or Processes()
        self._full = output_layer(target, config.loss_temperature)
        self._common, self._rare = _partition(data.distinct_tokens(), target.vocab_size)

    def __call__(self, step: int, epoch: int, sequences: Sequence[int]) -> tuple[float, int]:
        """This process's part of (loss, blocks), for its ``sequences``: possibly none. A collective."""
        layer = self._output_layer(step)
        blocks = [self._blocks(epoch, sequence) for sequence in sequences]
        [total] = self.processes.sum(sum(float(b.weights.sum()) for b in blocks))
        losses = [self._accumulate(layer, s, b, total) for s, b in zip(sequences, blocks, strict=True)]
        return sum(losses, 0.0), sum(len(b.anchors) for b in blocks)

    def find_fault(self, sequences: Sequence[int]) -> str | None:
        """What is not finite of the target in ``sequences``, in words; None where the loss has another cause."""
        for sequence in sequences:
            captured = self.data.read(sequence)
            layers = self.head.config.target_layer_ids
            fault = find_non_finite(captured.aux_hidden_states, captured.hidden, layers)
            hidden = captured.hidden.float().to(self._full.weight.device)
            if fault is None and not all(
                bool(self._full.logits(rows).isfinite().all()) for rows in torch.split(hidden, self._full.chunk_rows)
            ):
                fault = "the target's logits are not finite"
            if fault is not None:
                return f"training sequence {sequence + 1}: {fault}"
        return None

    def _accumulate(self, layer: OutputLayer, sequence: int, blocks: Blocks, total: float) -> float:
        if not bool(blocks.weights.any()):
            return 0.0
        device = self.head.device
        captured = self.data.read(sequence, rows=int(blocks.anchors.max()))
        positions, rows = torch.unique(blocks.teacher_rows[blocks.weights > 0], return_inverse=True)
        labels = captured.token_ids[positions + 1].to(device)
        teacher = teach(layer, captured.hidden[positions].to(device), labels, self.config.hard_labels)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.config.precision == "bfloat16"):
            hidden = self.head.forward_text(
                captured.aux_hidden_states.to(device, self.head.dtype),
                captured.token_ids.to(device),
                blocks.anchors.to(device),
                self.target.embed,
            )
        carrying = (blocks.weights > 0).to(device)
        losses, hits = row_losses(layer, hidden[carrying], teacher, rows.to(device))
        weights = blocks.weights.to(device)
        if self.config.weighting == "reach":
            weights = weights * reach(torch.ones_like(weights).masked_scatter(carrying, hits))
        loss = losses @ weights[carrying] / total
        torch.autograd.backward(loss)
        return loss.item()

    def _blocks(self, epoch: int, sequence: int) -> Blocks:
        config, data = self.config, self.data
        generator = keyed_generator(config.seed, epoch, sequence)
        length, loss_start = data.lengths[sequence], data.loss_starts[sequence]
        anchors = sample_anchors(length, loss_start, config.blocks_per_sequence, generator)
        return make_blocks(length, anchors, config.block_size, config.depth_gamma)

    def _output_layer(self, step: int) -> OutputLayer:
        """The whole vocabulary, or its share that this step looks at."""
        count = self.config.negatives
        if count is None or count >= len(self._rare):
            return self._full
        generator = keyed_generator(self.config.seed, step, "negatives")
        drawn = self._rare[torch.randperm(len(self._rare), generator=generator)[:count]]
        log_counts = torch.zeros(len(self._common) + count)
        log_counts[len(self._common) :] = math.log(len(self._rare) / count)
        device = self._full.weight.device
        return self._full.restrict(torch.cat((self._common, drawn)).to(device), log_counts.to(device))


def reach(hits: Tensor) -> Tensor:
    """The probability [A, B - 1] that a draft reaches each depth.

    It is the product of ``hits`` [A, B - 1], the probabilities of the true tokens, over the depths before.
    """
    return torch.cat((torch.ones_like(hits[:, :1]), hits[:, :-1].cumprod(1)), dim=1)


def _partition(common: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """(common ids, all others)."""
    rare = torch.ones(vocab_size, dtype=torch.bool)
    rare[common] = False
    return common, rare.nonzero().flatten()
