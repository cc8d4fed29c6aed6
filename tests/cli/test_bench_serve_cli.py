"""`jetspec bench serve` against a small server on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

import jetspec.bench.serve.run as run_module
import jetspec.cli.bench_serve as command_module
from jetspec.bench.serve.config import ServeConfig
from jetspec.bench.serve.records import LEVELS, read_load_test
from tests.helpers.cli import call
from tests.helpers.openai_server import FakeServer, delta, fake_server, finish, usage


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as fake:
        yield fake


@pytest.fixture
def options(server: FakeServer, data: Path, tmp_path: Path) -> list[object]:
    """A load test of 5 requests at each of two rates, over within a fraction of a second."""
    load = ["--rate", 200, "--rate", 400, "--num-requests", 5, "--warm-up", 2, "--max-tokens", 8]
    return [server.url, "--output", tmp_path / "run", "--data", data, *load]


@pytest.fixture
def without_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the files of the reports, whose plots take time."""
    monkeypatch.setattr("jetspec.bench.serve.report.write_reports", lambda folder: [folder / "report.md"])


def serve(*arguments: object) -> Result:
    return call("bench", "serve", *arguments)


def test_run_report_and_compare(server: FakeServer, options: list[object], tmp_path: Path) -> None:
    done = serve(*options, "--slo-e2e-ms", 60_000, "--api-key", "secret")
    assert done.exit_code == 0, done.output
    assert len(server.requests) == 2 + 5 + 5, "no more than was asked for"
    assert set(server.keys) == {"Bearer secret"}
    assert all(body["max_tokens"] == 8 and body["stream"] for body in server.requests)
    folder = tmp_path / "run"
    assert {path.name for path in folder.iterdir()} == {LEVELS, "report.md", "report.html"}
    assert all(b"secret" not in path.read_bytes() for path in folder.iterdir())
    test = read_load_test(folder / LEVELS)
    assert test.header.config["model"] == "tiny"
    assert [level.rate for level in test.levels] == [200.0, 400.0]
    assert [len(level.requests) for level in test.levels] == [5, 5]
    assert all((r.completion_tokens, r.rounds, r.error) == (4, 2, None) for r in test.levels[0].requests)
    for word in ("TTFT", "TPOT", "E2E", "goodput", "(100.0%)", "1.50"):
        assert word in done.stdout
    again = call("bench", "report", folder)
    assert (again.exit_code, again.stdout) == (0, done.stdout)
    both = call("bench", "compare", folder, folder)
    assert both.exit_code == 0
    assert "| 200 |" in both.stdout
    (tmp_path / "other").mkdir()
    mixed = call("bench", "compare", folder, tmp_path / "other")
    assert mixed.exit_code == 1
    assert "compare like with like" in mixed.stderr


@pytest.mark.usefixtures("without_reports")
def test_a_run_is_resumed_and_others_are_kept_out(server: FakeServer, options: list[object], tmp_path: Path) -> None:
    assert serve(*options).exit_code == 0
    path = tmp_path / "run" / LEVELS
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]))
    before = len(server.requests)
    assert serve(*options).exit_code == 0
    assert len(server.requests) == before + 2 + 5, "the warm-up and the rate that is missing"
    assert path.read_text().splitlines(keepends=True)[:2] == lines[:2]
    assert serve(*options).exit_code == 0
    assert len(server.requests) == before + 2 + 5, "there is nothing left to send"
    other = serve(*options, "--seed", 1)
    assert other.exit_code == 1
    assert "holds a run with seed=0; this one has seed=1" in other.stderr


@pytest.mark.usefixtures("without_reports")
def test_failures_are_counted_and_end_in_status_1(server: FakeServer, options: list[object], tmp_path: Path) -> None:
    def busy(body: dict[str, Any]) -> Any:
        if len(server.requests) in (4, 5):
            return 503, {"error": {"message": "busy"}}
        return [delta("a"), finish(), usage(1, 1)]

    server.answer = busy
    done = serve(*options, "--json")
    assert done.exit_code == 1
    assert "2 of 10 requests failed" in done.stderr
    printed = json.loads(done.stdout)
    assert [level["errors"] for level in printed["figures"]] == [{"HTTP 503": 2}, {}]
    assert [level["completed"] for level in printed["figures"]] == [3, 5]
    assert printed["reports"] == [str(tmp_path / "run" / "report.md")]


def test_a_server_that_refuses_the_warm_up_gets_no_load(server: FakeServer, options: list[object]) -> None:
    server.answer = lambda body: (401, {"error": {"message": "wrong key"}})
    done = serve(*options)
    assert done.exit_code == 1
    assert "401 Unauthorized: wrong key" in done.stderr
    assert len(server.requests) == 1
    server.answer = lambda body: [delta("a"), finish()]
    assert "holds no usage" in serve(*options).stderr


def test_an_interrupt_says_how_to_go_on(
    server: FakeServer, options: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stop(*args: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "run_level", stop)
    done = serve(*options)
    assert done.exit_code == 130
    assert "the same command resumes the run" in done.stderr
    assert done.stdout == ""
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-o", "x"), "url: is required"),
        (("http://localhost:1",), "output: is required"),
        (("localhost:1", "-o", "x"), "url='localhost:1': must be the address of a server"),
        (("http://me:word@localhost:1", "-o", "x"), "url: must not hold a user name or password"),
        (("http://localhost:1", "-o", "x", "--rate", 0), "rates.0=0: must be above 0"),
        (("http://localhost:1", "-o", "x", "--rate", "fast"), "rates.0='fast': must be a number"),
        (("http://localhost:1", "-o", "x", "--rate", "1,1"), "rates=1: is given twice"),
        (("http://localhost:1", "-o", "x", "--extra-body", '{"stream": false}'), "must not hold 'stream'"),
        (("http://localhost:1", "-o", "x", "--dataset", "nothing"), "no such data set or file"),
    ],
)
def test_errors_are_one_line(
    arguments: tuple[object, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = serve(*arguments)
    assert done.exit_code == 1
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


def test_every_field_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ServeConfig] = []
    monkeypatch.setattr(command_module, "load_with_progress", lambda config: seen.append(config) or 1 / 0)
    words = (
        "http://localhost:9/api -o out --model m --api-key k --endpoint completions --dataset x.jsonl --data f "
        "--num-prompts 3 -n 5 --temperature 0.5 -r 1.5 --rate 2,4 --num-requests 7 --max-duration-s 9 "
        "--max-concurrency 2 --timeout-s 11 --warm-up 1 --seed 6 --slo-ttft-ms 10 --slo-tpot-ms 20 --slo-e2e-ms 30"
    )
    serve(*words.split(), "--extra-body", '{"ignore_eos": true}')
    expected = ServeConfig(
        url="http://localhost:9/api",
        output=Path("out"),
        model="m",
        api_key="k",
        endpoint="completions",
        extra_body={"ignore_eos": True},
        dataset="x.jsonl",
        data=Path("f"),
        num_prompts=3,
        max_tokens=5,
        temperature=0.5,
        rates=(1.5, 2, 4),
        num_requests=7,
        max_duration_s=9.0,
        max_concurrency=2,
        timeout_s=11.0,
        warm_up=1,
        seed=6,
        slo_ttft_ms=10.0,
        slo_tpot_ms=20.0,
        slo_e2e_ms=30.0,
    )
    assert seen == [expected]
    assert all(getattr(expected, name) != field.default for name, field in ServeConfig.model_fields.items())


def test_help_fits_80_columns() -> None:
    done = serve("--help")
    assert done.exit_code == 0
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    assert "serve" in call("bench", "--help").stdout
