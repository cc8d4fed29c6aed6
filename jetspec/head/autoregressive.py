"""The autoregressive head: one forward drafts one level of a tree, from its own hidden states at the level before."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from jetspec.attention import KVCache, RowBatch, row_attention
from jetspec.attention.reference import attend
from jetspec.head.base import Attend, DraftHead, Embed, KeysValues, block_tokens, spoiled_before, zero_not_finite
from jetspec.head.config import HeadConfig
from jetspec.head.masks import block_mask

ReadContext = Callable[[int, int], KeysValues]


class AutoregressiveHead(DraftHead):
    """n decoder layers over entries that pair a token with the feature of the token before it.

    Entry j is (feature j, token j + 1), at position j, and predicts token j + 2. The feature of a committed token fuses
    the target's aux hidden states there. Behind token n, the anchor, which has none yet, the context is the entries
    0 .. n - 2;
    their keys and values are computed once. The root of a draft is entry n - 1, the anchor with the feature of the last
    committed token, and predicts the tokens of depth 1. The entry of such a token has the head's own output at the
    root, before the final norm, for a feature, and predicts the tokens of depth 2; and so on.

    Source: EAGLE-3 (Li et al., 2025, arXiv 2503.01840), here with one projection before layers like any other.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        self.embed_norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes that the head keeps for one committed token, its feature included."""
        return super().cache_bytes_per_token + self.config.hidden_size * self.dtype.itemsize

    def features(self, aux_hidden_states: Tensor) -> Tensor:
        """Aux hidden states [n, aux_layers * hidden] -> features [n, hidden]."""
        features: Tensor = self.fc(aux_hidden_states.to(self.dtype))
        return features

    @torch.inference_mode()
    def extend(
        self, features: Tensor, embeds: Tensor, batch: RowBatch, cache: KVCache, window: int | None = None
    ) -> None:
        """Write the keys and values of newly committed entries.

        features and embeds [n, hidden] are the two halves of the entries. The rows of `batch` stand for them: chains at
        their positions j, behind the entries that their sequences have already. An entry sees itself and all before
        it, or the last `window` of those.
        """

        def attend_rows(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            seen = narrower(self.config.windows[layer], None if window is None else window + 1)
            return row_attention(q, k, v, batch, cache, layer, self._scaling, seen)

        keys, values = self._last_keys_values(self._entries(features, embeds), batch.positions, attend_rows)
        cache.write(cache.num_layers - 1, batch.slot_mapping, keys, values)

    def forward_level(self, features: Tensor, embeds: Tensor, paths: Paths, parents: Tensor) -> Tensor:
        """Run one more level of draft nodes, W for each of S sequences, and add it to `paths`.

        features and embeds [S, W, hidden] are the two halves of the nodes' entries; parents [S, W] are places in the
        level before. A node sees the context before its root, the nodes on its path, and itself. Returns hidden states
        [S, W, hidden]: the features of the nodes' children and, through `output`, what their tokens are predicted from.
        They are NaN for nodes whose entries are not finite; other nodes are not touched by those.
        """
        (features, spoiled_features), (embeds, spoiled_embeds) = zero_not_finite(features), zero_not_finite(embeds)
        sequences, width, _ = features.shape
        positions = paths.descend(parents)
        masks = {w: [paths.mask(s, positions[s], w) for s in range(sequences)] for w in set(self.config.windows)}

        def attend_paths(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            node_k, node_v = paths.add(layer, *(x.view(sequences, width, *x.shape[1:]) for x in (k, v)))
            attended = []
            for s, rows in enumerate(torch.split(q, width)):
                past_k, past_v = paths.context(layer, s)
                keys, values = torch.cat((past_k, node_k[s])), torch.cat((past_v, node_v[s]))
                attended.append(attend(rows, keys, values, masks[self.config.windows[layer]][s], self._scaling))
            return torch.cat(attended)

        x = self._entries(features, embeds).flatten(0, 1)
        hidden = self._decode(x, positions.flatten(), attend_paths).view(sequences, width, -1)
        return hidden.masked_fill((spoiled_features | spoiled_embeds).unsqueeze(-1), float("nan"))

    def output(self, hidden: Tensor) -> Tensor:
        """What tokens are predicted from, of hidden states [.., hidden] that `forward_level` returns."""
        output: Tensor = self.norm(hidden)
        return output

    def forward_text(self, aux_hidden_states: Tensor, token_ids: Tensor, anchors: Tensor, embed: Embed) -> Tensor:
        """See `DraftHead.forward_text`."""
        aux_hidden_states, spoiled = zero_not_finite(aux_hidden_states)
        features = self.features(aux_hidden_states)
        embeds, spoiled_embeds = zero_not_finite(embed(token_ids[1 : len(aux_hidden_states)]).to(self.dtype))
        windows = [window for window in self.config.windows if window is not None]
        reach = sum(windows) - len(windows) if len(windows) == len(self.layers) else None
        lost = spoiled_before(spoiled[:-1] | spoiled_embeds, anchors - 1, reach)
        context = self._text_context(features[:-1], embeds)
        roots = (anchors - 1).unsqueeze(0)
        paths = Paths(
            roots,
            [torch.arange(len(aux_hidden_states) - 1, device=aux_hidden_states.device)],
            lambda layer, _: context[layer],
        )
        # Every block is a chain: its nodes are the true tokens, each the child of its own block's node before.
        parents = torch.arange(len(anchors), device=aux_hidden_states.device).unsqueeze(0)
        hidden = features[roots].masked_fill(spoiled[roots].unsqueeze(-1), float("nan"))
        steps = []
        for tokens in block_tokens(token_ids, anchors, self.config.block_size - 1).T:
            hidden = self.forward_level(hidden, embed(tokens).to(self.dtype).unsqueeze(0), paths, parents)
            steps.append(self.output(hidden[0]))
        return torch.stack(steps, dim=1).masked_fill(lost[:, None, None], float("nan"))

    @torch.no_grad()
    def read_last_aux_hidden_state(self) -> None:
        """Set the weights before the layers so that these read the last of the aux hidden states, and no token."""
        super().read_last_aux_hidden_state()
        self.input_proj.weight[:, self.config.hidden_size :].copy_(torch.eye(self.config.hidden_size))

    def _entries(self, features: Tensor, embeds: Tensor) -> Tensor:
        """What the layers read: features and embeds [.., hidden] -> [.., hidden]."""
        halves = self.embed_norm(embeds.to(self.dtype)), self.hidden_norm(features)
        entries: Tensor = self.input_proj(torch.cat(halves, dim=-1))
        return entries

    def _text_context(self, features: Tensor, embeds: Tensor) -> list[KeysValues]:
        """Keys and values of the entries [n, hidden] of one text, layer by layer."""
        positions = torch.arange(len(features), device=features.device)
        masks = {window: block_mask(positions, True, window) for window in set(self.config.windows)}
        context: list[KeysValues] = []

        def attend_text(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            context.append((k, v))
            return attend(q, k, v, masks[self.config.windows[layer]], self._scaling)

        last = self._last_keys_values(self._entries(features, embeds), positions, attend_text)
        return [*context, last]

    def _last_keys_values(self, x: Tensor, positions: Tensor, attend_entries: Attend) -> KeysValues:
        """Run entries x [n, hidden] through the layers as far as their keys and values take."""
        x = self._decode(x, positions, attend_entries, self.layers[:-1])
        last = self.layers[-1]
        return last.self_attn.keys_values(last.input_layernorm(x), self.rotary(positions, self.dtype))


class Paths:
    """The draft nodes of S sequences, level by level: their keys and values, and which of them each newest node sees.

    roots [S, R] are the positions of the roots' entries, R being 1 or the width of every level. The context of sequence
    s holds the entries at context_positions[s]; context(layer, s) reads their keys and values.
    """

    def __init__(self, roots: Tensor, context_positions: Sequence[Tensor], context: ReadContext) -> None:
        self.roots = roots
        self.context_positions = context_positions
        self.context = context
        self._depth = 0
        self._positions = roots[:, :0]  # [S, nodes]
        self._seen: Tensor | None = None  # [S, W, nodes], of the newest level
        self._stored: dict[int, KeysValues] = {}

    def descend(self, parents: Tensor) -> Tensor:
        """Begin a level of nodes with parents [S, W] in the level before; returns their positions [S, W]."""
        width = parents.shape[1]
        seen = torch.eye(width, dtype=torch.bool, device=parents.device).expand(len(parents), -1, -1)
        if self._seen is not None:
            above = self._seen.gather(1, parents.unsqueeze(-1).expand(-1, -1, self._seen.shape[-1]))
            seen = torch.cat((above, seen), dim=-1)
        positions = (self.roots + self._depth).expand(parents.shape)
        self._seen, self._depth = seen, self._depth + 1
        self._positions = torch.cat((self._positions, positions), dim=1)
        return positions

    def mask(self, sequence: int, positions: Tensor, window: int | None) -> Tensor:
        """What the newest nodes, at positions [W], see: bool [W, context + nodes]."""
        assert self._seen is not None
        context, nodes = self.context_positions[sequence], self._positions[sequence]
        before = (context < self.roots[sequence, :, None]).expand(len(positions), -1)
        mask = torch.cat((before, self._seen[sequence]), dim=1)
        return mask if window is None else mask & (torch.cat((context, nodes)) > positions[:, None] - window)

    def add(self, layer: int, keys: Tensor, values: Tensor) -> KeysValues:
        """Keep the newest level's keys and values [S, W, ..]; returns those of all levels [S, nodes, ..]."""
        if layer in self._stored:
            above_keys, above_values = self._stored[layer]
            keys, values = torch.cat((above_keys, keys), dim=1), torch.cat((above_values, values), dim=1)
        self._stored[layer] = keys, values
        return keys, values


def narrower(window: int | None, other: int | None) -> int | None:
    """The smaller of two windows; None is no bound."""
    return min((w for w in (window, other) if w is not None), default=None)
