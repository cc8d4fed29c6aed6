"""The plan of a reproduction: the heads that are trained, and the budgets and depths that are measured."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jetspec.train import TrainConfig

BUDGETS = (16, 32, 64, 128, 256)
#: Depths at which drafting time is measured. A block of 8 drafts 7 tokens.
DEPTHS = (1, 2, 3, 5, 7)
#: Seeds that heads are trained with. Some kinds use the first one alone: see `seeds_of`.
SEEDS = (0, 1)

#: Kinds of heads, and the options in which they differ.
KINDS: dict[str, dict[str, Any]] = {
    "causal": {"transition_size": 0},
    "bidirectional": {"causal": False},
    "transition": {"transition_size": 256},
    "autoregressive": {"kind": "autoregressive"},
}
#: Other weights of the depths in the loss than the default, exp(-(d - 1) / 4).
WEIGHTINGS: dict[str, dict[str, Any]] = {
    "causal, equal weights": {"transition_size": 0, "gamma": 1e9},
    "causal, reach": {"transition_size": 0, "weighting": "reach"},
}


def seeds_of(kind: str) -> tuple[int, ...]:
    """The seeds of a kind of head. An autoregressive head gets one: it takes longest to train and to measure."""
    return SEEDS if kind in KINDS and kind != "autoregressive" else SEEDS[:1]


@dataclass(frozen=True)
class Plan:
    """The sizes of a reproduction. Two runs of one plan give the same figures, except for times."""

    target: str
    data: str
    train_prompts: int
    eval_prompts: int
    max_tokens: int
    eval_tokens: int
    num_layers: int
    steps: int

    def check_folder(self, folder: Path) -> None:
        """Write the plan into `folder`. Exits with an error if the folder has another plan."""
        path = folder / "plan.json"
        if path.exists() and json.loads(path.read_text()) != asdict(self):
            raise SystemExit(f"error: {folder} holds a reproduction of another plan ({path.name}); name a new --output")
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)))

    def jobs(self) -> dict[str, tuple[dict[str, Any], int]]:
        """The options and the seed of every head, by the name of its job. The slowest come first."""
        named = {f"{kind}-{seed}": (KINDS[kind], seed) for kind in KINDS for seed in seeds_of(kind)}
        named |= {f"{name}-{SEEDS[0]}": (options, SEEDS[0]) for name, options in WEIGHTINGS.items()}
        return dict(sorted(named.items(), key=lambda item: item[1][0].get("kind") != "autoregressive"))

    def config(self, folder: Path, name: str) -> TrainConfig:
        """The training run of job `name`. It gets answers that are captured already, so it never reads `prompts`."""
        options, seed = self.jobs()[name]
        return TrainConfig(
            target=self.target,
            prompts=Path(self.data) / "gsm8k_train.jsonl",
            output=folder / "heads" / name,
            num_layers=self.num_layers,
            block_size=8,
            blocks_per_step=128,
            max_steps=self.steps,
            negatives=3000,
            eval_prompts=0,
            seed=seed,
            dtype="float32",
            **options,
        )
