"""What a run trains on: sources together, copies, held-out conversations, answers and prompts the target writes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jetspec import LLM, SamplingParams
from jetspec.errors import JetSpecError
from jetspec.models.target import Target
from jetspec.train import TrainConfig, train
from jetspec.train import data as data_module
from jetspec.train.answers import AnswerStore, EngineAnswers
from jetspec.train.data import training_prompts
from jetspec.train.prompts import Answer, Ask, Prompt
from jetspec.train.render import Renderer
from jetspec.train.self_prompts import write_user_turns

MakeConfig = Callable[..., TrainConfig]


def talk(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant") * len(texts)
    return {"messages": [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]}


def gather(target: Target, config: TrainConfig, said: list[str] | None = None) -> tuple[list[Prompt], list[Prompt]]:
    say = [].append if said is None else said.append
    return training_prompts(target, config, say=say, track=lambda _name: lambda *_: None)


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def test_copies_are_left_out_after_rendering(target: Target, make_config: MakeConfig, tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "a"}, talk("a"), talk("b", "c", "d"), {"text": "b"}, talk("b", "c"))
    said: list[str] = []
    prompts, _ = gather(target, make_config(prompts=path, eval_prompts=0), said)
    texts = [target.tokenizer.decode(p.token_ids) for p in prompts]
    b = "<|user|>b<|end|>"
    assert texts == [
        "<|user|>a<|end|><|assistant|>",
        f"{b}<|assistant|>",
        f"{b}<|assistant|>c<|end|><|user|>d<|end|><|assistant|>",
    ]
    assert said == ["left out 2 prompts that occur more than once"]


def test_no_turn_of_a_held_out_conversation_is_trained_on(
    target: Target, make_config: MakeConfig, tmp_path: Path
) -> None:
    # Each conversation's first turn is also a row of its own.
    rows = [r for i in range(12) for r in (talk(f"q{i}", "a", f"r{i}", "b"), {"prompt": f"q{i}"})]
    training, held_out = gather(
        target, make_config(prompts=write(tmp_path / "p.jsonl", *rows), max_prompts=None, eval_prompts=4)
    )
    trained = {p.token_ids for p in training}
    assert len(held_out) == 4
    for prompt in held_out:
        assert prompt.token_ids not in trained
        if b"r" in bytes(t for t in prompt.token_ids if t < 256):
            first = next(i for i, t in enumerate(prompt.token_ids) if t == target.tokenizer.eos_token_id) + 2
            assert prompt.token_ids[:first] not in trained


def test_bad_rows(target: Target, make_config: MakeConfig, tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "a"}, {}, {"prompt": "x" * 300}, {"prompt": "b"})
    with pytest.raises(JetSpecError, match=r"2 rows cannot be used; .*on_bad_rows=skip:\n.*line 2: .*\n.*line 3: 3"):
        gather(target, make_config(prompts=path, eval_prompts=0))
    said: list[str] = []
    prompts, _ = gather(target, make_config(prompts=path, eval_prompts=0, on_bad_rows="skip"), said)
    assert len(prompts) == 2
    assert "skipped 2 rows" in said[0]


def test_regenerated_turns_are_what_the_target_says_in_a_chat(
    target: Target, make_config: MakeConfig, tmp_path: Path
) -> None:
    path = write(tmp_path / "p.jsonl", talk("hello", "?", "and", "?", "so", "?"), {"prompt": "one", "response": "?"})
    config = make_config(prompts=path, eval_prompts=0, regenerate=True, max_tokens=30)
    prompts, _ = gather(target, config)
    llm, params = LLM(target, None), SamplingParams(temperature=0, max_tokens=30)
    messages: list[dict] = []
    for prompt, text in zip(prompts, ("hello", "and", "so"), strict=False):
        messages.append({"role": "user", "content": text})
        [output] = llm.chat(messages, params)
        assert list(prompt.token_ids) == output.prompt_token_ids
        if prompt.response_ids is None:
            break  # the last one is left to capture
        assert list(prompt.response_ids) == output.outputs[0].token_ids
        if output.outputs[0].finish_reason == "length":
            break
        messages.append({"role": "assistant", "content": output.outputs[0].text})
    assert prompts[-1] == Prompt(tuple(llm.prepare_chat([{"role": "user", "content": "one"}])[0].prompt_token_ids))
    assert gather(target, config) == (prompts, [])


@pytest.fixture
def brief(target: Target) -> Target:
    """The target, with many tokens that end a turn: at random it would hardly ever find its only one."""
    other = copy.copy(target)
    other.eos_token_ids = target.eos_token_ids | set(range(100, 150))
    return other


def engine_answers(target: Target, folder: Path, **changes: Any) -> EngineAnswers:
    settings: dict[str, Any] = {"max_tokens": 12, "temperature": 1.0, "seed": 0, "target_name": "tiny"}
    return EngineAnswers(target, AnswerStore(folder / "answers.jsonl"), **{**settings, **changes})


def test_engine_answers_are_seeded_and_stored(target: Target, tmp_path: Path) -> None:
    asks = [Ask(tuple(range(5, 9 + n)), "") for n in range(6)]
    answers = engine_answers(target, tmp_path / "a")(asks)
    assert engine_answers(target, tmp_path / "b", max_num_seqs=2)(asks[::-1]) == answers[::-1]
    assert engine_answers(target, tmp_path / "c", seed=1)(asks) != answers
    ran: list[int] = []
    again = engine_answers(target, tmp_path / "a", progress=lambda done, *_: ran.append(done))
    assert again(asks) == answers
    assert not ran  # nothing was left to write
    for answer in answers:
        assert isinstance(answer, Answer)
        assert answer.finished == (answer.token_ids[-1] in target.eos_token_ids)


def test_user_turns(brief: Target, tmp_path: Path) -> None:
    target = brief
    renderer = Renderer(target)
    assert renderer.user_turn().opening == tuple(target.tokenizer.encode("<|user|>"))
    assert renderer.user_turn().stop_token_ids == (target.tokenizer.eos_token_id,)
    texts = write_user_turns(engine_answers(target, tmp_path / "a"), renderer, 5)
    assert len(set(texts)) == 5
    assert all(t == t.strip() and len(t) >= 2 for t in texts)
    assert write_user_turns(engine_answers(target, tmp_path / "b"), renderer, 8)[:5] == texts
    assert write_user_turns(engine_answers(target, tmp_path / "c", seed=1), renderer, 5) != texts
    # What a killed run left is used: a turn and half of another.
    lines = (tmp_path / "a/answers.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "d").mkdir()
    (tmp_path / "d/answers.jsonl").write_bytes(lines[0] + lines[1][:20])
    assert write_user_turns(engine_answers(target, tmp_path / "d"), renderer, 5) == texts


def test_a_target_that_repeats_itself_is_told(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same = Answer("what is it?", (1, 2, 3, 4, target.tokenizer.eos_token_id), True)
    monkeypatch.setattr(EngineAnswers, "write", lambda _self, requests: [same for _ in requests])
    with pytest.raises(JetSpecError, match="self_prompts=3: the target wrote only 1 usable user turns"):
        write_user_turns(engine_answers(target, tmp_path), Renderer(target), 3)


@pytest.mark.parametrize(
    ("tokens", "finished", "usable"),
    [
        ((5, 6, 7, 256), True, True),
        ((6, 7, 256), True, False),
        ((5, 6, 7, 8), False, False),
        ((5, 258, 7, 256), True, False),
    ],
)
def test_which_user_turns_are_usable(target: Target, tokens: tuple[int, ...], finished: bool, usable: bool) -> None:
    from jetspec.train.self_prompts import _usable

    assert _usable(Answer("text", tokens, finished), Renderer(target).special_ids) == usable


def test_a_run_without_a_file(brief: Target, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(prompts=None, self_prompts=8, eval_prompts=2, max_steps=1)
    result = train(config, target=brief)
    assert result.finished
    assert "8 user turns that the target wrote" in (config.folder / "README.md").read_text()
    monkeypatch.setattr(
        EngineAnswers, "_decode", lambda _self, prompts: pytest.fail("written again") if prompts else []
    )
    assert train(config, target=brief).finished


def test_answers_of_a_server_are_trained_on(
    target: Target, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []

    def fake(url: str, **settings: Any) -> Any:
        made.append({"url": url, **settings})
        return lambda asks: [Answer("fine", (7, 8), True) for _ in asks]

    monkeypatch.setattr(data_module, "ServerAnswers", fake)
    monkeypatch.setenv("MY_KEY", "secret")
    path = write(tmp_path / "p.jsonl", {"prompt": "a"}, talk("b", "given"), {"prompt": "c"}, {"prompt": "d"})
    server = {"answers_from": "http://x/v1", "answers_key_env": "MY_KEY", "eval_prompts": 0}
    prompts, _ = gather(target, make_config(prompts=path, **server))
    given = tuple(target.tokenizer.encode("given<|end|>"))
    assert [p.response_ids for p in prompts] == [(7, 8), given, (7, 8), (7, 8)]
    assert (made[0]["model"], made[0]["api_key"], made[0]["keep_failures"]) == ("tiny", "secret", False)
    prompts, _ = gather(target, make_config(prompts=path, regenerate=True, **server))
    assert {p.response_ids for p in prompts} == {(7, 8)}
    _, held_out = gather(target, make_config(prompts=path, **{**server, "eval_prompts": 2}))
    assert len(held_out) == 2
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(JetSpecError, match="answers_key_env=MY_KEY: no such environment variable"):
        gather(target, make_config(prompts=path, **server))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": None}, "prompts: none are given; name a file .*self_prompts=N"),
        ({"self_prompts": 3, "chat": False}, "self_prompts=3: needs the chat template"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs="),
        ({"answers_from": "localhost:8000"}, "answers_from='localhost:8000': must be an address like"),
        ({"answers_model": "m"}, "answers_model='m': is for a server; give answers_from too"),
        ({"on_bad_rows": "drop"}, "on_bad_rows='drop': must be one of 'refuse' or 'skip'"),
    ],
)
def test_a_configuration_names_its_bad_field(make_config: MakeConfig, change: dict, message: str) -> None:
    with pytest.raises(JetSpecError, match=message):
        make_config(**change)
