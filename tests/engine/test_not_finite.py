"""Logits that are not finite: a target's fail the request, a drafter's cost the draft and nothing else."""

from __future__ import annotations

import logging

import pytest
import torch

from jetspec import LLM, SamplingParams
from jetspec.engine import ModelDrafter
from jetspec.engine.drafters import Drafter
from jetspec.errors import JetSpecError, RequestError
from jetspec.head import DraftHead, head_for_target
from jetspec.models.target import Target
from tests.helpers.tiny import TINY_MODELS, VOCAB_SIZE, tiny_llama, tiny_target

PROMPTS = [[1, 2, 3], [4, 5]]


def spoiled(kind: str, value: float) -> Target:
    model = TINY_MODELS[kind](seed=1)
    with torch.no_grad():
        model.get_decoder().norm.weight[3] = value
    return Target.from_model(model)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=5),
        SamplingParams(seed=1, max_tokens=5),
        SamplingParams(temperature=0, max_tokens=5, logprobs=2),
        SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=1),
        SamplingParams(temperature=0, max_tokens=5, repetition_penalty=1.2),
    ],
    ids=["greedy", "sampled", "logprobs", "prompt logprobs", "processors"],
)
def test_a_target_that_is_not_finite_fails_the_request(kind: str, value: float, params: SamplingParams) -> None:
    llm = LLM(spoiled(kind, value), draft=None)
    with pytest.raises(RequestError, match=r"logits at position 1?[0-9] are not finite") as caught:
        llm.generate(PROMPTS[:1], params)
    [output] = caught.value.outputs
    assert output.outputs[0].token_ids == []
    assert output.outputs[0].finish_reason == "error"
    assert not llm.engine.has_work
    assert llm.engine.blocks.num_free == llm.engine.blocks.num_blocks


def test_a_request_whose_own_text_makes_the_target_fail_harms_no_other() -> None:
    """One token's embedding is NaN: the request that holds it fails, the one beside it ends as alone."""
    model = tiny_llama()
    with torch.no_grad():
        model.get_input_embeddings().weight[77] = float("nan")
        model.lm_head.weight[77] = 0
    llm = LLM(Target.from_model(model), draft=None)
    params = SamplingParams(temperature=0, max_tokens=6)
    [alone] = llm.generate(PROMPTS[:1], params)
    with pytest.raises(RequestError, match="not finite") as caught:
        llm.generate([PROMPTS[0], [5, 77]], params)
    assert caught.value.outputs[0].outputs[0].token_ids == alone.outputs[0].token_ids
    assert caught.value.outputs[1].outputs[0].finish_reason == "error"


def spoiled_head(kind: str) -> DraftHead:
    mask = {} if kind == "autoregressive" else {"mask_token_id": VOCAB_SIZE - 1}
    head = head_for_target(tiny_target(), kind=kind, num_layers=1, block_size=4, num_aux_layers=2, **mask)
    with torch.no_grad():
        head.norm.weight[0] = float("nan")
    return head


@pytest.mark.parametrize(
    "make",
    [
        lambda: ModelDrafter(spoiled("llama", float("nan"))),
        lambda: ModelDrafter(spoiled("llama", float("inf"))),
        lambda: spoiled_head("parallel"),
        lambda: spoiled_head("autoregressive"),
    ],
    ids=["model of NaN", "model of infinity", "parallel head", "autoregressive head"],
)
def test_a_drafter_that_is_not_finite_drafts_nothing_and_says_so_once(make, caplog: pytest.LogCaptureFixture) -> None:
    params = SamplingParams(temperature=0, max_tokens=8)
    plain = LLM(tiny_target(), draft=None).generate(PROMPTS, params)
    drafter: Drafter | DraftHead = make()
    with caplog.at_level(logging.WARNING):
        drafted = LLM(tiny_target(), draft=drafter, tree_budget=8).generate(PROMPTS, params)
    assert [o.outputs[0].token_ids for o in drafted] == [o.outputs[0].token_ids for o in plain]
    assert all(o.metrics.tree_rows == o.metrics.rounds for o in drafted)
    assert len([r for r in caplog.records if "NaN or infinite" in r.message]) == 1


def test_a_finite_drafter_is_not_accused(caplog: pytest.LogCaptureFixture) -> None:
    head = head_for_target(tiny_target(), num_layers=1, block_size=4, num_aux_layers=2, mask_token_id=VOCAB_SIZE - 1)
    with caplog.at_level(logging.WARNING):
        LLM(tiny_target(), draft=head, tree_budget=8).generate(PROMPTS, SamplingParams(temperature=0, max_tokens=8))
    assert not caplog.records


def test_the_error_is_one_a_caller_can_catch() -> None:
    assert issubclass(RequestError, JetSpecError)
