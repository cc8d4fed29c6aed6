"""Grammars along the accepted walk: the same constrained answer whatever is drafted and whoever shares the batch."""

from __future__ import annotations

import json
import re

import pytest
import torch

from jetspec import LLM
from jetspec.engine import Engine, Sequence
from jetspec.errors import JetSpecError
from jetspec.head import head_for_target
from jetspec.models.target import Target
from jetspec.sampling import SamplingParams, StructuredOutputsParams, new_grammar, process, sample
from tests.helpers.drafters import OracleDrafter
from tests.helpers.tiny import TEXT_VOCAB_SIZE, tiny_llama, tiny_target

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "tags", "ok"],
    "additionalProperties": False,
}
FORMS = {
    "json": {"json": SCHEMA, "disable_any_whitespace": True},
    "regex": {"regex": r"([0-9]{1,3}\.){3}[0-9]{1,3} (up|down)( again){0,4}"},
    "choice": {"choice": ["a rather long answer", "a rather short one", "no"]},
    "grammar": {
        "grammar": 'start: "let " NAME " = " sum ";"\nsum: NUMBER | NUMBER "+" NUMBER\nNAME: /[a-z]{1,8}/\n'
        "NUMBER: /[0-9]{1,6}/"
    },
    "lax json": {"json": SCHEMA},
}
PROMPTS = [list(b"tell me"), [7], list(b"what is a fairly long prompt good for?"), list(b"0123456789"), list(b"x y")]


def make_params(temperature: float, **settings) -> list[SamplingParams]:
    return [
        SamplingParams(
            temperature=temperature,
            seed=i,
            max_tokens=20 if name == "lax json" else 90,
            structured_outputs=StructuredOutputsParams(**form),
            **settings,
        )
        for i, (name, form) in enumerate(FORMS.items())
    ]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(text=True, num_hidden_layers=2)


@torch.inference_mode()
def decode(target: Target, prompt: list[int], params: SamplingParams) -> tuple[list[int], str]:
    """Plain constrained decoding through transformers alone; the whole sequence is recomputed for every token."""
    grammar = new_grammar(target.tokenizer, target.eos_token_ids, params.structured_outputs)
    model = tiny_llama(vocab_size=TEXT_VOCAB_SIZE, num_hidden_layers=2)
    output: list[int] = []
    while len(output) < params.max_tokens:
        logits = model(torch.tensor([prompt + output]), use_cache=False).logits[0, -1]
        scores = process(logits, params, prompt, output, target.eos_token_ids, grammar=grammar)
        output.append(sample(scores, params, params.seed, len(prompt) + len(output)))
        grammar.advance(output[-1])
        if output[-1] in target.eos_token_ids or grammar.complete:
            return output, "stop"
    return output, "length"


def finish(engine: Engine, params: list[SamplingParams], prompts: list[list[int]] = PROMPTS) -> list[Sequence]:
    free = engine.blocks.num_free
    sequences = [engine.add(str(i), ids, p) for i, (ids, p) in enumerate(zip(prompts, params, strict=True))]
    while engine.has_work:
        engine.step()
    assert engine.blocks.num_free == free, "blocks leaked"
    return sequences


def results(sequences: list[Sequence]) -> list[tuple[list[int], str | None]]:
    return [(s.output_ids, s.finish_reason) for s in sequences]


@pytest.mark.parametrize(
    "temperature", [pytest.param(0.0, marks=pytest.mark.slow, id="greedy"), pytest.param(1.2, id="sampled")]
)
def test_drafts_change_nothing(target: Target, temperature: float) -> None:
    params = make_params(temperature)
    truth = [decode(target, ids, p) for ids, p in zip(PROMPTS, params, strict=True)]
    head = head_for_target(target, num_layers=1, block_size=4, num_aux_layers=1, mask_token_id=271)
    known = {tuple(ids): output for ids, (output, _) in zip(PROMPTS, truth, strict=True)}
    for draft in (None, head, OracleDrafter(known, TEXT_VOCAB_SIZE, hit=0.9), OracleDrafter(known, 272, hit=0.0)):
        engine = Engine(target, draft, tree_budget=20, num_blocks=80, kv_block_size=8)
        assert results(finish(engine, params)) == truth
    assert [reason for _, reason in truth][:4] == ["stop"] * 4


def test_accepted_paths_are_long(target: Target) -> None:
    """The grammar state moves with every token of a path, not once a round."""
    params = make_params(0.0)
    known = {tuple(s.prompt_ids): s.output_ids for s in finish(Engine(target, num_blocks=80), params)}
    drafted = finish(
        Engine(target, OracleDrafter(known, TEXT_VOCAB_SIZE, hit=1.0), tree_budget=40, num_blocks=80), params
    )
    long = [s for s in drafted if s.num_output > 15]
    assert len(long) >= 3
    assert all(s.metrics.acceptance_length > 2 for s in long)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_answers_have_the_form_asked_for(target: Target, seed: int) -> None:
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=150, structured_outputs=StructuredOutputsParams(**form))
        for form in FORMS.values()
    ]
    by_form = dict(zip(FORMS, finish(Engine(target, num_blocks=200), params), strict=True))
    value = json.loads(by_form["json"].text)
    assert list(value) == ["name", "age", "tags", "ok"]
    assert len(value["name"]) <= 12
    assert 0 <= value["age"] <= 999
    assert type(value["age"]) is int
    assert 1 <= len(value["tags"]) <= 3
    assert set(value["tags"]) <= {"red", "green", "blue"}
    assert type(value["ok"]) is bool
    assert re.fullmatch(FORMS["regex"]["regex"], by_form["regex"].text)
    assert by_form["choice"].text in FORMS["choice"]["choice"]
    assert re.fullmatch(r"let [a-z]{1,8} = \d{1,6}(\+\d{1,6})?;", by_form["grammar"].text)


def test_preemption_keeps_the_grammars_place(target: Target) -> None:
    params = [p.replace(max_tokens=90) for p in make_params(1.0)]
    roomy = finish(Engine(target, num_blocks=200, kv_block_size=4), params)
    known = {tuple(s.prompt_ids): s.output_ids for s in roomy}
    for draft in (None, OracleDrafter(known, TEXT_VOCAB_SIZE, hit=0.8)):
        tight = finish(
            Engine(target, draft, tree_budget=8, num_blocks=32, kv_block_size=4, max_num_batched_tokens=32), params
        )
        assert sum(s.metrics.preemptions for s in tight) > 0
        assert results(tight) == results(roomy)
        assert [s.text for s in tight] == [s.text for s in roomy]


def one(target: Target, **settings) -> Sequence:
    form = StructuredOutputsParams(**settings.pop("form"))
    params = SamplingParams(structured_outputs=form, **{"temperature": 0, "max_tokens": 20, **settings})
    return finish(Engine(target, num_blocks=20), [params], PROMPTS[:1])[0]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_the_end_of_a_grammar_ends_the_request(target: Target, ignore_eos: bool) -> None:
    eos = max(target.eos_token_ids)
    got = one(target, form={"choice": ["yes"]}, ignore_eos=ignore_eos)
    assert (got.text, got.num_output, got.finish_reason, got.stop_reason) == ("yes", 3, "stop", None)
    # Where more could follow, the end-of-text token is what ends it.
    got = one(target, form={"regex": "(yes)*"}, logit_bias={eos: 100.0}, ignore_eos=ignore_eos)
    assert (got.text, got.output_ids, got.finish_reason) == ("", [eos], "stop")
    got = one(target, form={"regex": "yes(yes)*"}, logit_bias={eos: 100.0}, ignore_eos=ignore_eos)
    assert (got.text, got.output_ids[3:], got.finish_reason) == ("yes", [eos], "stop")


def test_an_end_outranks_the_length_and_a_stop_string_the_end(target: Target) -> None:
    assert one(target, form={"choice": ["yes"]}, max_tokens=3).finish_reason == "stop"
    cut = one(target, form={"choice": ["yes"]}, max_tokens=2)
    assert (cut.text, cut.finish_reason) == ("ye", "length")
    stopped = one(target, form={"choice": ["yes"]}, stop="es")
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == ("y", "stop", "es")


def test_min_tokens_holds_the_end_back_or_fails_the_request(target: Target) -> None:
    eos = max(target.eos_token_ids)
    long = one(target, form={"regex": "(yes)*"}, logit_bias={eos: 100.0}, min_tokens=4)
    assert (long.text, long.finish_reason) == ("yesyes", "stop")
    failed = one(target, form={"choice": ["yes"]}, min_tokens=5)
    assert (failed.text, failed.finish_reason) == ("yes", "error")
    assert re.search("structured_outputs with min_tokens", str(failed.error))


def test_a_processor_that_breaks_the_grammar_harms_only_its_own_request(target: Target) -> None:
    def lift(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(scores).index_fill(1, torch.tensor([5]), 9.0) if ids.shape[1] > 8 else scores

    good = make_params(0.0)
    form = good[0].structured_outputs
    bad = SamplingParams(structured_outputs=form, temperature=0, logits_processors=[lift], logprobs=1)
    failed, *others = finish(Engine(target, num_blocks=80), [bad, *good[1:]])
    assert failed.finish_reason == "error"
    assert "structured_outputs: token 5" in str(failed.error)
    assert len(failed.output_ids) == len(failed.logprobs) == 2
    assert failed.text == '{"'
    assert results(others) == results(finish(Engine(target, num_blocks=80), good))[1:]


def test_n_answers_each_follow_the_grammar(target: Target) -> None:
    form = StructuredOutputsParams(regex=r"[a-z]{3}-[0-9]{4}")
    params = SamplingParams(n=4, temperature=1.5, seed=3, max_tokens=20, structured_outputs=form)
    [output] = LLM(target, None, num_blocks=80).generate("hello", params)
    texts = [c.text for c in output.outputs]
    assert len(set(texts)) == 4
    assert all(re.fullmatch(r"[a-z]{3}-[0-9]{4}", text) for text in texts)


def test_bad_grammars_are_refused_before_anything_runs(target: Target) -> None:
    llm = LLM(target, None, num_blocks=20)
    good, bad = (SamplingParams(structured_outputs=StructuredOutputsParams(regex=r)) for r in ("a", "("))
    with pytest.raises(JetSpecError, match=r"prompt 1: structured_outputs: at 1\(8\): invalid regex"):
        llm.generate(["a", "b"], [good, bad])
    with pytest.raises(JetSpecError, match="structured_outputs needs a tokenizer"):
        Engine(tiny_target(), num_blocks=8).check([1], good)
    assert not llm.engine.has_work
