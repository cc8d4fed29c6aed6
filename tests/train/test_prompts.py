"""The prompts file: forms, errors, held-out split."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jetspec.errors import JetSpecError
from jetspec.train.prompts import Prompt, read_prompts, split_prompts
from tests.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
HI = tuple(TOKENIZER.encode("hi"))
EOS = TOKENIZER.eos_token_id
CHAT_HI = tuple(TOKENIZER.encode("<|user|>hi<|end|><|assistant|>"))


def read(tmp_path: Path, *records: object, chat: bool | None = None) -> list[Prompt]:
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records))
    return read_prompts(path, TOKENIZER, chat=chat)


@pytest.mark.parametrize("name", ["prompt", "question", "text"])
def test_text_fields(tmp_path: Path, name: str) -> None:
    assert read(tmp_path, {name: "hi"}) == [Prompt(CHAT_HI)]
    assert read(tmp_path, {name: "hi"}, chat=False) == [Prompt(HI)]


def test_answers_already_given(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hi"}]
    assert read(tmp_path, {"prompt": "hi", "response": "hi"}) == [Prompt(CHAT_HI, (*HI, EOS))]
    assert read(tmp_path, {"messages": turns}) == [Prompt(CHAT_HI, (*HI, EOS))]
    assert read(tmp_path, {"messages": turns[:1]}) == [Prompt(CHAT_HI)]
    assert read(tmp_path, {"prompt_token_ids": [1, 2], "response_token_ids": [3]}) == [Prompt((1, 2), (3,))]


def test_plain_text_has_a_prompt_a_line(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("hi\n\nhi\n")
    assert read_prompts(path, TOKENIZER, chat=False) == [Prompt(HI)] * 2


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ("{", "line 2: not valid JSON"),
        ([1], "line 2: not a JSON object"),
        ({"prompts": "hi"}, "line 2: no prompt: give one of prompt"),
        ({"prompt": 3}, "line 2: prompt: must be a text"),
        ({"prompt": "hi", "response": ""}, "line 2: response: must be a text"),
        ({"prompt": "hi", "response_token_ids": ["a"]}, "line 2: response_token_ids: must be a list"),
        ({"messages": [{"role": "user"}]}, r"line 2: messages\[0\]"),
    ],
)
def test_errors_name_file_line_and_field(tmp_path: Path, record: object, message: str) -> None:
    with pytest.raises(JetSpecError, match=r"p\.jsonl, " + message):
        read(tmp_path, {"prompt": "hi"}, record)


def test_a_file_without_prompts_and_a_missing_one(tmp_path: Path) -> None:
    with pytest.raises(JetSpecError, match="holds none"):
        read(tmp_path, "")
    with pytest.raises(JetSpecError, match="cannot read"):
        read_prompts(tmp_path / "absent.jsonl", TOKENIZER)


def test_held_out_prompts_are_never_trained_on() -> None:
    prompts = [Prompt((i % 15,)) for i in range(30)]  # every prompt occurs twice
    training, held_out = split_prompts(prompts, held_out=4, max_prompts=None, seed=0)
    assert len(held_out) == 4
    assert not {p.token_ids for p in training} & {p.token_ids for p in held_out}
    assert split_prompts(prompts, held_out=4, max_prompts=5, seed=0) == (training[:5], held_out)
    assert split_prompts(prompts, held_out=4, max_prompts=None, seed=1)[1] != held_out
    with pytest.raises(JetSpecError, match="eval_prompts=30"):
        split_prompts(prompts, held_out=30, max_prompts=None, seed=0)
