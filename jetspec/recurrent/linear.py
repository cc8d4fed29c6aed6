"""Linear recurrences over forests of rows, without a step from row to row.

A head's state changes by ``S_t = exp(g_t) S_(t-1) + k_t d_t^T`` and is read by ``o_t = q_t^T S_t``. In Mamba-2 the
update ``d_t`` is an input; in the gated delta rule it is ``beta_t (v_t - k_t^T exp(g_t) S_(t-1))``. With ``G_i`` the
sum of g along the path to row i, every row's output follows from the committed state S and the rows of its path:

    o_i = exp(G_i) q_i^T S + sum over ancestors j and i itself of exp(G_i - G_j) (q_i . k_j) d_j

and the updates of the delta rule solve a unit triangular system, as rows come after their ancestors:

    d_i + beta_i sum over ancestors j of exp(G_i - G_j) (k_i . k_j) d_j = beta_i (v_i - exp(G_i) k_i^T S)

Sources: the UT transform of the delta rule (Yang et al., arXiv 2406.06484; gated: arXiv 2412.06464) and the dual form
of Mamba-2 (arXiv 2405.21060), with the causal mask of a chain replaced by the ancestors of a tree.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Updates(NamedTuple):
    """What rows would write into the state: enough to commit any path of them without another computation."""

    keys: Tensor  # [rows, heads, dk] float32
    values: Tensor  # [rows, heads, dv] float32, the updates d
    log_decay: Tensor  # [rows, heads] float32, g


class Rows(NamedTuple):
    """The inputs of a group: [s, n, heads, ...] float32. Without `beta` the values are the updates themselves."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    log_decay: Tensor
    beta: Tensor | None = None


def decay_between(log_decay: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """How much the state decays on the way to every row.

    Args:
        log_decay: [s, n, heads].
        visible: [s, n, n] bool, the ancestors of a row and itself.

    Returns:
        From the committed state: [s, heads, n]. From each ancestor: [s, heads, n, n], 0 for other rows.
    """
    # The sums grow along the path and their differences stay small, so the sums need more digits than the rest.
    wide = torch.float32 if log_decay.device.type == "mps" else torch.float64
    total = (visible.to(wide) @ log_decay.to(wide)).transpose(1, 2)
    # Masked before exp: from another branch the decay could be a growth without bound.
    between = (total[..., :, None] - total[..., None, :]).float().masked_fill_(~visible[:, None], float("-inf"))
    return total.float().exp(), between.exp()


def scan(rows: Rows, visible: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and updates of every row, each behind its own path.

    Args:
        rows: the inputs.
        visible: [s, n, n] bool, ancestors and the row itself.
        state: [s, heads, dk, dv] float32, committed before the rows.

    Returns:
        Outputs and updates, both [s, n, heads, dv] float32.
    """
    queries, keys, values = (x.transpose(1, 2) for x in rows[:3])
    from_state, between = decay_between(rows.log_decay, visible)
    updates = values
    if rows.beta is not None:
        beta = rows.beta.transpose(1, 2)[..., None]
        updates = beta * (values - from_state[..., None] * (keys @ state))
        if keys.shape[2] > 1:
            system = beta * (keys @ keys.mT) * between  # its diagonal is not read
            updates = torch.linalg.solve_triangular(system, updates, upper=False, unitriangular=True)
    outputs = from_state[..., None] * (queries @ state) + ((queries @ keys.mT) * between) @ updates
    return outputs.transpose(1, 2), updates.transpose(1, 2)


def scan_finite(rows: Rows, visible: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """`scan`, except that a row that is not finite spoils those that see it and no others."""
    parts = [x for x in rows if x is not None]
    spoiled = ~torch.stack([x.flatten(2).isfinite().all(2) for x in parts]).all(0)
    clean = Rows(*(x.masked_fill(spoiled.view(*spoiled.shape, *[1] * (x.dim() - 2)), 0.0) for x in parts))
    spoils = (visible & spoiled[:, None]).any(2)[..., None, None]
    outputs, updates = (x.masked_fill(spoils, float("nan")) for x in scan(clean, visible, state))
    return outputs, updates


def state_after(updates: Updates, state: Tensor, rows: Tensor, is_real: Tensor) -> Tensor:
    """The state behind a path of rows.

    Args:
        updates: of all rows of the forward.
        state: [s, heads, dk, dv] before the path.
        rows: [s, n] int64, the path of each sequence from its root, then padding.
        is_real: [s, n] bool, False at the padding.

    Returns:
        [s, heads, dk, dv] float32.
    """
    # Sums from the end keep the digits of what the latest rows wrote, however long the path is.
    log_decay = updates.log_decay[rows].masked_fill(~is_real[..., None], 0.0).transpose(1, 2)
    after = log_decay.flip(-1).cumsum(-1).flip(-1)
    weights = torch.cat([after[..., 1:], torch.zeros_like(after[..., :1])], dim=-1).exp() * is_real[:, None]
    keys, values = (x[rows].transpose(1, 2) for x in (updates.keys, updates.values))
    # Padding repeats a row of the same path, so what is not finite there is in the state anyway.
    written = (keys * weights[..., None]).mT @ values
    return after[..., 0].exp()[..., None, None] * state + written
