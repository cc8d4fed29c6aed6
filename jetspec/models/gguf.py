"""GGUF files, converted once into plain checkpoints."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, AutoTokenizer

from jetspec.errors import JetSpecError
from jetspec.fingerprint import file_fingerprint

#: Changes whenever the same file is converted into something else.
CONVERSION_VERSION = "1"


def default_cache_dir() -> Path:
    """The folder for converted targets, beside the Hugging Face cache: ~/.cache/jetspec/targets by default."""
    return Path(constants.HF_HOME).parent / "jetspec" / "targets"


def converted(gguf_file: Path, cache_dir: str | Path | None = None) -> Path:
    """The directory with the converted GGUF file, made on first use.

    It is written under another name and renamed when complete, so a killed conversion leaves no half model.
    """
    parent = default_cache_dir() if cache_dir is None else Path(cache_dir)
    directory = parent / f"{gguf_file.stem}-{file_fingerprint(gguf_file, salt=CONVERSION_VERSION)[:12]}"
    if directory.is_dir():
        return directory
    require_gguf_packages()
    parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=parent))
    try:
        convert_gguf(gguf_file, unfinished)
        unfinished.chmod(0o755)
        try:
            unfinished.rename(directory)
        except OSError:
            if not directory.is_dir():  # otherwise another process finished the same conversion first
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return directory


def require_gguf_packages() -> None:
    """Raise JetSpecError unless the packages that read GGUF files are installed."""
    missing = [package for package in ("gguf", "accelerate") if importlib.util.find_spec(package) is None]
    if missing:
        raise JetSpecError(f"GGUF files need the packages {', '.join(missing)}: pip install 'jetspec[gguf]'")


def convert_gguf(gguf_file: Path, directory: Path) -> None:
    """Write a GGUF file as a plain float32 checkpoint (its exact dequantized values) with its tokenizer."""
    folder, file = str(gguf_file.parent), gguf_file.name
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
        quantized = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    except Exception as error:  # the parsers raise anything for a file they do not understand
        raise JetSpecError(f"cannot read the GGUF file {gguf_file}: {error}") from error
    settings = quantized.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        settings.pop(key, None)
    with torch.device("meta"):
        plain = cast(Any, AutoModelForCausalLM).from_config(type(quantized.config).from_dict(settings))
    plain.load_state_dict(quantized.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = quantized.generation_config
    plain.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
