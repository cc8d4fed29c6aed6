"""Draft heads on disk and on the hub: `config.json` and safetensors, in the published format."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
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
from jetspec.files import write_atomically
from jetspec.head.base import DraftHead
from jetspec.head.build import new_head
from jetspec.head.config import HeadConfig
from jetspec.head.published import causal_flag

logger = logging.getLogger(__name__)

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
        JetSpecError: nothing is found, the config is not valid or contradicts `causal`, or tensors are missing, unknown
            or misshapen.
    """
    folder = head_directory(name_or_path)
    data = _read_json(folder / CONFIG)
    config = HeadConfig.from_dict(data, causal=causal)
    if config.kind == "parallel" and causal is None and causal_flag(data) is None:
        logger.warning(
            "draft head %s: its config does not say whether its block is causal; it is loaded as bidirectional, as "
            "DFlash heads are. Pass causal=True for a causal head, or causal=False to silence this.",
            name_or_path,
        )
    tensors = _read_tensors(folder)
    with torch.device("meta"):
        head = new_head(config)
    _check_tensors(tensors, head.state_dict(), folder)
    own = tensors["fc.weight"].dtype
    chosen = own if dtype is None else head_dtype(tensors.values(), dtype)
    if dtype not in (None, chosen):
        logger.warning("draft head %s: stays in %s, whose values may overflow in %s", name_or_path, own, dtype)
    head.load_state_dict({name: tensor.to(device, chosen) for name, tensor in tensors.items()}, assign=True)
    return head.eval()


def head_dtype(tensors: Iterable[Tensor], wanted: torch.dtype) -> torch.dtype:
    """The number type to run a head in where `wanted` is asked for: `wanted`, or the type of its tensors.

    It is the latter where a weight overflows in `wanted`. It is also the latter for a bfloat16 head and float16: the
    activations of such a head were only ever held within the much larger range of bfloat16.
    """
    tensors = list(tensors)
    own = tensors[0].dtype
    limit = torch.finfo(wanted).max
    if torch.finfo(own).max <= limit:
        return wanted
    overflows = any(bool((tensor.abs() > limit).any()) for tensor in tensors)
    return own if overflows or (own, wanted) == (torch.bfloat16, torch.float16) else wanted


def save_head(head: DraftHead, directory: str | os.PathLike[str], *, dtype: torch.dtype | None = None) -> None:
    """Write `config.json` and `model.safetensors`.

    Each file is written beside its place and renamed into it, so a reader never sees half a file.

    Args:
        head: the head.
        directory: the folder, made where it does not exist.
        dtype: the number type to write; None: the head's own.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = head.dtype if dtype is None else dtype
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in head.state_dict().items()}
    text = json.dumps({**head.config.to_dict(), "dtype": str(dtype).removeprefix("torch.")}, indent=2) + "\n"
    write_atomically(folder / WEIGHTS, save(tensors, metadata={"format": "pt"}))
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
