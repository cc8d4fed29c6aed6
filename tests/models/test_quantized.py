"""Quantized checkpoints that a CPU can run: draft trees change no token of what the quantized model says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, TorchAoConfig

from jetspec.engine import Engine
from jetspec.models.loading import load_target
from jetspec.sampling import SamplingParams
from tests.helpers.drafters import OracleDrafter
from tests.helpers.engine import finish, make_prompts
from tests.helpers.tiny import TEXT_VOCAB_SIZE, tiny_qwen3, tiny_tokenizer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with the weights of its linear layers in int8, as transformers and torchao save it."""
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed: pip install torchao")
    plain, folder = (tmp_path_factory.mktemp(name) for name in ("plain", "int8"))
    tiny_qwen3(vocab_size=TEXT_VOCAB_SIZE).save_pretrained(plain)
    config: Any = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    AutoModelForCausalLM.from_pretrained(plain, quantization_config=config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("batch", [1, 3])
def test_int8_weights_draft_trees(checkpoint: Path, batch: int) -> None:
    target = load_target(str(checkpoint))
    weight = target.model.get_submodule("model.layers.0.self_attn.q_proj").weight
    assert type(weight).__name__ == "Int8Tensor"
    prompts = make_prompts(batch)
    params = [SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)] * batch
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    truth = {}
    for prompt in prompts:
        whole = model.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        truth[tuple(prompt)] = whole[0, len(prompt) :].tolist()
    drafter = OracleDrafter(truth, TEXT_VOCAB_SIZE)
    sequences = finish(Engine(target, drafter, tree_budget=8, num_blocks=64), prompts, params)
    assert [s.output_ids for s in sequences] == list(truth.values())
    assert all(s.metrics.acceptance_length > 1.5 for s in sequences)
