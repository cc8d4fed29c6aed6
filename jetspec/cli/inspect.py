"""`jetspec inspect`: one round's draft tree, drawn in the terminal."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text
from rich.tree import Tree

from jetspec.cli.common import (
    DEFAULT_TARGET,
    BudgetOption,
    ChatOption,
    DeviceOption,
    DraftOption,
    DtypeOption,
    JsonOption,
    TargetOption,
    decode,
    load_pair,
    print_json,
    results,
    token_text,
)
from jetspec.errors import JetSpecError

if TYPE_CHECKING:
    from jetspec.engine import RoundRecord
    from jetspec.llm import LLM


class DraftTree(Tree):
    """A rich tree with narrow guides, so that deep trees fit 80 columns."""

    TREE_GUIDES = [("  ", "│ ", "├╴", "└╴")] * 3


@dataclass
class Node:
    """One row of the tree. `probability` is the head's, given its parent; `path_probability` from the root on."""

    row: int
    parent: int
    token_id: int
    text: str
    probability: float
    path_probability: float
    accepted: bool


def inspect(
    prompt: Annotated[str, typer.Argument(help="The prompt.")],
    target: TargetOption = DEFAULT_TARGET,
    draft: DraftOption = None,
    round_number: Annotated[int, typer.Option("--round", "-k", min=1, help="Which round of the answer to draw.")] = 1,
    tree_budget: BudgetOption = 16,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy decoding.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of a sampled answer.")] = 0,
    chat: ChatOption = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    json: JsonOption = False,
) -> None:
    """Draw the draft tree of one round, with probabilities and the accepted path."""
    model, head = load_pair(target, draft, device=device, dtype=dtype)
    from jetspec.engine import Observer
    from jetspec.llm import LLM
    from jetspec.sampling import SamplingParams

    rounds: list[RoundRecord] = []

    class Recorder(Observer):
        def round(self, record: RoundRecord) -> None:
            rounds.append(record)

    llm = LLM(model, head, tree_budget=tree_budget, observer=Recorder())
    [ids] = llm.encode_prompts([prompt], chat)
    # Room for the wanted round even if all before it accept everything, and for its own whole depth.
    max_tokens = 1 + (round_number + 1) * head.config.block_size
    sequence = llm.engine.add("inspect", ids, SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens))
    while llm.engine.has_work and len(rounds) < round_number:
        before = len(sequence.output_ids)
        llm.engine.step()
    if len(rounds) < round_number:
        raise JetSpecError(f"--round {round_number}: the answer ended after {len(rounds)} rounds")
    llm.engine.cancel("inspect")
    record = rounds[-1]
    nodes = nodes_of(record, llm)
    answer = decode(llm, sequence.output_ids[:before])
    bonus = record.new_tokens[-1]
    if json:
        print_json(
            {
                "round": round_number,
                "answer_so_far": answer,
                "nodes": [asdict(node) for node in nodes],
                "new_token_ids": record.new_tokens,
                "bonus": {"token_id": bonus, "text": decode(llm, [bonus])},
            }
        )
        return
    header = Text(f"round {round_number}", style="bold")
    header.append(f"  rows in: {len(nodes)}, tokens out: {len(record.new_tokens)}", style="not bold")
    results.print(header)
    results.print(Text(f"answer so far: ...{answer[-60:]!r}", style="dim"))
    results.print(draw(nodes))
    results.print(Text.assemble("then the target's own ", (token_text(llm, bonus), "bold")))


def nodes_of(record: RoundRecord, llm: LLM) -> list[Node]:
    """The rows of a round with text and probabilities."""
    accepted = set(record.accepted_rows)
    nodes = []
    for row, (token, parent) in enumerate(zip(record.tokens, record.parents, strict=True)):
        path = record.log_probs[row]
        above = record.log_probs[parent] if parent >= 0 else 0.0
        text = decode(llm, [token])
        nodes.append(Node(row, parent, token, text, math.exp(path - above), math.exp(path), row in accepted))
    return nodes


def draw(nodes: list[Node]) -> Tree:
    """The tree, root first; accepted rows are bold and marked."""
    branches: list[Tree] = []
    for node in nodes:
        branch = DraftTree(label(node), guide_style="dim")
        if node.parent >= 0:
            branches[node.parent].children.append(branch)
        branches.append(branch)
    return branches[0]


def label(node: Node) -> Text:
    quoted = repr(node.text)
    text = Text(quoted, style="bold green" if node.accepted else "")
    if node.parent < 0:
        return text.append("  newest token", style="not bold dim")
    text.append(f"  {node.probability:.3f}", style="not bold")
    text.append(f"  path {node.path_probability:.3f}", style="dim not bold")
    return text.append("  accepted", style="not bold green") if node.accepted else text
