"""A load test from its configuration to its records."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from jetspec.bench.datasets import load_questions
from jetspec.bench.machine import client_machine
from jetspec.bench.records import Header
from jetspec.bench.results import check_same, locked, not_writable
from jetspec.bench.serve.config import ServeConfig
from jetspec.bench.serve.load import Planned, plan, run_level, warm_up
from jetspec.bench.serve.records import LEVELS, Level, LoadTest, read_load_test, to_line
from jetspec.client import OpenAIClient
from jetspec.files import write_atomically

#: Called with the rate, the number of its requests that have ended, and the number of all of them.
Progress = Callable[[float, int, int], None]


def run(config: ServeConfig, *, progress: Progress = lambda *_: None) -> LoadTest:
    """Run a load test. Records go to ``levels.jsonl`` in its output folder.

    Rates that the folder holds already are skipped. An interrupted run can be resumed; the rate that was running starts
    again.

    Raises:
        JetSpecError: data cannot be loaded, the server cannot be reached or does not answer the warm-up, the folder
            holds a run with other settings, or another run is writing into it.
    """
    questions = load_questions(config.dataset, data=config.data, num_prompts=config.num_prompts or None)

    async def everything() -> LoadTest:
        async with OpenAIClient(config.url, api_key=config.api_key, timeout_s=config.timeout_s) as client:
            model = await client.model(config.model)
            first, levels = plan(questions, model, config)
            header = Header(config={**config.result_settings(), "model": model}, machine=client_machine())
            return await _run(client, first, levels, header, config, progress)

    with locked(config.output):
        return asyncio.run(everything())


async def _run(
    client: OpenAIClient,
    first: Sequence[Planned],
    levels: Sequence[Sequence[Planned]],
    header: Header,
    config: ServeConfig,
    progress: Progress,
) -> LoadTest:
    path = config.output / LEVELS
    done: list[Level] = []
    if path.exists():
        before = read_load_test(path)
        check_same(before.header, header, config.output)
        done = before.levels
    known = {level.rate for level in done}
    left = [(rate, planned) for rate, planned in zip(config.rates, levels, strict=True) if rate not in known]
    if left:
        await warm_up(client, first, config.timeout_s)
    for rate, planned in left:
        ended = 0

        def on_end(_: object, rate: float = rate, total: int = len(planned)) -> None:
            nonlocal ended
            ended += 1
            progress(rate, ended, total)

        progress(rate, 0, len(planned))
        level = await run_level(
            client,
            rate,
            planned,
            timeout_s=config.timeout_s,
            max_concurrency=config.max_concurrency,
            on_end=on_end,
        )
        done.append(level)
        _write(path, LoadTest(header, done))
    return LoadTest(header, sorted(done, key=lambda level: level.rate))


def _write(path: Path, test: LoadTest) -> None:
    try:
        write_atomically(path, "".join([to_line(test.header), *map(to_line, test.levels)]).encode())
    except OSError as error:
        raise not_writable(path.parent, error) from error
