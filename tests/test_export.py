"""An exported head loads back to equal logits, is what vLLM reads, and reaches the hub whole."""

from __future__ import annotations

import json
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

import jetspec
from jetspec.cli import app
from jetspec.errors import JetSpecError
from jetspec.export import check_for_vllm, export_hub
from jetspec.head import checkpoint, head_for_target, load_head, save_head
from jetspec.models.target import Target
from tests.helpers.drafted import check_drafts, published_rounds
from tests.helpers.published_heads import eagle3
from tests.helpers.tiny import tiny_target

#: What belongs to a head. A training configuration names the user's own paths, and logs are of no use to others.
CARD_FILES = ["LICENSE", "NOTICE.txt", "README.md", "acceptance.png"]
FILES = sorted([*CARD_FILES, "config.json", "model.safetensors"])


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(seed=2)


@pytest.fixture(scope="module")
def folder(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head as training leaves it."""
    folder = tmp_path_factory.mktemp("head")
    head = head_for_target(target, num_layers=2, block_size=4, num_aux_layers=2, mask_token_id=127)
    save_head(head, folder)
    for name in (*CARD_FILES, "train_config.json", "metrics.jsonl", "training_state.pt"):
        (folder / name).write_bytes(f"the head's own {name}\n".encode())
    (folder / "checkpoints").mkdir()
    return folder


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


def test_vllm_is_offered_no_autoregressive_head(target: Target) -> None:
    head = head_for_target(target, kind="autoregressive", num_layers=1, block_size=4, num_aux_layers=2)
    with pytest.raises(JetSpecError, match="no autoregressive head"):
        check_for_vllm(head)


def test_an_output_that_is_no_directory_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    result = call("--draft", folder, "--to", "directory", "--output", tmp_path / "file")
    assert (result.exit_code, result.exception.__class__) == (1, SystemExit)
    assert "output: cannot write to" in result.stderr


@pytest.fixture(params=["alias", "directory", "hub cache directory", "hub id"])
def source(request: pytest.FixtureRequest, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The same head under each kind of name it may have."""
    blobs, snapshot = tmp_path / "models--me--head" / "blobs", tmp_path / "models--me--head" / "snapshots" / "1234"

    def download(name: str, *, allow_patterns: list[str]) -> str:
        """A snapshot as the hub's cache keeps it: links to blobs, for the files that were asked for."""
        assert name == "me/head"
        blobs.mkdir(parents=True)
        snapshot.mkdir(parents=True)
        for path in folder.iterdir():
            if path.is_file() and any(fnmatch(path.name, pattern) for pattern in allow_patterns):
                (blobs / f"blob-{path.name}").write_bytes(path.read_bytes())
                (snapshot / path.name).symlink_to(blobs / f"blob-{path.name}")
        return str(snapshot)

    monkeypatch.setattr(checkpoint, "snapshot_download", download)
    monkeypatch.setattr(checkpoint, "shipped_heads", lambda: {"tiny-alias": folder})
    if request.param == "hub cache directory":
        return download("me/head", allow_patterns=["*"])
    return {"alias": "tiny-alias", "directory": str(folder), "hub id": "me/head"}[request.param]


def test_every_file_of_a_head_is_exported(folder: Path, source: str, tmp_path: Path) -> None:
    result = call("--draft", source, "--to", "directory", "--output", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == FILES
    assert json.loads(result.stdout)["files"] == FILES
    for name in CARD_FILES:
        copy = tmp_path / "out" / name
        assert copy.read_bytes() == (folder / name).read_bytes()
        assert not copy.is_symlink()


def test_the_shipped_head_keeps_its_card(tmp_path: Path) -> None:
    result = call("--draft", "smollm2-135m", "--to", "directory", "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    shipped = Path(jetspec.__file__).parent / "heads" / "smollm2-135m"
    assert (tmp_path / "out" / "README.md").read_bytes() == (shipped / "README.md").read_bytes()


def test_a_head_is_exported_onto_itself(target: Target, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "head")
    before = logits(target, folder)
    result = call("--draft", tmp_path / "head", "--to", "directory", "--output", tmp_path / "head")
    assert result.exit_code == 0, result.output
    assert torch.equal(logits(target, tmp_path / "head"), before)
    assert (tmp_path / "head" / "README.md").read_bytes() == (folder / "README.md").read_bytes()


def logits(target: Target, folder: Path) -> torch.Tensor:
    head = load_head(folder, dtype=torch.float32)
    aux_hidden_states = torch.randn(9, 2 * target.hidden_size, generator=torch.Generator().manual_seed(0))
    block = target.embed(torch.tensor([[1, 127, 127, 127]]))
    return target.lm_head(head.forward_train(head.context(aux_hidden_states), block, torch.tensor([9])))


@pytest.mark.parametrize("destination", ["directory", "vllm"])
def test_an_exported_directory_loads_back_to_equal_logits(
    target: Target, folder: Path, tmp_path: Path, destination: str
) -> None:
    result = call("--draft", folder, "--to", destination, "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert torch.equal(logits(target, tmp_path / "out"), logits(target, folder))
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert files == FILES


def test_what_vllm_reads(target: Target, folder: Path, tmp_path: Path) -> None:
    """Its loader takes the tensors' names and these fields; embedding and output layer are the target's."""
    result = call("--draft", folder, "--to", "vllm", "--output", tmp_path, "--dtype", "bfloat16", "--json")
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["DFlashDraftModel"], "qwen3")
    assert config["dflash_config"].items() >= {"causal": True, "mask_token_id": 127, "target_layer_ids": [1, 3]}.items()
    assert config["dtype"] == "bfloat16"
    tensors = load_file(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert {name.split(".")[0] for name in tensors} == {"fc", "hidden_norm", "layers", "norm"}
    assert json.loads(result.stdout)["speculative_config"] == {
        "method": "dflash",
        "model": str(tmp_path),
        "num_speculative_tokens": 3,
    }


def test_heads_that_vllm_would_misread_are_refused(folder: Path) -> None:
    head = load_head(folder)
    head.transition = torch.nn.Linear(2, 2, bias=False)
    with pytest.raises(JetSpecError, match=r"vLLM reads no transition\.weight"):
        check_for_vllm(head)
    shifted = load_head(folder)
    object.__setattr__(shifted.config, "shifted", True)
    with pytest.raises(JetSpecError, match="shifted"):
        check_for_vllm(shifted)


class Hub:
    """Stands in for the hub's API."""

    def __init__(self, copies: Path) -> None:
        self.copies = copies
        self.calls: list[dict[str, Any]] = []

    def create_repo(self, repository: str, **options: Any) -> str:
        if "/" not in repository:
            raise OSError("401 Unauthorized\nmore")
        self.calls.append({"repository": repository, **options})
        return f"https://example.org/{repository}"

    def upload_folder(self, *, repo_id: str, folder_path: str, **_: Any) -> None:
        shutil.copytree(folder_path, self.copies / repo_id)


def test_the_hub_gets_a_head_that_loads(
    target: Target, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    result = call("--draft", folder, "--to", "hub", "--repo", "me/head", "--private", "--json")
    assert json.loads(result.stdout) == {"address": "https://example.org/me/head"}
    assert hub.calls == [{"repository": "me/head", "private": True, "exist_ok": True}]
    assert torch.equal(logits(target, tmp_path / "me" / "head"), logits(target, folder))
    assert sorted(path.name for path in (tmp_path / "me" / "head").iterdir()) == FILES
    with pytest.raises(JetSpecError, match="--repo nobody: 401 Unauthorized; log in"):
        export_hub(load_head(folder), "nobody")


@pytest.mark.parametrize(("to", "missing"), [("hub", "--repo"), ("vllm", "--output"), ("directory", "--output")])
def test_a_missing_destination_is_named(folder: Path, to: str, missing: str) -> None:
    result = call("--draft", folder, "--to", to)
    assert result.exit_code == 1
    assert f"{missing}: needed with --to {to}" in result.stderr


SPECULATORS = ("--to", "speculators", "--target", "someone/target")


def test_what_speculators_reads(target: Target, tmp_path: Path) -> None:
    """A bidirectional head; layers are counted as hidden states, of which the embedding's output is the first."""
    head = head_for_target(target, num_layers=2, block_size=4, num_aux_layers=2, mask_token_id=127, causal=False)
    save_head(head, tmp_path / "head")
    result = call("--draft", tmp_path / "head", *SPECULATORS, "--output", tmp_path / "out", "--json")
    assert json.loads(result.stdout)["files"] == ["config.json", "model.safetensors"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["speculators_model_type"], config["aux_hidden_state_layer_ids"]) == ("dflash", [2, 4])
    assert (config["block_size"], config["mask_token_id"], config["draft_vocab_size"]) == (4, 127, 128)
    assert config["transformer_layer_config"]["model_type"] == "qwen3"
    assert config["speculators_config"]["verifier"]["name_or_path"] == "someone/target"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 3
    again = load_head(tmp_path / "out")
    assert again.config == head.config.replace(num_target_layers=None)
    assert torch.equal(logits(target, tmp_path / "out"), logits(target, tmp_path / "head"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"causal": True}, "causal=True: speculators' layers of full attention see the whole block"),
        ({"causal": False, "transition_size": 4}, "transition_size=4: no head of speculators has a transition"),
        ({"causal": False, "shifted": True}, "shifted=True"),
        ({"kind": "autoregressive", "mask_token_id": None}, "kind='autoregressive': speculators has EAGLE-3 heads"),
    ],
)
def test_heads_that_speculators_does_not_have_are_refused(
    target: Target, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    options = {"num_layers": 1, "block_size": 4, "num_aux_layers": 2, "mask_token_id": 127, **settings}
    save_head(head_for_target(target, **options), tmp_path / "head")
    result = call("--draft", tmp_path / "head", *SPECULATORS, "--output", tmp_path / "out")
    assert result.exit_code == 1
    assert message in " ".join(result.stderr.split())


@pytest.mark.parametrize("options", [("--to", "speculators"), ("--to", "directory", "--target", "someone/target")])
def test_the_target_is_named_for_speculators_alone(folder: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    result = call("--draft", folder, *options, "--output", tmp_path)
    assert result.exit_code == 1
    assert "--target: needed with --to speculators, and for nothing else" in result.stderr


@pytest.mark.parametrize("layout", ["EAGLE", "SpecForge", "speculators"])
def test_an_eagle3_head_is_exported_for_speculators(tmp_path: Path, layout: str) -> None:
    published = eagle3(layout)
    call("--draft", published.write(tmp_path / "head"), *SPECULATORS, "--output", tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    expected = {name.replace("midlayer", "layers.0"): tensor for name, tensor in published.tensors.items()}
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {n: t.tolist() for n, t in expected.items()}
    check_drafts(published, published_rounds(load_head(tmp_path / "out")))


def test_vllm_reads_eagle3_heads_in_the_layout_of_speculators(tmp_path: Path) -> None:
    with pytest.raises(JetSpecError, match="--to speculators"):
        check_for_vllm(load_head(eagle3("EAGLE").write(tmp_path)))
