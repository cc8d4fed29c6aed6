"""Write `docs/results.md` and its plots from the results of a reproduction."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Template

from benchmarks.reproduction.jobs import result_path
from benchmarks.reproduction.plan import BUDGETS, DEPTHS, KINDS, SEEDS, WEIGHTINGS, Plan, seeds_of
from jetspec.bench.report.plots import against_budget

#: Names of the kinds of heads, with the way in which their drafts are verified.
NAMES = {
    "autoregressive": "autoregressive tree (EAGLE-3 style)",
    "bidirectional chain": "bidirectional chain (DFlash)",
    "bidirectional": "bidirectional tree",
    "causal chain": "causal chain",
    "causal": "causal tree",
    "transition chain": "causal chain with transition",
    "transition": "causal tree with transition",
}
#: The kinds that are plotted, with names that fit a legend.
PLOTTED = {
    "transition": "with transition",
    "bidirectional": "DFlash tree",
    "bidirectional chain": "DFlash chain",
    "autoregressive": "EAGLE-3 style",
    "causal": "causal tree",
}


@dataclass(frozen=True)
class Spread:
    """A figure over seeds: its mean, smallest and largest value."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def bounds(self) -> tuple[float, float]:
        return min(self.values), max(self.values)

    def __str__(self) -> str:
        half = (max(self.values) - min(self.values)) / 2
        return f"{self.mean:.2f} ± {half:.2f}" if len(self.values) > 1 else f"{self.mean:.2f}"

    def __sub__(self, other: Spread) -> Spread:
        """Differences seed by seed."""
        return Spread(tuple(a - b for a, b in zip(self.values, other.values, strict=True)))


class Results:
    """All results of a reproduction, by what is asked of them."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        names = [*plan.jobs(), "costs", "speed"]
        self.of: dict[str, Any] = {name: json.loads(result_path(folder, name).read_text()) for name in names}

    def acceptance(self, what: str, budget: int, answers: str = "greedy") -> Spread:
        """Acceptance length of a kind's trees, or of its chains ("causal chain")."""
        kind, _, shape = what.rpartition(" ") if what.endswith(" chain") else (what, "", "tree")
        seeds = seeds_of(kind) if answers == "greedy" else SEEDS[:1]
        return Spread(tuple(self.of[f"{kind}-{seed}"][answers][shape][str(budget)] for seed in seeds))

    def head(self, kind: str) -> dict[str, Any]:
        return self.of[f"{kind}-{SEEDS[0]}"]


def write_results(plan: Plan, folder: Path, docs: Path) -> None:
    """Write `results.md` and the folder `results` with its plots into `docs`."""
    results = Results(plan, folder)
    plots = docs / "results"
    plots.mkdir(parents=True, exist_ok=True)
    curves = {
        name: {b: (s.mean, s.bounds) for b in BUDGETS for s in [results.acceptance(what, b)]}
        for what, name in PLOTTED.items()
    }
    svg = against_budget(curves, title="acceptance length", label="acceptance length (tokens)", standalone=True)
    (plots / "acceptance.svg").write_text(svg + "\n")
    speeds: dict[str, dict[Any, Any]] = {}
    for row in results.of["speed"]:
        interval = row["speedup_interval"]
        point = (row["speedup"], None if interval is None else tuple(interval))
        speeds.setdefault(row["cell"]["method"], {})[row["cell"]["budget"]] = point
    svg = against_budget(speeds, title="speed-up", label="speed-up over plain decoding", standalone=True)
    (plots / "speed.svg").write_text(svg + "\n")
    path = docs / "results.md"
    path.write_text(page(plan, results))
    print(f"wrote {path} and {plots}")


def page(plan: Plan, results: Results) -> str:
    """The whole page, in Markdown."""
    template = Path(__file__).with_name("results.md.j2").read_text()
    tables = {
        "methods": methods_table,
        "claims": claims_table,
        "faithfulness": faithfulness_table,
        "weighting": weighting_table,
        "costs": costs_table,
        "temperature": temperature_table,
        "speed": speed_table,
    }
    filled = {name: "\n".join(make(results)) for name, make in tables.items()}
    return Template(template, keep_trailing_newline=True).render(plan=plan, seeds=len(SEEDS), **filled)


def methods_table(results: Results) -> list[str]:
    rows = []
    for what, name in NAMES.items():
        kind = what.removesuffix(" chain")
        cells = [str(results.acceptance(what, budget)) for budget in BUDGETS]
        if what.endswith(" chain"):
            cells = [cells[0], *["same"] * (len(BUDGETS) - 1)]
        costs = results.of["costs"][kind]
        rows.append(
            [name, *cells, f"{costs['16']['7']:.0f}", "" if what.endswith(" chain") else f"{costs['256']['7']:.0f}"]
        )
    return table(["draft", *[f"{b} rows" for b in BUDGETS], "draft ms, 16 rows", "draft ms, 256"], rows)


def claims_table(results: Results) -> list[str]:
    """The claims of the paper beside what was measured here."""
    rows = [*tree_claims(results), *head_claims(results), *speed_claims(results)]
    return table(["claim of the paper", "here", "verdict"], rows)


def tree_claims(results: Results) -> list[list[str]]:
    """Rows about acceptance by budget."""
    accept = results.acceptance
    first, last = BUDGETS[0], BUDGETS[-1]
    gains = {what: accept(what, last) - accept(what, first) for what in ("causal", "bidirectional", "transition")}
    over = [accept("causal", b) - accept("bidirectional", b) for b in BUDGETS]
    paths = [accept("transition", b) - accept("bidirectional", b) for b in BUDGETS]
    return [
        [
            "acceptance keeps growing with the budget for causal trees, and saturates for chains",
            f"{first} to {last} rows: causal tree +{gains['causal']}, with transition +{gains['transition']}; a chain "
            "has no more rows than its block, so +0",
            verdict(min(gains["causal"].values) > 0),
        ],
        [
            "causal trees beat bidirectional trees at every budget",
            "difference at " + ", ".join(f"{b}: {d.mean:+.2f}" for b, d in zip(BUDGETS, over, strict=True)),
            seeds_verdict(over),
        ],
        [
            "conditioning a branch on its path beats branch-agnostic scores at every budget",
            "causal with transition minus bidirectional at "
            + ", ".join(f"{b}: {d.mean:+.2f}" for b, d in zip(BUDGETS, paths, strict=True)),
            seeds_verdict(paths),
        ],
    ]


def head_claims(results: Results) -> list[list[str]]:
    """Rows about the best branch and about the loss."""
    own = results.head("causal")["faithfulness"]["agreement"]
    other = results.head("bidirectional")["faithfulness"]["agreement"]
    conditioned = results.head("transition")["faithfulness"]["agreement"]
    decay = results.acceptance("causal", 64)
    weights = [results.acceptance(name, 64).mean - decay.values[0] for name in WEIGHTINGS]
    return [
        [
            "the best branch of a causal head follows the target's factorization, a bidirectional one's does not",
            f"agreement at depth 2, 4, 7: causal {at(own)}; with transition {at(conditioned)}; "
            f"bidirectional {at(other)}",
            verdict(all(a > b for a, b in zip(own[1:], other[1:], strict=True))),
        ],
        [
            "acceptance hardly depends on how the loss weights positions",
            "64 rows, against exp(-(d - 1) / 4): "
            + ", ".join(f"{n.split(', ')[1]} {w:+.2f}" for n, w in zip(WEIGHTINGS, weights)),
            verdict(all(abs(w) <= 0.05 * decay.mean for w in weights), "holds within 5%"),
        ],
    ]


def speed_claims(results: Results) -> list[list[str]]:
    """Rows about the cost of drafting, sampling and the speed on the engine."""
    auto, parallel = (results.of["costs"][kind]["64"] for kind in ("autoregressive", "causal"))
    ratio = {
        kind: results.head(kind)["sampled"]["tree"]["64"] / results.head(kind)["greedy"]["tree"]["64"] for kind in KINDS
    }
    fastest = max((r for r in results.of["speed"] if r["cell"]["method"] == "jetspec"), key=lambda r: r["speedup"])
    return [
        [
            "an autoregressive draft costs more with every level, a parallel one does not",
            f"64 rows, depth 1 to 7: autoregressive {auto['1']:.0f} to {auto['7']:.0f} ms, "
            f"causal {parallel['1']:.0f} to {parallel['7']:.0f} ms",
            verdict(auto["7"] / auto["1"] > 2 * parallel["7"] / parallel["1"]),
        ],
        [
            "sampling at temperature 1 accepts less than greedy decoding, but still gains",
            "64 rows, ratio of sampled to greedy: " + ", ".join(f"{kind} {r:.2f}" for kind, r in ratio.items()),
            verdict(all(r < 1 for r in ratio.values())),
        ],
        [
            "up to 9.64x on MATH-500 and 4.58x in chat (Qwen3-8B on an H100)",
            f"{fastest['speedup']:.2f}x on GSM8K at budget {fastest['cell']['budget']}, on this CPU",
            "not comparable: other hardware, target, and training",
        ],
    ]


def at(agreement: Sequence[float]) -> str:
    return " / ".join(f"{agreement[d - 1]:.2f}" for d in (2, 4, 7))


def verdict(holds: bool, words: str = "holds") -> str:
    return words if holds else "does not hold at this scale"


def seeds_verdict(differences: Sequence[Spread]) -> str:
    """Of a claim that a difference is above zero at every budget."""
    if all(min(d.values) > 0 for d in differences):
        return "holds at every budget and seed"
    if all(max(d.values) < 0 for d in differences):
        return "does not hold at this scale: the reverse does"
    return "undecided at this scale: the sign differs between seeds and budgets"


def faithfulness_table(results: Results) -> list[str]:
    rows = []
    for kind in KINDS:
        measured = results.head(kind)["faithfulness"]
        rows.append([f"{kind}: agreement", *[f"{v:.2f}" for v in measured["agreement"]]])
        pairs = zip(measured["target"], measured["draft"], strict=True)
        rows.append([f"{kind}: log probability, target / head", *[f"{t:.1f} / {d:.1f}" for t, d in pairs]])
    return table(["best branch of", *[f"depth {d}" for d in range(1, len(rows[0]))]], rows)


def weighting_table(results: Results) -> list[str]:
    names = {"causal": "exp(-(d - 1) / 4), the default", "causal, equal weights": "equal", "causal, reach": "reach"}
    seed = f"(seed {SEEDS[0]})"
    rows = [
        [name, *[f"{results.of[f'{kind}-{SEEDS[0]}']['greedy']['tree'][str(b)]:.2f}" for b in BUDGETS]]
        for kind, name in names.items()
    ]
    return table([f"weight of depth d {seed}", *[f"{b} rows" for b in BUDGETS]], rows)


def costs_table(results: Results) -> list[str]:
    rows = [
        [kind, f"{budget}", *[f"{costs[budget][str(d)]:.0f}" for d in DEPTHS]]
        for kind, costs in results.of["costs"].items()
        for budget in costs
    ]
    return table(["head", "rows", *[f"depth {d}" for d in DEPTHS]], rows)


def temperature_table(results: Results) -> list[str]:
    rows = []
    for kind in KINDS:
        head = results.head(kind)
        rows += [
            [
                kind,
                temperature,
                *[f"{head[answers]['tree'][str(b)]:.2f}" for b in BUDGETS[:3]],
                f"{head[answers]['chain']['16']:.2f}",
            ]
            for temperature, answers in (("0", "greedy"), ("1", "sampled"))
        ]
    return table([f"head (seed {SEEDS[0]})", "temperature", *[f"{b} rows" for b in BUDGETS[:3]], "chain"], rows)


def speed_table(results: Results) -> list[str]:
    rows = []
    for r in results.of["speed"]:
        interval = r["speedup_interval"]
        optional: Callable[[Any, str], str] = lambda value, form: "" if value is None else format(value, form)  # noqa: E731
        rows.append(
            [
                r["cell"]["method"],
                "" if r["cell"]["budget"] is None else str(r["cell"]["budget"]),
                f"{r['tokens_per_s']:.1f}",
                f"{r['speedup']:.2f}" + ("" if interval is None else f" ({interval[0]:.2f} to {interval[1]:.2f})"),
                optional(r["acceptance_length"], ".2f"),
                optional(r["rows"], ".1f"),
                "" if r["identical"] is None else f"{r['identical']} of {r['compared']}",
            ]
        )
    return table(["method", "budget", "tokens/s", "speed-up", "acceptance length", "rows", "identical"], rows)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table, line by line; columns behind the first are numbers."""
    words = max(len(cell) for row in rows for cell in row[1:]) > 40
    marks = ["---"] * len(header) if words else ["---", *["---:"] * (len(header) - 1)]
    return ["| " + " | ".join(cells) + " |" for cells in (header, marks, *rows)]
