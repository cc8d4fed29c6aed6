"""Draft heads on disk and on the hub: `config.json` and safetensors, in the published format."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from jetspec.errors import JetSpecError
from jetspec.head.base import DraftHead
from jetspec.head.build import new_head
from jetspec.head.config import HeadConfig

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
#: Files that belong to a published head beside its configuration and weights: the model card, its figures, the licence.
CARD_FILES = ("README.md", "LICENSE*", "NOTICE*", "*.png", "*.jpg", "*.svg")


def shipped_heads() -> dict[str, Path]:
    """The heads that come with the package, by alias."""
    folder = Path(str(resources.files("jetspec"))) / "heads"
    return {path.parent.name: path.parent for path in sorted(folder.glob(f"*/{CONFIG}"))}


def load_head(
    name_or_path: str | os.PathLike[str],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    causal: bool | None = None,
) -> DraftHead:
    """Load a head by alias of a shipped head, directory, or hub repository id.

    `dtype=None` keeps the checkpoint's own. `causal` answers for a checkpoint that carries no causality flag.
    Raises JetSpecError where nothing is found, the config is not valid, or tensors are missing, unknown or misshapen.
    """
    folder = head_directory(name_or_path)
    head_config = HeadConfig.from_dict(_read_json(folder / CONFIG), causal=causal)
    tensors = _read_tensors(folder)
    with torch.device("meta"):
        head = new_head(head_config)
    _check_tensors(tensors, head.state_dict(), folder)
    dtype = tensors["fc.weight"].dtype if dtype is None else dtype
    head.load_state_dict({name: tensor.to(device, dtype) for name, tensor in tensors.items()}, assign=True)
    return head.eval()


def save_head(head: DraftHead, directory: str | os.PathLike[str], *, dtype: torch.dtype | None = None) -> None:
    """Write `config.json` and `model.safetensors` into `directory`, in `dtype` (None: the head's own).

    Each file is written beside its place and renamed into it, so a reader never sees half a file.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = head.dtype if dtype is None else dtype
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in head.state_dict().items()}
    text = json.dumps({**head.config.to_dict(), "dtype": str(dtype).removeprefix("torch.")}, indent=2) + "\n"
    _write_atomically(folder / WEIGHTS, save(tensors, metadata={"format": "pt"}))
    _write_atomically(folder / CONFIG, text.encode())


def head_directory(name_or_path: str | os.PathLike[str], *, with_card: bool = False) -> Path:
    """The directory of a head, by alias of a shipped head, directory, or hub repository id, which is fetched.

    Args:
        name_or_path: the head.
        with_card: fetch `CARD_FILES` from the hub too.

    Raises:
        JetSpecError: no head is found under that name.
    """
    name = os.fspath(name_or_path)
    shipped = shipped_heads()
    if name in shipped:
        return shipped[name]
    if os.path.isdir(name):
        return Path(name)
    try:
        patterns = [CONFIG, "*.safetensors", "*.safetensors.index.json", *(CARD_FILES if with_card else ())]
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        aliases = ", ".join(shipped) or "none"
        raise JetSpecError(
            f"no draft head {name!r}: it is no directory, no shipped head (shipped: {aliases}), and the hub answered: "
            f"{str(error).splitlines()[0]}"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise JetSpecError(f"a draft head needs {path.name}, and {path.parent} has none")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise JetSpecError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise JetSpecError(f"{path} must hold a JSON object")
    return data


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors: of the one file where there is one, else of the shards that the index names."""
    files = [folder / WEIGHTS]
    if not files[0].is_file() and (folder / INDEX).is_file():
        weight_map = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise JetSpecError(f"{folder / INDEX} lacks weight_map")
        files = [folder / Path(name).name for name in sorted(set(weight_map.values()))]
    tensors: dict[str, Tensor] = {}
    for file in files:
        if not file.is_file():
            raise JetSpecError(f"the draft head's weights are incomplete: {file} does not exist")
        try:
            tensors |= load_file(file)
        except SafetensorError as error:
            raise JetSpecError(f"{file} is not a valid safetensors file: {error}") from error
    return tensors


def _check_tensors(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], folder: Path) -> None:
    missing, unknown = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted.keys())
    if missing or unknown:
        found = {"missing": missing, "unknown": unknown}
        problems = [f"{kind} tensors {_few(names)}" for kind, names in found.items() if names]
        raise JetSpecError(f"the draft head in {folder} does not fit its {CONFIG}: {'; '.join(problems)}")
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            raise JetSpecError(
                f"tensor {name} in {folder} has shape {tuple(tensor.shape)}, "
                f"its {CONFIG} asks for {tuple(wanted[name].shape)}"
            )


def _few(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _write_atomically(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
