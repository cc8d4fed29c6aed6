"""`jetspec train`: a draft head for a target, from a file of prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from enum import Enum
from json import loads as parse_json
from pathlib import Path
from typing import Annotated, Any

import typer

from jetspec.cli.common import DeviceOption, JsonOption, load_model, messages, print_json, results
from jetspec.errors import JetSpecError

HEAD, ANSWERS, OPTIMIZER, MEASURE = "Head", "Answers", "Optimization", "Measurement and files"


class Init(str, Enum):
    target = "target"
    random = "random"


class OnBadRows(str, Enum):
    refuse = "refuse"
    skip = "skip"


class Export(str, Enum):
    best = "best"
    last = "last"


def train(
    context: typer.Context,
    target: Annotated[
        str, typer.Option("--target", "-t", help="Target model: alias, hub id, directory or .gguf file.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Directory for the head; a run there goes on.")],
    prompts: Annotated[
        str | None,
        typer.Option(
            "--prompts",
            "-f",
            help="Prompts: a text file (one a line), .jsonl, .json, or hub:owner/name (see docs/training.md).",
        ),
    ] = None,
    device: DeviceOption = "auto",
    target_dtype: Annotated[str, typer.Option("--target-dtype", help="Number type the target runs in.")] = "auto",
    json: JsonOption = False,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw", help="Use the chat template; by default where there is one.", rich_help_panel=ANSWERS
        ),
    ] = None,
    max_prompts: Annotated[
        int | None, typer.Option(min=1, help="Train on this many prompts at most.", rich_help_panel=ANSWERS)
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Longest answer.", rich_help_panel=ANSWERS)] = 256,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Of the target's answers; 0 is greedy.", rich_help_panel=ANSWERS)
    ] = 0.0,
    max_running: Annotated[int, typer.Option(min=1, help="Answers at the same time.", rich_help_panel=ANSWERS)] = 64,
    self_prompts: Annotated[
        int, typer.Option(min=0, help="Prompts that the target writes itself.", rich_help_panel=ANSWERS)
    ] = 0,
    regenerate: Annotated[
        bool, typer.Option("--regenerate", help="Write given answers anew.", rich_help_panel=ANSWERS)
    ] = False,
    chat_template_kwargs: Annotated[
        str | None,
        typer.Option(help='Switches of the chat template: {"enable_thinking": false}.', rich_help_panel=ANSWERS),
    ] = None,
    on_bad_rows: Annotated[
        OnBadRows, typer.Option(help="What to do where a row cannot be used.", rich_help_panel=ANSWERS)
    ] = OnBadRows.refuse,
    answers_from: Annotated[
        str | None,
        typer.Option(help="Let this server answer: http://localhost:8000/v1.", rich_help_panel=ANSWERS),
    ] = None,
    answers_model: Annotated[
        str | None, typer.Option(help="The target's name there; else that of --target.", rich_help_panel=ANSWERS)
    ] = None,
    answers_key_env: Annotated[
        str | None, typer.Option(help="Environment variable with its API key.", rich_help_panel=ANSWERS)
    ] = None,
    answers_concurrency: Annotated[
        int, typer.Option(min=1, help="Requests to it at the same time.", rich_help_panel=ANSWERS)
    ] = 16,
    num_layers: Annotated[int, typer.Option(min=1, help="Layers of the head.", rich_help_panel=HEAD)] = 3,
    block_size: Annotated[
        int, typer.Option(min=2, help="Tokens of a block, the known one included.", rich_help_panel=HEAD)
    ] = 8,
    num_taps: Annotated[int, typer.Option(min=1, help="Target layers the head reads.", rich_help_panel=HEAD)] = 5,
    target_layer_ids: Annotated[
        str | None, typer.Option(help="These layers instead: 1,8,15.", rich_help_panel=HEAD)
    ] = None,
    causal: Annotated[
        bool, typer.Option("--causal/--bidirectional", help="What a block position sees.", rich_help_panel=HEAD)
    ] = True,
    mask_token: Annotated[
        str | None, typer.Option(help="Id or text of the mask token; else an unused one.", rich_help_panel=HEAD)
    ] = None,
    init: Annotated[
        Init, typer.Option(help="Start from the target's last layers, or from noise.", rich_help_panel=HEAD)
    ] = Init.target,
    epochs: Annotated[int, typer.Option(min=1, help="Visits of each answer.", rich_help_panel=OPTIMIZER)] = 6,
    max_steps: Annotated[
        int | None, typer.Option(min=1, help="Steps; wins over --epochs.", rich_help_panel=OPTIMIZER)
    ] = None,
    max_minutes: Annotated[
        float | None, typer.Option(help="Stop after this long; the run can go on later.", rich_help_panel=OPTIMIZER)
    ] = None,
    blocks_per_step: Annotated[int, typer.Option(min=1, help="Blocks of a step.", rich_help_panel=OPTIMIZER)] = 128,
    blocks_per_sequence: Annotated[
        int, typer.Option(min=1, help="Blocks of one answer in a step.", rich_help_panel=OPTIMIZER)
    ] = 32,
    gamma: Annotated[
        float | None,
        typer.Option(help="Depth d weighs exp(-(d - 1) / gamma); else half the block.", rich_help_panel=OPTIMIZER),
    ] = None,
    negatives: Annotated[
        int | None,
        typer.Option(min=1, help="Approximate the softmax with this many random tokens.", rich_help_panel=OPTIMIZER),
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="Peak.", rich_help_panel=OPTIMIZER)] = 1e-3,
    min_learning_rate: Annotated[
        float, typer.Option(help="Share of the peak at the end.", rich_help_panel=OPTIMIZER)
    ] = 0.02,
    warmup: Annotated[float, typer.Option(help="Share of the steps.", rich_help_panel=OPTIMIZER)] = 0.04,
    weight_decay: Annotated[float, typer.Option(min=0.0, help="Of AdamW.", rich_help_panel=OPTIMIZER)] = 0.0,
    max_grad_norm: Annotated[float, typer.Option(help="Longer gradients are cut.", rich_help_panel=OPTIMIZER)] = 1.0,
    seed: Annotated[int, typer.Option(help="Of everything random.", rich_help_panel=OPTIMIZER)] = 0,
    eval_prompts: Annotated[
        int, typer.Option(min=0, help="Prompts held out to measure acceptance on.", rich_help_panel=MEASURE)
    ] = 16,
    eval_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between measurements; else five.", rich_help_panel=MEASURE)
    ] = None,
    eval_max_tokens: Annotated[
        int, typer.Option(min=2, help="Longest answer in a measurement.", rich_help_panel=MEASURE)
    ] = 128,
    tree_budget: Annotated[
        int, typer.Option(min=1, help="Rows of a verify forward there.", rich_help_panel=MEASURE)
    ] = 16,
    export: Annotated[
        Export, typer.Option(help="The weights with the best measurement, or the last.", rich_help_panel=MEASURE)
    ] = Export.best,
    dtype: Annotated[str, typer.Option(help="Number type of the head's file.", rich_help_panel=MEASURE)] = "bfloat16",
    log_every: Annotated[int, typer.Option(min=1, help="Steps between log lines.", rich_help_panel=MEASURE)] = 10,
    checkpoint_every: Annotated[
        int, typer.Option(min=1, help="Steps between checkpoints.", rich_help_panel=MEASURE)
    ] = 200,
    checkpoint_minutes: Annotated[
        float, typer.Option(help="Minutes between checkpoints.", rich_help_panel=MEASURE)
    ] = 5.0,
    shard_sequences: Annotated[
        int, typer.Option(min=1, help="Answers captured and stored at a time.", rich_help_panel=MEASURE)
    ] = 128,
    license: Annotated[
        str, typer.Option("--license", help="Of the head, for its model card.", rich_help_panel=MEASURE)
    ] = "apache-2.0",
) -> None:
    """Train a draft head for a target on prompts.

    The target answers the prompts itself. The same command goes on where it was stopped. Progress goes to stderr.
    """
    from jetspec.train import TrainConfig
    from jetspec.train import train as run

    config = TrainConfig(**config_values(context.params))
    model = load_model(target, device=device, dtype=target_dtype)
    result = run(config, target=model, console=messages)
    if json:
        print_json({**asdict(result), "output": str(result.output)})
        return
    state = "finished" if result.finished else "stopped; the same command goes on"
    results.print(f"{result.output}: step {result.steps} of {result.num_steps}, {state}", highlight=False, markup=False)
    if result.acceptance_length:
        results.print(f"acceptance length {result.acceptance_length:.2f} on held-out prompts", highlight=False)


#: Options of the command that say how to run it, not what is trained.
RUN_OPTIONS = frozenset({"device", "target_dtype", "json"})


def config_values(options: Mapping[str, Any]) -> dict[str, Any]:
    """The command's options as fields of `TrainConfig`.

    Raises:
        JetSpecError: the layer list is not one, or the template's switches are not JSON.
    """
    values = {name: value for name, value in options.items() if name not in RUN_OPTIONS}
    values |= {name: value.value for name, value in values.items() if isinstance(value, Enum)}
    if values["mask_token"] is not None and values["mask_token"].isdecimal():
        values["mask_token"] = int(values["mask_token"])
    switches = values["chat_template_kwargs"]
    if switches is not None:
        try:
            values["chat_template_kwargs"] = parse_json(switches)
        except ValueError as error:
            raise JetSpecError(f"--chat-template-kwargs {switches}: not valid JSON: {error}") from error
    layers = values["target_layer_ids"]
    if layers is not None:
        try:
            values["target_layer_ids"] = tuple(int(layer) for layer in layers.split(","))
        except ValueError:
            raise JetSpecError(f"--target-layer-ids {layers}: give numbers like 1,8,15") from None
    return values
