"""The parts of a reproduction. Each runs in a process and writes one file, so that a run can be resumed."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.reproduction.measure import acceptance, drafting_ms, faithfulness
from benchmarks.reproduction.plan import BUDGETS, DEPTHS, KINDS, SEEDS, Plan
from jetspec import LLM
from jetspec.cli.common import quiet_transformers
from jetspec.head import load_head, save_head
from jetspec.models.loading import load_target
from jetspec.models.target import Target, default_target_layer_ids
from jetspec.prompts import read_prompts
from jetspec.train.capture import CaptureSettings, capture
from jetspec.train.dataset import Captured, CapturedSequences
from jetspec.train.processes import Processes
from jetspec.train.prompts import Prompt
from jetspec.train.run import initial_head
from jetspec.train.trainer import Trainer

#: The sets of answers: file of prompts, and the temperature they are drawn at.
ANSWERS = {"train": ("gsm8k_train.jsonl", 0.0), "test": ("gsm8k_test.jsonl", 0.0), "sampled": ("gsm8k_test.jsonl", 1.0)}


def capture_answers(plan: Plan, folder: Path) -> None:
    """Let the target answer the prompts to train on and the held-out ones. Every process takes a share."""
    processes = Processes.start("cpu")
    target = _target(plan)
    llm = LLM(target, None, num_blocks=1)
    for name, (file, temperature) in ANSWERS.items():
        count = plan.train_prompts if name == "train" else plan.eval_prompts
        questions = read_prompts(Path(plan.data) / file)
        random.Random(0).shuffle(questions)
        prompts = [Prompt(tuple(ids)) for ids in llm.encode_prompts(questions[:count], chat=True)]
        settings = CaptureSettings(
            target_layer_ids=tuple(default_target_layer_ids(target.num_layers, 5)),
            max_tokens=plan.max_tokens if name == "train" else plan.eval_tokens,
            temperature=temperature,
            shard_sequences=max(1, min(25, count // (2 * processes.count))),
        )
        capture(target, prompts, folder / "answers" / name, settings, processes=processes)


def train_head(plan: Plan, folder: Path, name: str) -> None:
    """Train the head of job `name`, measure it, and write `results/NAME.json`."""
    target, config = _target(plan), plan.config(folder, name)
    data = CapturedSequences(folder / "answers" / "train")
    head = initial_head(target, config, frozenset(data.distinct_tokens().tolist()))
    trainer = Trainer(target, head, data, [], config, Processes())
    trainer.run()
    head, step = trainer.choose_weights()
    save_head(head, config.folder, dtype=torch.float32)
    head = head.eval().requires_grad_(False)
    greedy = held_out(folder, "test")
    result: dict[str, Any] = {
        "steps": step,
        "loss": trainer.progress.last_loss,
        "train_seconds": trainer.progress.train_seconds,
        "parameters": sum(p.numel() for p in head.parameters()),
        "greedy": acceptance(target, head, greedy, BUDGETS, plan.eval_tokens, 0.0),
    }
    if config.seed == SEEDS[0]:
        result["faithfulness"] = faithfulness(target, head, greedy, plan.eval_tokens)
        sampled = held_out(folder, "sampled")
        result["sampled"] = acceptance(target, head, sampled, BUDGETS[:3], plan.eval_tokens, 1.0)
    write_result(folder, name, result)


def measure_costs(plan: Plan, folder: Path) -> None:
    """Measure the drafting times of each kind of head, and write `results/costs.json`."""
    target, [answer, *_] = _target(plan), held_out(folder, "test")
    costs = {}
    for kind in KINDS:
        head = load_head(folder / "heads" / f"{kind}-{SEEDS[0]}", dtype=target.dtype)
        costs[kind] = drafting_ms(target, head, answer, DEPTHS, (16, 64, 256))
    write_result(folder, "costs", costs)


def held_out(folder: Path, name: str) -> list[Captured]:
    """The answers of a set that are long enough for a round."""
    data = CapturedSequences(folder / "answers" / name)
    answers = [data.read(i) for i in range(len(data))]
    return [answer for answer in answers if len(answer.token_ids) - answer.loss_start >= 2]


def result_path(folder: Path, name: str) -> Path:
    return folder / "results" / f"{name}.json"


def write_result(folder: Path, name: str, result: Any) -> None:
    """Write a result, as a whole or not at all."""
    path = result_path(folder, name)
    path.parent.mkdir(exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.rename(path)
    print(f"{time.strftime('%H:%M:%S')} {name}: done", flush=True)


def _target(plan: Plan) -> Target:
    quiet_transformers()
    return load_target(plan.target, device="cpu", dtype="float32")
