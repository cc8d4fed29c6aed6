"""Every public option has an effect, and is refused by name where its value is wrong.

The tables list every option with a wrong value and a right one. A new option without an entry fails
`test_every_option_is_listed`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from jetspec import LLM
from jetspec.engine import Committed, Engine, EngineConfig, EngineStep, Observer, Sequence
from jetspec.errors import JetSpecError
from jetspec.head import head_for_target, save_head
from jetspec.models.target import Target
from jetspec.outputs import RequestOutput
from jetspec.sampling import SamplingParams, StructuredOutputsParams
from tests.helpers.layers import FAMILY_MODELS
from tests.helpers.tiny import tiny_target, tiny_tokenizer

A, B, EOS, USER = tiny_tokenizer().convert_tokens_to_ids(["A", "B", "<|end|>", "<|user|>"])


@cache
def target() -> Target:
    return tiny_target(text=True, num_hidden_layers=2)


class Recorder(Observer):
    def __init__(self) -> None:
        self.steps: list[EngineStep] = []
        self.commits: list[Committed] = []

    def step(self, record: EngineStep) -> None:
        self.steps.append(record)

    def committed(self, rows: Committed) -> None:
        self.commits.append(rows)


# The engine

PROMPT = list(b"abcabcabcabcabcabcabc")


def played(
    draft: Any = None, params: dict[str, Any] | None = None, **options: Any
) -> tuple[Engine, Recorder, Sequence]:
    """An engine that ran a request, and then two more at a time, the last of them with the first one's prompt."""
    recorder = Recorder()
    engine = Engine(target(), draft, observer=recorder, **{"num_blocks": 40, "tree_budget": 4, **options})
    sampling = SamplingParams(**{"temperature": 0, "max_tokens": 5, "ignore_eos": True, **(params or {})})
    engine.add("first", PROMPT, sampling)
    engine.run()
    engine.add("other", [7] * 5, sampling)
    last = engine.add("again", PROMPT, sampling)
    engine.run()
    return engine, recorder, last


def compiles(**options: Any) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        asked: list[Target] = []
        patch.setattr(Target, "as_compiled", lambda self, *_: asked.append(self) or self)
        Engine(target(), num_blocks=4, **options)
        return bool(asked)


def rows(**options: Any) -> list[int]:
    return [step.rows for step in played(small_head(), **options)[1].steps]


def cached_behind_a_state(**options: Any) -> int:
    """Tokens of a known prompt that a target with recurrent layers does not read again."""
    engine = Engine(Target.from_model(FAMILY_MODELS["lfm2"](num_hidden_layers=2)), num_blocks=20, **options)
    for name in "ab":
        sequence = engine.add(name, [*range(40)], SamplingParams(max_tokens=1))
        engine.run()
    return sequence.metrics.cached_prompt_tokens


#: Option -> a wrong value, a right one that is not the default, and what shows the difference.
ENGINE: dict[str, tuple[Any, Any, Callable[..., Any]]] = {
    "tree_budget": (0, 2, rows),
    "num_blocks": (0, 30, lambda **o: played(**o)[0].blocks.num_blocks),
    "kv_block_size": (0, 4, lambda **o: played(**o)[0].cache.num_slots),
    "max_num_batched_tokens": (0, 5, rows),
    "max_num_seqs": (0, 1, lambda **o: max(step.decoding for step in played(**o)[1].steps)),
    "enable_prefix_caching": (None, False, lambda **o: played(**o)[2].metrics.cached_prompt_tokens),
    "num_state_snapshots": (-1, 0, lambda **o: cached_behind_a_state(**o)),
    "batch_invariant": (1, True, lambda **o: played(**o)[0].target.tile_sizes),
    "compile": ("yes", True, compiles),
    "seed": ("x", 5, lambda **o: played(params={"temperature": 1}, **o)[2].output_ids),
    "target_layer_ids": ("01", (1, 0), lambda **o: states_of("aux_hidden_states", **o)),
    "want_hidden": (2, True, lambda **o: states_of("hidden", **o)),
}


def states_of(name: str, **options: Any) -> tuple[int, ...] | None:
    states = getattr(played(**options)[1].commits[0], name)
    return None if states is None else tuple(states.shape)


@pytest.mark.parametrize("name", ENGINE)
def test_engine_options_have_an_effect(name: str) -> None:
    _, value, effect = ENGINE[name]
    assert effect(**{name: value}) != effect()


@pytest.mark.parametrize("name", ENGINE)
def test_wrong_engine_options_are_refused(name: str) -> None:
    for build in (lambda **o: Engine(target(), **o), lambda **o: LLM(target(), None, **o)):
        with pytest.raises(JetSpecError, match=rf"^{name}\b"):
            build(**{name: ENGINE[name][0]})


def test_unknown_engine_options_are_refused() -> None:
    with pytest.raises(JetSpecError, match=r"max_num_sequences.*max_num_seqs"):
        Engine(target(), max_num_sequences=3)
    with pytest.raises(JetSpecError, match="draft=3"):
        Engine(target(), 3)  # type: ignore[arg-type]


# The front door


def small_head() -> Any:
    return head_for_target(target(), num_layers=1, block_size=4, target_layer_ids=(0, 1), mask_token_id=271)


def llm(model: Any = None, draft: Any = None, **options: Any) -> LLM:
    return LLM(model or target(), draft, **{"num_blocks": 20, "tree_budget": 4, **options})


def drafter(folder: Path, draft: Any = "head", **options: Any) -> Any:
    return llm(None, str(folder / draft) if isinstance(draft, str) else draft, **options).engine.drafter


#: Option -> a wrong value, a right one that is not the default, and what shows the difference. The folder holds a
#: model, a head of it, and one whose configuration does not say whether it is causal.
LLM_OPTIONS: dict[str, tuple[Any, Any, Callable[..., Any]]] = {
    "model": (3, "model", lambda folder, model=None: llm(model and str(folder / model)).target.name),
    "draft": (3, "head", lambda folder, draft=None: type(drafter(folder, draft))),
    "draft_method": ("magic", "chain", lambda folder, **o: drafter(folder, **o).chain),
    "head_window": (0, 8, lambda folder, **o: drafter(folder, **o).window),
    "head_causal": ("yes", False, lambda folder, head_causal=True: is_causal(folder, head_causal)),
    "tree_budget": (0, 1, lambda _, tree_budget=4: llm(tree_budget=tree_budget).engine.config.tree_budget),
    "device": ("abacus", "meta", lambda folder, **o: on_device(folder, **o)),
    "dtype": ("float23", "bfloat16", lambda folder, **o: llm(str(folder / "model"), **o).target.dtype),
    "batch_invariant": (1, True, lambda _, **o: llm(**o).target.tile_sizes),
    "seed": ("x", 5, lambda _, **o: answer(llm(**o)).outputs[0].token_ids),
    "observer": (3, Recorder(), lambda _, **o: observed(**o)),
}


def is_causal(folder: Path, head_causal: bool) -> bool:
    return drafter(folder, "flagless", head_causal=head_causal).head.config.causal


def on_device(folder: Path, **options: Any) -> str:
    """The device that loading asks for: there is but one here that can run."""
    with pytest.MonkeyPatch.context() as patch:
        asked: list[str] = []
        patch.setattr("jetspec.llm.load_target", lambda *_, device, **__: asked.append(device) or target())
        llm(str(folder / "model"), **options)
        return asked[0]


def answer(llm: LLM) -> RequestOutput:
    return llm.generate("abc", SamplingParams(max_tokens=5))[0]


def observed(observer: Recorder | None = None) -> int:
    answer(llm(observer=observer))
    return len(observer.steps) if observer else 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    target().model.save_pretrained(folder / "model")
    target().tokenizer.save_pretrained(folder / "model")
    for name in ("head", "flagless"):
        save_head(small_head(), folder / name)
    config = json.loads((folder / "flagless" / "config.json").read_text())
    for place in (config, config["dflash_config"]):
        for key in ("causal", "causal_head", "is_causal"):
            place.pop(key, None)
    (folder / "flagless" / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", LLM_OPTIONS)
def test_options_of_llm_have_an_effect(name: str, folder: Path) -> None:
    _, value, effect = LLM_OPTIONS[name]
    assert effect(folder, **{name: value}) != effect(folder)


@pytest.mark.parametrize("name", LLM_OPTIONS)
def test_wrong_options_of_llm_are_refused(name: str, folder: Path) -> None:
    values = {"model": str(folder / "model"), "draft": str(folder / "head"), name: LLM_OPTIONS[name][0]}
    with pytest.raises(JetSpecError, match=name):
        LLM(**values, num_blocks=20)


# Sampling


def bias(**biases: float) -> dict[str, Any]:
    """Greedy decoding that the target has next to no say in, of two letters or of a special token."""
    ids = {"A": A, "B": B, "eos": EOS, "user": USER}
    return {"temperature": 0, "logit_bias": {ids[name]: value for name, value in biases.items()}}


def rolled(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores.roll(1)


LETTERS = bias(A=100.0, B=95.0)
FEW = {"temperature": 1.0, "seed": 0, "max_tokens": 16, "logit_bias": dict.fromkeys(range(A, A + 6), 50.0)}
SAMPLED = {"temperature": 1.0, "seed": 0}
#: Option -> a wrong value, a right one that is not the default, and the settings beside it.
SAMPLING: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "n": (0, 2, SAMPLED),
    "temperature": (-1, 0.2, {"seed": 0}),
    "top_p": (1.5, 0.05, SAMPLED),
    "top_k": (-2, 1, SAMPLED),
    "min_p": (2, 0.9, SAMPLED),
    "repetition_penalty": (0, 3.0, FEW),
    "frequency_penalty": (3, 2.0, FEW),
    "presence_penalty": (3, 2.0, FEW),
    "seed": ("x", 1, {"temperature": 1.0}),
    "stop": ([""], "AA", LETTERS),
    "stop_token_ids": ([-1], [A], LETTERS),
    "bad_words": ("A", ["A"], LETTERS),
    "ignore_eos": ("no", True, bias(eos=100.0)),
    "max_tokens": (0, 3, LETTERS),
    "min_tokens": (-1, 4, bias(eos=100.0)),
    "logprobs": (-2, 1, LETTERS),
    "prompt_logprobs": (-2, 1, LETTERS),
    "logit_bias": ({A: float("nan")}, {A: 100.0}, {"temperature": 0}),
    "logits_processors": ([3], [rolled], LETTERS),
    "skip_special_tokens": ("no", False, bias(user=100.0)),
    "include_stop_str_in_output": ("no", True, {**LETTERS, "stop": "AA"}),
    "structured_outputs": ({"choice": ["a"]}, StructuredOutputsParams(choice=["yes"]), {"temperature": 0}),
}


@cache
def plain_llm() -> LLM:
    return llm(num_blocks=40)


def outcome(**params: Any) -> tuple[Any, ...]:
    [output] = plain_llm().generate("hello", SamplingParams(**{"max_tokens": 8, **params}))
    answers = [(c.token_ids, c.text, c.finish_reason, c.logprobs) for c in output.outputs]
    return answers, output.prompt_logprobs


@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_options_have_an_effect(name: str) -> None:
    _, value, beside = SAMPLING[name]
    assert outcome(**{**beside, name: value}) != outcome(**beside)


@pytest.mark.parametrize("name", SAMPLING)
def test_wrong_sampling_options_are_refused(name: str) -> None:
    with pytest.raises(JetSpecError, match=rf"^{name}\b"):
        SamplingParams(**{name: SAMPLING[name][0]})


def test_every_option_is_listed() -> None:
    arguments = inspect.signature(LLM.__init__).parameters.values()
    assert {p.name for p in arguments if p.name != "self" and p.kind != p.VAR_KEYWORD} == set(LLM_OPTIONS)
    arguments = inspect.signature(Engine.__init__).parameters.values()
    named = {p.name for p in arguments if p.kind != p.VAR_KEYWORD}
    assert {*named, *EngineConfig.model_fields} == {"self", "target", "draft", "observer", *ENGINE}
    assert set(SamplingParams.model_fields) == set(SAMPLING)
