"""The target: a frozen causal language model, loaded from anywhere and scored one batch of rows at a time."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from jetspec.attention.batch_invariant import (
    SLOTS_NEEDED,
    RowTile,
    base_tile,
    batch_invariant_attention,
    first_differences,
    next_tile,
    row_independent,
)
from jetspec.attention.cache import KVCache
from jetspec.attention.interface import probe_layers, use_row_attention
from jetspec.attention.reference import attend, attend_visible, row_attention
from jetspec.attention.rows import RowBatch
from jetspec.errors import JetSpecError
from jetspec.models.config_fields import config_field
from jetspec.models.layers import captured_outputs, decoder_layers, decoder_of, forwards_replaced
from jetspec.models.probe import check_rows_apart
from jetspec.models.recurrent import BatchStates, ProbedStates, use_row_operations
from jetspec.recurrent.states import RecurrentStates


class TargetOutput(NamedTuple):
    """What one forward over rows gives; inference tensors, without autograd history."""

    logits: Tensor  # [len(logits_rows), vocab_size], in the model's dtype
    aux_hidden_states: Tensor | None  # [rows, n * hidden_size]: raw outputs of the n target layers, in their order
    hidden: Tensor | None  # [rows, hidden_size]: after the final norm


class Target:
    """A transformers model driven through row attention, with its K/V in block-managed storage.

    Weights are frozen. `embed` and `lm_head` are the model's own modules, borrowed by the draft head, and can be
    differentiated through. Attributes: model, tokenizer, config (of the text model), name, device, dtype,
    hidden_size, vocab_size (the width of the logits), num_embeddings (ids it takes), num_layers, max_context (tokens),
    eos_token_ids, tile_sizes (row counts of a batch-invariant target's forwards, empty for others).
    """

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, name: str) -> None:
        use_row_attention(model)
        check_causal_lm(model)
        self.model: PreTrainedModel = cast(Any, model).eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.config = model.config.get_text_config(decoder=True)
        self.device, self.dtype = model.device, model.dtype
        self.hidden_size: int = config_field(self.config, "hidden_size", "count")
        self.num_layers: int = config_field(self.config, "num_hidden_layers", "count")
        self._embedding = cast(Any, model.get_input_embeddings())
        self._lm_head = cast(Any, model).get_output_embeddings()
        self.vocab_size: int = self._lm_head.weight.shape[0]
        self.num_embeddings: int = self._embedding.weight.shape[0]
        self.max_context = context_limit(self.config)
        self.eos_token_ids = eos_token_ids(model, tokenizer)
        self._decoder = decoder_of(model, self.num_layers)
        self._layers = decoder_layers(self._decoder, self.num_layers)
        use_row_operations(model)
        probed = ProbedStates()
        self._attention = probe_layers(model, self.num_layers, row_states=probed)
        self._states = probed.shapes
        check_rows_apart(model, self._layers, self._attention)
        self.tile_sizes: tuple[int, ...] = ()
        self._compiled_layers: list[Callable[..., Any]] = []

    @classmethod
    def from_model(
        cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None, *, name: str | None = None
    ) -> Target:
        """Wrap an already built transformers model, whatever its attention implementation; it is changed in place."""
        return cls(model, tokenizer, name or model.config._name_or_path or type(model).__name__)

    @torch.inference_mode()
    def as_batch_invariant(self) -> Target:
        """This target, run so that the bits of a row's outputs depend on its token and its context alone.

        Batch, chunks and trees then change nothing in any number type, at the price of padded forwards. A check finds
        the tile sizes that give the same bits with this model, these kernels and the present number of threads. Model
        and weights are shared with this target, which stays as it is. Raises JetSpecError where the model or a kernel
        does not keep rows apart, and for a compiled target, whose arithmetic is the compiler's.
        """
        if self._states:
            raise JetSpecError(
                f"batch_invariant=True is not possible for {self.name}: it has recurrent layers; use "
                "batch_invariant=False"
            )
        if self._compiled_layers:
            raise JetSpecError("batch_invariant=True: not possible for a compiled target; set one of the two to False")
        invariant = copy.copy(self)
        cache = self.new_cache(SLOTS_NEEDED, block_size=1)

        def score(batch: RowBatch, size: int) -> list[Tensor]:
            invariant.tile_sizes = (size,)
            output = invariant.forward(batch, cache, target_layer_ids=range(self.num_layers))
            return [*cast(Tensor, output.aux_hidden_states).chunk(self.num_layers, dim=-1), output.logits]

        base = base_tile(self.device, self.dtype)
        differing = first_differences(score, base, self.max_context, self.num_embeddings)
        layer = differing[base]
        if layer is not None:
            where = f"decoder layer {layer}" if layer < self.num_layers else "the logits"
            raise JetSpecError(
                f"batch_invariant=True is not possible for {self.name} in {self.dtype} on {self.device.type}: {where} "
                "gives a row other bits when other rows share its forward; use batch_invariant=False"
            )
        invariant.tile_sizes = tuple(size for size, layer in differing.items() if layer is None)
        return invariant

    def as_compiled(self, backend: str = "inductor") -> Target:
        """This target with its decoder layers run through torch.compile; pays on accelerators.

        The first forwards of one row and of several wait for the compiler. Attention stays outside of what is
        compiled. Model and weights are shared with this target, which stays as it is. Raises JetSpecError for a
        batch-invariant target, whose arithmetic a compiler would change.
        """
        if self.tile_sizes:
            raise JetSpecError(
                "compile=True: a batch-invariant target cannot be compiled; use batch_invariant=False or compile=False"
            )
        compiled = copy.copy(self)
        compiled._compiled_layers = [torch.compile(x.forward, dynamic=True, backend=backend) for x in self._layers]
        return compiled

    def new_cache(self, num_blocks: int, block_size: int, num_sequences: int = 1, num_snapshots: int = 0) -> KVCache:
        """K/V storage for this model. Where it has recurrent layers: states of sequences, and snapshots of them."""
        keys = [(0, 0) if layer is None else (layer.kv_heads, layer.head_dim) for layer in self._attention]
        values = [(0, 0) if layer is None else (layer.kv_heads, layer.value_dim) for layer in self._attention]
        states = RecurrentStates(self._states, num_sequences, num_snapshots, self.device) if self._states else None
        return KVCache(keys, num_blocks, block_size, self.dtype, self.device, value_shapes=values, states=states)

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token, over all layers."""
        widths = [x.kv_heads * (x.head_dim + x.value_dim) for x in self._attention if x is not None]
        return sum(widths) * self.dtype.itemsize

    @property
    def state_bytes(self) -> int:
        """Bytes of the recurrent state of one sequence, over all layers; 0 without recurrent layers."""
        return sum(shape.num_bytes for shape in self._states)

    @torch.inference_mode()
    def forward(
        self,
        batch: RowBatch,
        cache: KVCache,
        logits_rows: Tensor | None = None,
        target_layer_ids: Sequence[int] = (),
        final_hidden: bool = False,
    ) -> TargetOutput:
        """Score new rows and store their keys and values.

        A row depends on the rows that it may attend to and on no others, also where those others are not finite.

        Args:
            batch: the rows.
            cache: where keys and values are; made by `new_cache`.
            logits_rows: [k] int64, the rows whose logits are computed; None: all. It may be empty.
            target_layer_ids: decoder layers, counted from 0, whose raw outputs are returned. That of layer l is
                transformers' hidden_states[l + 1], except that transformers gives the last one after the final norm.
            final_hidden: whether the output of the final norm is returned.

        Raises:
            JetSpecError: the batch is empty, an id lies outside the vocabulary, a position is at or past max_context,
                or a layer is unknown.
        """
        target_layer_ids = self.validate_target_layer_ids(target_layer_ids)
        self._check_rows(batch)
        batch = batch.to(self.device)
        if logits_rows is not None:
            logits_rows = logits_rows.to(self.device)
        watched = [*(self._layers[layer] for layer in target_layer_ids), self._decoder]
        logits, outputs = self._score(batch, cache, logits_rows, watched, finite=True)
        # A masked key that is not finite spoils the rows that must not see it, and then their last hidden states show
        # it. One look at those costs less than a look at the keys and values of every layer.
        if any(segment.num_rows > 1 for segment in batch.segments) and not bool(outputs[-1].isfinite().all()):
            logits, outputs = self._score(batch, cache, logits_rows, watched, finite=False)
        hidden = outputs.pop()
        states = torch.cat(outputs, dim=-1) if target_layer_ids else None
        return TargetOutput(logits, states, hidden if final_hidden else None)

    def _score(
        self, batch: RowBatch, cache: KVCache, logits_rows: Tensor | None, watched: list[nn.Module], *, finite: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits and watched outputs; `finite=False` keeps rows apart that are not finite, and takes longer."""
        if self.tile_sizes:
            return self._run_tiles(batch, cache, logits_rows, watched, share_keys=finite)
        kernel = attend if finite else attend_visible
        attention = partial(row_attention, batch=batch, cache=cache, kernel=kernel)
        extra = {} if cache.states is None else {"row_states": BatchStates(batch, cache.states, finite=finite)}
        return self._run(batch.token_ids, batch.positions, logits_rows, attention, watched, **extra)

    def _run(
        self,
        ids: Tensor,
        positions: Tensor,
        logits_rows: Tensor | None,
        attention: Any,
        watched: list[nn.Module],
        **extra: Any,
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits of the chosen rows and the outputs [rows, width] of the watched modules."""
        with captured_outputs(watched) as outputs, forwards_replaced(self._layers, self._compiled_layers):
            result = self.model(
                input_ids=ids[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=0 if logits_rows is None else logits_rows,
                row_attention=attention,
                row_positions=positions,
                **extra,
            )
        return result.logits[0], [output[0] for output in outputs]

    def _run_tiles(
        self, batch: RowBatch, cache: KVCache, logits_rows: Tensor | None, watched: list[nn.Module], share_keys: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """`_run` for a whole batch, in forwards of the tile sizes.

        Parents come before their children in a batch, so their K/V are there when a child needs them.
        """
        wanted = torch.arange(len(batch), device=self.device) if logits_rows is None else logits_rows
        start = 0
        places, logits, outputs = [], [], []
        with row_independent(self.model):
            while start < len(batch):
                size = next_tile(len(batch) - start, self.tile_sizes)
                tile = RowTile(batch, start, min(start + size, len(batch)), share_keys=share_keys)
                ids, positions = (
                    functional.pad(x[start : tile.stop], (0, size - len(tile)))
                    for x in (batch.token_ids, batch.positions)
                )
                chosen = ((wanted >= start) & (wanted < tile.stop)).nonzero().flatten()
                # The output projection, too, runs on all rows of a tile or on none.
                keep = None if len(chosen) else chosen
                attention = partial(batch_invariant_attention, tile=tile, cache=cache)
                tile_logits, tile_outputs = self._run(ids, positions, keep, attention, watched)
                places.append(chosen)
                logits.append(tile_logits[wanted[chosen] - start])
                outputs.append([output[: len(tile)] for output in tile_outputs])
                start = tile.stop
        order = torch.cat(places).argsort()
        return torch.cat(logits)[order], [torch.cat(pieces) for pieces in zip(*outputs, strict=True)]

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings of ids [..]: [.., hidden_size], as the model's embedding module gives them.

        Raises:
            JetSpecError: an id on the CPU lies outside the embedding. Ids on an accelerator are not read, as that would
                wait for it.
        """
        if ids.device.type == "cpu" and ids.numel():
            self._check_id_range(int(ids.min()), int(ids.max()))
        embeddings: Tensor = self._embedding(ids.to(self.device))
        return embeddings

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Logits [.., vocab_size] of hidden [.., hidden_size]: the plain output projection, no cap or scale."""
        logits: Tensor = self._lm_head(hidden)
        return logits

    def lm_head_rows(self, ids: Tensor) -> Tensor:
        """What `lm_head` multiplies a hidden state with for the logits of ids [..]: [.., hidden_size]."""
        rows: Tensor = self._lm_head.weight[ids]
        return rows

    def validate_target_layer_ids(self, target_layer_ids: Sequence[int]) -> tuple[int, ...]:
        """The layers as a tuple. Raises JetSpecError unless they are distinct layers of this model."""
        target_layer_ids = tuple(int(layer) for layer in target_layer_ids)
        if len(set(target_layer_ids)) != len(target_layer_ids) or any(
            not 0 <= layer < self.num_layers for layer in target_layer_ids
        ):
            raise JetSpecError(
                f"target_layer_ids {list(target_layer_ids)} must be distinct and lie in 0..{self.num_layers - 1}, "
                f"the {self.num_layers} layers of {self.name}"
            )
        return target_layer_ids

    def _check_rows(self, batch: RowBatch) -> None:
        if len(batch) == 0:
            raise JetSpecError("RowBatch is empty; a forward needs one row or more")
        self._check_id_range(*batch.id_range)
        if batch.max_position >= self.max_context:
            raise JetSpecError(
                f"position {batch.max_position} is past the context limit of {self.name}, {self.max_context}"
            )

    def _check_id_range(self, first: int, last: int) -> None:
        if first < 0 or last >= self.num_embeddings:
            raise JetSpecError(
                f"token ids {first}..{last} do not all lie in 0..{self.num_embeddings - 1}, the embedding of "
                f"{self.name}; is this the tokenizer that belongs to the model?"
            )


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a text. JetSpecError where it cannot be encoded as UTF-8."""
    try:
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))
    except TypeError:  # what the tokenizer makes of a lone surrogate
        raise JetSpecError(f"text cannot be encoded as UTF-8: {text!r:.80}") from None


def default_target_layer_ids(num_layers: int, n: int) -> list[int]:
    """Spread n layers evenly from 1 to num_layers - 3; one is the middle layer. JetSpecError if they do not fit."""
    if n == 1 and num_layers >= 1:
        return [num_layers // 2]
    first, last = 1, num_layers - 3
    if not 1 <= n <= last - first + 1:
        raise JetSpecError(f"a model of {num_layers} layers has no {n} default target layers; name target_layer_ids")
    return [round(first + index * (last - first) / (n - 1)) for index in range(n)]


def check_causal_lm(model: PreTrainedModel) -> None:
    """Raise JetSpecError unless the model has an output projection and can compute chosen logits only."""
    name = type(model).__name__
    if cast(Any, model).get_output_embeddings() is None:
        raise JetSpecError(f"{name} has no lm_head; a target is a causal language model (a ...ForCausalLM class)")
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise JetSpecError(f"{name}.forward takes no logits_to_keep; this model is not supported")


def context_limit(config: Any) -> int:
    """Tokens the model may hold. JetSpecError where the config names no max_position_embeddings.

    LongRoPE rotates all keys anew once a sequence outgrows the original context, and would do so for every sequence
    of a batch, so such a model is held to its original context.
    """
    limit: int = config_field(config, "max_position_embeddings", "count")
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if parameters.get("rope_type") == "longrope":
            limit = min(limit, parameters["original_max_position_embeddings"])
    return limit


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Every id that the generation config, the tokenizer or the model config calls the end of a sequence."""
    ids: set[int] = set()
    for source in (model.generation_config, tokenizer, model.config, model.config.get_text_config(decoder=True)):
        found = getattr(source, "eos_token_id", None)
        if found is not None:
            ids.update(found if isinstance(found, (list, tuple)) else [found])
    return frozenset(ids)
