"""The run itself: cells take turns on groups of questions, and every group's record is written as it comes."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers

from jetspec.bench.config import BenchConfig
from jetspec.bench.datasets import Question, load_questions
from jetspec.bench.methods import Decoded, Method, Models
from jetspec.bench.records import Answer, Cell, Failure, Group, Header, Run, read_run
from jetspec.bench.results import Results, check_config
from jetspec.bench.sandbox import check_platform
from jetspec.bench.scoring import score
from jetspec.errors import JetSpecError
from jetspec.head import shipped_heads
from jetspec.llm import LLM
from jetspec.models.target import Target

#: Longest answer of the group that each cell answers first, without a record.
WARM_UP_TOKENS = 32

T = TypeVar("T")
#: Told (the cell whose turn it is, groups that are done, groups in all).
Progress = Callable[[Cell, int, int], None]


def run(config: BenchConfig, *, progress: Progress = lambda cell, done, total: None) -> Run:
    """Measure what `config` asks for; records go to `results.jsonl` in its output folder.

    A folder that holds a part of the same run is gone on with: groups it has are skipped, failures tried again. A cell
    that raises is noted as a failure and left out from then on. An interrupt leaves a file that can be gone on with.

    Raises:
        JetSpecError: data, target or a draft cannot be loaded or do not fit, or the folder holds another run.
    """
    if config.run_code:
        check_platform()
    check_config(config.output, config.decisive())
    questions = {
        name: load_questions(name, data=config.data, num_prompts=config.num_prompts) for name in config.datasets
    }
    models = Models(config.target, drafts_of(config), config.methods, device=config.device, dtype=config.dtype)
    # Only its tokenizer and chat template are used.
    door = LLM(models.target, None, num_blocks=1)
    lengths = {name: check_lengths(door, name, found, config) for name, found in questions.items()}
    blocks = config.blocks()
    total = sum(len(cells) * len(grouped(questions[cells[0].dataset], cells[0].batch_size)) for cells in blocks)
    done = 0
    with Results(
        config.output, Header({**config.decisive(), "weights": models.digests()}, machine(models.target))
    ) as results:
        for cells in blocks:
            name = cells[0].dataset
            for cell in run_block(cells, questions[name], lengths[name], models, door, results, config):
                progress(cell, done, total)
                done += 1
        progress(blocks[-1][-1], total, total)
    return read_run(results.path)


def run_block(
    cells: Sequence[Cell],
    questions: Sequence[Question],
    lengths: Sequence[int],
    models: Models,
    door: LLM,
    results: Results,
    config: BenchConfig,
) -> Iterator[Cell]:
    """Let cells answer the same groups in turn; yields the cell before each of its turns.

    Every group starts with another cell, so that what drifts meanwhile hits all of them alike. The cells' engines live
    together and end with the block.
    """
    groups = grouped(questions, cells[0].batch_size)
    live: dict[Cell, Method] = {}

    def attempt(cell: Cell, work: Callable[[], T]) -> T | None:
        try:
            return work()
        except Exception as error:
            live.pop(cell, None)
            message = str(error) if isinstance(error, JetSpecError) else f"{type(error).__name__}: {error}"
        results.write(Failure(cell, message))
        return None

    def start(cell: Cell) -> None:
        live[cell] = models.method(cell, lengths)
        warm_up = replace(config, max_tokens=min(config.max_tokens, WARM_UP_TOKENS), run_code=False)
        answer_group(live[cell], cell, 0, groups[0], door, warm_up)

    def measure(cell: Cell, index: int) -> Group:
        return answer_group(live[cell], cell, index, groups[index], door, config)

    for cell in cells:
        if any((cell, index) not in results.known for index in range(len(groups))):
            attempt(cell, partial(start, cell))
    for index in range(len(groups)):
        for cell in rotated(cells, index):
            yield cell
            if cell in live and (cell, index) not in results.known:
                group = attempt(cell, partial(measure, cell, index))
                if group is not None:
                    results.write(group)


def answer_group(
    method: Method,
    cell: Cell,
    index: int,
    questions: Sequence[Question],
    door: LLM,
    config: BenchConfig,
) -> Group:
    """Let a method answer questions together, all turns of them, and score the answers."""
    device = door.target.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    decoded = Decoded()
    answers: list[Answer] = []
    given: dict[str, list[str]] = {question.id: [] for question in questions}
    for turn in range(max(len(question.turns) for question in questions)):
        asked = [question for question in questions if len(question.turns) > turn]
        prompts = door.encode_prompts(
            [question.prompt(given[question.id]) for question in asked],
            chat_template_kwargs=config.chat_template_kwargs,
        )
        new = method.answer(prompts, [question.number for question in asked], cell.temperature, config.max_tokens)
        decoded.add(new)
        for question, ids, text, reason in zip(asked, new.token_ids, new.texts, new.finish_reasons, strict=True):
            given[question.id].append(text)
            correct = score(cell.dataset, question.facts, text, run_code=config.run_code)
            answers.append(Answer(question.id, turn, ids, reason, correct))
    return Group(
        cell=cell,
        index=index,
        answers=answers,
        prefill_s=decoded.prefill_s,
        decode_s=decoded.decode_s,
        tokens=decoded.tokens,
        rounds={str(n): count for n, count in sorted(decoded.rounds.items())},
        rows=decoded.rows,
        split_s=decoded.split_s if decoded.rounds else {},
        peak_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    )


def grouped(questions: Sequence[Question], size: int) -> list[Sequence[Question]]:
    """Questions in groups of `size`; the last one may have fewer."""
    return [questions[start : start + size] for start in range(0, len(questions), size)]


def rotated(cells: Sequence[Cell], by: int) -> list[Cell]:
    """All cells, starting with number `by`, counted round."""
    first = by % len(cells)
    return [*cells[first:], *cells[:first]]


def check_lengths(door: LLM, name: str, questions: Sequence[Question], config: BenchConfig) -> list[int]:
    """Tokens that each question's conversation may grow to.

    Raises:
        JetSpecError: the target's context does not hold one, or the target has no chat template for several turns.
    """
    max_tokens, switches = config.max_tokens, config.chat_template_kwargs
    lengths = []
    for question in questions:
        earlier = len(question.turns) - 1
        [prompt] = door.encode_prompts([question.prompt(["."] * earlier)], chat_template_kwargs=switches)
        # An answer's text may take a few more tokens when it is read back than it had when it was written.
        length = len(prompt) + max_tokens + earlier * (max_tokens + max_tokens // 4)
        if length > door.target.max_context:
            raise JetSpecError(
                f"--max-tokens {max_tokens}: question {question.id} of {name} may grow to {length} tokens with its "
                f"answers, the target's context holds {door.target.max_context}; lower it, or leave the question out"
            )
        lengths.append(length)
    return lengths


def drafts_of(config: BenchConfig) -> dict[str, str | None]:
    """The name of each option's draft. JetSpecError where "jetspec" has no head."""
    draft = config.draft
    if draft is None and "jetspec" in config.methods:
        if config.target not in shipped_heads():
            raise JetSpecError(f"--draft: no head is shipped for target {config.target!r}; name one for method jetspec")
        draft = config.target
    return {"draft": draft, "eagle": config.eagle, "dflash": config.dflash, "draft_model": config.draft_model}


def machine(target: Target) -> dict[str, Any]:
    """What the figures depend on beside the configuration."""
    from jetspec import __version__

    device = target.device
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "jetspec": __version__,
        },
    }


def cpu_name() -> str:
    """The processor's own name where the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
