"""A head in training on several processes.

Each process adds up the gradient of its own sequences, which may be many or none, and one reduction ends the step.
DistributedDataParallel would reduce in every backward pass, of which each process has another number. With ``fsdp``,
parameters, summed gradients and optimizer state are sharded, and each step gathers the parameters once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from jetspec.head import DraftHead, new_head
from jetspec.train.processes import Processes


class DistributedHead:
    """``head``, whole on every process or, with ``fsdp``, in shards. Every method is a collective."""

    def __init__(self, head: DraftHead, processes: Processes, *, fsdp: bool) -> None:
        self.head = head
        self.processes = processes
        self.sharded = fsdp and processes.count > 1
        if self.sharded:
            from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

            mesh = init_device_mesh(processes.device.type, (processes.count,))
            fully_shard(self.head, mesh=mesh, reshard_after_forward=False)
            # FSDP reduces gradients after a backward pass through a forward method that it knows; this is the one.
            self.head.all_parameters = _all_parameters.__get__(self.head)
            register_fsdp_forward_method(self.head, "all_parameters")

    def gather(self) -> None:
        """Make the parameters whole for a step's forward and backward passes."""
        if self.sharded:
            self.head.unshard()  # type: ignore[operator]

    def sum_gradients(self) -> None:
        """Replace each parameter's gradient by its sum over all processes; a parameter without one counts as zero."""
        if self.sharded:
            self.head.all_parameters().backward()  # type: ignore[operator]
            self.head.reshard()  # type: ignore[operator]
            for parameter in self.head.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(self.processes.count)  # FSDP has averaged
            return
        for parameter in self.head.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.processes.count > 1:
            works = [dist.all_reduce(p.grad, async_op=True) for p in self.head.parameters()]
            for work in works:
                work.wait()

    def clip_gradients(self, max_norm: float) -> float:
        """Scale the gradient down to ``max_norm``; returns its norm before."""
        norm: Tensor = nn.utils.clip_grad_norm_(self.head.parameters(), max_norm)
        return float(whole(norm))

    def whole_head(self) -> DraftHead:
        """A head with all weights on every process: the head itself, or a copy where it is sharded."""
        if not self.sharded:
            return self.head
        with torch.device("meta"):
            copy = new_head(self.head.config)
        copy.load_state_dict(whole(self.head.state_dict()), assign=True)
        return copy.eval()

    def load(self, head: dict[str, Tensor], optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        """Load the whole states of the head and of its optimizer, as ``whole`` gives them."""
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        placed = {i: {k: like(t.clone(), parameters[i]) for k, t in one.items()} for i, one in state["state"].items()}
        optimizer.load_state_dict({**state, "state": placed})
        own = self.head.state_dict()
        self.head.load_state_dict({name: like(tensor, own[name]) for name, tensor in head.items()})


def _all_parameters(self: nn.Module) -> Tensor:
    """Zero, with a gradient of zero for each parameter."""
    total = torch.stack([p.sum() for p in self.parameters()]).sum()
    return total * 0


def whole(tree: Any) -> Any:
    """A tensor, or a tree of dicts and lists of them, with the shards of each put together. A collective."""
    if isinstance(tree, DTensor):
        return tree.full_tensor()
    if isinstance(tree, dict):
        return {key: whole(value) for key, value in tree.items()}
    return [whole(value) for value in tree] if isinstance(tree, list) else tree


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """``tensor`` in shards, where ``other`` is and has its shape."""
    if not isinstance(other, DTensor) or tensor.shape != other.shape:
        return tensor
    tensor = tensor.to(other.device)
    return distribute_tensor(tensor, other.device_mesh, other.placements)
