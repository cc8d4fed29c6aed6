"""`draft="auto"`: the shipped head, else a published one, else prompt lookup; and one line that says which."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest

import jetspec
from jetspec import LLM, AsyncLLM, JetSpecError, SamplingParams, drafts
from jetspec.drafts import load_drafter
from jetspec.engine import HeadDrafter, NgramDrafter
from jetspec.head import checkpoint, head_for_target, load_head, save_head
from jetspec.models.target import Target
from tests.helpers.cli import call
from tests.helpers.tiny import tiny_target

HUB_ID = "someone/tiny-llama"


def named(name: str, **settings: Any) -> Target:
    target = tiny_target("llama", text=True, **settings)
    target.name = name
    return target


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads") / "tiny"
    save_head(head_for_target(named("x"), num_layers=1, block_size=4, num_aux_layers=2, mask_token_id=7), folder)
    return folder


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> dict[str, drafts.PublishedHead]:
    """The table of published heads, for tests to fill."""
    table: dict[str, drafts.PublishedHead] = {}
    monkeypatch.setattr(drafts, "published_heads", lambda: table)
    return table


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("jetspec")]


@pytest.fixture(autouse=True)
def _listen(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jetspec")


def test_a_shipped_head_comes_first(
    head: Path, published: dict, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shipped = {"tiny": head}
    monkeypatch.setattr(drafts, "shipped_heads", lambda: shipped)
    monkeypatch.setattr(checkpoint, "shipped_heads", lambda: shipped)
    published["tiny"] = drafts.PublishedHead("someone/else", True, "https://example.org")
    drafter = load_drafter("auto", named("tiny"))
    assert isinstance(drafter, HeadDrafter)
    assert lines(caplog) == ["draft: the head 'tiny', which ships with JetSpec"]


def test_a_shipped_head_is_known_by_the_hub_id_of_its_target() -> None:
    assert drafts.shipped_head("HuggingFaceTB/SmolLM2-135M-Instruct") == "smollm2-135m"
    assert drafts.shipped_head("smollm2-135m") == "smollm2-135m"
    assert drafts.shipped_head("HuggingFaceTB/SmolLM2-360M-Instruct") is None


@pytest.mark.parametrize("name", [HUB_ID, HUB_ID.upper()])
@pytest.mark.parametrize("method", ["tree", "chain"])
def test_a_published_head_comes_next(
    head: Path, published: dict, caplog: pytest.LogCaptureFixture, name: str, method: str
) -> None:
    published[HUB_ID.lower()] = drafts.PublishedHead(str(head), True, "https://example.org")
    drafter = load_drafter("auto", named(name), method=method, head_window=9)
    assert isinstance(drafter, HeadDrafter)
    assert (drafter.chain, drafter.window) == (method == "chain", 9)
    assert lines(caplog) == [f"draft: the head {str(head)!r}, published for {name}"]


@pytest.mark.parametrize("method", ["tree", "chain"])
def test_prompt_lookup_comes_last(published: dict, caplog: pytest.LogCaptureFixture, method: str) -> None:
    drafter = load_drafter("auto", named(HUB_ID), method=method, head_window=9)
    assert isinstance(drafter, NgramDrafter)
    assert (drafter.max_matches == 1) == (method == "chain"), "one match gives a chain"
    [line] = lines(caplog)
    assert line.startswith(f"draft: prompt lookup, because no head is known for {HUB_ID!r}")


@pytest.mark.parametrize("problem", ["unreachable", "unfit", "unreadable"])
def test_a_published_head_that_cannot_be_used_says_why(
    head: Path, published: dict, tmp_path: Path, caplog: pytest.LogCaptureFixture, problem: str
) -> None:
    target = named(HUB_ID, num_hidden_layers=4) if problem == "unfit" else named(HUB_ID)
    (tmp_path / "config.json").write_text("{")
    name, why = {
        "unreachable": ("someone/no-such-head", "the hub answered"),
        "unfit": (str(head), "num_target_layers is 6, the target's is 4"),
        "unreadable": (str(tmp_path), "not valid JSON"),
    }[problem]
    published[HUB_ID] = drafts.PublishedHead(name, True, "https://example.org")
    assert isinstance(load_drafter("auto", target), NgramDrafter)
    [record] = [r for r in caplog.records if r.name.startswith("jetspec")]
    assert record.levelno == logging.WARNING, "shown by default: nothing falls back silently"
    assert record.getMessage().startswith(f"draft: prompt lookup, because the head {name!r}")
    assert why in record.getMessage()
    assert "\n" not in record.getMessage()


def test_methods_without_a_head(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(load_drafter("auto", named(HUB_ID), method="ngram"), NgramDrafter)
    assert lines(caplog) == [], "it was asked for"
    with pytest.raises(JetSpecError, match="draft='auto': draft_method='model' needs a small language model"):
        load_drafter("auto", named(HUB_ID), method="model")
    with pytest.raises(JetSpecError, match="draft_method"):
        load_drafter("auto", named(HUB_ID), method="magic")
    assert load_drafter(None, named(HUB_ID)) is None


@pytest.mark.parametrize(
    ("draft", "method"), [(None, "tree"), ("auto", "ngram"), ("x", "model"), ("loaded head", "tree")]
)
def test_a_causal_flag_without_a_head_to_load_is_refused(head: Path, draft: Any, method: str) -> None:
    if draft == "loaded head":
        draft = load_head(head)
    with pytest.raises(JetSpecError, match="head_causal=True"):
        load_drafter(draft, named(HUB_ID), method=method, head_causal=True)


@pytest.mark.parametrize("value", [1, "yes"])
def test_a_causal_flag_is_a_boolean(head: Path, value: Any) -> None:
    with pytest.raises(JetSpecError, match="head_causal="):
        load_drafter(head, named(HUB_ID), head_causal=value)


def test_auto_is_the_default_of_llm_and_async_llm() -> None:
    target, params = named(HUB_ID), SamplingParams(temperature=0, max_tokens=8)
    default, plain = LLM(target, num_blocks=40), LLM(target, None, num_blocks=40)
    assert isinstance(default.engine.drafter, NgramDrafter)
    assert plain.engine.drafter is None
    [expected] = plain.generate("abab", params)
    assert default.generate("abab", params)[0].outputs[0].token_ids == expected.outputs[0].token_ids

    async def answer() -> list[int]:
        async with AsyncLLM(target, num_blocks=40) as llm:
            assert isinstance(llm.llm.engine.drafter, NgramDrafter)
            return (await (await llm.submit("abab", params)).result()).outputs[0].token_ids

    assert asyncio.run(answer()) == expected.outputs[0].token_ids


def test_the_table_of_published_heads() -> None:
    raw = json.loads((Path(jetspec.__file__).parent / "data" / "published_heads.json").read_text())
    assert len({entry["target"].lower() for entry in raw}) == len(raw)
    for entry in raw:
        assert set(entry) == {"target", "head", "causal", "source"}
        assert entry["target"].count("/") == entry["head"].count("/") == 1
        assert isinstance(entry["causal"], bool)
        assert entry["source"].startswith(("https://huggingface.co/", "https://github.com/"))
    table = drafts.published_heads()
    assert len(table) == len(raw)
    assert table["qwen/qwen3-8b"].head == "JetSpec/jetspec-qwen3-8b"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    target = named("x", max_position_embeddings=512)
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "Hello", "--max-tokens", 4),
        ("verify", "--max-tokens", 4, "--samples", 100, "--raw"),
        ("inspect", "Hello Hello"),
        ("demo", "--max-tokens", 4),
    ],
)
@pytest.mark.parametrize("draft", [(), ("--draft", "auto")])
def test_a_first_command_works(directory: Path, command: tuple[object, ...], draft: tuple[str, ...]) -> None:
    result = call(*command, "--target", directory, *draft)
    assert result.exit_code == 0, result.output
    said = [line for line in result.stderr.splitlines() if line.startswith("draft: ")]
    assert len(said) == 1, result.stderr
    assert "prompt lookup, because no head is known" in said[0]
    assert "draft: " not in result.stdout


def test_the_line_is_no_part_of_json(directory: Path) -> None:
    result = call("generate", "Hello", "--max-tokens", 4, "--target", directory, "--json")
    assert json.loads(result.stdout)["completion_tokens"] == 4
    assert "prompt lookup" in result.stderr
