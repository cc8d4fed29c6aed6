"""The bridge to transformers' recurrent layers: their projections stay, their operations run over rows.

transformers writes the operations of such layers as functions of their own (a kernel package may supply them), which a
mixer's `forward` finds by name and gives the model's keyword arguments to. A mixer that has been taken over runs a
copy of its `forward` in which these names mean the operations of this module, and they take the keyword ``row_states``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from jetspec.attention.interface import NotThroughRowsError
from jetspec.attention.rows import RowBatch
from jetspec.errors import JetSpecError
from jetspec.recurrent.convolution import convolve
from jetspec.recurrent.linear import Rows, Updates, scan, scan_finite, state_after
from jetspec.recurrent.plan import Group, RowPlan
from jetspec.recurrent.states import EMPTY_STATE, RecurrentStates, StateShape


class RowStates(Protocol):
    """What the operations of one forward run on. Rows are flat: inputs [rows, ...]."""

    def convolve(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The next convolution of the forward, as `recurrent.convolution.convolve`."""

    def scan(self, rows: Rows) -> Tensor:
        """The next recurrence of the forward: inputs [rows, heads, ...] float32 -> outputs [rows, heads, dv]."""


class ProbedStates:
    """Finds the shapes of states: every row stands alone, behind the empty state."""

    def __init__(self) -> None:
        self.shapes: list[StateShape] = []

    def convolve(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As in `RowStates`."""
        channels, width = weight.shape
        self.shapes.append(StateShape((width - 1, channels), inputs.dtype))
        output = inputs.to(weight.dtype) * weight[:, -1]
        return output if bias is None else output + bias

    def scan(self, rows: Rows) -> Tensor:
        """As in `RowStates`."""
        queries, keys, values = rows[:3]
        self.shapes.append(StateShape((keys.shape[1], keys.shape[2], values.shape[2]), torch.float32))
        updates = values if rows.beta is None else values * rows.beta[..., None]
        return (queries * keys).sum(-1, keepdim=True) * updates


class BatchStates:
    """Runs the recurrent operations of one forward over a batch, and leaves in `states` what a commit needs.

    Args:
        batch: the rows, on the device of the states.
        states: the committed states; read and not changed.
        finite: whether all rows may be taken to be finite, which is faster.

    Raises:
        JetSpecError: a sequence has committed tokens and no state.
    """

    def __init__(self, batch: RowBatch, states: RecurrentStates, *, finite: bool) -> None:
        for index, segment in enumerate(batch.segments):
            if segment.context_len and segment.state == EMPTY_STATE:
                raise JetSpecError(
                    f"RowBatch.segments[{index}] has {segment.context_len} committed tokens and no recurrent state; "
                    "give it the number of its state, or start it at its first token"
                )
        self._states, self._scan = states, scan if finite else scan_finite
        self._plan = RowPlan(batch.parents, [(s.start, s.stop) for s in batch.segments], batch.device)
        self._numbers = torch.tensor([s.state for s in batch.segments], device=batch.device)
        self._next = 0

    def _take(self) -> tuple[int, Tensor]:
        """The number of the next operation, and the state [segments, ...] that each sequence has there."""
        index, self._next = self._next, self._next + 1
        return index, self._states.pools[index][self._numbers]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def convolve(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """As in `RowStates`."""
        index, columns = self._take()
        self._states.rows[index] = inputs
        return convolve(inputs, weight, bias, columns, self._plan)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def scan(self, rows: Rows) -> Tensor:
        """As in `RowStates`."""
        index, states = self._take()  # a copy, which goes along with the pieces
        outputs = torch.empty_like(rows.values)
        updates = Updates(rows.keys, torch.empty_like(rows.values), rows.log_decay)
        for step in self._plan.steps:
            for group in step:
                before = states[group.segments]
                found, written = self._scan(_group_rows(rows, group), group.visible, before)
                outputs[group.rows[group.is_real]] = found[group.is_real]
                updates.values[group.rows[group.is_real]] = written[group.is_real]
                if group.has_next:
                    states[group.segments] = state_after(updates, before, group.rows, group.is_real)
        self._states.rows[index] = updates
        return outputs


def _group_rows(rows: Rows, group: Group) -> Rows:
    return Rows(*(x[group.rows] for x in rows if x is not None))


def _given(row_states: RowStates | None) -> RowStates:
    if row_states is None:
        raise NotThroughRowsError("a model that a Target has taken over is called through Target.forward")
    return row_states


def row_convolution(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    row_states: RowStates | None = None,
    **_: Any,
) -> Tensor:
    """In the place of transformers' `causal_conv1d_fn`: [1, channels, rows] -> [1, channels, rows]."""
    output = _given(row_states).convolve(hidden_states[0].T, weight, bias)
    if activation is not None:
        output = ACT2FN[activation](output)
    return output.T[None].to(hidden_states.dtype)


def row_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    row_states: RowStates | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """In the place of `torch_chunk_gated_delta_rule`; query, key [1, rows, k_heads, dk], value [1, rows, heads, dv]."""
    dtype, heads = value.dtype, value.shape[2]
    query, key = (x[0].float().repeat_interleave(heads // x.shape[2], dim=1) for x in (query, key))
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    rows = Rows(query * query.shape[-1] ** -0.5, key, value[0].float(), g[0].float(), beta[0].float())
    return _given(row_states).scan(rows)[None].to(dtype), None


def row_mamba2(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803  transformers' name
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    *,
    row_states: RowStates | None = None,
    D: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: Any,
) -> Any:
    """In the place of `mamba2_chunk_scan`; hidden_states [1, rows, heads, dv], B, C [1, rows, groups, dk].

    The time step dt [1, rows, heads] scales the decay A [heads] and what is written; D [heads] skips the state.
    """
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    dt = (functional.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)[0].float()
    inputs = hidden_states[0].float()
    queries, keys = (x[0].float().repeat_interleave(inputs.shape[1] // x.shape[2], dim=1) for x in (C, B))
    output = _given(row_states).scan(Rows(queries, keys, inputs * dt[..., None], dt * A.float()))
    if D is not None:
        output = output + D[..., None] * inputs
    return (output[None], None) if return_final_states else output[None]


#: By the name under which transformers' mixers call them.
OPERATIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": row_convolution,
    "torch_chunk_gated_delta_rule": row_gated_delta_rule,
    "mamba2_chunk_scan": row_mamba2,
}


def use_row_operations(model: nn.Module) -> None:
    """Let every mixer of a model that calls one of OPERATIONS run it over rows. The model is changed in place."""
    for module in model.modules():
        forward = inspect.unwrap(type(module).forward)
        code = getattr(forward, "__code__", None)
        if code is not None and not OPERATIONS.keys().isdisjoint(code.co_names):
            vars(module)["forward"] = partial(_with_operations(forward), module)


def _with_operations(forward: Any) -> FunctionType:
    """A copy of a function that finds OPERATIONS under their names."""
    names = {**forward.__globals__, **OPERATIONS}
    copy = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return copy
