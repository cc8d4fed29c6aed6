"""Runs on tiny models: turns, resuming, failures, and the answers of all methods."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import jetspec.bench.run as run_module
from jetspec import drafts
from jetspec.bench.config import DRAFT_FIELDS, BenchConfig
from jetspec.bench.methods import Decoded, Models
from jetspec.bench.metrics import figures
from jetspec.bench.records import METHODS, Cell, Group, Run, read_run
from jetspec.bench.results import LOCK, RESULTS, locked
from jetspec.bench.run import drafts_of, run
from jetspec.errors import JetSpecError
from jetspec.head import head_for_target, load_head, save_head
from jetspec.llm import LLM
from jetspec.models.loading import ALIASES
from tests.helpers.tiny import tiny_target

Make = Callable[..., BenchConfig]


@pytest.fixture
def config(tmp_path: Path, models: dict[str, str], data: Path) -> Make:
    def make(**settings: Any) -> BenchConfig:
        base = {"output": tmp_path / "run", "data": data, "num_prompts": 3, "max_tokens": 8, "budgets": (6,)}
        methods = settings.get("methods", ("jetspec",))
        options = {"target", *(option for method, option in DRAFT_FIELDS.items() if method in methods)}
        named = {name: path for name, path in models.items() if name in options}
        return BenchConfig(**{**base, **named, **settings})

    return make


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory, models: dict[str, str], data: Path) -> Run:
    """All methods on questions of two turns, greedy and sampled, two at a time."""
    return run(
        BenchConfig(
            output=tmp_path_factory.mktemp("everything"),
            data=data,
            datasets=("mt_bench",),
            max_tokens=8,
            methods=METHODS,
            budgets=(6,),
            temperatures=(0.0, 1.0),
            batch_sizes=(2,),
            **models,
        )
    )


def answers(run: Run, method: str, temperature: float) -> dict[tuple[str, int], list[int]]:
    groups = [g for g in run.groups if g.cell.method == method and g.cell.temperature == temperature]
    return {(a.question, a.turn): a.token_ids for g in groups for a in g.answers}


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_the_baseline_s_answers(everything: Run, method: str) -> None:
    assert everything.failures == []
    expected = answers(everything, "plain", 0.0)
    assert len(expected) == 6
    assert answers(everything, method, 0.0) == expected
    if method != "hf":
        assert answers(everything, method, 1.0) == answers(everything, "plain", 1.0)
    assert answers(everything, "plain", 1.0) != expected


def test_groups_add_up(everything: Run) -> None:
    assert len(everything.groups) == 2 * len(METHODS) * 2
    for group in everything.groups:
        length = sum(len(a.token_ids) for a in group.answers)
        # A token of each answer comes with its prompt.
        assert group.tokens == length - len(group.answers)
        assert all(a.finish_reason == ("length" if len(a.token_ids) == 8 else "stop") for a in group.answers)
        assert all(a.correct is None for a in group.answers)
        if group.cell.method == "hf":
            assert (group.rounds, group.rows, group.split_s) == ({}, 0, {})
            continue
        assert sum(int(n) * count for n, count in group.rounds.items()) == group.tokens
        forwards = sum(group.rounds.values())
        assert sum(group.split_s.values()) == pytest.approx(group.decode_s if forwards else 0.0)
        most = 1 if group.cell.method == "plain" else 6
        assert forwards <= group.rows <= most * forwards


def test_what_a_method_drafts_is_what_its_name_says(everything: Run) -> None:
    found = {e.cell.method: e for e in figures(everything) if e.cell.temperature == 0}
    assert found["draft-model"].acceptance_length > 1.5  # the target itself, four tokens ahead
    assert found["plain"].rows == found["plain"].acceptance_length == 1
    # A block of five has four drafted places: no chain is longer, while a tree branches.
    assert found["dflash-chain"].rows <= 5 < found["dflash-tree"].rows
    assert found["plain"].split["draft"] == 0
    assert all(found[name].split["select"] > 0 for name in ("eagle", "dflash-tree", "jetspec"))


def untimed(run: Run) -> list[Group]:
    """Groups without what differs from one time to the next, in an order of their own."""
    groups = [g.replace(prefill_s=0.0, decode_s=0.0, split_s={}) for g in run.groups]
    return sorted(groups, key=lambda g: (repr(g.cell), g.index))


def test_a_run_that_was_interrupted_goes_on(config: Make, tmp_path: Path) -> None:
    settings = {"methods": ("plain", "jetspec"), "temperatures": (0.0, 0.8), "batch_sizes": (2,)}
    whole = run(config(**settings, output=tmp_path / "whole"))

    def stop(cell: Cell, done: int, total: int) -> None:
        assert total == 8
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config(**settings), progress=stop)
    path = tmp_path / "run" / RESULTS
    kept = read_run(path).groups
    assert len(kept) == 5
    path.write_text(path.read_text() + '{"kind": "group", "ce')
    resumed = run(config(**settings))
    assert resumed.groups[:5] == kept
    assert untimed(resumed) == untimed(whole)
    before = path.read_text()
    assert untimed(run(config(**settings))) == untimed(whole)
    assert path.read_text().splitlines()[1:9] == before.splitlines()[1:9]


@pytest.mark.parametrize("field", ["max_tokens", "budgets", "data", "chat_template_kwargs"])
def test_another_run_is_refused_by_name(fake: Fake, config: Make, tmp_path: Path, data: Path, field: str) -> None:
    for file in data.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    run(config())
    other = {"max_tokens": 9, "budgets": (7,), "data": tmp_path, "chat_template_kwargs": {"a": 1}}[field]
    before = (tmp_path / "run" / RESULTS).read_text()
    with pytest.raises(JetSpecError, match=f"with {field}"):
        run(config(**{field: other}))
    assert (tmp_path / "run" / RESULTS).read_text() == before


def test_every_difference_is_named(fake: Fake, config: Make) -> None:
    run(config())
    with pytest.raises(JetSpecError) as caught:
        run(config(max_tokens=9, budgets=(7, "auto")))
    there, here = "max_tokens=8, budgets=[6]", "max_tokens=9, budgets=[7, 'auto']"
    assert f"holds a run with {there}; this one has {here}. Name another folder" in str(caught.value)


def test_a_folder_that_a_run_writes_into_is_refused(fake: Fake, config: Make, tmp_path: Path) -> None:
    errors = []

    def start_another(cell: Cell, done: int, total: int) -> None:
        for settings in ({}, {"max_tokens": 9}):
            with pytest.raises(JetSpecError) as caught:
                run(config(**settings))
            errors.append(str(caught.value))
        run(config(output=tmp_path / "other"))

    done = run(config(num_prompts=1), progress=start_another)
    assert len(done.groups) == 3
    assert set(errors) == {
        f"output={tmp_path / 'run'}: another run (process {os.getpid()}) is writing into it; wait for its end, or name "
        "another folder"
    }
    assert run(config(num_prompts=1)).groups == done.groups
    assert {path.name for path in (tmp_path / "run").iterdir()} == {RESULTS}


@pytest.mark.parametrize("wait", [False, True])
def test_the_lock_ends_with_the_process_and_waits_for_nobody(tmp_path: Path, wait: bool) -> None:
    """A process that is killed leaves its lock file, which does not stop the next run."""
    code = (
        "import pathlib, sys\nfrom jetspec.bench.results import locked\n"
        "with locked(pathlib.Path(sys.argv[1])):\n    print('locked', flush=True)\n    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(JetSpecError, match=rf"\(process {holder.pid}\) is writing"), locked(tmp_path):
            pass
    finally:
        holder.communicate("") if wait else holder.kill()
        holder.wait()
    assert (tmp_path / LOCK).exists() is not wait
    with locked(tmp_path):
        assert (tmp_path / LOCK).read_text() == str(os.getpid())
    assert not (tmp_path / LOCK).exists()


def test_another_machine_is_refused(fake: Fake, config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run(config())
    monkeypatch.setattr(run_module, "cpu_name", lambda: "abacus")
    with pytest.raises(JetSpecError, match="cpu="):
        run(config())


def test_other_weights_under_the_same_name_are_refused(config: Make, models: dict[str, str], tmp_path: Path) -> None:
    copied = shutil.copytree(models["draft"], tmp_path / "draft")
    settings = {"methods": ("plain", "jetspec"), "draft": str(copied), "num_prompts": 1, "max_tokens": 2}
    run(config(**settings))
    head = load_head(copied)
    with torch.no_grad():
        head.norm.weight[0] += 1
    save_head(head, copied)
    with pytest.raises(JetSpecError, match=r"with weights\.draft="):
        run(config(**settings))


def test_another_configuration_is_refused_before_anything_is_loaded(fake: Fake, config: Make) -> None:
    run(config())
    with pytest.raises(JetSpecError, match="with target="):
        run(config(target="/nowhere"))


def test_arguments_reach_the_chat_template(fake: Fake, config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    render = LLM.render_chat
    monkeypatch.setattr(LLM, "render_chat", lambda self, m, kwargs=None: seen.append(kwargs) or render(self, m))
    run(config(methods=("plain",), datasets=("mt_bench",), chat_template_kwargs={"enable_thinking": False}))
    assert len(seen) > 6
    assert seen == [{"enable_thinking": False}] * len(seen)


def test_a_foreign_file_is_left_alone(fake: Fake, config: Make, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / RESULTS).write_text("mine\n")
    with pytest.raises(JetSpecError, match="not a benchmark's"):
        run(config())
    assert (tmp_path / "run" / RESULTS).read_text() == "mine\n"


def test_an_output_that_is_no_folder_is_refused(fake: Fake, config: Make, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("mine\n")
    with pytest.raises(JetSpecError, match=r"output=.*run: cannot be written to"):
        run(config())
    assert (tmp_path / "run").read_text() == "mine\n"


class Fake:
    """Stands for `Models`: every method answers at once, and its turns are noted. `broken` raise at their n-th turn."""

    def __init__(self) -> None:
        self.target = tiny_target("llama", text=True, max_position_embeddings=512)
        self.turns: list[tuple[str, list[int], float, int]] = []
        self.broken: dict[str, int] = {}
        self.lengths: list[list[int]] = []

    def fingerprints(self) -> dict[str, str]:
        return {"target": "0"}

    def method(self, cell: Cell, lengths: Sequence[int]) -> Any:
        if self.broken.get(cell.method) == -1:
            raise JetSpecError("does not fit")
        self.lengths.append(list(lengths))
        return FakeMethod(self, cell.label)


class FakeMethod:
    def __init__(self, fake: Fake, label: str) -> None:
        self.fake, self.label = fake, label

    def answer(self, prompts: Sequence[list[int]], seeds: Sequence[int], temperature: float, limit: int) -> Decoded:
        if sum(turn[0] == self.label for turn in self.fake.turns) == self.fake.broken.get(self.label.split()[0]):
            raise MemoryError("no room")
        self.fake.turns.append((self.label, list(seeds), temperature, limit))
        count = len(prompts)
        return Decoded([[1, 2]] * count, ["so #### 6"] * count, ["stop"] * count, 0.1, 1.0, 1)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    stand_in = Fake()
    monkeypatch.setattr(run_module, "Models", lambda *args, **options: stand_in)
    return stand_in


def test_methods_take_turns_and_each_starts_once(fake: Fake, config: Make) -> None:
    run(config(methods=("jetspec", "ngram"), budgets=(4, "auto"), max_tokens=100))
    labels = ["plain", "jetspec 4", "jetspec auto", "ngram 4", "ngram auto"]
    # First all warm up, on the first question and with short answers.
    assert fake.turns[:5] == [(label, [0], 0.0, 32) for label in labels]
    turns = [(label, seeds[0]) for label, seeds, _, _ in fake.turns[5:]]
    # Questions 0, 1 and 3 of 5 are three of them spread evenly.
    expected = [(label, n) for i, n in enumerate((0, 1, 3)) for label in labels[i:] + labels[:i]]
    assert turns == expected


def test_blocks_and_groups(fake: Fake, config: Make) -> None:
    done = run(config(methods=("plain",), temperatures=(0.0, 1.0), batch_sizes=(1, 2), datasets=("gsm8k", "mt_bench")))
    sizes = [(g.cell.dataset, g.cell.temperature, g.cell.batch_size, g.index, len(g.answers)) for g in done.groups]
    assert sizes == [
        (name, temperature, size, index, min(size, 3 - index * size) * turns)
        for name, turns in (("gsm8k", 1), ("mt_bench", 2))
        for temperature in (0.0, 1.0)
        for size in (1, 2)
        for index in range(-(-3 // size))
    ]
    assert [a.correct for a in done.groups[0].answers] == [True]  # 3 hens and 3 ducks
    assert [a.correct for a in done.groups[1].answers] == [False]


def test_a_second_turn_holds_the_method_s_own_answer(fake: Fake, config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[str] = []
    answer = FakeMethod.answer

    def spy(self: FakeMethod, ids: Sequence[list[int]], *rest: Any) -> Decoded:
        prompts.extend(fake.target.tokenizer.decode(i) for i in ids)
        return answer(self, ids, *rest)

    monkeypatch.setattr(FakeMethod, "answer", spy)
    run(config(methods=("plain",), datasets=("mt_bench",), num_prompts=1))
    first = "<|user|>Say writing.<|end|><|assistant|>"
    assert prompts[-2:] == [first, f"{first}so #### 6<|end|><|user|>Again.<|end|><|assistant|>"]
    # The prompt that stands for the second turn has one token for the answer, which may take 8 and some more.
    assert fake.lengths == [
        [len(fake.target.tokenizer.encode(f"{first}.<|end|><|user|>Again.<|end|><|assistant|>")) + 18]
    ]


@pytest.mark.parametrize(("when", "measured"), [(-1, 0), (0, 0), (1, 0), (2, 1), (3, 2)])
def test_a_failure_leaves_the_others_alone(fake: Fake, config: Make, when: int, measured: int) -> None:
    """-1: the method cannot be made; 0: its warm-up fails; then its groups."""
    fake.broken = {"ngram": when}
    done = run(config())
    counts = Counter(g.cell.method for g in done.groups)
    assert counts == Counter(plain=3, jetspec=3, ngram=measured)
    [failure] = done.failures
    assert failure.cell == Cell(dataset="gsm8k", method="ngram", budget=6, temperature=0.0, batch_size=1)
    assert failure.error == ("does not fit" if when == -1 else "MemoryError: no room")
    assert sum(label == "ngram 6" for label, *_ in fake.turns) == max(when, 0)


def test_an_error_that_is_not_utf_8_is_recorded(fake: Fake, config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(self: FakeMethod, *args: Any) -> Decoded:
        raise OSError("cannot read a\udcff")

    monkeypatch.setattr(FakeMethod, "answer", answer)
    assert {failure.error for failure in run(config()).failures} == {r"OSError: cannot read a\udcff"}


def test_failures_are_tried_again(fake: Fake, config: Make) -> None:
    fake.broken = {"ngram": 2}
    run(config())
    fake.broken, fake.turns = {}, []
    done = run(config())
    assert done.failures == []
    assert [(label, seeds) for label, seeds, *_ in fake.turns] == [("ngram 6", [0]), ("ngram 6", [1]), ("ngram 6", [3])]
    assert [g.index for g in done.groups if g.cell.method == "ngram"] == [0, 1, 2]


def test_records_are_there_as_soon_as_they_are_measured(fake: Fake, config: Make, tmp_path: Path) -> None:
    seen: list[int] = []

    def look(cell: Cell, done: int, total: int) -> None:
        lines = (tmp_path / "run" / RESULTS).read_text().splitlines()
        seen.append(sum(json.loads(line)["kind"] == "group" for line in lines))

    run(config(), progress=look)
    assert seen == [*range(9), 9]


def test_the_header_tells_what_and_where(fake: Fake, config: Make) -> None:
    header = run(config()).header
    assert header.config["budgets"] == [6]
    assert "output" not in header.config
    assert {"device", "cpu", "threads", "dtype", "versions"} <= set(header.machine)
    assert header.peak_resident_bytes > 1 << 20


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"datasets": ()}, "datasets=.*at least 1"),
        ({"methods": ("plain", "magic")}, r"methods\.1='magic': must be one of"),
        ({"methods": ("ngram", "ngram")}, "methods='ngram': is given twice"),
        ({"budgets": (0,)}, "budgets=0: must be auto or"),
        ({"budgets": ("some",)}, "budgets='some': must be auto or"),
        ({"budgets": (True,)}, "budgets=True: must be auto or"),
        ({"budgets": 4}, "budgets=4: must be a list"),
        ({"temperatures": (-1.0,)}, r"temperatures\.0=-1\.0: must be at least 0"),
        ({"temperatures": (float("nan"),)}, r"temperatures\.0=nan"),
        ({"temperatures": (float("inf"),)}, r"temperatures\.0=inf: must be a finite number"),
        ({"temperatures": (0, 0.0)}, r"temperatures=0\.0: is given twice"),
        ({"batch_sizes": (True,)}, r"batch_sizes\.0=True: must be an integer"),
        ({"num_prompts": -1}, "num_prompts=-1"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"dtype": "int8"}, "dtype='int8': must be one of"),
        ({"model": "x"}, "model: is not a field of BenchConfig"),
        ({"methods": ("eagle",), "eagle": None}, "eagle: method eagle"),
        ({"methods": ("draft-model",), "draft_model": None}, "draft_model: method"),
        ({"methods": ("dflash-tree",), "dflash": None}, "dflash: method dflash-tree"),
        ({"methods": ("plain",), "draft": "x"}, "draft='x': is for method jetspec"),
        ({"methods": ("plain",), "dflash": "x"}, "dflash='x': is for method dflash-chain or dflash-tree"),
        ({"run_code": True}, "run_code: scores humaneval alone"),
        *(
            ({field: value}, rf"{field}='.*\\udcff': must be valid UTF-8; rename the file")
            for field, value in {
                "output": Path("a\udcff"),
                "data": "a\udcff",
                "target": "a\udcff",
                "draft": "a\udcff",
                "datasets": ("gsm8k", "a\udcff"),
                "chat_template_kwargs": {"a": ["a\udcff"]},
            }.items()
        ),
        ({"methods": ("plain", "a\udcff")}, r"methods\.1="),
    ],
)
def test_bad_settings_are_refused(config: Make, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(JetSpecError, match=message) as caught:
        config(**settings)
    str(caught.value).encode()


def test_text_is_taken_for_a_path_and_the_baseline_is_added(tmp_path: Path) -> None:
    config = BenchConfig(output=str(tmp_path), methods=["ngram"], data="x")
    assert (config.output, config.data, config.methods) == (tmp_path, Path("x"), ("plain", "ngram"))
    assert json.loads(json.dumps(config.result_settings())) == config.result_settings()
    assert "output" not in config.result_settings()


@pytest.mark.parametrize(
    ("method", "option", "found"),
    [
        ("eagle", "draft", "this is a causal parallel head"),
        ("dflash-tree", "draft", "this is a causal parallel head"),
        ("dflash-chain", "eagle", "this is an autoregressive head"),
        ("jetspec", "dflash", "this is a bidirectional head"),
        ("jetspec", "eagle", "this is an autoregressive head"),
    ],
)
def test_heads_of_another_kind_are_refused(models: dict[str, str], method: Any, option: str, found: str) -> None:
    drafts = dict.fromkeys(("draft", "eagle", "dflash"), models[option])
    with pytest.raises(JetSpecError, match=rf"^\w+=.*: method {method} needs .*, {found}"):
        Models(models["target"], drafts, [method])


def test_a_head_of_another_target_is_refused_by_its_option(models: dict[str, str], tmp_path: Path) -> None:
    other = tiny_target(text=True, hidden_size=32, head_dim=8)
    save_head(head_for_target(other, num_layers=1, block_size=5, num_aux_layers=2, mask_token_id=5), tmp_path)
    with pytest.raises(JetSpecError, match=r"^draft=.*hidden_size"):
        Models(models["target"], {"draft": str(tmp_path)}, ["jetspec"])


def test_answers_that_do_not_fit_are_refused(fake: Fake, config: Make) -> None:
    with pytest.raises(JetSpecError, match=r"max_tokens=500: question 0 of gsm8k"):
        run(config(max_tokens=500))


def test_jetspec_needs_a_head(config: Make) -> None:
    for draft in (None, "auto"):
        with pytest.raises(JetSpecError, match="draft: no head is known"):
            run(config(draft=draft))


@pytest.mark.parametrize("draft", [None, "auto"])
def test_the_default_draft_is_the_head_that_generate_takes(
    config: Make, models: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, draft: str | None
) -> None:
    head = shutil.copytree(models["draft"], tmp_path / "head")
    settings = json.loads((head / "config.json").read_text())
    del settings["is_causal"], settings["dflash_config"]["causal"], settings["dflash_config"]["causal_head"]
    (head / "config.json").write_text(json.dumps(settings))
    table = {models["target"].lower(): drafts.PublishedHead(str(head), True, "https://example.org")}
    monkeypatch.setattr(drafts, "published_heads", lambda: table)
    found = run(config(draft=draft, num_prompts=1, max_tokens=4))
    assert not found.failures
    assert "jetspec" in [group.cell.method for group in found.groups]


def test_the_target_of_a_shipped_head_may_be_named_by_its_hub_id(config: Make) -> None:
    name = ALIASES["smollm2-135m"].hub_id
    assert drafts_of(config(target=name, draft=None)) == drafts_of(config(target="smollm2-135m", draft="auto"))
