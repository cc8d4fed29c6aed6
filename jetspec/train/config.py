"""The configuration of a training run."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from jetspec.config import Config, flag_of, option, option_extra
from jetspec.errors import JetSpecError

#: The resolved configuration, beside the weights.
FILE = "train_config.json"

#: The default `transition_size` of causal parallel heads.
TRANSITION_SIZE = 256

ANSWERS, HEAD, OPTIMIZER = "Answers", "Head", "Optimization"
MEASURE, FILES, MACHINE = "Measurement", "Files", "Machine"

LayerId = Annotated[int, Field(ge=0)]
Rows = Annotated[int, Field(ge=1)]


class TrainConfig(Config):
    """Everything that decides a training run. Two runs of one configuration give the same head, bit for bit.

    The number of processes is not part of it: they share a step's blocks, so it changes rounding only. Each field is
    described in its ``option``, which ``jetspec train --help`` shows. A run that is resumed may change the fields that
    are ``free``, because they change neither what is trained nor in which order.

    Raises:
        JetSpecError: a value has another type or is out of range, or two fields disagree; the message names the field.
    """

    target: str = option(
        help="Target model: alias, hub id, directory or .gguf file.", flags=("--target", "-t"), free=True
    )
    prompts: str | Path | None = option(
        None,
        help="Prompts: a text file (one a line), .jsonl, .json, or hub:owner/name (see docs/training.md).",
        flags=("--prompts", "-f"),
        free=True,
    )
    output: str | Path = option(
        help="Directory for the head. A run that is there is resumed.", flags=("--output", "-o"), free=True
    )

    chat: bool | None = option(
        None,
        help="Use the chat template, or the prompts as they are. By default the template is used where there is one.",
        group=ANSWERS,
        flags=("--chat/--raw",),
    )
    max_prompts: int | None = option(None, help="Train on at most this many prompts.", group=ANSWERS, ge=1)
    max_tokens: int = option(256, help="Maximum tokens of an answer.", group=ANSWERS, ge=2)
    temperature: float = option(
        0.0, help="Temperature of the target's answers; 0 is greedy.", group=ANSWERS, ge=0, allow_inf_nan=False
    )
    max_num_seqs: int = option(64, help="Answers decoded at the same time.", group=ANSWERS, ge=1, free=True)
    self_prompts: int = option(0, help="Number of prompts that the target writes itself.", group=ANSWERS, ge=0)
    regenerate: bool = option(
        False,
        help="Let the target write answers that the prompts already have.",
        group=ANSWERS,
        flags=("--regenerate",),
    )
    chat_template_kwargs: dict[str, Any] | None = option(
        None, help='Arguments of the chat template, as JSON: {"enable_thinking": false}.', group=ANSWERS
    )
    on_bad_rows: Literal["refuse", "skip"] = option(
        "refuse", help="Whether a row that cannot be used ends the run or is skipped.", group=ANSWERS
    )
    answers_from: str | None = option(
        None,
        help="Address of an OpenAI-compatible server that writes the answers: http://localhost:8000/v1.",
        group=ANSWERS,
    )
    answers_model: str | None = option(
        None, help="The target's name on that server; by default the value of --target.", group=ANSWERS
    )
    answers_key_env: str | None = option(
        None, help="Environment variable that holds the server's API key.", group=ANSWERS, free=True
    )
    answers_concurrency: int = option(
        16, help="Requests sent to the server at the same time.", group=ANSWERS, ge=1, free=True
    )
    shard_sequences: int = option(128, help="Answers captured and stored together.", group=ANSWERS, ge=1)

    kind: Literal["parallel", "autoregressive"] = option(
        "parallel",
        help="Kind of head: drafts all depths in one forward, or one depth a forward as EAGLE-3 does.",
        group=HEAD,
    )
    num_layers: int = option(3, help="Layers of the head.", group=HEAD, ge=1)
    block_size: int = option(8, help="Tokens of a block, the known one included.", group=HEAD, ge=2)
    num_aux_layers: int = option(5, help="Number of target layers whose outputs the head reads.", group=HEAD, ge=1)
    target_layer_ids: tuple[LayerId, ...] | None = option(
        None, help="Which target layers the head reads instead: 1,8,15.", group=HEAD, min_length=1
    )
    causal: bool = option(
        True,
        help="Whether a block position sees the positions before it, or all of the block.",
        group=HEAD,
        flags=("--causal/--bidirectional",),
    )
    transition_size: int | None = option(
        None,
        help="Size of the state that conditions a draft on its path; 0 for none, which vLLM needs. By default "
        f"{TRANSITION_SIZE} in causal parallel heads, 0 in others.",
        group=HEAD,
        ge=0,
    )
    mask_token: int | str | None = option(
        None, help="Id or text of the mask token; by default an unused token.", group=HEAD
    )
    init: str = option(
        "target",
        help="Initial weights: the target's last layers (target), noise (random), or those of this trained head.",
        group=HEAD,
    )

    epochs: int = option(6, help="Passes over the answers. Each draws other anchors.", group=OPTIMIZER, ge=1)
    max_steps: int | None = option(None, help="Number of steps; overrides --epochs.", group=OPTIMIZER, ge=1)
    max_minutes: float | None = option(
        None, help="Stop after this time. The run can be resumed.", group=OPTIMIZER, gt=0, free=True
    )
    blocks_per_step: int = option(128, help="Blocks of a step, over all processes.", group=OPTIMIZER, ge=1)
    blocks_per_sequence: int = option(32, help="Maximum blocks of one answer in a step.", group=OPTIMIZER, ge=1)
    gamma: float | None = option(
        None,
        help="The loss at depth d weighs exp(-(d - 1) / gamma); by default half the block size.",
        group=OPTIMIZER,
        gt=0,
    )
    weighting: Literal["decay", "reach"] = option(
        "decay",
        help="Weigh a depth by gamma, or by the probability that the draft reaches it.",
        group=OPTIMIZER,
    )
    loss_temperature: float = option(
        1.0,
        help="Temperature of both distributions in the loss, which is multiplied by its square.",
        group=OPTIMIZER,
        gt=0,
        allow_inf_nan=False,
    )
    hard_labels: float = option(
        0.0, help="Share of the loss that is cross entropy with the chosen tokens.", group=OPTIMIZER, ge=0, le=1
    )
    negatives: int | None = option(
        None, help="Approximate the softmax with this many random tokens.", group=OPTIMIZER, ge=1
    )
    learning_rate: float = option(1e-3, help="Peak learning rate.", group=OPTIMIZER, gt=0, allow_inf_nan=False)
    min_learning_rate: float = option(
        0.02, help="Learning rate of the last step, as a share of the peak.", group=OPTIMIZER, ge=0, le=1
    )
    warmup: float = option(0.04, help="Share of the steps that warm up.", group=OPTIMIZER, ge=0, le=1)
    weight_decay: float = option(0.0, help="Weight decay of AdamW.", group=OPTIMIZER, ge=0, allow_inf_nan=False)
    max_grad_norm: float = option(1.0, help="Norm at which gradients are clipped.", group=OPTIMIZER, gt=0)
    seed: int = option(0, help="Seed of everything random in the run.", group=OPTIMIZER, ge=0)

    eval_prompts: int = option(16, help="Prompts held out to measure acceptance on.", group=MEASURE, ge=0)
    eval_every: int | None = option(
        None, help="Steps between measurements; by default the run has five.", group=MEASURE, ge=1
    )
    eval_max_tokens: int = option(128, help="Maximum tokens of an answer in a measurement.", group=MEASURE, ge=2)
    eval_budgets: tuple[Rows, ...] = option(
        (16, 64),
        help="Tree budgets to measure with: rows of a verify forward. The first decides which weights are best.",
        group=MEASURE,
        min_length=1,
    )
    export: Literal["best", "last"] = option(
        "best", help="Export the weights with the best measurement, or those of the last step.", group=MEASURE
    )

    dtype: Literal["float32", "bfloat16", "float16"] = option(
        "bfloat16", help="Number type of the exported weights.", group=FILES, free=True
    )
    log_every: int = option(10, help="Steps between log lines.", group=FILES, ge=1, free=True)
    log_with: Literal["tensorboard", "wandb"] | None = option(
        None, help="Tracker to log to, beside metrics.jsonl.", group=FILES, free=True
    )
    checkpoint_every: int = option(200, help="Steps between checkpoints.", group=FILES, ge=1, free=True)
    checkpoint_minutes: float = option(5.0, help="Minutes between checkpoints.", group=FILES, gt=0, free=True)
    keep_checkpoints: int = option(2, help="Number of checkpoints kept.", group=FILES, ge=1, free=True)
    license: str = option("apache-2.0", help="License of the head, for its model card.", group=FILES, free=True)

    device: str = option(
        "auto", help="auto, cpu, cuda, ...; several processes share the GPUs.", group=MACHINE, free=True
    )
    target_dtype: str = option("auto", help="Number type that the target runs in.", group=MACHINE)
    precision: Literal["float32", "bfloat16"] = option(
        "float32", help="Number type of the head's arithmetic; its weights stay float32.", group=MACHINE
    )
    fsdp: bool = option(
        False, help="Also shard the head's weights over the processes.", group=MACHINE, flags=("--fsdp",), free=True
    )

    @model_validator(mode="before")
    @classmethod
    def _resolve_transition_size(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("transition_size") is not None:
            return values
        conditioned = values.get("kind", "parallel") == "parallel" and values.get("causal", True) is True
        return {**values, "transition_size": TRANSITION_SIZE if conditioned else 0}

    @field_validator("mask_token")
    @classmethod
    def _read_mask_token_id(cls, value: int | str | None) -> int | str | None:
        """An id may be written as text."""
        return int(value) if isinstance(value, str) and value.isdecimal() else value

    @model_validator(mode="after")
    def _check_answers(self) -> Self:
        if self.prompts is None and not self.self_prompts:
            raise JetSpecError(
                "prompts: none are given; name a file or hub:owner/name, or let the target write self_prompts=N"
            )
        if self.chat is False and self.self_prompts:
            raise JetSpecError(f"self_prompts={self.self_prompts}: needs the chat template; remove chat=False")
        if self.answers_from is not None and not self.answers_from.startswith(("http://", "https://")):
            raise JetSpecError(f"answers_from={self.answers_from!r}: must be an address like http://localhost:8000/v1")
        for name in ("answers_model", "answers_key_env"):
            if self.answers_from is None and getattr(self, name) is not None:
                raise JetSpecError(f"{name}={getattr(self, name)!r}: is for a server; give answers_from too")
        return self

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if self.weighting == "reach" and self.gamma is not None:
            raise JetSpecError(f"gamma={self.gamma}: is for weighting='decay'; remove it")
        only_parallel: dict[str, Any] = {"causal": True, "transition_size": 0, "mask_token": None}
        for name, neutral in only_parallel.items():
            if self.kind != "parallel" and getattr(self, name) != neutral:
                raise JetSpecError(
                    f"{name}={getattr(self, name)!r}: is for kind='parallel'; remove it, or change kind={self.kind!r}"
                )
        return self

    @property
    def depth_gamma(self) -> float:
        """Gamma of the weights of the depths; infinite where they are weighed by reach."""
        if self.weighting == "reach":
            return math.inf
        return self.block_size / 2 if self.gamma is None else self.gamma

    @property
    def folder(self) -> Path:
        """The output directory."""
        return Path(self.output)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON holds them."""
        return self.model_dump(mode="json")

    def command(self) -> str:
        """The command line of this run: the options that differ from their defaults."""
        words = ["jetspec", "train"]
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if value == field.default:
                continue
            flag = flag_of(name, field)
            if isinstance(value, bool):
                words.append(flag.split("/")[0 if value else 1])
            else:
                joined = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
                text = json.dumps(value) if isinstance(value, dict) else joined
                words += [flag, shlex.quote(text)]
        return " ".join(words)


def check_same_run(saved: Mapping[str, Any], config: TrainConfig) -> None:
    """Check that ``config`` would resume the run that has the ``saved`` configuration.

    Raises:
        JetSpecError: a field that is not free differs; the message names the first one.
    """
    now = config.to_dict()
    for name, field in TrainConfig.model_fields.items():
        if not option_extra(field, "free") and saved.get(name) != now[name]:
            raise JetSpecError(
                f"{name}: the run in {config.output} has {saved.get(name)!r}, this one {now[name]!r}; "
                "resume with the same value, or give a new output directory"
            )
