"""What a training run is made of."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jetspec.errors import JetSpecError
from jetspec.train.fields import check_names, checked, flag_of, kinds, option, option_of

#: The resolved configuration, beside the weights.
FILE = "train_config.json"

#: Of causal parallel heads, where none is given.
TRANSITION_SIZE = 256

ANSWERS, HEAD, OPTIMIZER = "Answers", "Head", "Optimization"
MEASURE, FILES, MACHINE = "Measurement", "Files", "Machine"


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides a training run. Two runs of one configuration give the same head, bit for bit.

    The number of processes is not part of it: a step's blocks are shared among them, and it changes rounding only.
    ``jetspec train --help`` lists the fields; ``help`` below says what each means.

    Raises:
        JetSpecError: a value has another type or is out of range; the message names the field.
    """

    target: str = option(help="Target model: alias, hub id, directory or .gguf file.", flags=("-t",), free=True)
    prompts: str | Path | None = option(
        None,
        help="Prompts: a text file (one a line), .jsonl, .json, or hub:owner/name (see docs/training.md).",
        flags=("-f",),
        free=True,
    )
    output: str | Path = option(help="Directory for the head; a run there goes on.", flags=("-o",), free=True)

    chat: bool | None = option(
        None, help="Use the chat template; by default where there is one.", group=ANSWERS, flags=("--chat/--raw",)
    )
    max_prompts: int | None = option(None, help="Train on this many prompts at most.", group=ANSWERS, least=1)
    max_tokens: int = option(256, help="Longest answer.", group=ANSWERS, least=2)
    temperature: float = option(0.0, help="Of the target's answers; 0 is greedy.", group=ANSWERS, least=0)
    max_num_seqs: int = option(64, help="Answers at the same time.", group=ANSWERS, least=1, free=True)
    self_prompts: int = option(0, help="Prompts that the target writes itself.", group=ANSWERS, least=0)
    regenerate: bool = option(False, help="Write given answers anew.", group=ANSWERS, flags=("--regenerate",))
    chat_template_kwargs: dict | None = option(
        None, help='ChatTemplateKwargs of the chat template: {"enable_thinking": false}.', group=ANSWERS
    )
    on_bad_rows: Literal["refuse", "skip"] = option(
        "refuse", help="What to do where a row cannot be used.", group=ANSWERS
    )
    answers_from: str | None = option(
        None, help="Let this OpenAI-compatible server answer: http://localhost:8000/v1.", group=ANSWERS
    )
    answers_model: str | None = option(None, help="The target's name there; else that of --target.", group=ANSWERS)
    answers_key_env: str | None = option(
        None, help="Environment variable with the server's API key.", group=ANSWERS, free=True
    )
    answers_concurrency: int = option(
        16, help="Requests to the server at the same time.", group=ANSWERS, least=1, free=True
    )
    shard_sequences: int = option(128, help="Answers captured and stored at a time.", group=ANSWERS, least=1)

    kind: Literal["parallel", "autoregressive"] = option(
        "parallel", help="Draft all depths in one forward, or one a forward as EAGLE-3 does.", group=HEAD
    )
    num_layers: int = option(3, help="Layers of the head.", group=HEAD, least=1)
    block_size: int = option(8, help="Tokens of a block, the known one included.", group=HEAD, least=2)
    num_aux_layers: int = option(5, help="Target layers the head reads.", group=HEAD, least=1)
    target_layer_ids: tuple[int, ...] | None = option(None, help="These layers instead: 1,8,15.", group=HEAD, least=0)
    causal: bool = option(True, help="What a block position sees.", group=HEAD, flags=("--causal/--bidirectional",))
    transition_size: int | None = option(
        None,
        help=f"State that conditions a draft on its path; 0: none, as vLLM needs it; else {TRANSITION_SIZE} in causal "
        "parallel heads.",
        group=HEAD,
        least=0,
    )
    mask_token: int | str | None = option(None, help="Id or text of the mask token; else an unused one.", group=HEAD)
    init: str = option(
        "target",
        help="Start from the target's last layers (target), from noise (random), or from this trained head.",
        group=HEAD,
    )

    epochs: int = option(6, help="Visits of each answer, each with other anchors.", group=OPTIMIZER, least=1)
    max_steps: int | None = option(None, help="Steps; wins over --epochs.", group=OPTIMIZER, least=1)
    max_minutes: float | None = option(
        None, help="Stop after this long; the run can go on later.", group=OPTIMIZER, above=0, free=True
    )
    blocks_per_step: int = option(128, help="Blocks of a step, of all processes.", group=OPTIMIZER, least=1)
    blocks_per_sequence: int = option(32, help="Blocks of one answer in a step.", group=OPTIMIZER, least=1)
    gamma: float | None = option(
        None, help="Depth d weighs exp(-(d - 1) / gamma); else half the block.", group=OPTIMIZER, above=0
    )
    weighting: Literal["decay", "reach"] = option(
        "decay",
        help="Weigh a depth by gamma, or by how likely the draft gets there.",
        group=OPTIMIZER,
    )
    loss_temperature: float = option(
        1.0, help="Of both distributions in the loss, times its square.", group=OPTIMIZER, above=0
    )
    hard_labels: float = option(
        0.0,
        help="Share of the loss that is cross entropy with the tokens chosen.",
        group=OPTIMIZER,
        least=0,
        most=1,
    )
    negatives: int | None = option(
        None, help="Approximate the softmax with this many random tokens.", group=OPTIMIZER, least=1
    )
    learning_rate: float = option(1e-3, help="Peak.", group=OPTIMIZER, above=0)
    min_learning_rate: float = option(0.02, help="Share of the peak at the end.", group=OPTIMIZER, least=0, most=1)
    warmup: float = option(0.04, help="Share of the steps.", group=OPTIMIZER, least=0, most=1)
    weight_decay: float = option(0.0, help="Of AdamW.", group=OPTIMIZER, least=0)
    max_grad_norm: float = option(1.0, help="Longer gradients are cut.", group=OPTIMIZER, above=0)
    seed: int = option(0, help="Of everything random.", group=OPTIMIZER, least=0)

    eval_prompts: int = option(16, help="Prompts held out to measure acceptance on.", group=MEASURE, least=0)
    eval_every: int | None = option(None, help="Steps between measurements; else five.", group=MEASURE, least=1)
    eval_max_tokens: int = option(128, help="Longest answer in a measurement.", group=MEASURE, least=2)
    eval_budgets: tuple[int, ...] = option(
        (16, 64),
        help="Rows of a verify forward there; the first decides which weights are best.",
        group=MEASURE,
        least=1,
    )
    export: Literal["best", "last"] = option(
        "best", help="The weights with the best measurement, or the last.", group=MEASURE
    )

    dtype: Literal["float32", "bfloat16", "float16"] = option(
        "bfloat16", help="Number type of the head's file.", group=FILES, free=True
    )
    log_every: int = option(10, help="Steps between log lines.", group=FILES, least=1, free=True)
    log_with: Literal["tensorboard", "wandb"] | None = option(
        None, help="Log there, too, beside metrics.jsonl.", group=FILES, free=True
    )
    checkpoint_every: int = option(200, help="Steps between checkpoints.", group=FILES, least=1, free=True)
    checkpoint_minutes: float = option(5.0, help="Minutes between checkpoints.", group=FILES, above=0, free=True)
    keep_checkpoints: int = option(2, help="Newest checkpoints kept.", group=FILES, least=1, free=True)
    license: str = option("apache-2.0", help="Of the head, for its model card.", group=FILES, free=True)

    device: str = option(
        "auto", help="auto, cpu, cuda, ...; several processes share out the GPUs.", group=MACHINE, free=True
    )
    target_dtype: str = option("auto", help="Number type the target runs in.", group=MACHINE)
    precision: Literal["float32", "bfloat16"] = option(
        "float32", help="Of the head's arithmetic; its weights stay float32.", group=MACHINE
    )
    fsdp: bool = option(
        False, help="Share out weights, too, among the processes.", group=MACHINE, flags=("--fsdp",), free=True
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = checked(field.name, getattr(self, field.name), _KINDS[field.name], option_of(field))
            object.__setattr__(self, field.name, value)
        self._check_data()
        self._check_kind()
        if self.transition_size is None:
            conditioned = self.kind == "parallel" and self.causal
            object.__setattr__(self, "transition_size", TRANSITION_SIZE if conditioned else 0)

    def _check_data(self) -> None:
        if self.prompts is None and not self.self_prompts:
            raise JetSpecError("prompts: none; give a file or hub:owner/name, or let the target write self_prompts=N")
        if self.chat is False and self.self_prompts:
            raise JetSpecError(f"self_prompts={self.self_prompts}: needs the chat template; leave chat on")
        if self.weighting == "reach" and self.gamma is not None:
            raise JetSpecError(f"gamma={self.gamma}: is for weighting=decay; leave it out")
        if self.answers_from is not None and not self.answers_from.startswith(("http://", "https://")):
            raise JetSpecError(f"answers_from={self.answers_from!r}: an address like http://localhost:8000/v1")
        for name in ("answers_model", "answers_key_env"):
            if self.answers_from is None and getattr(self, name) is not None:
                raise JetSpecError(f"{name}={getattr(self, name)!r}: is for a server; give answers_from too")

    def _check_kind(self) -> None:
        only_parallel: dict[str, tuple[Any, ...]] = {
            "causal": (True,),
            "transition_size": (None, 0),
            "mask_token": (None,),
        }
        for name, neutral in only_parallel.items():
            if self.kind != "parallel" and getattr(self, name) not in neutral:
                raise JetSpecError(
                    f"{name}={getattr(self, name)!r}: is for kind 'parallel'; leave it out with {self.kind!r}"
                )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: str = "configuration") -> TrainConfig:
        """A configuration from plain values, as a file holds them.

        Raises:
            JetSpecError: a field is unknown (the closest known one is named), missing or not valid.
        """
        check_names(values, cls, where)
        needed = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
        if missing := [name for name in needed if values.get(name) is None]:
            raise JetSpecError(f"{missing[0]}: missing; give {flag_of(missing[0])} or a field of this name in the file")
        return cls(**values)

    @property
    def depth_gamma(self) -> float:
        if self.weighting == "reach":
            return math.inf
        return self.block_size / 2 if self.gamma is None else self.gamma

    @property
    def folder(self) -> Path:
        return Path(self.output)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON holds them."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self), default=str))
        return plain

    def command(self) -> str:
        """The command line of this run: options that differ from their defaults."""
        words = ["jetspec", "train"]
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value == field.default:
                continue
            flags = next((f for f in option_of(field).flags if f.startswith("--")), flag_of(field.name))
            if isinstance(value, bool):
                words.append(flags.split("/")[0 if value else 1])
            else:
                joined = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
                text = json.dumps(value) if isinstance(value, dict) else joined
                words += [flags, shlex.quote(text)]
        return " ".join(words)


_KINDS = kinds(TrainConfig)


def read_config_file(path: str | Path) -> dict[str, Any]:
    """The values of a YAML or JSON file, for ``TrainConfig.from_dict``.

    Raises:
        JetSpecError: the file cannot be read, is not valid, or holds an unknown field.
    """
    import yaml

    parse = json.loads if Path(path).suffix == ".json" else yaml.safe_load
    try:
        values = parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise JetSpecError(f"config: cannot read {path}: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise JetSpecError(f"config: {path} must hold fields and values, like `epochs: 6`")
    check_names(values, TrainConfig, str(path))
    return values


def check_same_run(saved: Mapping[str, Any], config: TrainConfig) -> None:
    """JetSpecError, naming the first field that differs, where ``config`` would not continue the saved run."""
    now = config.to_dict()
    for field in dataclasses.fields(config):
        name = field.name
        if not option_of(field).free and saved.get(name) != now[name]:
            raise JetSpecError(
                f"{name}: the run in {config.output} has {saved.get(name)!r}, this one {now[name]!r}; "
                "resume with the same value, or give a new output directory"
            )
