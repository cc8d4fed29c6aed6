"""Draft heads on disk and on the hub: `config.json` and safetensors, in any of the published layouts."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from importlib import resources
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from jetspec.errors import JetSpecError
from jetspec.files import write_atomically
from jetspec.head.base import DraftHead
from jetspec.head.build import new_head
from jetspec.head.layouts import own_tensors, published_tensors, read_layout
from jetspec.head.speculators_writer import speculators_config

logger = logging.getLogger(__name__)

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
#: The file of heads of the original EAGLE repository; it is read without running code.
PICKLED = "pytorch_model.bin"
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
    """Load a head.

    Args:
        name_or_path: the alias of a shipped head, a directory, or a hub repository id.
        device: where to put it.
        dtype: the number type to load it in, usually the target's; None: the checkpoint's own. A checkpoint whose
            values may grow beyond what float16 can hold stays in its own type where float16 is asked for, and a
            warning is logged: see `head_dtype`.
        causal: whether the block is causal, for a config without a causal flag. With None such a parallel head is
            loaded as bidirectional, as its publisher's class does, and a warning is logged.

    Raises:
        JetSpecError: nothing is found, the layout is not known, the config is not valid or contradicts `causal`, or
            tensors are missing, unknown or misshapen.
    """
    folder = head_directory(name_or_path)
    data, tensors = _read_json(folder / CONFIG), _read_tensors(folder)
    layout = read_layout(data, tensors.keys(), causal)
    config = layout.config
    if causal is None and not layout.says_causal:
        logger.warning(
            "draft head %s: its config does not say whether its block is causal; it is loaded as bidirectional, as "
            "DFlash heads are. Pass causal=True for a causal head, or causal=False to silence this.",
            name_or_path,
        )
    tensors = own_tensors(tensors, config)
    with torch.device("meta"):
        head = new_head(config)
    _check_tensors(tensors, head.state_dict(), folder, layout.file_name)
    own = tensors["fc.weight"].dtype
    chosen = own if dtype is None else head_dtype(tensors.values(), dtype)
    if dtype not in (None, chosen):
        logger.warning("draft head %s: stays in %s, whose values may overflow in %s", name_or_path, own, dtype)
    head.load_state_dict(_in_dtype(tensors, chosen, device), assign=True)
    head.layout = layout.name
    return head.eval()


def head_dtype(tensors: Iterable[Tensor], wanted: torch.dtype) -> torch.dtype:
    """The number type to run a head in where `wanted` is asked for: `wanted`, or the type of its tensors.

    It is the latter where a weight overflows in `wanted`. It is also the latter for a bfloat16 head and float16: the
    activations of such a head were only ever held within the much larger range of bfloat16.
    """
    tensors = [tensor for tensor in tensors if tensor.is_floating_point()]
    own = tensors[0].dtype
    limit = torch.finfo(wanted).max
    if torch.finfo(own).max <= limit:
        return wanted
    overflows = any(bool((tensor.abs() > limit).any()) for tensor in tensors)
    return own if overflows or (own, wanted) == (torch.bfloat16, torch.float16) else wanted


def save_head(head: DraftHead, directory: str | os.PathLike[str], *, dtype: torch.dtype | None = None) -> None:
    """Write `config.json` and `model.safetensors`, in the layout of DFlash heads or else in that of speculators.

    Each file is written beside its place and renamed into it, so a reader never sees half a file.

    Args:
        head: the head.
        directory: the folder, made where it does not exist.
        dtype: the number type to write; None: the head's own.
    """
    config = head.config
    _write(head, directory, config.to_dict() if config.has_dflash_layout else speculators_config(config, None), dtype)


def save_for_speculators(
    head: DraftHead, directory: str | os.PathLike[str], verifier: str, *, dtype: torch.dtype | None = None
) -> None:
    """Write a head in speculators' layout; see `save_head`.

    Args:
        head: the head.
        directory: the folder, made where it does not exist.
        verifier: hub id or directory of the target, from which speculators takes the embedding and the lm_head of a
            head that borrows them.
        dtype: the number type to write; None: the head's own.

    Raises:
        JetSpecError: that layout has no head of this kind.
    """
    _write(head, directory, speculators_config(head.config, verifier), dtype)


def _write(
    head: DraftHead, directory: str | os.PathLike[str], config: Mapping[str, Any], dtype: torch.dtype | None
) -> None:
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = head.dtype if dtype is None else dtype
    tensors = published_tensors(_in_dtype(head.state_dict(), dtype, "cpu"), head.config)
    text = json.dumps({**config, "dtype": str(dtype).removeprefix("torch.")}, indent=2) + "\n"
    content = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    write_atomically(folder / WEIGHTS, save(content, metadata={"format": "pt"}))
    write_atomically(folder / CONFIG, text.encode())


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
    try:
        if name and Path(name).is_dir():  # without a name, it would be the current directory
            return Path(name)
        patterns = [CONFIG, "*.safetensors", "*.safetensors.index.json", *(CARD_FILES if with_card else ())]
        folder = Path(snapshot_download(name, allow_patterns=patterns))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(name, allow_patterns=[*patterns, PICKLED]))
        return folder
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
    if not files[0].is_file() and not (folder / INDEX).is_file() and (folder / PICKLED).is_file():
        return _read_pickled(folder / PICKLED)
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


def _read_pickled(file: Path) -> dict[str, Tensor]:
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise JetSpecError(f"{file} holds more than tensors, or is broken: {str(error).splitlines()[0]}") from error
    if not isinstance(tensors, dict) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise JetSpecError(f"{file} must hold a mapping from names to tensors")
    return tensors


def _in_dtype(tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device | str) -> dict[str, Tensor]:
    """Tensors on a device, those of floating point numbers in `dtype`."""
    return {
        name: tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)
        for name, tensor in tensors.items()
    }


def _check_tensors(
    tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], folder: Path, file_name: Callable[[str], str]
) -> None:
    """JetSpecError, with the names in the files, where tensors are missing, unknown or misshapen."""
    missing, unknown = (
        sorted(map(file_name, names)) for names in (wanted.keys() - tensors.keys(), tensors.keys() - wanted.keys())
    )
    if missing or unknown:
        found = {"missing": missing, "unknown": unknown}
        problems = [f"{kind} tensors {_few(names)}" for kind, names in found.items() if names]
        raise JetSpecError(f"the draft head in {folder} does not fit its {CONFIG}: {'; '.join(problems)}")
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            raise JetSpecError(
                f"tensor {file_name(name)} in {folder} has shape {tuple(tensor.shape)}, "
                f"its {CONFIG} asks for {tuple(wanted[name].shape)}"
            )


def _few(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
