"""Draft trees as flat tensors, and what can be asked of them whoever built them."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class Forest:
    """The draft trees of a batch, flat and on the CPU.

    Trees lie end to end; within a tree nodes are ordered by (depth, parent, rank), so the root is first and parents
    come before their children.
    """

    tokens: Tensor  # [N] int64
    parents: Tensor  # [N] int64, index within the tree, -1 for the root
    depths: Tensor  # [N] int64
    log_probs: Tensor  # [N] float32, of the path from the root (root: 0)
    offsets: list[int]  # [S + 1], tree s is the range offsets[s]:offsets[s + 1]

    def rows(self, index: int) -> slice:
        """The range of tree `index`."""
        return slice(self.offsets[index], self.offsets[index + 1])

    @property
    def num_trees(self) -> int:
        """The number of trees, S."""
        return len(self.offsets) - 1

    def keep(self, kept: Tensor) -> "Forest":
        """The trees with only the nodes where kept [N] is True; a kept node's parent is kept too, and every root."""
        before = torch.cat([torch.zeros(1, dtype=torch.int64), kept.cumsum(0)])  # kept nodes before each node
        offsets = before[self.offsets]
        moved = before[self.parent_nodes()] - before[self.starts()]
        return Forest(
            tokens=self.tokens[kept],
            parents=torch.where(self.parents < 0, -1, moved)[kept],
            depths=self.depths[kept],
            log_probs=self.log_probs[kept],
            offsets=offsets.tolist(),
        )

    def fault(
        self, anchors: Sequence[int], budgets: Sequence[int], max_depths: Sequence[int], num_ids: int
    ) -> str | None:
        """Why this is not one tree an anchor, within budgets and max_depths, of ids below num_ids; None if it is."""
        if self.num_trees != len(anchors) or self.offsets[0] != 0 or self.offsets[-1] != len(self.tokens):
            return f"{self.num_trees} trees over {len(self.tokens)} nodes, for {len(anchors)} sequences"
        sizes = [stop - start for start, stop in zip(self.offsets[:-1], self.offsets[1:])]
        for index, (size, budget) in enumerate(zip(sizes, budgets)):
            if not 1 <= size <= budget:
                return f"tree {index} has {size} nodes, its budget is {budget}"
        if self.tokens[self.offsets[:-1]].tolist() != list(anchors):
            return "a root is not its sequence's newest token"
        place = torch.arange(len(self.tokens)) - self.starts()
        if bool(((self.parents < 0) != (place == 0)).any()) or bool((self.parents >= place).any()):
            return "a node's parent does not come before it in its tree"
        depths = torch.where(place == 0, 0, self.depths[self.parent_nodes()] + 1)
        if not torch.equal(depths, self.depths):
            return "depths do not follow from parents"
        if bool((depths > torch.tensor(max_depths).repeat_interleave(torch.tensor(sizes))).any()):
            return "a tree is deeper than its sequence's max_depth"
        if not 0 <= int(self.tokens.min()) <= int(self.tokens.max()) < num_ids:
            return f"a token lies outside of 0 .. {num_ids - 1}"
        if not bool((self.log_probs.isfinite() & (self.log_probs <= 0)).all()):
            return "a log probability is not a number of at most 0"
        return None

    def starts(self) -> Tensor:
        """[N] index of the root of each node's tree."""
        offsets = torch.tensor(self.offsets)
        return offsets[:-1].repeat_interleave(offsets.diff())

    def parent_nodes(self) -> Tensor:
        """[N] index of each node's parent in the whole forest; a root is its own."""
        return self.starts() + self.parents.clamp(min=0)

    def sibling_ranks(self) -> Tensor:
        """[N] place of each node among its siblings, 0 the most probable (and a root)."""
        index = torch.arange(len(self.parents))
        # Siblings lie side by side, so a node's rank is its distance from where its parent's children begin.
        family = torch.where(self.parents < 0, -1 - index, self.parent_nodes())
        begins = torch.ones_like(family, dtype=torch.bool)
        begins[1:] = family[1:] != family[:-1]
        return index - torch.where(begins, index, 0).cummax(0).values


def forest_of(trees: Sequence[tuple[Sequence[int], Sequence[int], Sequence[float]]]) -> Forest:
    """A forest of trees given as (tokens, parents, path log probabilities), each ordered by (depth, parent, rank)."""
    depths: list[int] = []
    for _, parents, _ in trees:
        own: list[int] = []
        for parent in parents:
            own.append(0 if parent < 0 else own[parent] + 1)
        depths += own
    return Forest(
        tokens=torch.tensor([t for tokens, _, _ in trees for t in tokens], dtype=torch.int64),
        parents=torch.tensor([p for _, parents, _ in trees for p in parents], dtype=torch.int64),
        depths=torch.tensor(depths, dtype=torch.int64),
        log_probs=torch.tensor([p for _, _, log_probs in trees for p in log_probs], dtype=torch.float32),
        offsets=[0, *accumulate(len(tokens) for tokens, _, _ in trees)],
    )
