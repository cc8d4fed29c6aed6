#!/usr/bin/env python3
"""Check the paper's claims at small scale in one command: train heads of each kind alike, and measure them.

    pip install 'jetspec[train,bench,demo]'
    python benchmarks/reproduce.py --data DIR --output DIR [--docs docs]

The folder of --data holds gsm8k_train.jsonl and gsm8k_test.jsonl, with the fields `question` and `answer`. Results are
written to --output as they come, and the same command resumes a run that was stopped. With --docs, docs/results.md and
its plots are written again. A run takes under an hour on two cores if nothing else runs on the machine.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.reproduction.jobs import ANSWERS, capture_answers, measure_costs, result_path, train_head  # noqa: E402
from benchmarks.reproduction.plan import Plan  # noqa: E402
from benchmarks.reproduction.report import write_results  # noqa: E402
from benchmarks.reproduction.speed import measure_speed  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the data sets")
    parser.add_argument("--output", type=Path, required=True, help="folder of the run")
    parser.add_argument("--docs", type=Path, help="folder to write results.md and its plots to")
    parser.add_argument("--target", default="smollm2-135m", help="target model")
    parser.add_argument("--train-prompts", type=int, default=200, help="number of prompts to train on")
    parser.add_argument("--eval-prompts", type=int, default=16, help="number of held-out prompts, from the test set")
    parser.add_argument("--max-tokens", type=int, default=96, help="maximum tokens of an answer to train on")
    parser.add_argument("--eval-tokens", type=int, default=64, help="maximum tokens of a held-out answer")
    parser.add_argument("--num-layers", type=int, default=2, help="layers of every head")
    parser.add_argument("--steps", type=int, default=80, help="steps of 128 blocks for every head")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="number of processes, of one thread each"
    )
    parser.add_argument("--job", help=argparse.SUPPRESS)  # a worker's part
    options = parser.parse_args()
    plan = Plan(
        options.target,
        str(options.data.resolve()),
        options.train_prompts,
        options.eval_prompts,
        options.max_tokens,
        options.eval_tokens,
        options.num_layers,
        options.steps,
    )
    if options.job is not None:
        run_job(plan, options.output, options.job)
        return
    plan.check_folder(options.output)
    started = time.monotonic()
    command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:]]
    if not all((options.output / "answers" / name / "done").exists() for name in ANSWERS):
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(options.workers)]
        run([*launcher, *command[1:], "--job", "answers"], threads=1)
        for name in ANSWERS:
            (options.output / "answers" / name / "done").touch()
    with ThreadPoolExecutor(options.workers) as pool:
        waiting = [name for name in plan.jobs() if not result_path(options.output, name).exists()]
        list(pool.map(lambda name: run([*command, "--job", name], threads=1), waiting))
    for name in ("costs", "speed"):
        if not result_path(options.output, name).exists():
            run([*command, "--job", name], threads=os.cpu_count() or 1)
    print(f"all measured, {(time.monotonic() - started) / 60:.0f} minutes in this call")
    write_results(plan, options.output, options.docs or options.output)


def run_job(plan: Plan, folder: Path, name: str) -> None:
    if name == "answers":
        capture_answers(plan, folder)
    elif name == "costs":
        measure_costs(plan, folder)
    elif name == "speed":
        measure_speed(plan, folder)
    else:
        train_head(plan, folder, name)


def run(command: list[str], threads: int) -> None:
    """Run a part in a process. If it fails, the reproduction ends, and the same command resumes it."""
    # By default glibc returns large buffers to the system after every operation, which takes several times as long.
    settings = {"OMP_NUM_THREADS": str(threads), "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"}
    done = subprocess.run(command, env={**os.environ, **settings}, check=False)
    if done.returncode:
        raise SystemExit(
            f"error: {' '.join(command[-2:])} ended with status {done.returncode}; the same command resumes the run"
        )


if __name__ == "__main__":
    main()
