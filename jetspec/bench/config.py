"""What a benchmark run is asked to do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from jetspec.bench.records import BASELINE, METHODS, Cell, MethodName
from jetspec.errors import JetSpecError, is_positive_integer

#: The option that each method cannot do without.
NEEDED: dict[MethodName, str] = {
    "draft-model": "draft_model",
    "eagle": "eagle",
    "dflash-chain": "dflash",
    "dflash-tree": "dflash",
}
#: Methods that draft nothing, so that no budget applies.
UNDRAFTED: tuple[MethodName, ...] = ("hf", "plain")


@dataclass(frozen=True)
class BenchConfig:
    """A benchmark run: every method and budget on every data set, at every temperature and batch size.

    Args:
        output: folder of the results.
        target: the target model: alias, hub id, directory or .gguf file.
        draft: head of "jetspec"; None: the one shipped for the target.
        eagle: head of "eagle", an autoregressive one.
        dflash: head of "dflash-chain" and "dflash-tree", a bidirectional one.
        draft_model: small model of "draft-model".
        datasets: names of `jetspec.bench.datasets.DATASETS`, or prompt sources.
        data: folder with local copies of the data sets; None: the hub.
        num_prompts: questions of each data set, spread evenly over it; None: all.
        max_tokens: longest answer, of each turn.
        methods: names of `METHODS`. The baseline is measured first, also where it is not among them.
        budgets: rows of a sequence's verify forward at most, or "auto"; for every method that drafts.
        temperatures: 0 is greedy.
        batch_sizes: questions answered together.
        device: "auto", or a torch device.
        dtype: "auto", "float32", "bfloat16" or "float16".
        chat_template_kwargs: switches of the target's chat template.
        run_code: execute answers to humaneval, to score them.

    Raises:
        JetSpecError: a value is out of range, or a method lacks what it needs; the message names the option.
    """

    output: Path
    target: str = "smollm2-135m"
    draft: str | None = None
    eagle: str | None = None
    dflash: str | None = None
    draft_model: str | None = None
    datasets: tuple[str, ...] = ("gsm8k",)
    data: Path | None = None
    num_prompts: int | None = 20
    max_tokens: int = 256
    methods: tuple[MethodName, ...] = ("plain", "ngram", "jetspec")
    budgets: tuple[int | Literal["auto"], ...] = ("auto",)
    temperatures: tuple[float, ...] = (0.0,)
    batch_sizes: tuple[int, ...] = (1,)
    device: str = "auto"
    dtype: str = "auto"
    chat_template_kwargs: dict[str, Any] | None = None
    run_code: bool = False

    def __post_init__(self) -> None:
        if self.num_prompts is not None and not is_positive_integer(self.num_prompts):
            raise JetSpecError(f"--num-prompts {self.num_prompts}: must be at least 1")
        if not is_positive_integer(self.max_tokens):
            raise JetSpecError(f"--max-tokens {self.max_tokens}: must be at least 1")
        _each("--dataset", self.datasets, lambda name: isinstance(name, str) and bool(name), "must be a name")
        _each("--method", self.methods, lambda name: name in METHODS, f"must be one of {', '.join(METHODS)}")
        _each(
            "--budget", self.budgets, lambda b: b == "auto" or is_positive_integer(b), "must be auto or at least 1 row"
        )
        _each("--temperature", self.temperatures, _is_temperature, "must be a number of at least 0")
        _each("--batch-size", self.batch_sizes, is_positive_integer, "must be at least 1")
        for method, option in NEEDED.items():
            if method in self.methods and getattr(self, option) is None:
                raise JetSpecError(
                    f"--{option.replace('_', '-')}: method {method} needs it; give the option, or leave the method out"
                )
        for option in ("draft", *NEEDED.values()):
            users = [method for method, needed in {"jetspec": "draft", **NEEDED}.items() if needed == option]
            if getattr(self, option) is not None and not set(users) & set(self.methods):
                raise JetSpecError(
                    f"--{option.replace('_', '-')}: is for method {' or '.join(users)}; name it with --method, or "
                    "leave the option out"
                )
        if self.run_code and "humaneval" not in self.datasets:
            raise JetSpecError("--run-code: scores humaneval alone; name it with --dataset, or leave the option out")
        if BASELINE not in self.methods:
            object.__setattr__(self, "methods", (BASELINE, *self.methods))

    def decisive(self) -> dict[str, Any]:
        """All that decides the results, as JSON holds it: everything but where they lie."""
        values = asdict(self)
        del values["output"]
        values["data"] = None if self.data is None else str(self.data)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    def blocks(self) -> list[list[Cell]]:
        """Cells that take turns on the same questions: one list for each data set, temperature and batch size."""
        return [
            [
                Cell(dataset, method, budget, temperature, batch_size)
                for method in self.methods
                for budget in ((None,) if method in UNDRAFTED else self.budgets)
            ]
            for dataset in self.datasets
            for temperature in self.temperatures
            for batch_size in self.batch_sizes
        ]


def _each(option: str, values: Sequence[Any], holds: Any, must: str) -> None:
    """JetSpecError unless there are values, all different, for all of which something holds."""
    if not values:
        raise JetSpecError(f"{option}: none given")
    for index, value in enumerate(values):
        if not holds(value):
            raise JetSpecError(f"{option} {value}: {must}")
        if value in values[:index]:
            raise JetSpecError(f"{option} {value}: given twice")


def _is_temperature(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
