"""Captured states equal the target's own, survive a kill, and are not mixed with others."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from jetspec.errors import JetSpecError
from jetspec.models.target import Target
from jetspec.train.capture import CaptureSettings, capture
from jetspec.train.dataset import CapturedSequences
from jetspec.train.prompts import Prompt
from tests.helpers.tiny import TEXT_VOCAB_SIZE, tiny_llama, tiny_target

SETTINGS = CaptureSettings(target_layer_ids=(1, 3), max_tokens=9, shard_sequences=3)
PROMPTS = [Prompt(tuple(range(5 + i, 12 + 2 * i))) for i in range(7)]
ANSWERED = [Prompt((4, 5, 6), (7, 8, 9, 10)), Prompt((9, 8), (1, 2, 3))]


def contents(folder: Path) -> list[dict[str, torch.Tensor]]:
    return [load_file(path) for path in sorted(folder.glob("*.safetensors"))]


def assert_same(left: Path, right: Path) -> None:
    for a, b in zip(contents(left), contents(right), strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)


def test_states_are_those_of_the_model(target: Target, tmp_path: Path) -> None:
    prompts = [*PROMPTS, *ANSWERED]
    capture(target, prompts, tmp_path, SETTINGS)
    data = CapturedSequences(tmp_path)
    assert len(data) == len(prompts)
    width = target.hidden_size
    model = tiny_llama(seed=3, vocab_size=TEXT_VOCAB_SIZE)  # the target's twin, driven by transformers
    end = list(target.eos_token_ids)
    for index, prompt in enumerate(prompts):
        sequence = data.read(index)
        length = len(sequence.token_ids)
        assert sequence.loss_start == len(prompt.token_ids)
        assert tuple(sequence.token_ids[: sequence.loss_start].tolist()) == prompt.token_ids
        if prompt.response_ids is None:
            start = sequence.token_ids[None, : sequence.loss_start]
            out = model.generate(start, max_new_tokens=9, do_sample=False, eos_token_id=end, pad_token_id=end[0])
            assert sequence.token_ids.tolist() == out[0].tolist()
        else:
            assert tuple(sequence.token_ids[sequence.loss_start :].tolist()) == prompt.response_ids
        states = model(sequence.token_ids[None], output_hidden_states=True, use_cache=False).hidden_states
        assert sequence.aux_hidden_states.shape == (length - 1, 2 * width)
        expected = torch.cat([states[2][0], states[4][0]], -1)[:-1]
        torch.testing.assert_close(sequence.aux_hidden_states.float(), expected, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(sequence.hidden.float(), states[-1][0, :-1], rtol=1e-2, atol=1e-2)
        assert torch.equal(data.read(index, rows=3).aux_hidden_states, sequence.aux_hidden_states[:3])
    assert data.distinct_tokens().tolist() == sorted({t for i in range(len(data)) for t in data.token_ids(i).tolist()})


def test_a_killed_capture_goes_on_after_its_last_whole_shard(target: Target, tmp_path: Path) -> None:
    capture(target, PROMPTS, tmp_path / "whole", SETTINGS)
    calls = []

    def die(done: int, _total: int, _tokens: int) -> None:
        calls.append(done)
        if done == 6:  # answered, but not written yet
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture(target, PROMPTS, tmp_path / "killed", SETTINGS, on_progress=die)
    calls.clear()
    capture(target, PROMPTS, tmp_path / "killed", SETTINGS, on_progress=lambda done, *_: calls.append(done))
    assert calls[0] == 3  # the first shard was not answered again
    assert calls[-1] == len(PROMPTS)
    assert_same(tmp_path / "whole", tmp_path / "killed")


def test_prompts_that_begin_alike_are_captured_whole(target: Target, tmp_path: Path) -> None:
    prompts = [Prompt(tuple(range(40))), Prompt((*range(40), 50, 51)), Prompt((*range(40), 50, 51), (52, 53))]
    capture(target, prompts, tmp_path, SETTINGS, max_num_seqs=1)
    data = CapturedSequences(tmp_path)
    assert torch.equal(data.read(0).aux_hidden_states[:40], data.read(1).aux_hidden_states[:40])
    assert [len(data.read(i).aux_hidden_states) for i in range(3)] == [length - 1 for length in data.lengths]


def test_sampled_answers_are_seeded_by_prompt(target: Target, tmp_path: Path) -> None:
    settings = dataclasses.replace(SETTINGS, temperature=1.0)
    same = [PROMPTS[0]] * 4
    for name in ("a", "b"):
        capture(target, same, tmp_path / name, settings)
    assert_same(tmp_path / "a", tmp_path / "b")
    data = CapturedSequences(tmp_path / "a")
    assert len({tuple(data.token_ids(i).tolist()) for i in range(4)}) > 1


@pytest.mark.parametrize("change", ["prompts", "max_tokens", "target_layer_ids", "target"])
def test_captures_are_not_mixed(target: Target, tmp_path: Path, change: str) -> None:
    capture(target, PROMPTS[:2], tmp_path, SETTINGS)
    other: Target = tiny_target(text=True, seed=4) if change == "target" else target
    prompts = PROMPTS[1:3] if change == "prompts" else PROMPTS[:2]
    changes = {"max_tokens": {"max_tokens": 5}, "target_layer_ids": {"target_layer_ids": (1, 2)}}.get(change, {})
    with pytest.raises(JetSpecError, match=f"another {change}"):
        capture(other, prompts, tmp_path, dataclasses.replace(SETTINGS, **changes))


def test_prompts_that_do_not_fit(target: Target, tmp_path: Path) -> None:
    with pytest.raises(JetSpecError, match="training prompt 2: holds ids outside"):
        capture(target, [PROMPTS[0], Prompt((99_999,))], tmp_path / "a", SETTINGS)
    with pytest.raises(JetSpecError, match="training prompt 1: 300 tokens"):
        capture(target, [Prompt((1,) * 300)], tmp_path / "b", SETTINGS)
