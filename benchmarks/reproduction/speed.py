"""The speed of the trained heads on the engine, measured as `jetspec bench` does."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.reproduction.jobs import write_result
from benchmarks.reproduction.plan import SEEDS, Plan
from jetspec.bench.config import BenchConfig
from jetspec.bench.metrics import figures
from jetspec.bench.run import run
from jetspec.cli.common import quiet_transformers

FOLDER = "speed"


def measure_speed(plan: Plan, folder: Path) -> None:
    """Answer some test problems with every method in turn. Writes `results/speed.json` and the folder `speed`."""
    quiet_transformers()
    heads = {kind: str(folder / "heads" / f"{kind}-{SEEDS[0]}") for kind in ("transition", "autoregressive")}
    config = BenchConfig(
        output=folder / FOLDER,
        target=plan.target,
        draft=heads["transition"],
        eagle=heads["autoregressive"],
        dflash=str(folder / "heads" / f"bidirectional-{SEEDS[0]}"),
        datasets=("gsm8k",),
        data=Path(plan.data),
        num_prompts=min(4, plan.eval_prompts),
        max_tokens=min(40, plan.eval_tokens),
        methods=("plain", "ngram", "eagle", "dflash-chain", "dflash-tree", "jetspec"),
        budgets=(8, "auto"),
        device="cpu",
        dtype="float32",
    )
    measured = run(
        config, progress=lambda cell, done, total: print(f"speed: {done} of {total}, {cell.label}", flush=True)
    )
    failures = [failure.model_dump() for failure in measured.failures]
    if failures:
        raise SystemExit(f"error: {json.dumps(failures)}")
    write_result(folder, "speed", [entry.model_dump() for entry in figures(measured)])
