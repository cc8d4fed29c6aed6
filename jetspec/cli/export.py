"""`jetspec export`: writes a draft head for the hub, for vLLM, or as a directory."""

from __future__ import annotations

import json as json_module
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jetspec.cli.common import print_json, results
from jetspec.cli.options import CausalOption, HeadOption, JsonOption
from jetspec.errors import JetSpecError

if TYPE_CHECKING:
    import torch


class Destination(str, Enum):
    """Where a head is exported to."""

    hub = "hub"
    vllm = "vllm"
    speculators = "speculators"
    directory = "directory"


def export(
    draft: HeadOption,
    to: Annotated[
        Destination,
        typer.Option("--to", help="The hub, vLLM or speculators (which read a directory), or a plain directory."),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Directory to write.", show_default=False)
    ] = None,
    repo: Annotated[str | None, typer.Option("--repo", help="Hub repository: owner/name.", show_default=False)] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new hub repository private.")] = False,
    target: Annotated[
        str | None,
        typer.Option("--target", "-t", help="Target of the head, which --to speculators notes.", show_default=False),
    ] = None,
    causal: CausalOption = None,
    dtype: Annotated[
        str, typer.Option("--dtype", help="Number type: auto (the head's own), float32, bfloat16 or float16.")
    ] = "auto",
    json: JsonOption = False,
) -> None:
    """Publish a draft head, or write it where vLLM or another program reads it.

    The model card, its figures and the licence come along. The target's embedding and output layer are not part of a
    head: whoever loads it shares the target's.
    """
    wanted, given = ("--repo", repo) if to is Destination.hub else ("--output", output)
    if given is None:
        raise JetSpecError(f"{wanted}: needed with --to {to.value}")
    if (to is Destination.speculators) != (target is not None):
        raise JetSpecError("--target: needed with --to speculators, and for nothing else")
    from jetspec import export as exports
    from jetspec.head import head_directory, load_head

    settings: dict[str, Any] = {"dtype": resolve(dtype), "source": head_directory(draft, with_card=True)}
    head = load_head(settings["source"], causal=causal)
    if to is Destination.vllm:
        exports.check_for_vllm(head)
    if repo is not None and to is Destination.hub:
        show({"address": exports.export_hub(head, repo, private=private, **settings)}, json=json)
        return
    assert output is not None
    files = exports.export_directory(head, output, verifier=target, **settings)
    report: dict[str, Any] = {"output": str(output), "files": [path.name for path in files]}
    if to is Destination.vllm:
        report["speculative_config"] = exports.vllm_arguments(head, output)
    show(report, json=json)


def resolve(dtype: str) -> torch.dtype | None:
    """The number type of an option; None for auto. Raises JetSpecError."""
    import torch

    from jetspec.models.loading import resolve_dtype

    if dtype == "auto":
        return None
    chosen = resolve_dtype(dtype, torch.device("cpu"))
    assert isinstance(chosen, torch.dtype)
    return chosen


def show(report: dict[str, Any], *, json: bool) -> None:
    """Print what was written, and for vLLM how to serve it."""
    if json:
        print_json(report)
        return
    results.print(f"wrote {report.get('address', report.get('output'))}", highlight=False, markup=False)
    if "speculative_config" in report:
        arguments = json_module.dumps(report["speculative_config"])
        results.print(
            f"vllm serve TARGET --speculative-config '{arguments}'", highlight=False, markup=False, soft_wrap=True
        )
