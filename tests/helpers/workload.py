"""Random workloads: requests of every kind that come, share, stop, fail and leave, on engines of every shape.

A workload is a pure function of architecture and seed. `check_workload(Bench("llama"), 17)` runs one: every request
must get what it gets alone, undrafted, on an engine with all the room it wants.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch

from jetspec.engine import Engine, Observer, RoundRecord, Sequence
from jetspec.models.target import Target
from jetspec.sampling import Logprob, SamplingParams
from tests.helpers.drafters import OracleDrafter
from tests.helpers.tiny import BASE, TEXT_VOCAB_SIZE, TINY_MODELS, tiny_tokenizer
from tests.helpers.tiny_head import tiny_head

#: Many, so that answers end on them now and then; the tokenizer's own among them.
EOS = frozenset({*range(3, 256, 23), 256})
#: What biased answers are made of: repetitive enough for stop strings and bad words to hit; characters of two bytes.
ALPHABETS = ("abcd", "ab\n", "éü")
TOKENIZER = tiny_tokenizer()
MAX_ROUNDS = 2000


class BoomError(Exception):
    """What a failing processor raises."""


class Processor:
    """A user's processor whose result depends on the ids; it remembers them, and raises at its `fails_at`-th call."""

    def __init__(self, fails_at: int | None) -> None:
        self.fails_at = fails_at
        self.seen: list[list[int]] = []

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen.append(ids[0].tolist())
        if len(self.seen) == self.fails_at:
            raise BoomError
        scores[0, ids[0, -1]] -= 3  # in place, as many do
        return scores.roll(ids.shape[1] % 2, dims=1)


@dataclass(frozen=True)
class Request:
    """One request and when it comes and goes, in rounds of the engine."""

    prompt: list[int]
    sampling: dict[str, Any]
    has_processor: bool
    fails_at: int | None
    arrives: int
    cancelled: int | None

    def params(self) -> SamplingParams:
        """The parameters, with a processor of their own."""
        processors = [Processor(self.fails_at)] if self.has_processor else None
        return SamplingParams(**self.sampling, logits_processors=processors)


@dataclass(frozen=True)
class Workload:
    requests: list[Request]
    engine: dict[str, Any]
    draft: str
    hit: float  # how often, and among how many candidates, an oracle drafts the truth
    width: int


def draw_workload(kind: str, seed: int) -> Workload:
    rng = random.Random(f"{kind} {seed}")
    shared = [rng.randrange(TEXT_VOCAB_SIZE) for _ in range(40)]
    longest = rng.choice([5, 15, 40])
    requests = [_draw_request(rng, shared[: longest - 4], longest) for _ in range(rng.randint(2, 7))]
    block_size = rng.randint(1, 8)
    largest = max(-(-(len(r.prompt) + r.sampling["max_tokens"]) // block_size) for r in requests)
    budgets: list[Any] = [rng.randint(1, 24), rng.randint(6, 24), "auto"]
    budget = rng.choice(budgets)
    engine = {
        "kv_block_size": block_size,
        "num_blocks": largest + rng.choice([0, 1, 3, largest // 2, 20 * largest]),
        "max_num_batched_tokens": rng.choice([2 if longest < 40 else 5, 9, 20, 50, 100, 1024]),
        "max_num_seqs": rng.choice([1, 3, 8, 8, 8]),
        "enable_prefix_caching": rng.random() < 0.7,
        "tree_budget": budget,
    }
    draft = rng.choice(["oracle", "oracle", "oracle", "head", "none"])
    return Workload(requests, engine, draft, hit=rng.choice([0.6, 0.9, 1.0]), width=rng.randint(1, 3))


def _draw_request(rng: random.Random, shared: list[int], longest: int) -> Request:
    prompt = [rng.randrange(TEXT_VOCAB_SIZE) for _ in range(rng.randint(1, longest))]
    if rng.random() < 0.6:
        prompt = shared[: rng.randint(1, len(shared))] + prompt[: rng.randint(0, 4)]
    sampling: dict[str, Any] = {
        "temperature": rng.choice([0, 0, 0.7, 1.3]),
        "seed": rng.randrange(1000),
        "max_tokens": rng.choice([1, 2, 6, 12, 18, 24]),
        "ignore_eos": rng.random() < 0.5,
        "skip_special_tokens": rng.random() < 0.8,
        "logprobs": rng.choice([None, None, 0, 1, 4, -1]),
        "prompt_logprobs": rng.choice([None, None, None, 0, 2]),
    }
    options = {
        "top_k": (1, 4, 30),
        "top_p": (0.3, 0.8, 0.95),
        "min_p": (0.02, 0.2),
        "repetition_penalty": (1.3, 0.8),
        "frequency_penalty": (0.7, -0.4),
        "presence_penalty": (0.9, -0.3),
        "min_tokens": (1, 3, 6),
    }
    sampling |= {name: rng.choice(values) for name, values in options.items() if rng.random() < 0.25}
    sampling["min_tokens"] = min(sampling.get("min_tokens", 0), sampling["max_tokens"])
    if rng.random() < 0.25:
        sampling["stop_token_ids"] = rng.sample(range(TEXT_VOCAB_SIZE), 25)
    if rng.random() < 0.5:
        letters = rng.choice(ALPHABETS)
        ids = sorted(set(TOKENIZER.encode(letters)))
        sampling["logit_bias"] = dict.fromkeys(ids, 12.0) | {rng.choice(ids): -float("inf") if len(ids) > 4 else 10.0}
        words = ["".join(rng.choices(letters, k=rng.randint(1, 3))) for _ in range(3)]
        sampling["stop"] = rng.choice([None, words[0], words])
        sampling["include_stop_str_in_output"] = rng.random() < 0.4
        sampling["bad_words"] = [w for w in words[1:] if len(w) > 1 and w.strip()] if rng.random() < 0.5 else None
    fails_at = rng.randint(1, 8) if rng.random() < 0.1 else None
    return Request(
        prompt=prompt,
        sampling=sampling,
        has_processor=fails_at is not None or rng.random() < 0.15,
        fails_at=fails_at,
        arrives=rng.choice([0, 0, 0, rng.randint(1, 12)]),
        cancelled=rng.randint(0, 12) if rng.random() < 0.15 else None,
    )


class Bench:
    """A target of two layers and the plain engine on it. `options` go to every engine."""

    def __init__(self, kind: str, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.kind, self.options = kind, options
        settings: dict[str, Any] = {"num_hidden_layers": 2, "vocab_size": TEXT_VOCAB_SIZE}
        if kind == "gemma3":
            settings["layer_types"] = ["sliding_attention", "full_attention"]
        model = TINY_MODELS[kind](attn="sdpa", **settings).to(dtype)
        self.target = Target.from_model(model, TOKENIZER, name=kind)
        self.target.eos_token_ids = EOS
        self.plain = Engine(self.target, num_blocks=32, enable_prefix_caching=False, **options)

    def alone(self, request: Request) -> Sequence:
        """What the request gets from plain decoding, with nothing else running."""
        sequence = self.plain.add("alone", request.prompt, request.params())
        while self.plain.has_work:
            self.plain.step()
        return sequence

    def engine(self, workload: Workload, truth: list[list[int]], observer: Observer) -> Engine:
        draft: Any = None
        if workload.draft == "head":
            draft = tiny_head(
                hidden_size=BASE["hidden_size"],
                vocab_size=TEXT_VOCAB_SIZE,
                mask_token_id=TEXT_VOCAB_SIZE - 1,
                num_target_layers=2,
                target_layer_ids=(0, 1),
            ).to(self.target.dtype)
        elif workload.draft == "oracle":
            draft = RequestOracle(truth, workload.hit, workload.width)
        return Engine(self.target, draft, observer=observer, **workload.engine, **self.options)


class RequestOracle(OracleDrafter):
    """An oracle for requests that may have the same prompt: request i continues as `answers[i]`."""

    def __init__(self, answers: list[list[int]], hit: float, width: int) -> None:
        super().__init__({}, TEXT_VOCAB_SIZE, hit=hit, width=width)
        self.answers = answers

    def _candidates(self, sequence: Sequence) -> list[list[int]]:
        self.truth[tuple(sequence.prompt_ids)] = self.answers[int(sequence.request_id)]
        return super()._candidates(sequence)


@dataclass
class Seen(Observer):
    """Counts what the rounds of a workload had in them, so that a suite can tell that it saw everything."""

    counts: Counter[str] = field(default_factory=Counter)
    ends_in_tree: set[str] = field(default_factory=set)

    def round(self, record: RoundRecord) -> None:
        deepest = 0
        depths = [0] * len(record.parents)
        for row, parent in enumerate(record.parents[1:], start=1):
            depths[row] = depths[parent] + 1
            deepest = max(deepest, depths[row])
        accepted = len(record.accepted_rows) - 1
        self.counts["rejected"] += deepest > 0 and accepted == 0
        self.counts["partly accepted"] += 0 < accepted < deepest
        self.counts["fully accepted"] += 1 < accepted == deepest
        # The last token was drafted below the last accepted row, and yet the walk did not go on: the request ended.
        drafted = zip(record.parents, record.tokens, strict=True)
        if (record.accepted_rows[-1], record.new_tokens[-1]) in set(drafted):
            self.ends_in_tree.add(record.request_id)

    def request(self, request: Request, sequence: Sequence) -> None:
        kind = "eos" if sequence.stop_reason is None else type(sequence.stop_reason).__name__
        self.counts["ended by " + (kind if sequence.finish_reason == "stop" else str(sequence.finish_reason))] += 1
        self.counts["cancelled while decoding"] += sequence.finish_reason == "abort" and sequence.num_output > 0
        self.counts["preempted"] += sequence.metrics.preemptions > 0
        self.counts["prefix hit"] += sequence.metrics.cached_prompt_tokens > 0
        self.counts["stopped inside an accepted path"] += (
            sequence.finish_reason == "stop" and sequence.request_id in self.ends_in_tree
        )


def check_workload(bench: Bench, seed: int, tolerance: float = 1e-4) -> Counter[str]:
    """Run a workload and compare every request; returns what happened in it.

    Raises AssertionError, which names the architecture, the seed and the request.
    """
    workload = draw_workload(bench.kind, seed)
    place = f"{bench.kind}, workload {seed} ({workload.draft}, {workload.engine})"
    expected = [bench.alone(request) for request in workload.requests]
    seen = Seen()
    engine = bench.engine(workload, [s.output_ids for s in expected], seen)
    try:
        sequences, texts = run(engine, workload.requests)
    except Exception as error:
        raise AssertionError(f"{place}: {error!r}") from error
    for index, request in enumerate(workload.requests):
        problem = difference(sequences[index], expected[index], tolerance) or broken_rule(request, sequences[index])
        if texts[index] != sequences[index].text and sequences[index].finish_reason != "abort":
            problem = f"streamed {texts[index]!r}, which is not its text {sequences[index].text!r}"
        assert not problem, f"{place}, request {index}: {problem}\n{request}"
        seen.request(request, sequences[index])
    assert engine.blocks.num_free == engine.blocks.num_blocks, f"{place}: blocks leaked"
    assert not [*engine.scheduler.running, *engine.scheduler.waiting], f"{place}: sequences left behind"
    return seen.counts


def run(engine: Engine, requests: list[Request]) -> tuple[list[Sequence], list[str]]:
    """The sequences, and the text that each streamed."""
    sequences: dict[int, Sequence] = {}
    texts = [""] * len(requests)
    for round_number in range(MAX_ROUNDS):
        for index, request in enumerate(requests):
            if request.arrives == round_number:
                sequences[index] = engine.add(str(index), request.prompt, request.params())
            if request.cancelled is not None and request.arrives + request.cancelled == round_number:
                engine.cancel(str(index))
        for output in engine.step():
            texts[int(output.sequence.request_id)] += output.new_text
        if len(sequences) == len(requests) and not engine.has_work:
            return [sequences[index] for index in range(len(requests))], texts
    raise RuntimeError(f"still running after {MAX_ROUNDS} rounds")


def difference(got: Sequence, expected: Sequence, tolerance: float) -> str:
    """How an answer differs from the one expected, or ''. A cancelled one must be the beginning of it."""
    tokens = expected.output_ids
    length = len(got.output_ids) if got.finish_reason == "abort" else len(tokens)
    if got.output_ids != tokens[:length]:
        return f"tokens {got.output_ids}, expected {tokens[:length]}"
    if got.metrics.completion_tokens != length:
        return f"completion_tokens={got.metrics.completion_tokens} of {length} tokens"
    if not same_logprobs(got.logprobs, expected.logprobs[:length], tolerance):
        return f"logprobs {got.logprobs}, expected {expected.logprobs[:length]}"
    seen, expected_seen = ([p.seen for p in s.params.logits_processors or ()] for s in (got, expected))
    if got.finish_reason == "abort":
        return "" if seen == [calls[:length] for calls in expected_seen] else "the processor saw other tokens"
    if seen != expected_seen:
        return "the processor saw other tokens"
    if not same_logprobs(got.prompt_logprobs, expected.prompt_logprobs, tolerance):
        return f"prompt_logprobs {got.prompt_logprobs}, expected {expected.prompt_logprobs}"
    for name in ("text", "finish_reason", "stop_reason"):
        if getattr(got, name) != getattr(expected, name):
            return f"{name} {getattr(got, name)!r}, expected {getattr(expected, name)!r}"
    return "" if type(got.error) is type(expected.error) else f"error {got.error!r}, expected {expected.error!r}"


def broken_rule(request: Request, got: Sequence) -> str:
    """What an answer has that the request rules out, or ''. The engine's own code has no say here."""
    wants, output = request.params(), got.output_ids
    ends = {*(wants.stop_token_ids or ()), *(() if wants.ignore_eos else EOS)}
    text = TOKENIZER.decode(output, skip_special_tokens=wants.skip_special_tokens)
    found = [s for s in wants.stop_strings if s in text]
    if ends & set(output[:-1]) or len(output) > wants.max_tokens:
        return f"tokens {output} run on past a stop or past max_tokens={wants.max_tokens}"
    if got.finish_reason == "length" and (output[-1] in ends or len(output) != wants.max_tokens):
        return f"it ended by length after {output}"
    if got.finish_reason == "stop":
        told = got.stop_reason in found if isinstance(got.stop_reason, str) else output[-1] in ends
        if not told or (isinstance(got.stop_reason, int) and got.stop_reason != output[-1]):
            return f"stop_reason {got.stop_reason!r} after {text!r}, {output}"
        if len(output) < wants.min_tokens + isinstance(got.stop_reason, str):
            return f"it stopped after {len(output)} tokens"
    if got.finish_reason == "length" and found and wants.min_tokens == 0:
        return f"text {text!r} runs on past {found}"
    if not request.has_processor:  # the processor of the workloads moves scores after bans are set
        if ends & set(output[: wants.min_tokens]):
            return f"a stop came before {wants.min_tokens} tokens: {output}"
        banned = [w for w in wants.bad_words or () if w in text]
        if banned:
            return f"text {text!r} holds the bad words {banned}"
    return ""


def same_logprobs(
    got: list[dict[int, Logprob] | None], expected: list[dict[int, Logprob] | None], tolerance: float
) -> bool:
    """Whether the same tokens are reported in the same order; of improbable ones rounding may swap two neighbours."""
    if tolerance == 0 or len(got) != len(expected):
        return got == expected
    for a, b in zip(got, expected, strict=True):
        if a is None or b is None:
            if a is not b:
                return False
            continue
        if a.keys() != b.keys() or next(iter(a)) != next(iter(b)):
            return False
        for token, theirs in b.items():
            slack = 0 if theirs.rank <= 4 else 2
            if abs(a[token].logprob - theirs.logprob) > tolerance or abs(a[token].rank - theirs.rank) > slack:
                return False
    return True
