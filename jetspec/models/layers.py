"""The decoder layers of a transformers model, what they put out, and other forwards in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedModel

from jetspec.errors import JetSpecError


def decoder_of(model: PreTrainedModel, num_layers: int) -> nn.Module:
    """The text decoder: what the model calls so, or the module in it that holds the list of `num_layers` layers."""
    decoder: nn.Module = cast(Any, model).get_decoder()
    holders = [
        module
        for module in decoder.modules()
        if any(isinstance(child, nn.ModuleList) and len(child) == num_layers for child in module.children())
    ]
    return decoder if decoder in holders or not holders else holders[0]


def decoder_layers(decoder: nn.Module, num_layers: int) -> nn.ModuleList:
    """The decoder's list of layers. JetSpecError where there is no single list of that length."""
    lists = [child for child in decoder.children() if isinstance(child, nn.ModuleList) and len(child) == num_layers]
    if len(lists) != 1:
        raise JetSpecError(
            f"{type(decoder).__name__} has no single list of {num_layers} decoder layers; this model is not supported"
        )
    return lists[0]


@contextmanager
def captured_outputs(modules: list[nn.Module]) -> Iterator[list[Tensor]]:
    """Collect the first output tensor of each module, in the order of `modules`, while the context is open."""
    outputs: list[Any] = [None] * len(modules)

    def keep(index: int, _module: nn.Module, _args: Any, output: Any) -> None:
        outputs[index] = output if isinstance(output, Tensor) else output[0]

    handles = [module.register_forward_hook(partial(keep, index)) for index, module in enumerate(modules)]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def forwards_replaced(modules: nn.ModuleList, forwards: list[Callable[..., Any]]) -> Iterator[None]:
    """While the context is open the modules run these forwards; their own where there are none."""
    replaced = list(zip(modules, forwards))
    before = [vars(module).get("forward") for module, _ in replaced]
    try:
        for module, forward in replaced:
            module.forward = forward
        yield
    finally:
        for (module, _), own in zip(replaced, before):
            if own is None:
                del module.forward
            else:
                module.forward = own
