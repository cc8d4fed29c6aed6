"""`jetspec export`: a draft head for the hub, for vLLM, or as a directory."""

from __future__ import annotations

import json as json_module
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from jetspec.cli.common import JsonOption, print_json, results
from jetspec.errors import JetSpecError


class Destination(str, Enum):
    hub = "hub"
    vllm = "vllm"
    directory = "directory"


def export(
    head: Annotated[str, typer.Option("--head", help="Draft head: alias, hub id or directory.")],
    to: Annotated[Destination, typer.Option("--to", help="The hub, vLLM (which reads a directory), or a directory.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Directory to write.", show_default=False)
    ] = None,
    repo: Annotated[str | None, typer.Option("--repo", help="Hub repository: owner/name.", show_default=False)] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new hub repository private.")] = False,
    dtype: Annotated[str, typer.Option("--dtype", help="auto (as it is), float32, bfloat16 or float16.")] = "auto",
    json: JsonOption = False,
) -> None:
    """Publish a draft head, or write it where vLLM or another program reads it.

    The target's embedding and output layer are no part of it: whoever loads the head shares the target's.
    """
    wanted, given = ("--repo", repo) if to is Destination.hub else ("--output", output)
    if given is None:
        raise JetSpecError(f"{wanted}: needed with --to {to.value}")
    import torch

    from jetspec import export as exports
    from jetspec.head import load_head
    from jetspec.models.loading import resolve_dtype

    chosen = None if dtype == "auto" else resolve_dtype(dtype, torch.device("cpu"))
    assert not isinstance(chosen, str)
    loaded = load_head(head)
    source = head if Path(head).is_dir() else None
    if to is Destination.hub:
        assert repo is not None
        report: dict[str, object] = {
            "address": exports.export_hub(loaded, repo, source=source, dtype=chosen, private=private)
        }
    else:
        assert output is not None
        if to is Destination.vllm:
            exports.check_for_vllm(loaded)
        files = exports.export_directory(loaded, output, source=source, dtype=chosen)
        report = {"output": str(output), "files": [path.name for path in files]}
        if to is Destination.vllm:
            report["speculative_config"] = exports.vllm_arguments(loaded, output)
    if json:
        print_json(report)
        return
    results.print(f"wrote {report.get('address', output)}", highlight=False, markup=False)
    if "speculative_config" in report:
        arguments = json_module.dumps(report["speculative_config"])
        results.print(
            f"vllm serve TARGET --speculative-config '{arguments}'", highlight=False, markup=False, soft_wrap=True
        )
