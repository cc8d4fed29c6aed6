"""The configuration of a benchmark run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from jetspec.bench.records import BASELINE, UNDRAFTED, Cell, MethodName
from jetspec.config import Config, option
from jetspec.errors import JetSpecError, is_positive_integer

#: The field that names what each method drafts with. Only "draft" has a default: the head known for the target.
DRAFT_FIELDS: dict[MethodName, str] = {
    "draft-model": "draft_model",
    "eagle": "eagle",
    "dflash-chain": "dflash",
    "dflash-tree": "dflash",
    "jetspec": "draft",
}

MODELS, QUESTIONS, DECODING, MACHINE = "Models", "Questions", "Decoding", "Machine"

Rows = int | Literal["auto"]
Temperature = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Size = Annotated[int, Field(ge=1)]


class BenchConfig(Config):
    """A benchmark run: every method and budget on every data set, at every temperature and batch size.

    Each field is described in its ``option``, which ``jetspec bench --help`` shows.

    Raises:
        JetSpecError: a value has another type or is out of range, or two fields disagree; the message names the field.
    """

    output: Path = option(
        help="Folder of the run. The same command resumes the run that is there.", flags=("--output", "-o")
    )

    target: str = option(
        "smollm2-135m",
        help="Target model: alias, hub id, directory or .gguf file.",
        group=MODELS,
        flags=("--target", "-t"),
    )
    draft: str | None = option(
        None,
        help="Causal head, for jetspec. By default, or with auto, the head that ships for the target, else one "
        "published for it on the hub.",
        group=MODELS,
        flags=("--draft", "-d"),
    )
    eagle: str | None = option(None, help="Autoregressive head, for eagle.", group=MODELS)
    dflash: str | None = option(None, help="Bidirectional head, for dflash-chain and dflash-tree.", group=MODELS)
    draft_model: str | None = option(None, help="Small language model, for draft-model.", group=MODELS)

    datasets: tuple[str, ...] = option(
        ("gsm8k",),
        help="Data set: gsm8k, math500, humaneval, mt_bench, or a source of prompts. May be repeated.",
        group=QUESTIONS,
        flags=("--dataset",),
        min_length=1,
    )
    data: Path | None = option(
        None, help="Folder with local copies of the data sets. By default they come from the hub.", group=QUESTIONS
    )
    num_prompts: int = option(
        20, help="Questions of each data set, spread evenly over it. 0 takes all.", group=QUESTIONS, ge=0
    )
    max_tokens: int = option(
        256, help="Maximum tokens of an answer to one turn.", group=QUESTIONS, flags=("--max-tokens", "-n"), ge=1
    )
    chat_template_kwargs: dict[str, Any] | None = option(
        None, help='Arguments of the chat template, as JSON: {"enable_thinking": false}.', group=QUESTIONS
    )
    run_code: bool = option(
        False,
        help="Execute the code in answers to humaneval, to score them. It runs with your rights.",
        group=QUESTIONS,
        flags=("--run-code",),
    )

    methods: tuple[MethodName, ...] = option(
        ("plain", "ngram", "jetspec"),
        help="Way of decoding: hf, plain, ngram, draft-model, eagle, dflash-chain, dflash-tree or jetspec. May be "
        "repeated. plain is always measured.",
        group=DECODING,
        flags=("--method", "-m"),
        min_length=1,
    )
    budgets: tuple[Rows, ...] = option(
        ("auto",),
        help="Maximum rows of a sequence's verify forward, or auto, for every method that drafts. May be repeated.",
        group=DECODING,
        flags=("--budget", "-b"),
        min_length=1,
    )
    temperatures: tuple[Temperature, ...] = option(
        (0.0,),
        help="Sampling temperature; 0 is greedy. May be repeated.",
        group=DECODING,
        flags=("--temperature",),
        min_length=1,
    )
    batch_sizes: tuple[Size, ...] = option(
        (1,),
        help="Questions answered together. May be repeated.",
        group=DECODING,
        flags=("--batch-size",),
        min_length=1,
    )

    device: str = option("auto", help="Device: auto, cpu, cuda, cuda:1, ...", group=MACHINE)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option("auto", help="Number type.", group=MACHINE)

    @field_validator("output", "data", mode="before")
    @classmethod
    def _text_to_path(cls, value: Any) -> Any:
        return Path(value) if isinstance(value, str) else value

    @field_validator("draft")
    @classmethod
    def _auto_is_the_default(cls, value: str | None) -> str | None:
        return None if value == "auto" else value

    @field_validator("budgets", mode="before")
    @classmethod
    def _check_budgets(cls, values: Any) -> Any:
        for value in values if isinstance(values, tuple | list) else ():
            if value != "auto" and not is_positive_integer(value):
                raise JetSpecError(f"budgets={value!r}: must be auto or a number of rows of at least 1")
        return values

    @field_validator("methods")
    @classmethod
    def _with_baseline(cls, methods: tuple[MethodName, ...]) -> tuple[MethodName, ...]:
        return methods if BASELINE in methods else (BASELINE, *methods)

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("datasets", "methods", "budgets", "temperatures", "batch_sizes"):
            values = getattr(self, name)
            for value in values:
                if values.count(value) > 1:
                    raise JetSpecError(f"{name}={value!r}: is given twice; leave one out")
        for field in dict.fromkeys(DRAFT_FIELDS.values()):
            self._check_draft(field)
        if self.run_code and "humaneval" not in self.datasets:
            raise JetSpecError("run_code: scores humaneval alone; add it to datasets, or leave run_code out")
        return self

    def _check_draft(self, field: str) -> None:
        users = [method for method, needed in DRAFT_FIELDS.items() if needed == field]
        asked = [method for method in users if method in self.methods]
        name = getattr(self, field)
        if name is None and asked and field != "draft":
            raise JetSpecError(f"{field}: method {asked[0]} needs it; give it, or leave the method out")
        if name is not None and not asked:
            raise JetSpecError(
                f"{field}={name!r}: is for method {' or '.join(users)}; add it to methods, or leave {field} out"
            )

    def result_settings(self) -> dict[str, Any]:
        """The settings that decide the results, as JSON holds them: all but the output folder."""
        return self.model_dump(mode="json", exclude={"output"})

    def blocks(self) -> list[list[Cell]]:
        """The cells that take turns on the same questions: a list for each data set, temperature and batch size."""
        return [
            [
                Cell(dataset=dataset, method=method, budget=budget, temperature=temperature, batch_size=batch_size)
                for method in self.methods
                for budget in ((None,) if method in UNDRAFTED else self.budgets)
            ]
            for dataset in self.datasets
            for temperature in self.temperatures
            for batch_size in self.batch_sizes
        ]
