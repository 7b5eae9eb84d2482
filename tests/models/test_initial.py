"""Weights to start from: what they must be, what is refused, and that those which ship are what they say."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.presets import MODEL
from support.toy import clone, same_bytes
from torch import Tensor

from fedvlp.core.types import group
from fedvlp.models.dual_encoder import DualEncoder, ModelConfig
from fedvlp.models.initial import (
    FOLDER,
    SHIPPED,
    InitialWeightsError,
    load_initial,
    made,
    parse,
    pinned,
    save_initial,
    settled,
)
from fedvlp.models.multimodal import MultimodalConfig
from fedvlp.run.presets import PRESETS

DIGEST = "0123456789abcdef" * 4


def encoders(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if group(name) == "encoder"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The encoders of a model of another seed."""
    save_initial(MODEL.build(7), tmp_path / "towers", {"seed": 7})
    return tmp_path / "towers"


# The setting


def test_a_setting_is_a_name_and_a_checksum() -> None:
    assert parse("x") == ("x", "")
    assert parse(f"a/b@c@{DIGEST}") == ("a/b@c", DIGEST)
    assert parse(f"x@{DIGEST[:-1]}") == (f"x@{DIGEST[:-1]}", ""), "no checksum, so it is part of the name"
    assert str(parse(f"x@{DIGEST}")) == f"x@{DIGEST}"


def test_random_weights_are_one_setting_however_they_are_said() -> None:
    assert settled("random") == settled("") == ModelConfig(init="random").init == ""


def test_shipped_weights_are_named_with_their_checksum_at_once() -> None:
    """So that a run or a job of today is refused by a fedvlp that ships others under the name."""
    assert ModelConfig(init="tiny-pool").init == f"tiny-pool@{SHIPPED['tiny-pool']}"
    assert ModelConfig(init=f"tiny-pool@{DIGEST}").init == f"tiny-pool@{DIGEST}"
    assert replace(ModelConfig(init="tiny-pool"), init="random").init == ""


def test_a_folder_is_named_with_its_checksum_when_it_is_pinned(folder: Path) -> None:
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert pinned(str(folder)) == f"{folder}@{digest}"
    assert pinned(f"{folder}@{DIGEST}") == f"{folder}@{DIGEST}", "what is said is not looked up"
    assert pinned("") == ""
    with pytest.raises(InitialWeightsError, match=r"model\.init 'gone': model\.safetensors cannot be read there"):
        pinned(str(folder / "gone"))


def test_published_and_given_weights_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="set init to random, or pretrained to false"):
        ModelConfig(image_tower="resnet18", pretrained=True, init="x")
    with pytest.raises(ValueError, match=r"ModelConfig\.init: 3, expected the name"):
        ModelConfig(init=3)  # type: ignore[arg-type]


# Loading


def test_encoders_start_from_the_folder_and_the_rest_from_the_seed(folder: Path) -> None:
    """Stored in half precision, they are float32 in the model again."""
    given, model, untouched = MODEL.build(7).state_dict(), MODEL.build(0), MODEL.build(0)
    load_initial(model, str(folder))
    expected = {n: t.half().float() for n, t in encoders(given).items()}
    same_bytes(encoders(model.state_dict()), expected)
    rest = {n: t for n, t in model.state_dict().items() if n not in expected}
    same_bytes(rest, {n: t for n, t in untouched.state_dict().items() if n not in expected})
    assert {group(name) for name in rest} == {"alignment", "head"}


@pytest.mark.parametrize("wrap", [False, True], ids=["a saved model", "the folder of a run"])
def test_a_whole_model_is_a_start_as_well(wrap: bool, tmp_path: Path) -> None:
    given, model = MODEL.build(7), MODEL.build(0)
    given.save(tmp_path / "model" if wrap else tmp_path)
    load_initial(model, str(tmp_path))
    same_bytes(dict(model.state_dict()), dict(given.state_dict()))


def test_no_weights_change_nothing() -> None:
    model = MODEL.build(0)
    load_initial(model, "")
    same_bytes(dict(model.state_dict()), dict(MODEL.build(0).state_dict()))


def edited(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    """Changes the tensors, and config.json with them, so that the checksum is no reason to refuse."""

    def edit(folder: Path) -> None:
        file = folder / "model.safetensors"
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file)
        config = json.loads((folder / "config.json").read_text())
        config["weights"]["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
        (folder / "config.json").write_text(json.dumps(config))

    return edit


def described(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return edit


def cut(name: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:100])

    return edit


def flipped(folder: Path) -> None:
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))


SUMMARY, HEAD = "image_encoder.summary", "image_head.0.weight"

WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "a tensor is missing": (edited(lambda t: t.pop(SUMMARY)), rf"1 tensors missing \({SUMMARY}\)"),
    "one tower is missing": (
        edited(lambda t: [t.pop(name) for name in list(t) if name.startswith("text")]), r"\d\d tensors missing \(text_"
    ),
    "a part is incomplete": (edited(lambda t: t.update({HEAD: torch.zeros(16, 128)})), r"5 tensors missing \(im"),
    "a tensor is unknown": (edited(lambda t: t.update(more=torch.zeros(2))), r"1 tensors unknown \(more\)"),
    "another shape": (
        edited(lambda t: t.update({SUMMARY: torch.zeros(1, 1, 64)})),
        rf"of another shape or kind \({SUMMARY} \[1, 1, 64\], expected \[1, 1, 128\]\)",
    ),
    "whole numbers": (
        edited(lambda t: t.update({SUMMARY: t[SUMMARY].long()})), rf"of another shape or kind \({SUMMARY}"
    ),
    "not a number": (edited(lambda t: t[SUMMARY].fill_(torch.nan)), rf"1 tensors not finite \({SUMMARY}\)"),
    "a flipped bit": (flipped, "the file is damaged or is another's"),
    "a cut file": (cut("model.safetensors"), "the file is damaged or is another's"),
    "a cut description": (cut("config.json"), r"config\.json cannot be read there \(JSONDecodeError\)"),
    "other towers": (described(text_architecture={"model_type": "gru"}), r"text_architecture \{'model_type': 'gru'\}"),
    "no file": (lambda folder: (folder / "model.safetensors").unlink(), r"of a finished run, or random"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_refused_and_the_model_stays(what: str, folder: Path) -> None:
    """The error names the weights and what is wrong with them, and no path."""
    change, said = WRONG[what]
    change(folder)
    model = MODEL.build(0)
    before = clone(model.state_dict())
    with pytest.raises(InitialWeightsError, match=said) as refused:
        load_initial(model, str(folder))
    assert "model.init 'towers'" in str(refused.value)
    assert str(folder.parent) not in str(refused.value)
    same_bytes(dict(model.state_dict()), before)


def test_a_damaged_file_without_a_description_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    load_initial(MODEL.build(0), str(folder))
    cut("model.safetensors")(folder)
    with pytest.raises(InitialWeightsError, match="is damaged or none"):
        load_initial(MODEL.build(0), str(folder))


def test_other_weights_than_were_meant_are_refused(folder: Path) -> None:
    meant = pinned(str(folder))
    save_initial(MODEL.build(8), folder, {"seed": 8})
    model = MODEL.build(0)
    with pytest.raises(InitialWeightsError, match=f"but the experiment was made with {parse(meant).digest}"):
        load_initial(model, meant)
    load_initial(model, str(folder))
    same_bytes(
        encoders(model.state_dict()), {n: t.half().float() for n, t in encoders(MODEL.build(8).state_dict()).items()}
    )


@pytest.mark.parametrize("change", [{"vocabulary": 128}, {"image_size": 64}, {"text_layers": 2}, {"max_tokens": 8}])
def test_towers_of_another_size_are_refused(change: dict[str, int], folder: Path) -> None:
    with pytest.raises(InitialWeightsError, match="Choose the towers and sizes that the weights were made with"):
        load_initial(replace(MODEL, **change).build(0), str(folder))


# Writing


def test_a_folder_says_what_is_in_it(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    weights = json.loads((folder / "config.json").read_text())["weights"]
    numbers = sum(t.numel() for t in encoders(MODEL.build(7).state_dict()).values())
    assert weights == {
        "sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content), "numbers": numbers, "dtype": "float16",
    }  # fmt: skip
    assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {torch.float16}
    assert made(str(folder)) == {"seed": 7}


def test_weights_beyond_half_precision_are_not_written(tmp_path: Path) -> None:
    model = MODEL.build(0)
    with torch.no_grad():
        model.image_encoder.summary.fill_(1e5)
    with pytest.raises(ValueError, match=rf"1 tensors hold values that torch\.float16 cannot \({SUMMARY}\)"):
        save_initial(model, tmp_path, {})
    save_initial(model, tmp_path, {}, torch.bfloat16)
    assert load_file(tmp_path / "model.safetensors")[SUMMARY].dtype == torch.bfloat16
    assert list(tmp_path.glob(".*")) == []


# What ships


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_weights_are_those_of_their_checksum(name: str) -> None:
    content = (FOLDER / name / "model.safetensors").read_bytes()
    described = json.loads((FOLDER / name / "config.json").read_text())
    assert hashlib.sha256(content).hexdigest() == SHIPPED[name] == described["weights"]["sha256"]
    assert len(content) < 2.5e6, "they are in every installation"


def test_an_installation_has_their_files() -> None:
    """Not only a checkout: what pyproject.toml does not name is in no wheel."""
    project = Path(__file__).parents[2] / "pyproject.toml"
    (line,) = re.findall(r"^fedvlp = (\[.*\])$", project.read_text(encoding="utf-8"), re.MULTILINE)
    package = FOLDER.parents[1]
    installed = {path for pattern in json.loads(line) for path in package.glob(pattern)}
    files = {path for path in FOLDER.rglob("*") if path.is_file()}
    assert len(files) == 1 + 2 * len(SHIPPED)
    assert files <= installed


def test_a_folder_of_the_same_name_does_not_take_their_place(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.rename(tmp_path / "tiny-pool")
    monkeypatch.chdir(tmp_path)
    model = PRESETS["fedavg"].model.build(0)
    load_initial(model, "tiny-pool")
    shipped = load_file(FOLDER / "tiny-pool" / "model.safetensors")
    same_bytes(encoders(model.state_dict()), {name: tensor.float() for name, tensor in shipped.items()})


def test_a_classifier_starts_from_them_as_well() -> None:
    """CAR-MFL's towers are the same; its heads and its classifier are its own."""
    config = MultimodalConfig(labels=("a", "b"), init="tiny-pool")
    model, untouched = config.build(0), config.build(0)
    load_initial(model, config.init)
    shipped = load_file(FOLDER / "tiny-pool" / "model.safetensors")
    same_bytes(dict(model.state_dict()), dict(untouched.state_dict()) | {n: t.float() for n, t in shipped.items()})


def test_a_saved_model_does_not_refer_to_them(tmp_path: Path) -> None:
    replace(MODEL, init="elsewhere").build(0).save(tmp_path)
    assert DualEncoder.from_pretrained(tmp_path).config.init == ""
