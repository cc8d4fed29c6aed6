"""The processes of a run: one, or those that torchrun or `accelerate launch` started."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from jetspec.errors import JetSpecError
from jetspec.models.loading import resolve_device

#: How long processes wait for each other: one may have to download the target first.
TIMEOUT = timedelta(hours=2)


@dataclass(frozen=True)
class Processes:
    """This process among ``count``; process 0 is the one that prints and writes. Every method is a collective."""

    rank: int = 0
    count: int = 1
    device: torch.device = torch.device("cpu")

    @classmethod
    def start(cls, device: str) -> Processes:
        """Join the other processes, where there are any, over NCCL on GPUs and gloo on CPUs.

        Raises:
            JetSpecError: accelerate is missing, its launcher asks for a kind of training that ``jetspec`` does
                differently, or ``device`` cannot be used.
        """
        try:
            from accelerate import PartialState
            from accelerate.utils import parse_choice_from_env, parse_flag_from_env
        except ImportError as error:
            raise JetSpecError("training needs accelerate; install it with `pip install 'jetspec[train]'`") from error
        # Settings of the launcher that would be ignored.
        if parse_flag_from_env("ACCELERATE_USE_FSDP") or parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
            raise JetSpecError("accelerate launch: use neither FSDP nor DeepSpeed there; give jetspec --fsdp")
        if parse_choice_from_env("ACCELERATE_MIXED_PRECISION", "no") != "no":
            raise JetSpecError("accelerate launch: use --mixed_precision no there; give jetspec --precision bfloat16")
        cpu = device == "cpu" or not torch.cuda.is_available()
        state = PartialState(cpu=cpu, timeout=TIMEOUT)
        if state.num_processes == 1:
            return cls(device=resolve_device(device))
        if device not in ("auto", "cpu", "cuda"):
            raise JetSpecError(f"device={device!r}: several processes share the devices; give auto, cpu or cuda")
        return cls(state.process_index, state.num_processes, state.device)

    @property
    def is_main(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.rank == 0

    def sum(self, *values: float) -> list[float]:
        """The sums of each value over all processes, the same bits on each of them."""
        if self.count == 1:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(sums)
        return sums.tolist()

    def any(self, *flags: bool) -> list[bool]:
        """Which of the flags is set on any process."""
        return [count > 0 for count in self.sum(*map(float, flags))]

    def wait(self) -> None:
        """Wait until all processes call it. For short waits only, because collectives time out."""
        if self.count > 1:
            self.sum(0.0)
