"""`jetspec train`: a draft head for a target, from a file of prompts. Its options are the fields of `TrainConfig`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from jetspec.cli.common import messages, print_json, quiet_transformers, results
from jetspec.cli.config_command import command_for
from jetspec.cli.options import JsonOption
from jetspec.train.config import TrainConfig

if TYPE_CHECKING:
    from jetspec.train import TrainResult


def run_training(config: TrainConfig, *, json: JsonOption = False) -> None:
    """Train a draft head for a target on a file of prompts.

    The target answers the prompts itself. --target, --prompts and --output are needed, here or in the --config file.
    The same command resumes a run that was stopped. torchrun starts it on several GPUs. Progress goes to stderr.
    """
    from accelerate import PartialState

    from jetspec.train.run import train

    quiet_transformers()
    result = train(config, console=messages)
    state = PartialState()
    state.destroy_process_group()
    if state.is_main_process:
        show(result, json=json)


def show(result: TrainResult, *, json: bool) -> None:
    """Print how the run ended and what was measured."""
    if json:
        print_json({**asdict(result), "output": str(result.output)})
        return
    state = "finished" if result.finished else "stopped; the same command resumes it"
    results.print(f"{result.output}: step {result.steps} of {result.num_steps}, {state}", highlight=False, markup=False)
    for measured in result.measured:
        length, budget = measured.acceptance_length, measured.tree_budget
        results.print(f"acceptance length {length:.2f} on held-out prompts with {budget} rows", highlight=False)


train = command_for(TrainConfig, run_training, name="train")
