"""What callers pass in: prompts, conversations, parameters and template arguments, checked and brought to one form."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.meta import find_undeclared_variables

from jetspec.engine.requests import is_list, plain_ids
from jetspec.errors import JetSpecError
from jetspec.models.target import Target, encode_text
from jetspec.sampling import SamplingParams

Prompt = str | list[int]
#: Messages of `role`, `content` and whatever else the chat template reads.
Conversation = Sequence[Mapping[str, Any]]
#: Arguments of a chat template, by name.
ChatTemplateKwargs = Mapping[str, Any]

_CONVERSATION_EXAMPLE = "[{'role': 'user', 'content': 'Hi'}]"
#: Variables of a template that are set for it: by this package and by transformers.
_SET_VARIABLES = frozenset({"messages", "add_generation_prompt"})
_TEMPLATE_FUNCTIONS = frozenset({"raise_exception", "strftime_now"})


def as_prompts(prompts: Any) -> list[Prompt]:
    """One prompt or a list of them as a list of texts and lists of plain integers.

    Raises:
        JetSpecError: something is neither a text nor token ids; the message names the prompt's place.
    """
    if isinstance(prompts, str):
        return [prompts]
    if not is_list(prompts):
        raise JetSpecError(f"prompts: must be a text, token ids, or a list of such prompts, not {prompts!r:.80}")
    items: list[Any] = list(prompts)
    # The ids of one prompt start with a number, or with the element of an array or a tensor.
    if items and (isinstance(items[0], int) or getattr(items[0], "ndim", None) == 0):
        items = [items]
    return [checked_prompt(prompt, f"prompt {index}") for index, prompt in enumerate(items)]


def checked_prompt(prompt: Any, name: str) -> Prompt:
    """A text as it is; token ids as plain integers, whether they came in a list, an array or a tensor.

    Raises:
        JetSpecError: the prompt is neither; the message calls it `name`.
    """
    if isinstance(prompt, str):
        return prompt
    ids = plain_ids(prompt)
    if ids is None:
        raise JetSpecError(f"{name}: must be a text or a list of token ids, not {prompt!r:.80}")
    return ids


def as_conversations(messages: Any) -> Sequence[Any]:
    """One conversation or a list of them as a list; `render_chat` checks each conversation.

    Raises:
        JetSpecError: `messages` is no list.
    """
    if not is_list(messages):
        raise JetSpecError(
            f"messages: must be a list of messages, as {_CONVERSATION_EXAMPLE}, or a list of such lists, "
            f"not {messages!r:.80}"
        )
    return [messages] if len(messages) and isinstance(messages[0], Mapping) else messages


def params_for(n: int, params: SamplingParams | Sequence[SamplingParams] | None) -> list[SamplingParams]:
    """The parameters of each of `n` prompts, from one set for all or a list.

    Raises:
        JetSpecError: there are other objects, or not as many as there are prompts.
    """
    if params is None:
        return [SamplingParams()] * n
    if isinstance(params, SamplingParams):
        return [params] * n
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise JetSpecError(f"params: must be SamplingParams or a list of them, not {params!r:.80}")
    if len(params) != n:
        raise JetSpecError(f"params: {len(params)} given for {n} prompts; give one for all, or one for each")
    return list(params)


def encode(target: Target, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Token ids of a text.

    Raises:
        JetSpecError: the target has no tokenizer, or the text cannot be encoded as UTF-8.
    """
    return encode_text(_tokenizer(target), text, add_special_tokens=add_special_tokens)


def render_chat(target: Target, messages: Any, chat_template_kwargs: ChatTemplateKwargs | None = None) -> str:
    """The prompt that the target's chat template makes of a conversation, ready for the assistant's turn.

    Raises:
        JetSpecError: `messages` is no conversation, the target has no chat template, or the template refuses the
            messages or does not use one of the arguments.
    """
    if not is_list(messages) or not all(isinstance(m, Mapping) and "role" in m for m in messages):
        raise JetSpecError(
            f"messages: a conversation is a list of messages, as {_CONVERSATION_EXAMPLE}, not {messages!r:.80}"
        )
    if not len(messages):
        raise JetSpecError("messages is an empty conversation: give at least one message")
    tokenizer = _tokenizer(target)
    if tokenizer.chat_template is None:
        raise JetSpecError(f"target {target.name!r} has no chat template: use generate with a plain prompt")
    kwargs = checked_chat_template_kwargs(tokenizer, chat_template_kwargs)
    try:
        text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **kwargs)
    except (jinja2.TemplateError, TypeError, KeyError) as error:
        raise JetSpecError(f"messages: the target's chat template refuses them: {error}") from error
    return text


def checked_chat_template_kwargs(tokenizer: Any, kwargs: ChatTemplateKwargs | None) -> dict[str, Any]:
    """Arguments for a tokenizer's chat template, as {"enable_thinking": False}; None is none.

    Raises:
        JetSpecError: the template does not use one of them, or it is set already; the message suggests a name.
    """
    if kwargs is None:
        return {}
    if not isinstance(kwargs, Mapping):
        raise JetSpecError(
            f"chat_template_kwargs={kwargs!r:.80}: must map names to values, as {{'enable_thinking': False}}"
        )
    template = getattr(tokenizer, "chat_template", None)
    if kwargs and template is None:
        raise JetSpecError("chat_template_kwargs: the target has no chat template; leave them out")
    templates = template.values() if isinstance(template, Mapping) else [template]
    for name in kwargs:
        used = frozenset().union(*map(_template_variables, templates))
        if name in _SET_VARIABLES:
            raise JetSpecError(f"chat_template_kwargs: {name!r} is set already; leave it out")
        if name not in used:
            close = get_close_matches(str(name), used, 1)
            fix = f"did you mean {close[0]}?" if close else f"it uses {', '.join(sorted(used)) or 'none'}"
            raise JetSpecError(f"chat_template_kwargs: the target's chat template does not use {name!r}; {fix}")
    return dict(kwargs)


@lru_cache(maxsize=32)
def _template_variables(template: str) -> frozenset[str]:
    """Names of the arguments that a chat template reads."""
    environment = jinja2.Environment(extensions=[loopcontrols])
    # A tag of transformers' own, which marks what the assistant wrote.
    source = re.sub(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}", "", template)
    try:
        names = find_undeclared_variables(environment.parse(source))
    except jinja2.TemplateError as error:
        raise JetSpecError(f"the target's chat template is not valid: {error}") from error
    return frozenset(names) - _SET_VARIABLES - _TEMPLATE_FUNCTIONS - frozenset(environment.globals)


def _tokenizer(target: Target) -> Any:
    if target.tokenizer is None:
        raise JetSpecError(f"target {target.name!r} has no tokenizer: give prompts as token ids")
    return target.tokenizer
