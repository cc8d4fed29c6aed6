"""JetSpec: lossless speculative decoding with causal parallel draft trees.

>>> from jetspec import LLM, SamplingParams
>>> llm = LLM("smollm2-135m", draft="smollm2-135m")
>>> outputs = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=32))
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jetspec.async_llm import AsyncLLM
    from jetspec.errors import JetSpecError
    from jetspec.llm import LLM
    from jetspec.sampling import SamplingParams, StructuredOutputsParams

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "JetSpecError", "SamplingParams", "StructuredOutputsParams", "__version__"]

_HOMES = {
    "LLM": "jetspec.llm",
    "AsyncLLM": "jetspec.async_llm",
    "SamplingParams": "jetspec.sampling",
    "StructuredOutputsParams": "jetspec.sampling",
    "JetSpecError": "jetspec.errors",
}


def __getattr__(name: str) -> Any:
    """Public names load on first use, so that `import jetspec` and `jetspec --help` do not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'jetspec' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
