"""`jetspec inspect`: one round's draft tree, drawn in the terminal."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text
from rich.tree import Tree

from jetspec.cli.common import decode, print_json, results, token_text
from jetspec.cli.options import (
    BudgetOption,
    DraftOptions,
    JsonOption,
    ModelOptions,
    PromptOptions,
    TemperatureOption,
    takes_groups,
)
from jetspec.errors import JetSpecError

if TYPE_CHECKING:
    from jetspec.engine import RoundRecord
    from jetspec.llm import LLM
    from jetspec.sampling import SamplingParams


class DraftTree(Tree):
    """A rich tree with narrow guides, so that deep trees fit 80 columns."""

    TREE_GUIDES = [("  ", "│ ", "├╴", "└╴")] * 3


@dataclass
class Node:
    """One row of the tree.

    `probability` is the draft's for the token given its parent, `path_probability` that of the path from the root.
    """

    row: int
    parent: int
    token_id: int
    text: str
    probability: float
    path_probability: float
    accepted: bool


@dataclass
class Round:
    """One round of an answer: the text before it, its tree, and the tokens it added. The last one is the bonus."""

    number: int
    answer_so_far: str
    nodes: list[Node]
    new_token_ids: list[int]


@takes_groups
def inspect(
    draft: DraftOptions,
    model: ModelOptions,
    prompting: PromptOptions,
    prompt: Annotated[str, typer.Argument(help="The prompt.")],
    round_number: Annotated[int, typer.Option("--round", "-k", min=1, help="Round of the answer to draw.")] = 1,
    tree_budget: BudgetOption = 16,
    temperature: TemperatureOption = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="Seed of a sampled answer.")] = 0,
    json: JsonOption = False,
) -> None:
    """Draw the draft tree of one round, with probabilities and the accepted path.

    The first line names the family of the draft head and the layout of its files.
    """
    settings = draft.required_settings("inspect")
    target = model.load()
    from jetspec.engine import Observer
    from jetspec.llm import LLM
    from jetspec.sampling import SamplingParams

    rounds: list[RoundRecord] = []

    class Recorder(Observer):
        def round(self, record: RoundRecord) -> None:
            rounds.append(record)

    llm = LLM(target, **settings, tree_budget=tree_budget, observer=Recorder())
    [ids] = prompting.encode(llm, [prompt])
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=None)
    found = run_to(round_number, llm, ids, params, rounds)
    if json:
        print_json(to_dict(found, llm))
    else:
        show(found, llm)


def run_to(number: int, llm: LLM, ids: list[int], params: SamplingParams, rounds: list[RoundRecord]) -> Round:
    """Answer a prompt up to the round of that number, which an observer of `llm` appends to `rounds`.

    Raises:
        JetSpecError: the answer ends before that round.
    """
    sequence = llm.engine.add("inspect", ids, params)
    while llm.engine.has_work and len(rounds) < number:
        before = len(sequence.output_ids)
        llm.engine.step()
    if len(rounds) < number:
        raise JetSpecError(f"--round {number}: the answer ended after {len(rounds)} rounds; name an earlier one")
    llm.engine.cancel("inspect")
    record = rounds[-1]
    return Round(number, decode(llm, sequence.output_ids[:before]), nodes_of(record, llm), record.new_tokens)


def to_dict(found: Round, llm: LLM) -> dict[str, Any]:
    """A round as a JSON object."""
    bonus = found.new_token_ids[-1]
    return {
        "head": head_names(llm),
        "round": found.number,
        "answer_so_far": found.answer_so_far,
        "nodes": [asdict(node) for node in found.nodes],
        "new_token_ids": found.new_token_ids,
        "bonus": {"token_id": bonus, "text": decode(llm, [bonus])},
    }


def show(found: Round, llm: LLM) -> None:
    """Draw a round in the terminal."""
    names = head_names(llm)
    if names is not None:
        results.print(Text(f"head: {names['family']}, in the layout of {names['layout']}", style="dim"))
    header = Text(f"round {found.number}", style="bold")
    header.append(f"  rows in: {len(found.nodes)}, tokens out: {len(found.new_token_ids)}", style="not bold")
    results.print(header)
    results.print(Text(f"answer so far: ...{found.answer_so_far[-60:]!r}", style="dim"))
    results.print(draw(found.nodes))
    results.print(Text.assemble("then the target's own ", (token_text(llm, found.new_token_ids[-1]), "bold")))


def head_names(llm: LLM) -> dict[str, str] | None:
    """The family of the draft head, and the layout that its files have; None where another drafter drafts."""
    from jetspec.engine import HeadDrafter

    drafter = llm.engine.drafter
    if not isinstance(drafter, HeadDrafter):
        return None
    return {"family": drafter.head.config.family, "layout": drafter.head.layout}


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
    """The tree, root first. Accepted rows are bold and marked."""
    branches: list[Tree] = []
    for node in nodes:
        branch = DraftTree(label(node), guide_style="dim")
        if node.parent >= 0:
            branches[node.parent].children.append(branch)
        branches.append(branch)
    return branches[0]


def label(node: Node) -> Text:
    """The line of one row."""
    quoted = repr(node.text)
    text = Text(quoted, style="bold green" if node.accepted else "")
    if node.parent < 0:
        return text.append("  newest token", style="not bold dim")
    text.append(f"  {node.probability:.3f}", style="not bold")
    text.append(f"  path {node.path_probability:.3f}", style="dim not bold")
    return text.append("  accepted", style="not bold green") if node.accepted else text
