"""The training loss: forward KL from the target's distribution to the draft head's, through the target's lm_head.

A row of logits is as wide as the vocabulary, so the loss never keeps one. With q the draft's distribution, p the
target's and W the lm_head, the loss of a row is ``sum p log p - (p @ W) . h + logsumexp(W h)`` and its gradient with
respect to the draft's hidden state h is ``q @ W - p @ W``. So the target contributes one vector of hidden size and one
number per position, shared by all blocks that overlap there, and the draft's logits live only chunk by chunk. Hard
labels, mixed into p, change that vector and number; a temperature t divides h and multiplies the loss by t^2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from jetspec.attention import RowBatch
from jetspec.errors import JetSpecError
from jetspec.models.target import Target

#: Bytes of logits that are alive at once. Large enough that reading the lm_head's weight is a small part of the work.
CHUNK_BYTES = 48 << 20


@dataclass
class OutputLayer:
    """The target's lm_head as plain tensors: ``logits = weight @ h / temperature + bias``.

    The target itself may cap its logits at ``softcap``; drafts are made from uncapped ones. Bias and cap are those of
    logits that are divided by the temperature already.
    """

    weight: Tensor  # [V, H]
    bias: Tensor | None = None  # [V] float32
    softcap: float | None = None
    temperature: float = 1.0
    #: [vocabulary] int64: a token's row of the weight, -1 for none; None where each token has its own.
    places: Tensor | None = None
    _scratch: Tensor | None = field(default=None, repr=False)

    @property
    def chunk_rows(self) -> int:
        """Rows of logits that are alive at once."""
        return max(16, CHUNK_BYTES // (4 * self.weight.shape[0]))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, V] float32 of at most ``chunk_rows`` rows [n, H], in a buffer that the next call overwrites."""
        weight = self.weight
        if self._scratch is None:
            self._scratch = torch.empty(self.chunk_rows, weight.shape[0], device=weight.device)
        logits = self._scratch[: hidden.shape[0]]
        if weight.dtype == torch.float32:
            torch.mm(hidden, weight.t(), out=logits)
        else:
            logits.copy_(torch.mm(hidden.to(weight.dtype), weight.t()))
        if self.temperature != 1:
            logits /= self.temperature
        if self.bias is not None:
            logits += self.bias
        return logits

    def cap_(self, logits: Tensor) -> Tensor:
        """Logits as the target uses them, in place."""
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)

    def project(self, rows: Tensor) -> Tensor:
        """``rows`` [n, V] float32 times the weight: [n, H] float32."""
        return torch.mm(rows.to(self.weight.dtype), self.weight).float()

    def restrict(self, token_ids: Tensor, log_counts: Tensor) -> OutputLayer:
        """The layer over ``token_ids`` only, each standing for ``exp(log_counts)`` tokens like it."""
        if self.softcap is not None:
            raise JetSpecError(
                "negatives: a target that caps its logits is trained over the whole vocabulary; unset it"
            )
        bias = log_counts if self.bias is None else self.bias[token_ids] + log_counts
        places = torch.full((len(self.weight),), -1, device=token_ids.device)
        places[token_ids] = torch.arange(len(token_ids), device=token_ids.device)
        return OutputLayer(self.weight[token_ids], bias, temperature=self.temperature, places=places)

    def place(self, tokens: Tensor) -> Tensor:
        """Rows of the weight that stand for ``tokens``, all of which it has."""
        return tokens if self.places is None else self.places[tokens]


@dataclass(frozen=True)
class Teacher:
    """What the target says at some positions: expectations under its next-token distribution p."""

    mean_row: Tensor  # [D, H], p @ W
    offset: Tensor  # [D], sum p log p - p . bias
    labels: Tensor  # [D] int64, the row of W of the token that follows


def output_layer(target: Target, temperature: float = 1.0) -> OutputLayer:
    """The output layer of ``target``.

    Raises:
        JetSpecError: the target's logits are not such a map of its final hidden state, or not finite.
    """
    module = target.model.get_output_embeddings()
    bias = getattr(module, "bias", None)
    softcap = getattr(target.config, "final_logit_softcapping", None)
    layer = OutputLayer(
        module.weight.detach(),
        None if bias is None else bias.detach().float() / temperature,
        None if softcap is None else softcap / temperature,
        temperature,
    )
    _check_output_layer(layer, target)
    return layer


@torch.no_grad()
def _check_output_layer(layer: OutputLayer, target: Target) -> None:
    """Compare with the model's own logits: scales and other steps between hidden state and logits exist."""
    ids = torch.arange(min(8, target.vocab_size))
    n = len(ids)
    out = target.forward(RowBatch.chains([ids], [torch.arange(n)]), target.new_cache(1, n), None, final_hidden=True)
    assert out.hidden is not None
    ours, theirs = layer.cap_(layer.logits(out.hidden.float())), out.logits.float() / layer.temperature
    if not bool(theirs.isfinite().all()):
        raise JetSpecError(
            "target: its logits are not finite; check its weights, or run it in another number type with target_dtype"
        )
    if (ours - theirs).abs().max() > 0.03 * theirs.abs().max().clamp(min=1.0):
        raise JetSpecError(
            f"target: the logits of {type(target.model).__name__} are not its output embedding times its final hidden "
            "state; training for such a target is not supported"
        )


@torch.no_grad()
def teach(layer: OutputLayer, hidden: Tensor, labels: Tensor, hard_labels: float = 0.0) -> Teacher:
    """The target's side of the loss at final hidden states ``hidden`` [D, H], followed by tokens ``labels`` [D].

    ``hard_labels`` is the share of the loss that is cross entropy with the label instead of divergence from p.
    """
    hidden, labels = hidden.float(), layer.place(labels)
    mean_row = torch.empty_like(hidden)
    offset = hidden.new_empty(hidden.shape[0])
    for start in range(0, hidden.shape[0], layer.chunk_rows):
        part = slice(start, start + layer.chunk_rows)
        logits = layer.cap_(layer.logits(hidden[part]))
        if layer.softcap is not None:
            probs = logits.log_softmax(1)
            entropy = -(probs.exp() * probs).sum(1)
            probs = probs.exp_()
            mean_row[part] = layer.project(probs)
            offset[part] = -entropy if layer.bias is None else -entropy - probs @ layer.bias
        else:
            probs, lse = _softmax_(logits)
            mean_row[part] = layer.project(probs)
            # sum p log p - p . b = sum p (W h / t + b - lse) - p . b = (p @ W) . h / t - lse
            offset[part] = (mean_row[part] * hidden[part]).sum(1) / layer.temperature - lse
    if hard_labels:
        mean_row.lerp_(layer.weight[labels].float(), hard_labels)
        # The label's own entropy is 0.
        offset.lerp_(torch.zeros_like(offset) if layer.bias is None else -layer.bias[labels], hard_labels)
    return Teacher(mean_row, offset, labels)


def row_losses(layer: OutputLayer, student: Tensor, teacher: Teacher, rows: Tensor) -> tuple[Tensor, Tensor]:
    """``KL(target at rows[r] || draft at student[r])`` times the squared temperature, differentiable in ``student``.

    student [R, H]; rows [R] int64, indices into the teacher's positions. Returns, beside the losses [R], the
    probability [R] that the draft gives to each row's label, without gradient.
    """
    apply: Callable[..., tuple[Tensor, Tensor]] = _RowLosses.apply
    return apply(student, layer, teacher, rows)


class _RowLosses(torch.autograd.Function):
    """Computes the gradient with the loss, so that nothing of the vocabulary's width is kept for backward."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, layer: OutputLayer, teacher: Teacher, rows: Tensor) -> tuple[Tensor, Tensor]:
        grad = torch.empty(student.shape, dtype=torch.float32, device=student.device)
        losses, hits = grad.new_empty(2, len(student))
        t = layer.temperature
        for start in range(0, len(student), layer.chunk_rows):
            part = slice(start, start + layer.chunk_rows)
            hidden, mean_row = student[part].float(), teacher.mean_row[rows[part]]
            probs, lse = _softmax_(layer.logits(hidden))
            losses[part] = (teacher.offset[rows[part]] - (mean_row * hidden).sum(1) / t + lse) * t**2
            grad[part] = (layer.project(probs) - mean_row) * t
            hits[part] = probs.gather(1, teacher.labels[rows[part], None])[:, 0]
        ctx.save_for_backward(grad.to(student.dtype))
        ctx.mark_non_differentiable(hits)
        return losses, hits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,) = ctx.saved_tensors
        return grad * grads[0][:, None].to(grad.dtype), None, None, None


def _softmax_(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax in place, and the log of its denominator: had from the largest entry without another pass of exp."""
    top = logits.amax(1)
    probs = torch.softmax(logits, 1, out=logits)
    return probs, top - probs.amax(1).log()
