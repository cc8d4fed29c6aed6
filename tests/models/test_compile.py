"""Compiled layers: torch.compile is given the layers, and what they compute stays the same."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from jetspec.engine import Engine
from jetspec.errors import JetSpecError
from tests.helpers.engine import make_draft, make_params, make_prompts, make_target, references, run


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_compiled_targets_give_the_same_tokens(kind: str) -> None:
    torch._dynamo.reset()
    compiler = CompileCounter()  # runs what it is given as it is
    target = make_target(kind)
    target = target.as_compiled(backend=compiler)
    prompts, params = make_prompts(2), make_params(2, 0.0)
    truth = references(kind, prompts, params)
    engine = Engine(
        target, make_draft("oracle", target, kind, prompts, params), tree_budget=9, num_blocks=64, kv_block_size=4
    )
    assert run(engine, prompts, params) == truth
    assert compiler.frame_count > 0
    assert compiler.op_count > 10 * compiler.frame_count, "graphs of a few operations: the layers fell apart"


def test_exact_targets_are_not_compiled_nor_compiled_ones_exact() -> None:
    target = make_target("llama")
    with pytest.raises(JetSpecError, match="batch_invariant=True"):
        Engine(target.as_compiled(backend="eager"), batch_invariant=True, num_blocks=8)
    with pytest.raises(JetSpecError, match="compile=True"):
        Engine(target, batch_invariant=True, compile=True, num_blocks=8)


@pytest.mark.slow
def test_a_compiled_target_leaves_the_one_it_was_made_of_as_it_is() -> None:
    torch._dynamo.reset()
    compiler = CompileCounter()
    target = make_target("llama")
    prompts, params = make_prompts(2), make_params(2, 0.0)
    compiled = Engine(target.as_compiled(backend=compiler), num_blocks=64, kv_block_size=4)
    plain = Engine(target, num_blocks=64, kv_block_size=4)
    exact = Engine(target, batch_invariant=True, num_blocks=64, kv_block_size=4)
    before = run(plain, prompts, params)
    run(exact, prompts, params)
    assert compiler.frame_count == 0
    assert run(compiled, prompts, params) == before
    assert compiler.frame_count > 0
