"""Questions: four public data sets, from the hub or a local copy, and any source of prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from jetspec.errors import JetSpecError
from jetspec.prompts import BadRows, Message, PromptInput, as_record, read_entries, read_prompts

T = TypeVar("T")


@dataclass(frozen=True)
class Dataset:
    """A data set: its sources, their names of the fields, and the words around a question.

    ``fields`` maps a name used here to the names in the sources; the first one that a row has counts. If a data set has
    no ``id``, a row's number identifies it.
    """

    hub: str
    file: str
    fields: Mapping[str, tuple[str, ...]]
    before: str = ""
    after: str = ""


DATASETS = {
    "gsm8k": Dataset(
        "hub:openai/gsm8k/main:test",
        "gsm8k_test.jsonl",
        {"turns": ("question",), "reference": ("answer",)},
        after="\n\nThink step by step and end with the answer as a number after ####.",
    ),
    "math500": Dataset(
        "hub:HuggingFaceH4/MATH-500:test",
        "math500.jsonl",
        {"id": ("unique_id",), "turns": ("problem",), "reference": ("answer", "solution")},
        after="\n\nThink step by step and put the answer in \\boxed{}.",
    ),
    "humaneval": Dataset(
        "hub:openai/openai_humaneval:test",
        "humaneval.jsonl",
        {
            "id": ("task_id",),
            "turns": ("prompt",),
            "prompt": ("prompt",),
            "test": ("test",),
            "entry_point": ("entry_point",),
        },
        before="Complete this function. Answer with the whole function in a block of code.\n\n```python\n",
        after="```",
    ),
    "mt_bench": Dataset(
        "hub:HuggingFaceH4/mt_bench_prompts:train",
        "mt_bench.jsonl",
        {"id": ("question_id", "prompt_id"), "turns": ("turns", "prompt")},
    ),
}


@dataclass(frozen=True)
class Question:
    """A conversation: each turn is asked after the method's own answers to the turns before it.

    ``number`` is the place in the whole data set. ``facts`` are the other fields, which score an answer.
    """

    id: str
    number: int
    turns: tuple[PromptInput, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)

    def prompt(self, answers: Sequence[str]) -> PromptInput:
        """The prompt of the turn that follows the first turns with these answers."""
        if not answers:
            return self.turns[0]
        messages: list[Message] = []
        for turn, answer in zip(self.turns, answers, strict=False):
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": answer}]
        return [*messages, {"role": "user", "content": self.turns[len(answers)]}]


def load_questions(name: str, *, data: Path | None = None, num_prompts: int | None = None) -> list[Question]:
    """Read the questions of a data set, or ``num_prompts`` of them that are spread evenly over it.

    Args:
        name: one of `DATASETS`, or a prompt source as `jetspec.prompts` reads it.
        data: folder with local copies of the data sets; None: the hub.
        num_prompts: how many; all where there are fewer.

    Raises:
        JetSpecError: there is no such source, it cannot be read, a row lacks a field, or two have the same id.
    """
    if name not in DATASETS:
        if not name.startswith("hub:") and not Path(name).exists():
            raise JetSpecError(
                f"datasets={name!r}: no such data set or file; give one of {', '.join(DATASETS)}, a file of prompts, "
                "or hub:owner/name"
            )
        prompts = list(enumerate(read_prompts(name)))
        return [Question(str(number), number, (prompt,)) for number, prompt in spread(prompts, num_prompts)]
    dataset = DATASETS[name]
    source = dataset.hub if data is None else data / dataset.file
    bad, questions, ids = BadRows(), [], set[str]()
    for number, (where, entry) in spread(list(enumerate(read_entries(source))), num_prompts):
        with bad.at(where):
            question = _question(dataset, number, as_record(entry))
            if question.id in ids:
                raise JetSpecError(f"id {question.id!r} is also that of an earlier row")
            ids.add(question.id)
            questions.append(question)
    bad.raise_if_any(fix=f"give the data set {name}")
    return questions


def spread(items: Sequence[T], n: int | None) -> list[T]:
    """``n`` items at even distances, from the first one on; all if ``n`` is None or there are no more."""
    if n is None or n >= len(items):
        return list(items)
    return [items[i * len(items) // n] for i in range(n)]


def _question(dataset: Dataset, number: int, record: dict[str, Any]) -> Question:
    facts: dict[str, Any] = {}
    for name, sources in dataset.fields.items():
        found = [record[source] for source in sources if source in record]
        if not found and name != "id":
            raise JetSpecError(f"no field {' or '.join(sources)}; there are {', '.join(record) or 'none'}")
        facts[name] = found[0] if found else number
    turns = facts.pop("turns")
    turns = [turns] if isinstance(turns, str) else list(turns)
    if not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise JetSpecError(f"{dataset.fields['turns'][0]}: must be texts that are not empty")
    for name, fact in facts.items():
        if name != "id" and not isinstance(fact, str):
            raise JetSpecError(f"{' or '.join(dataset.fields[name])}: must be text, not {fact!r}")
    turns[0] = dataset.before + turns[0] + dataset.after
    return Question(str(facts.pop("id", number)), number, tuple(turns), facts)
