"""A draft head for others: a directory in the published format, for vLLM or for anybody, and the hub."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch

from jetspec.errors import JetSpecError
from jetspec.head import DraftHead, save_head

CARD = "README.md"
#: Modules with weights in the published format; vLLM refuses a checkpoint with others.
PUBLISHED = ("fc", "hidden_norm", "layers", "norm")


def export_directory(
    head: DraftHead,
    directory: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
) -> list[Path]:
    """Write the head, and the model card that lies in ``source``, where one does.

    ``dtype=None`` keeps the head's own. Returns the files. JetSpecError where the directory cannot be written to.
    """
    folder = Path(directory)
    try:
        save_head(head, folder, dtype=dtype)
        if source is not None and (card := Path(source) / CARD).is_file():
            (folder / CARD).write_bytes(card.read_bytes())
    except OSError as error:
        raise JetSpecError(f"output: cannot write to {folder}: {error}; name another directory") from error
    return sorted(path for path in folder.iterdir() if path.is_file())


def check_for_vllm(head: DraftHead) -> None:
    """Raise JetSpecError where vLLM's DFlash reader would refuse the head or draft something else with it."""
    if head.config.kind != "parallel":
        raise JetSpecError(f"method: vLLM's dflash reads no {head.config.kind} head; serve it with JetSpec")
    unknown = [name for name in head.state_dict() if name.partition(".")[0] not in PUBLISHED]
    if unknown:
        raise JetSpecError(
            f"vLLM reads no {', '.join(unknown)}; train with --transition-size 0, or serve the head with JetSpec"
        )
    if head.config.shifted:
        raise JetSpecError("dflash_config.shifted: vLLM reads the token after a position from it, not two after")


def vllm_arguments(head: DraftHead, directory: str | os.PathLike[str]) -> dict[str, object]:
    """The ``speculative_config`` with which vLLM takes the head in ``directory`` as a chain."""
    return {
        "method": "dflash",
        "model": str(directory),
        "num_speculative_tokens": head.config.block_size - 1,
    }


def export_hub(
    head: DraftHead,
    repository: str,
    *,
    source: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    private: bool = False,
) -> str:
    """Upload the head to a hub repository, made where there is none; returns its address.

    Raises:
        JetSpecError: the hub refuses, for instance because nobody is logged in.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    api = HfApi()
    with tempfile.TemporaryDirectory() as folder:
        export_directory(head, folder, source=source, dtype=dtype)
        try:
            address = api.create_repo(repository, private=private, exist_ok=True)
            api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Add the draft head")
        except (OSError, HFValidationError) as error:
            raise JetSpecError(
                f"--repo {repository}: {str(error).splitlines()[0]}; is `hf auth login` done?"
            ) from error
    return str(address)
