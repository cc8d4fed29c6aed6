"""The configuration of a load test."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from jetspec.client import base_url
from jetspec.config import Config, option
from jetspec.errors import JetSpecError

SERVER, REQUESTS, LOAD, OBJECTIVES = "Server", "Requests", "Load", "Service level objectives"
#: Fields of a request that the load test sets itself.
OWN_FIELDS = ("model", "messages", "prompt", "max_tokens", "temperature", "seed", "stream", "stream_options")

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class ServeConfig(Config):
    """A load test: the same number of requests at every rate, one rate after the other.

    Each field is described in its ``option``, which ``jetspec bench serve --help`` shows.

    Raises:
        JetSpecError: a value has another type or is out of range, or two fields disagree; the message names the field.
    """

    url: str = option(help="Base of the server's API, like http://localhost:8000/v1.", argument=True)
    output: Path = option(
        help="Folder of the run. The same command resumes the run that is there.", flags=("--output", "-o")
    )

    model: str | None = option(
        None, help="Name of the model. By default the only one that the server lists.", group=SERVER
    )
    api_key: str | None = option(None, help="Key of the API. It is not recorded.", group=SERVER)
    endpoint: Literal["chat", "completions"] = option(
        "chat",
        help="How texts are sent: as a user's message, or as they are. Conversations always go to chat, token ids to "
        "completions.",
        group=SERVER,
    )
    extra_body: dict[str, Any] | None = option(
        None, help='Further fields of every request, as JSON: {"ignore_eos": true}.', group=SERVER
    )

    dataset: str = option(
        "gsm8k",
        help="Data set: gsm8k, math500, humaneval, mt_bench (its first turns), or a source of prompts.",
        group=REQUESTS,
    )
    data: Path | None = option(
        None, help="Folder with local copies of the data sets. By default they come from the hub.", group=REQUESTS
    )
    num_prompts: int = option(
        0, help="Questions of the data set to draw from, spread evenly over it. 0 takes all.", group=REQUESTS, ge=0
    )
    max_tokens: int = option(
        256, help="Maximum tokens of an answer.", group=REQUESTS, flags=("--max-tokens", "-n"), ge=1
    )
    temperature: float = option(
        0.0, help="Sampling temperature; 0 is greedy.", group=REQUESTS, ge=0, allow_inf_nan=False
    )

    rates: tuple[Rate, ...] = option(
        (1.0,),
        help="Mean requests a second, sent at random times whatever the server does. May be repeated.",
        group=LOAD,
        flags=("--rate", "-r"),
        min_length=1,
    )
    num_requests: int = option(100, help="Requests at each rate, at most.", group=LOAD, ge=1)
    max_duration_s: float = option(
        120.0,
        help="Seconds after which no request is sent at a rate, so that fewer are sent at a low one.",
        group=LOAD,
        gt=0,
        allow_inf_nan=False,
    )
    max_concurrency: int | None = option(
        None, help="Requests that run at a time, at most. Others wait, and their wait counts.", group=LOAD, ge=1
    )
    timeout_s: float = option(
        600.0, help="Seconds after which a request counts as failed.", group=LOAD, gt=0, allow_inf_nan=False
    )
    warm_up: int = option(
        4, help="Requests that are sent one after the other before the first rate, unmeasured.", group=LOAD, ge=1
    )
    seed: int = option(0, help="Seed of the times of arrival and the order of the questions.", group=LOAD, ge=0)

    slo_ttft_ms: float | None = option(
        None, help="Time to first token that a good request has at most.", group=OBJECTIVES, gt=0
    )
    slo_tpot_ms: float | None = option(
        None, help="Time per output token that a good request has at most.", group=OBJECTIVES, gt=0
    )
    slo_e2e_ms: float | None = option(
        None, help="Time to the end of the answer that a good request has at most.", group=OBJECTIVES, gt=0
    )

    @field_validator("output", "data", mode="before")
    @classmethod
    def _text_to_path(cls, value: Any) -> Any:
        return Path(value) if isinstance(value, str) else value

    @field_validator("url")
    @classmethod
    def _to_base(cls, url: str) -> str:
        return base_url(url)

    @model_validator(mode="after")
    def _check(self) -> Self:
        for rate in self.rates:
            if self.rates.count(rate) > 1:
                raise JetSpecError(f"rates={rate:g}: is given twice; leave one out")
        for name in OWN_FIELDS:
            if name in (self.extra_body or {}):
                raise JetSpecError(f"extra_body: must not hold {name!r}, which the load test sets; leave it out")
        return self

    def result_settings(self) -> dict[str, Any]:
        """The settings that decide the results, as JSON holds them: all but the output folder and the key."""
        return self.model_dump(mode="json", exclude={"output", "api_key"})
