"""A benchmark run: cells take turns on groups of questions, and the record of every group is written at once."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import transformers

from jetspec.bench.config import BenchConfig
from jetspec.bench.datasets import Question, load_questions
from jetspec.bench.machine import cpu_name
from jetspec.bench.methods import Decoded, Method, Models
from jetspec.bench.records import Answer, Cell, Failure, Group, Header, Run, read_run, shown
from jetspec.bench.results import Results, check_settings, locked
from jetspec.bench.sandbox import check_platform
from jetspec.bench.scoring import score
from jetspec.drafts import KnownHead, known_head
from jetspec.errors import JetSpecError
from jetspec.llm import LLM
from jetspec.models.target import Target

#: Maximum tokens of the answers that each cell gives first, to warm up, without a record.
WARM_UP_TOKENS = 32

T = TypeVar("T")
#: Called with the cell whose turn it is, the number of groups that are done, and the number of all groups.
Progress = Callable[[Cell, int, int], None]


def run(config: BenchConfig, *, progress: Progress = lambda *_: None) -> Run:
    """Measure what ``config`` asks for. Records go to ``results.jsonl`` in its output folder.

    If the folder holds a part of the same run, the run is resumed: its groups are skipped, and failures are tried
    again. A cell that raises an error is recorded as a failure and left out from then on. An interrupted run can be
    resumed.

    Raises:
        JetSpecError: data, target or a draft cannot be loaded or do not fit, the folder holds a run with other
            settings, or another run is writing into it.
    """
    if config.run_code:
        check_platform()
    with locked(config.output):
        check_settings(config.output, config.result_settings())
        return _run(config, progress)


def _run(config: BenchConfig, progress: Progress) -> Run:
    questions = {
        name: load_questions(name, data=config.data, num_prompts=config.num_prompts or None) for name in config.datasets
    }
    models = Models(config.target, drafts_of(config), config.methods, device=config.device, dtype=config.dtype)
    llm = LLM(models.target, None, num_blocks=1)  # for its tokenizer and chat template
    lengths = {name: check_lengths(llm, name, found, config) for name, found in questions.items()}
    blocks = config.blocks()
    total = sum(len(cells) * len(grouped(questions[cells[0].dataset], cells[0].batch_size)) for cells in blocks)
    header = Header(
        config={**config.result_settings(), "weights": models.fingerprints()}, machine=machine(models.target)
    )
    done = 0
    with Results(config.output, header) as results:
        for cells in blocks:
            name = cells[0].dataset
            for cell in run_block(cells, questions[name], lengths[name], models, llm, results, config):
                progress(cell, done, total)
                done += 1
        progress(blocks[-1][-1], total, total)
    return read_run(results.path)


def run_block(
    cells: Sequence[Cell],
    questions: Sequence[Question],
    lengths: Sequence[int],
    models: Models,
    llm: LLM,
    results: Results,
    config: BenchConfig,
) -> Iterator[Cell]:
    """Let cells answer the same groups in turn. Yields the cell before each of its turns.

    Every group starts with another cell, so that a drift of the machine affects all of them alike. The engines of the
    cells live together and end with the block.
    """
    groups = grouped(questions, cells[0].batch_size)
    live: dict[Cell, Method] = {}

    def attempt(cell: Cell, work: Callable[[], T]) -> T | None:
        try:
            return work()
        except Exception as error:
            live.pop(cell, None)
            message = str(error) if isinstance(error, JetSpecError) else f"{type(error).__name__}: {error}"
        results.write(Failure(cell=cell, error=shown(message)))
        return None

    def start(cell: Cell) -> None:
        live[cell] = models.method(cell, lengths)
        warm_up = config.replace(max_tokens=min(config.max_tokens, WARM_UP_TOKENS), run_code=False)
        answer_group(live[cell], cell, 0, groups[0], llm, warm_up)

    def measure(cell: Cell, index: int) -> Group:
        return answer_group(live[cell], cell, index, groups[index], llm, config)

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
    llm: LLM,
    config: BenchConfig,
) -> Group:
    """Let a method answer questions together, all turns of them, and score the answers."""
    device = llm.target.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    decoded = Decoded()
    answers: list[Answer] = []
    given: dict[str, list[str]] = {question.id: [] for question in questions}
    for turn in range(max(len(question.turns) for question in questions)):
        asked = [question for question in questions if len(question.turns) > turn]
        prompts = llm.encode_prompts(
            [question.prompt(given[question.id]) for question in asked],
            chat_template_kwargs=config.chat_template_kwargs,
        )
        new = method.answer(prompts, [question.number for question in asked], cell.temperature, config.max_tokens)
        decoded.add(new)
        for question, ids, text, reason in zip(asked, new.token_ids, new.texts, new.finish_reasons, strict=True):
            given[question.id].append(text)
            correct = score(cell.dataset, question.facts, text, run_code=config.run_code)
            answers.append(
                Answer(question=question.id, turn=turn, token_ids=ids, finish_reason=reason, correct=correct)
            )
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
    """Questions in groups of ``size``; the last group may have fewer."""
    return [questions[start : start + size] for start in range(0, len(questions), size)]


def rotated(cells: Sequence[Cell], by: int) -> list[Cell]:
    """All cells in order, from number ``by`` on and then from the start."""
    first = by % len(cells)
    return [*cells[first:], *cells[:first]]


def check_lengths(llm: LLM, name: str, questions: Sequence[Question], config: BenchConfig) -> list[int]:
    """The number of tokens that each question's conversation may grow to.

    Raises:
        JetSpecError: a conversation may exceed the target's context, or the target has no chat template for several
            turns.
    """
    max_tokens, kwargs = config.max_tokens, config.chat_template_kwargs
    lengths = []
    for question in questions:
        earlier = len(question.turns) - 1
        [prompt] = llm.encode_prompts([question.prompt(["."] * earlier)], chat_template_kwargs=kwargs)
        # An answer's text may take a few more tokens when it is read back than it had when it was written.
        length = len(prompt) + max_tokens + earlier * (max_tokens + max_tokens // 4)
        if length > llm.target.max_context:
            raise JetSpecError(
                f"max_tokens={max_tokens}: question {question.id} of {name} may grow to {length} tokens with its "
                f"answers, the target's context holds {llm.target.max_context}; lower it, or leave the question out"
            )
        lengths.append(length)
    return lengths


def drafts_of(config: BenchConfig) -> dict[str, str | KnownHead | None]:
    """The draft in each of `DRAFT_FIELDS`. JetSpecError if method jetspec has no head.

    There is no prompt lookup in place of a head, as in `load_drafter`: it is the method ngram.
    """
    draft: str | KnownHead | None = config.draft
    if draft is None and "jetspec" in config.methods:
        draft = known_head(config.target)
        if draft is None:
            raise JetSpecError(
                f"draft: no head is known for target {config.target!r}; name one, or leave method jetspec out"
            )
    return {"draft": draft, "eagle": config.eagle, "dflash": config.dflash, "draft_model": config.draft_model}


def machine(target: Target) -> dict[str, Any]:
    """The facts beside the configuration that the figures depend on."""
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
