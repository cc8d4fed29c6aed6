"""Exports a draft head: to a directory in the published format, for vLLM or speculators, and to the hub."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch

from jetspec.errors import JetSpecError
from jetspec.head import CARD_FILES, DraftHead, save_for_speculators, save_head

#: Modules with weights in the published format. vLLM refuses a checkpoint with others.
PUBLISHED = ("fc", "hidden_norm", "layers", "norm")


def export_directory(
    head: DraftHead,
    directory: str | os.PathLike[str],
    *,
    source: str | os.PathLike[str] | None = None,
    dtype: torch.dtype | None = None,
    verifier: str | None = None,
) -> list[Path]:
    """Write a head to a directory, with its model card.

    Args:
        head: the head.
        directory: where to write; it is made if it does not exist.
        source: the directory that the head was loaded from. Its model card, the figures of the card and the licence
            (`jetspec.head.CARD_FILES`) are copied. Logs and training settings stay behind: they may hold private paths.
        dtype: number type of the weights; None keeps the head's own.
        verifier: hub id or directory of the target, for speculators' layout; None: in the head's own layout.

    Returns:
        The files in the directory, sorted.

    Raises:
        JetSpecError: the directory cannot be written to, or speculators' layout has no head of this kind.
    """
    folder = Path(directory)
    try:
        if verifier is None:
            save_head(head, folder, dtype=dtype)
        else:
            save_for_speculators(head, folder, verifier, dtype=dtype)
        for path in _card_files(source):
            if not (folder / path.name).exists() or not path.samefile(folder / path.name):
                (folder / path.name).write_bytes(path.read_bytes())
    except OSError as error:
        raise JetSpecError(f"output: cannot write to {folder}: {error}; name another directory") from error
    return sorted(path for path in folder.iterdir() if path.is_file())


def _card_files(source: str | os.PathLike[str] | None) -> list[Path]:
    if source is None:
        return []
    return [path for pattern in CARD_FILES for path in sorted(Path(source).glob(pattern)) if path.is_file()]


def check_for_vllm(head: DraftHead) -> None:
    """Check that vLLM's DFlash reader loads the head and drafts the same tokens with it.

    Raises:
        JetSpecError: vLLM would refuse the head, or would read its weights in another way.
    """
    if head.config.kind == "eagle3":
        raise JetSpecError("kind: vLLM reads an EAGLE-3 head in speculators' layout; export it with --to speculators")
    if head.config.kind != "parallel":
        raise JetSpecError(f"kind: vLLM's dflash method reads no {head.config.kind} head; serve it with JetSpec")
    unknown = [name for name in head.state_dict() if name.partition(".")[0] not in PUBLISHED]
    if unknown:
        raise JetSpecError(
            f"vLLM reads no {', '.join(unknown)}; train with --transition-size 0, or serve the head with JetSpec"
        )
    if head.config.shifted or head.config.sample_from_anchor:
        raise JetSpecError(
            "dflash_config.shifted: vLLM takes the first mask's output for the next token, this head for the one after "
            "it; serve the head with JetSpec"
        )


def vllm_arguments(head: DraftHead, directory: str | os.PathLike[str]) -> dict[str, object]:
    """The `speculative_config` with which vLLM drafts chains with the head in `directory`."""
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
    """Upload a head to a hub repository, which is made if it does not exist.

    Args:
        head: the head.
        repository: the repository's id, as in "owner/name".
        source: as in `export_directory`.
        dtype: number type of the weights; None keeps the head's own.
        private: make a new repository private.

    Returns:
        The address of the repository.

    Raises:
        JetSpecError: the hub refuses the upload, for instance because the user is not logged in.
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
                f"--repo {repository}: {str(error).splitlines()[0]}; log in with `hf auth login`"
            ) from error
    return str(address)
