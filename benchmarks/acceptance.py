#!/usr/bin/env python3
"""Measure the acceptance length of a head's trees at several budgets, on the target's greedy answers to questions.

    python benchmarks/acceptance.py --questions gsm8k_test.jsonl --num-questions 40
    python benchmarks/acceptance.py --questions mt_bench.jsonl --num-questions 40 --stride 2

The target answers every question once. The rounds are then replayed along its answers, which accepts the same tokens
as the engine.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from jetspec import LLM
from jetspec.engine import head_drafter
from jetspec.head import load_head
from jetspec.models.loading import load_target
from jetspec.train.capture import CaptureSettings, capture
from jetspec.train.dataset import CapturedSequences
from jetspec.train.prompts import Prompt
from jetspec.train.replay import Replay, acceptance_length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m", help="alias, hub id, directory or .gguf file")
    parser.add_argument("--draft", default="smollm2-135m", help="head: alias, hub id or directory")
    parser.add_argument(
        "--questions",
        type=Path,
        required=True,
        help=".jsonl with a field question, or turns, of which the first is asked",
    )
    parser.add_argument("--num-questions", type=int, default=40, help="number of questions")
    parser.add_argument("--stride", type=int, default=1, help="take every n-th question")
    parser.add_argument("--max-tokens", type=int, default=256, help="maximum tokens of an answer")
    parser.add_argument("--budgets", type=int, nargs="+", default=[16, 64, 256], help="rows of a verify forward")
    options = parser.parse_args()

    rows = [json.loads(line) for line in options.questions.read_text(encoding="utf-8").splitlines()]
    questions = [row.get("question") or row["turns"][0] for row in rows]
    target = load_target(options.target, dtype="float32")
    head = load_head(options.draft, device=target.device, dtype=target.dtype)
    ids = LLM(target, None, num_blocks=1).encode_prompts(questions[:: options.stride][: options.num_questions])
    settings = CaptureSettings(target_layer_ids=head.config.target_layer_ids, max_tokens=options.max_tokens)
    with tempfile.TemporaryDirectory() as folder:
        capture(target, [Prompt(tuple(prompt)) for prompt in ids], folder, settings)
        data = CapturedSequences(folder)
        answers = [data.read(i) for i in range(len(data)) if data.lengths[i] - data.loss_starts[i] >= 2]
        replay = Replay(target, head_drafter(head), answers, max_tokens=options.max_tokens)
        for budget in options.budgets:
            rounds = replay.run(budget)
            print(f"{budget} rows: {acceptance_length(rounds):.2f} tokens a forward over {rounds.total()} forwards")


if __name__ == "__main__":
    main()
