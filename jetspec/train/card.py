"""The model card that goes with a trained head."""

from __future__ import annotations

from pathlib import Path

from jetspec.head import HeadConfig
from jetspec.train.checkpoint import Progress
from jetspec.train.config import TrainConfig


def model_card(
    config: TrainConfig,
    head: HeadConfig,
    progress: Progress,
    *,
    num_steps: int,
    exported_step: int,
    parameters: int,
    sequences: int,
    tokens: int,
) -> str:
    """Markdown: what the head is for, its data, its recipe, what was measured."""
    sampling = "greedy" if config.temperature == 0 else f"temperature {config.temperature:g}"
    precision = "" if config.precision == "float32" else f" Arithmetic in {config.precision}, weights in float32."
    vocabulary = "over the whole vocabulary"
    if config.negatives is not None:
        vocabulary = f"over the tokens of the training text and {config.negatives} random others a step"
    starts = {"target": "the target's last layers", "random": "random"}
    start = starts.get(config.init, f"those of the head `{config.init}`")
    return f"""---
license: {config.license}
tags: [speculative-decoding, jetspec, draft-head]
---

# Draft head for {config.target}

A JetSpec draft head: it proposes trees of tokens that its target, `{config.target}`, verifies in one forward. The
output is the target's own, whatever the head proposes; a better head makes it arrive sooner.

```python
from jetspec import LLM

llm = LLM("{config.target}", draft="path/to/this/directory")
```

## Head

{head.num_hidden_layers} layers, {parameters / 1e6:.1f} M parameters in {config.dtype}, {_kind(head)}.

## Data

{sequences} prompts of {_source(config)} with the target's answers ({sampling}, or as the file gives them, up to
{config.max_tokens} tokens): {tokens} tokens. {config.eval_prompts} other prompts were held out.

## Recipe

Forward KL from the target's next-token distribution to the head's, {vocabulary}, depth d weighing
{_weighting(config)}. AdamW (0.9, 0.95), learning rate {config.learning_rate:g} with
{config.warmup:.0%} warm-up and a cosine to {config.min_learning_rate:.0%}, weight decay {config.weight_decay:g},
gradients clipped at {config.max_grad_norm:g}, about {config.blocks_per_step} blocks a step, at most
{config.blocks_per_sequence} of a sequence. {progress.step} of {num_steps} steps in
{progress.train_seconds / 60:.0f} minutes; seed {config.seed}. Initial weights: {start}. Last loss
{progress.last_loss:.3f}.{precision}

    {config.replace(prompts=_prompts_name(config), output="DIR").command()}

## Measured

These are the weights after step {exported_step}. {_measured(config, progress, exported_step)}
"""


def _weighting(config: TrainConfig) -> str:
    """What a depth's loss is multiplied with, in words."""
    if config.weighting == "decay":
        return f"exp(-(d - 1) / {config.depth_gamma:g})"
    return "the head's own probability of getting there"


def _prompts_name(config: TrainConfig) -> str | None:
    """The prompts' name without the folders of this machine."""
    prompts = None if config.prompts is None else str(config.prompts)
    return prompts if prompts is None or prompts.startswith("hub:") else Path(prompts).name


def _source(config: TrainConfig) -> str:
    """Where the prompts are from, in words."""
    name = _prompts_name(config)
    sources = [] if name is None else [f"`{name}`"]
    if config.self_prompts:
        sources.append(f"{config.self_prompts} user turns that the target wrote")
    return " and ".join(sources)


def _kind(head: HeadConfig) -> str:
    """The kind of head and the target layers that it reads, in words."""
    layers = f"target layers {', '.join(map(str, head.target_layer_ids))} (0-based)"
    if head.kind != "parallel":
        return f"autoregressive,\n{head.block_size - 1} tokens ahead, {layers}"
    kind = "causal" if head.causal else "bidirectional"
    text = f"{kind} blocks of\n{head.block_size} tokens (anchor included), {layers}, mask token id {head.mask_token_id}"
    if head.transition_size:
        text += f". A transition of {head.transition_size} numbers conditions a draft on its path"
    return text


def _measured(config: TrainConfig, progress: Progress, exported_step: int) -> str:
    measured = progress.measured(exported_step)
    if not measured:
        return "Their acceptance was not measured."
    depths = range(1, len(measured[0].depths) + 1)
    header = ["tree budget", "acceptance length", *(f"{d} or more" for d in depths)]
    rows = [
        [str(m.tree_budget), f"{m.acceptance_length:.2f}", *(f"{share:.0%}" for share in m.depths)] for m in measured
    ]
    table = "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---:"] * len(header), *rows])
    return f"""{config.eval_prompts} held-out prompts, answered greedily with up to {config.eval_max_tokens} tokens,
once a budget (rows of a verify forward, root included). Acceptance length is the mean number of tokens that a verify
forward commits, bonus included; the other columns are the share of verify forwards that accepted so many drafts.

{table}"""
