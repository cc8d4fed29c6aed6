"""The methods of decoding that are compared, and the counts and times that each takes of itself."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from jetspec.attention.blocks import DEFAULT_KV_BLOCK_SIZE, blocks_needed
from jetspec.bench.config import DRAFT_FIELDS
from jetspec.bench.records import PARTS, Cell, MethodName
from jetspec.drafts import KnownHead, load_drafter
from jetspec.engine import Engine, EngineStep, Observer, RoundRecord
from jetspec.engine.budget import MOST_ROWS
from jetspec.errors import JetSpecError
from jetspec.fingerprint import weights_fingerprint
from jetspec.head import DraftHead, load_head
from jetspec.models.loading import load_target, resolve_source
from jetspec.models.target import Target
from jetspec.sampling import SamplingParams

#: Rows of one forward, unless the trees of a whole batch need more.
MAX_NUM_BATCHED_TOKENS = 1024


@dataclass(frozen=True)
class HeadKind:
    """A kind of head, and whether a head is of it."""

    name: str
    includes: Callable[[DraftHead], bool]


AUTOREGRESSIVE = HeadKind("an autoregressive head", lambda head: head.config.kind != "parallel")
BIDIRECTIONAL = HeadKind("a bidirectional head", lambda head: head.config.kind == "parallel" and not head.config.causal)
CAUSAL = HeadKind("a causal parallel head", lambda head: head.config.kind == "parallel" and head.config.causal)


@dataclass(frozen=True)
class Drafting:
    """How a method drafts: the engine's ``draft_method``, and the kind of head, if it is a head that drafts."""

    draft_method: str = "tree"
    head_kind: HeadKind | None = None


#: All methods but "hf", which runs without the engine. What they draft with is in `DRAFT_FIELDS`.
DRAFTING: dict[MethodName, Drafting] = {
    "plain": Drafting(),
    "ngram": Drafting("ngram"),
    "draft-model": Drafting("model"),
    "eagle": Drafting("tree", AUTOREGRESSIVE),
    "dflash-chain": Drafting("chain", BIDIRECTIONAL),
    "dflash-tree": Drafting("tree", BIDIRECTIONAL),
    "jetspec": Drafting("tree", CAUSAL),
}


@dataclass
class Decoded:
    """Answers to some prompts, in order, and their counts and seconds, which `Group` describes."""

    token_ids: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    prefill_s: float = 0.0
    decode_s: float = 0.0
    tokens: int = 0
    rounds: Counter[int] = field(default_factory=Counter)
    rows: int = 0
    split_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def add(self, other: Decoded) -> None:
        """Append other answers, and add their counts and seconds."""
        self.token_ids += other.token_ids
        self.texts += other.texts
        self.finish_reasons += other.finish_reasons
        self.prefill_s += other.prefill_s
        self.decode_s += other.decode_s
        self.tokens += other.tokens
        self.rounds += other.rounds
        self.rows += other.rows
        self.split_s = {name: seconds + other.split_s[name] for name, seconds in self.split_s.items()}


class Method(Protocol):
    """One way of decoding, ready to run."""

    def answer(self, prompts: Sequence[list[int]], seeds: Sequence[int], temperature: float, limit: int) -> Decoded:
        """Answer prompts together, with at most `limit` tokens each; 0 is the greedy temperature."""


class Models:
    """The loaded target, drafts and, for "hf", a copy of the target with transformers' own attention.

    Args:
        target: alias, hub id or path of the target.
        drafts: the draft for each of `DRAFT_FIELDS`: its alias, hub id or path, or a head known for the target.
        methods: the methods that will be run.
        device: "auto", or a torch device.
        dtype: number type of the target and the drafts.

    Raises:
        JetSpecError: something cannot be loaded, or a head is of another kind than a method needs.
    """

    def __init__(
        self,
        target: str,
        drafts: Mapping[str, str | KnownHead | None],
        methods: Sequence[MethodName],
        *,
        device: str = "auto",
        dtype: str = "auto",
    ) -> None:
        self.target = load_target(target, device=device, dtype=dtype)
        self.drafts: dict[str, DraftHead | Target] = {}
        for method in methods:
            field = DRAFT_FIELDS.get(method)
            if field is not None:
                draft = drafts[field]
                known = draft if isinstance(draft, KnownHead) else KnownHead(str(draft), None, "")
                self.drafts[field] = self._load_draft(method, field, known.name, known.causal)
        self.reference = load_reference(target, self.target) if "hf" in methods else None

    def _load_draft(self, method: MethodName, field: str, name: str, causal: bool | None) -> DraftHead | Target:
        device, dtype, kind = self.target.device, self.target.dtype, DRAFTING[method].head_kind
        if kind is None:
            return load_target(name, device=str(device), dtype=dtype)
        head = self.drafts.get(field) or load_head(name, device=device, dtype=dtype, causal=causal)
        assert isinstance(head, DraftHead), "fields of heads hold no target"
        if not kind.includes(head):
            found = next(other for other in (AUTOREGRESSIVE, BIDIRECTIONAL, CAUSAL) if other.includes(head))
            raise JetSpecError(f"{field}={name!r}: method {method} needs {kind.name}, this is {found.name}")
        try:
            head.validate_for(self.target)
        except JetSpecError as error:
            raise JetSpecError(f"{field}={name!r}: {error}") from error
        return head

    def fingerprints(self) -> dict[str, str]:
        """Fingerprints of the target's and the drafts' weights, which may change behind a name."""
        drafts = {name: draft.model if isinstance(draft, Target) else draft for name, draft in self.drafts.items()}
        return {name: weights_fingerprint(module) for name, module in {"target": self.target.model, **drafts}.items()}

    def method(self, cell: Cell, lengths: Sequence[int]) -> Method:
        """The method of a cell, with a K/V cache for prompts that grow to these ``lengths`` with their answers."""
        if cell.method == "hf":
            return Transformers(self.reference, self.target)
        model = self.drafts.get(DRAFT_FIELDS.get(cell.method, ""))
        budget = 1 if cell.budget is None else cell.budget
        rows = MOST_ROWS if budget == "auto" else budget
        recorder = Recorder()
        engine = Engine(
            self.target,
            load_drafter(model, self.target, method=DRAFTING[cell.method].draft_method),
            tree_budget=budget,
            num_blocks=blocks_needed(lengths, cell.batch_size, rows),
            kv_block_size=DEFAULT_KV_BLOCK_SIZE,
            max_num_batched_tokens=max(MAX_NUM_BATCHED_TOKENS, 0 if budget == "auto" else budget * cell.batch_size),
            max_num_seqs=cell.batch_size,
            enable_prefix_caching=False,
            observer=recorder,
        )
        return OnEngine(engine, recorder)


def load_reference(name: str, target: Target) -> Any:
    """Load transformers' model of a name, with its own attention, onto the device of a target.

    Raises:
        JetSpecError: transformers cannot load it.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(resolve_source(name, None), dtype=target.dtype)
    except (OSError, ValueError) as error:
        raise JetSpecError(f"methods='hf': transformers cannot load {name!r}: {error}") from error
    # The other methods ignore the settings that a checkpoint recommends, such as penalties.
    model.generation_config = GenerationConfig()
    model = torch.nn.Module.to(model, target.device)
    return torch.nn.Module.eval(model).requires_grad_(False)


class Recorder(Observer):
    """Counts rounds and their seconds while ``decoded`` is set."""

    def __init__(self) -> None:
        self.decoded: Decoded | None = None

    def round(self, record: RoundRecord) -> None:
        """Count the round of one sequence."""
        if self.decoded is not None:
            self.decoded.rounds[len(record.new_tokens)] += 1
            self.decoded.rows += len(record.tokens)
            self.decoded.tokens += len(record.new_tokens)

    def step(self, record: EngineStep) -> None:
        """Add the seconds of a step, by part."""
        if self.decoded is not None:
            known = [getattr(record, f"{part}_s") for part in PARTS[:-1]]
            for part, seconds in zip(PARTS, [*known, record.total_s - sum(known)], strict=True):
                self.decoded.split_s[part] += seconds


class OnEngine:
    """Answers on JetSpec's engine, drafted or plain."""

    def __init__(self, engine: Engine, recorder: Recorder) -> None:
        self.engine, self.recorder = engine, recorder

    def answer(self, prompts: Sequence[list[int]], seeds: Sequence[int], temperature: float, limit: int) -> Decoded:
        """See `Method`. Raises the error of a request that failed."""
        engine, decoded = self.engine, Decoded()
        start = time.perf_counter()
        sequences = [
            engine.add(str(i), prompt, SamplingParams(temperature=temperature, seed=seed, max_tokens=limit))
            for i, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
        ]
        while not all(s.is_decoding or s.finished for s in sequences):
            engine.step()
        middle = time.perf_counter()
        self.recorder.decoded = decoded
        engine.run()
        self.recorder.decoded = None
        decoded.prefill_s, decoded.decode_s = middle - start, time.perf_counter() - middle
        decoded.split_s["other"] += max(0.0, decoded.decode_s - sum(decoded.split_s.values()))  # between steps
        for sequence in sequences:
            if sequence.error is not None:
                raise sequence.error
            decoded.token_ids.append(sequence.output_ids)
            decoded.texts.append(sequence.text)
            decoded.finish_reasons.append(str(sequence.finish_reason))
        return decoded


class Transformers:
    """Answers by transformers' ``generate``. The time of the prompts is that of a run of one token."""

    def __init__(self, model: Any, target: Target) -> None:
        self.model, self.target = model, target

    def answer(self, prompts: Sequence[list[int]], seeds: Sequence[int], temperature: float, limit: int) -> Decoded:
        """See `Method`."""
        (_, first), (rows, whole) = (self._generate(prompts, seeds[0], temperature, n) for n in (1, limit))
        decoded = Decoded(prefill_s=first, decode_s=max(0.0, whole - first))
        eos, tokenizer = self.target.eos_token_ids, self.target.tokenizer
        for row in rows:
            end = next((i + 1 for i, token in enumerate(row) if token in eos), len(row))
            decoded.token_ids.append(row[:end])
            decoded.finish_reasons.append("stop" if row[end - 1] in eos else "length")
            decoded.texts.append(
                "" if tokenizer is None else str(tokenizer.decode(row[:end], skip_special_tokens=True))
            )
            decoded.tokens += end - 1
        return decoded

    @torch.inference_mode()
    def _generate(
        self, prompts: Sequence[list[int]], seed: int, temperature: float, limit: int
    ) -> tuple[list[list[int]], float]:
        """Answers, padded to the longest, and seconds. Prompts are padded on the left."""
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=self.target.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=self.target.device)
        # As with the other methods, only the temperature shapes the distribution.
        choice = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
        eos = sorted(self.target.eos_token_ids)
        config = GenerationConfig(
            **{"do_sample": False, **choice},
            max_new_tokens=limit,
            eos_token_id=eos or None,
            pad_token_id=eos[0] if eos else 0,
        )
        torch.manual_seed(seed)
        start = time.perf_counter()
        output = self.model.generate(ids, attention_mask=mask, generation_config=config)
        rows = output[:, width:].tolist()
        return rows, time.perf_counter() - start
