"""Targets, prompts and parameters that the engine's tests share, and what plain decoding answers to them.

The models have two layers, one of each kind of attention: engine tests ask what becomes of rows, blocks and tokens,
which takes more than one layer and no more than two.
"""

from __future__ import annotations

import random
from functools import cache

from transformers import PreTrainedModel

from jetspec.engine import Drafter, Engine, Sequence
from jetspec.head import DraftHead, head_for_target
from jetspec.models.target import Target
from jetspec.sampling import SamplingParams
from tests.helpers.decoding import decode
from tests.helpers.drafters import OracleDrafter
from tests.helpers.layers import FAMILIES, FAMILY_MODELS
from tests.helpers.tiny import TINY_MODELS, VOCAB_SIZE

#: Picked so that with every architecture some answer ends by one of them, inside what it would have gone on to say.
EOS = frozenset(range(19, VOCAB_SIZE, 22))
STOPS = list(range(16, VOCAB_SIZE, 17))
LENGTHS = [3, 17, 1, 40, 9]
LIMITS = [10, 13, 1, 16, 2]
#: An answer: its tokens, and why it ended.
Answer = tuple[list[int], str]


def make_model(kind: str, attn: str, num_layers: int = 2) -> PreTrainedModel:
    if kind in FAMILY_MODELS:
        return FAMILY_MODELS[kind](attn=attn, num_hidden_layers=max(num_layers, len(FAMILIES[kind][1])))
    windows = (["sliding_attention", "full_attention"] * num_layers)[:num_layers]
    settings = {"layer_types": windows} if kind == "gemma3" else {}
    return TINY_MODELS[kind](attn=attn, num_hidden_layers=num_layers, **settings)


def make_target(kind: str = "llama", num_layers: int = 2) -> Target:
    target = Target.from_model(make_model(kind, "sdpa", num_layers), name=kind)
    target.eos_token_ids = EOS
    return target


@cache
def reference_model(kind: str) -> PreTrainedModel:
    """The model of `make_target(kind)`, as transformers runs it."""
    return make_model(kind, "eager")


def make_prompts(n: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in LENGTHS[:n]]


def make_params(n: int, temperature: float) -> list[SamplingParams]:
    """Requests that end by a stop token, by eos and by their length, in different rounds."""
    return [
        SamplingParams(
            temperature=temperature,
            seed=100 + i,
            max_tokens=LIMITS[i],
            ignore_eos=i == 3,
            stop_token_ids=STOPS if i == 1 else None,
        )
        for i in range(n)
    ]


_answers: dict[tuple[str, tuple[int, ...], str], Answer] = {}


def references(kind: str, prompts: list[list[int]], params: list[SamplingParams]) -> list[Answer]:
    """What transformers alone answers; each request is decoded once a process."""
    found = []
    for ids, p in zip(prompts, params, strict=True):
        key = (kind, tuple(ids), repr(p))
        if key not in _answers:
            _answers[key] = decode(reference_model(kind), ids, p, EOS, p.seed or 0)
        tokens, reason = _answers[key]
        found.append((list(tokens), reason))
    return found


def known_answers(
    kind: str, prompts: list[list[int]], params: list[SamplingParams]
) -> dict[tuple[int, ...], list[int]]:
    """The tokens of `references` by prompt, as an oracle takes them."""
    answers = references(kind, prompts, params)
    return {tuple(ids): tokens for ids, (tokens, _) in zip(prompts, answers, strict=True)}


def random_head(target: Target, seed: int = 0) -> DraftHead:
    return head_for_target(
        target, num_layers=1, block_size=5, target_layer_ids=(0, 1), mask_token_id=VOCAB_SIZE - 1, seed=seed
    )


def make_draft(
    name: str, target: Target, kind: str, prompts: list[list[int]], params: list[SamplingParams]
) -> DraftHead | Drafter | None:
    if name == "none":
        return None
    if name == "random head":
        return random_head(target)
    known = known_answers(kind, prompts, params)
    return OracleDrafter(known, VOCAB_SIZE, hit={"oracle": 0.9, "liar": 0.0}[name])


def finish(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[Sequence]:
    """Run requests together to their end; every block must be free again."""
    sequences = [engine.add(str(i), ids, p) for i, (ids, p) in enumerate(zip(prompts, params, strict=True))]
    while engine.has_work:
        engine.step()
    assert engine.blocks.num_free == engine.blocks.num_blocks, "blocks leaked"
    return sequences


def run(engine: Engine, prompts: list[list[int]], params: list[SamplingParams]) -> list[Answer]:
    return [(s.output_ids, str(s.finish_reason)) for s in finish(engine, prompts, params)]
