"""What a training run is made of."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jetspec.errors import JetSpecError

#: Fields that change neither what is trained nor in which order; a resumed run may change them.
FREE_FIELDS = frozenset(
    {"target", "prompts", "output", "log_every", "checkpoint_every", "checkpoint_minutes", "max_minutes", "dtype"}
    | {"max_running", "license", "answers_concurrency", "answers_key_env"}
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything that decides a training run. Two runs of one configuration give the same head, bit for bit.

    Args:
        target: target model: alias, hub id, directory or .gguf file.
        prompts: file of prompts, one a line, ``.jsonl`` or ``.json``, or ``hub:owner/name[/config][:split[:column]]``
            (see ``jetspec.prompts``); None trains on ``self_prompts`` alone.
        output: directory for the head, its model card, metrics, checkpoints and captured states.
        chat: put prompts through the target's chat template; None does so where it has one.
        eval_prompts: prompts held out, on which acceptance length is measured; 0 measures nothing.
        max_prompts: train on this many prompts and conversations at most.
        max_tokens: length of the target's answers.
        temperature: of the target's answers; 0 is greedy.
        shard_sequences: sequences captured and stored at a time.
        max_running: sequences the target answers at the same time.
        self_prompts: this many more prompts, user turns that the target writes itself (needs a chat template).
        regenerate: let the target write every answer anew, also where one is given.
        chat_template_kwargs: switches of the chat template, as ``{"enable_thinking": False}``.
        on_bad_rows: "refuse" prompts where a row cannot be used, or "skip" such rows.
        answers_from: base address of an OpenAI-compatible server that writes the answers, as ``http://host:8000/v1``.
        answers_model: the target's name there; None is ``target``.
        answers_key_env: environment variable that holds the server's API key.
        answers_concurrency: requests to the server at the same time.
        num_layers, block_size, num_taps, target_layer_ids, causal: shape of the head (``target_layer_ids`` wins over
            ``num_taps``).
        mask_token: id or text of the mask token; None chooses one that no prompt or answer uses.
        init: "target" starts from the target's last layers, "random" from noise.
        epochs: times that each sequence is visited, each time with other anchors.
        max_steps: optimizer steps; wins over ``epochs``, which then repeat as often as needed.
        max_minutes: stop after this long wherever the schedule is; the schedule itself counts steps. The run can be
            resumed.
        blocks_per_step, blocks_per_sequence: blocks of an optimizer step, and of a sequence in it (at most).
        gamma: depth d weighs ``exp(-(d - 1) / gamma)``; None is half the block size.
        negatives: estimate both softmaxes from the tokens that occur in the captured text and this many random
            others, instead of the whole vocabulary: an approximation, and several times faster for a large one.
        learning_rate, min_learning_rate, warmup, weight_decay, max_grad_norm: AdamW with warm-up over a share of the
            steps, then a cosine down to a share of the peak.
        seed: of the held-out split, sampled answers, initial weights, data order, anchors and negatives.
        tree_budget: rows of a verify forward where acceptance is measured.
        eval_every: steps between measurements of acceptance; None measures five times. The last step is always one.
        eval_max_tokens: length of the answers in a measurement.
        export: "best" writes the weights with the best measured acceptance, "last" the final ones.
        dtype: number type of the exported weights.
        log_every: steps between lines of ``metrics.jsonl``.
        checkpoint_every, checkpoint_minutes: a checkpoint after this many steps or minutes, whichever is first.
        license: license of the head, for its model card.

    Raises:
        JetSpecError: a value is out of range; the message names the field.
    """

    target: str
    prompts: str | Path | None = None
    output: str | Path
    chat: bool | None = None
    eval_prompts: int = 16
    max_prompts: int | None = None
    max_tokens: int = 256
    temperature: float = 0.0
    shard_sequences: int = 128
    max_running: int = 64
    self_prompts: int = 0
    regenerate: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    on_bad_rows: Literal["refuse", "skip"] = "refuse"
    answers_from: str | None = None
    answers_model: str | None = None
    answers_key_env: str | None = None
    answers_concurrency: int = 16
    num_layers: int = 3
    block_size: int = 8
    num_taps: int = 5
    target_layer_ids: tuple[int, ...] | None = None
    causal: bool = True
    mask_token: int | str | None = None
    init: Literal["target", "random"] = "target"
    epochs: int = 6
    max_steps: int | None = None
    max_minutes: float | None = None
    blocks_per_step: int = 128
    blocks_per_sequence: int = 32
    gamma: float | None = None
    negatives: int | None = None
    learning_rate: float = 1e-3
    min_learning_rate: float = 0.02
    warmup: float = 0.04
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    seed: int = 0
    tree_budget: int = 16
    eval_every: int | None = None
    eval_max_tokens: int = 128
    export: Literal["best", "last"] = "best"
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    log_every: int = 10
    checkpoint_every: int = 200
    checkpoint_minutes: float = 5.0
    license: str = "apache-2.0"

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise JetSpecError(f"{name}={value}: must be at least {least}")
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise JetSpecError(f"{name}={value}: must be above 0")
        for name in ("min_learning_rate", "warmup"):
            if not 0 <= getattr(self, name) <= 1:
                raise JetSpecError(f"{name}={getattr(self, name)}: a share, 0 to 1")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise JetSpecError(f"{name}={getattr(self, name)!r}: one of {', '.join(choices)}")
        self._check_data()

    def _check_data(self) -> None:
        if self.prompts is None and not self.self_prompts:
            raise JetSpecError("prompts: none; give a file or hub:owner/name, or let the target write self_prompts=N")
        if self.chat is False and self.self_prompts:
            raise JetSpecError(f"self_prompts={self.self_prompts}: needs the chat template; leave chat on")
        if not isinstance(self.chat_template_kwargs, dict | None):
            raise JetSpecError(f"chat_template_kwargs={self.chat_template_kwargs!r}: must be an object of switches")
        if self.answers_from is not None and not self.answers_from.startswith(("http://", "https://")):
            raise JetSpecError(f"answers_from={self.answers_from!r}: an address like http://localhost:8000/v1")
        for name in ("answers_model", "answers_key_env"):
            if self.answers_from is None and getattr(self, name) is not None:
                raise JetSpecError(f"{name}={getattr(self, name)!r}: is for a server; give answers_from too")

    @property
    def depth_gamma(self) -> float:
        return self.block_size / 2 if self.gamma is None else self.gamma

    @property
    def folder(self) -> Path:
        return Path(self.output)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON holds them."""
        plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self), default=str))
        return plain


def check_same_run(saved: dict[str, Any], config: TrainConfig) -> None:
    """JetSpecError, naming the first field that differs, where ``config`` would not continue the saved run."""
    now = config.to_dict()
    for name in now:
        if name not in FREE_FIELDS and saved.get(name) != now[name]:
            raise JetSpecError(
                f"{name}: the run in {config.output} has {saved.get(name)!r}, this one {now[name]!r}; "
                "resume with the same value, or give a new output directory"
            )


_LEAST = {
    "eval_prompts": 0,
    "max_prompts": 1,
    "max_tokens": 2,
    "temperature": 0,
    "shard_sequences": 1,
    "max_running": 1,
    "self_prompts": 0,
    "answers_concurrency": 1,
    "num_layers": 1,
    "block_size": 2,
    "num_taps": 1,
    "epochs": 1,
    "max_steps": 1,
    "blocks_per_step": 1,
    "blocks_per_sequence": 1,
    "negatives": 1,
    "weight_decay": 0,
    "tree_budget": 1,
    "eval_every": 1,
    "eval_max_tokens": 2,
    "log_every": 1,
    "checkpoint_every": 1,
}
_POSITIVE = ("max_minutes", "gamma", "learning_rate", "max_grad_norm", "checkpoint_minutes")
_CHOICES = {
    "init": ("target", "random"),
    "export": ("best", "last"),
    "on_bad_rows": ("refuse", "skip"),
    "dtype": ("float32", "bfloat16", "float16"),
}
