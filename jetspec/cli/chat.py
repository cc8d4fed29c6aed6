"""`jetspec chat`: a conversation at the terminal, with a model in this process or on a server."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer

from jetspec.chat.backends import Backend, LocalBackend, ServerBackend
from jetspec.chat.conversation import Conversation
from jetspec.chat.session import Chat
from jetspec.chat.terminal import TerminalScreen, converse, new_prompt
from jetspec.cli.common import describe, messages, read_stdin, results
from jetspec.cli.options import (
    DEFAULT_TARGET,
    ChatTemplateKwargsOption,
    DeviceOption,
    DraftOptions,
    DtypeOption,
    EngineOptions,
    MaxTokensOption,
    ModelOptions,
    TemperatureOption,
    takes_groups,
)
from jetspec.client import OpenAIClient
from jetspec.errors import JetSpecError

#: Parameters that only apply to a server.
OF_SERVER = ("model", "api_key")


@takes_groups
def chat(
    context: typer.Context,
    draft: DraftOptions,
    engine: EngineOptions,
    target: Annotated[
        str | None,
        typer.Argument(help=f"Target model: alias, hub id, directory or .gguf file. By default {DEFAULT_TARGET}."),
    ] = None,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "auto",
    url: Annotated[
        str | None,
        typer.Option("--url", help="Talk to an OpenAI-compatible server instead, like http://localhost:8000/v1."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="Name of the model on the server. By default the only one that it lists."),
    ] = None,
    api_key: Annotated[str | None, typer.Option("--api-key", help="Key of the server.")] = None,
    system: Annotated[str | None, typer.Option("--system", "-s", help="System message.")] = None,
    max_tokens: MaxTokensOption = 1024,
    temperature: TemperatureOption = 0.0,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Seed that makes sampling repeatable.", show_default=False)
    ] = None,
    chat_template_kwargs: ChatTemplateKwargsOption = None,
) -> None:
    """Talk to a model.

    /help lists the commands of the chat. Ctrl-C stops an answer. After each answer, its speed and acceptance length
    are shown. If the standard input is no terminal, it is read as one message, and the answer is printed.
    """
    check_choice(context, url)
    text = None if sys.stdin.isatty() else read_stdin().strip()
    if text == "":
        raise JetSpecError("no message: standard input is empty")
    prompt = new_prompt() if text is None else None
    settings: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
    if seed is not None:
        settings["seed"] = seed

    async def run() -> None:
        if url is not None:
            backend, name = await on_server(url, model, api_key, settings, chat_template_kwargs)
        else:
            loading = ModelOptions(target or DEFAULT_TARGET, dtype, device)
            backend, name = in_process(loading, draft, engine, settings, chat_template_kwargs)
        screen = TerminalScreen(results, messages, show_reasoning=text is None)
        talk = Chat(backend, screen, Conversation(system))
        try:
            if prompt is None:
                await talk.ask(text or "")
            else:
                screen.note(f"{name}; /help lists the commands")
                await converse(talk, screen, prompt)
        finally:
            await backend.close()

    asyncio.run(run())


async def on_server(
    url: str, model: str | None, api_key: str | None, settings: dict[str, Any], kwargs: dict[str, Any] | None
) -> tuple[Backend, str]:
    """A backend that asks a server, and its name. JetSpecError if the server cannot be reached."""
    client = OpenAIClient(url, api_key=api_key)
    try:
        name = await client.model(model)
    except JetSpecError:
        await client.close()
        raise
    body = {"model": name, **settings, **({"chat_template_kwargs": kwargs} if kwargs else {})}
    return ServerBackend(client, body), f"{name} at {client.url}"


def in_process(
    model: ModelOptions,
    draft: DraftOptions,
    engine: EngineOptions,
    settings: dict[str, Any],
    kwargs: dict[str, Any] | None,
) -> tuple[Backend, str]:
    """A backend that runs a target, and its name. JetSpecError if it cannot be loaded or has no chat template."""
    target = model.load()
    from jetspec.async_llm import AsyncLLM
    from jetspec.inputs import render_chat
    from jetspec.sampling import SamplingParams

    render_chat(target, [{"role": "user", "content": "Hi"}], kwargs)
    llm = AsyncLLM(target, **draft.settings(), **engine.settings())
    return LocalBackend(llm, SamplingParams(**settings), kwargs), describe(llm.llm)


def check_choice(context: typer.Context, url: str | None) -> None:
    """Raise JetSpecError for options of a model in this process beside --url, and for those of a server without it."""
    local = ["target", "dtype", "device", *DraftOptions.__dataclass_fields__, *EngineOptions.__dataclass_fields__]
    given = next(_given(context, OF_SERVER if url is None else local), None)
    if given is not None:
        raise JetSpecError(
            f"{given}: is for a server; name it with --url, or leave {given} out"
            if url is None
            else f"{given}: is for a model in this process, and the server has its own; leave {given} or --url out"
        )


def _given(context: typer.Context, names: Iterable[str]) -> Iterator[str]:
    """The options among some parameters that the command line sets."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in names and getattr(source, "name", "") == "COMMANDLINE":
            yield parameter.name.upper() if parameter.param_type_name == "argument" else parameter.opts[0]
