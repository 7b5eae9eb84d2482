"""Exported towers, loaded by their library alone in a process without fedvlp, have the features that they have here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.exports import SMALL, WORDS, alone, readme_names, trained
from support.towers import local_bert

from fedvlp.data.preprocessing import CLEANED, Preprocessing
from fedvlp.data.radiograph import read_film
from fedvlp.models import DualEncoder, ModelConfig
from fedvlp.models.export import ExportError, export_huggingface, export_timm
from fedvlp.models.export import towers as module


def exported(model: DualEncoder, folder: Path) -> tuple[str, torch.Tensor, torch.Tensor]:
    """How timm loads the exported image tower, films as timm takes them, and their features here."""
    line = export_timm(model, folder / "tower")
    channels = model.image_encoder.in_channels
    films = torch.randn(3, 1, 32, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        features = model.image_encoder(films)[:, 0].contiguous()
    return line, films.repeat(1, channels, 1, 1), features  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "channels"), [("vit_tiny_patch16_224", 3), ("resnet10t", None), ("resnet10t", 1)])
def test_timm_gives_the_features_of_the_image_tower(name: str, channels: int | None, tmp_path: Path) -> None:
    import timm
    from PIL import Image

    model = trained(ModelConfig(name, "tiny", image_size=32, in_channels=channels, **SMALL))  # type: ignore[arg-type]
    model.prepare = Preprocessing(40, 32)
    model.preprocessing = model.prepare.described()
    line, films, features = exported(model, tmp_path)
    folder = tmp_path / "tower"
    assert line == f'timm.create_model("local-dir:{folder}", pretrained=True)'
    loaded = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    with torch.no_grad():
        assert (loaded(films) - features).abs().max() <= 1e-5 * features.abs().max()
    told = timm.data.resolve_model_data_config(loaded)
    assert (tuple(told["input_size"]), told["crop_pct"]) == ((channels or 3, 32, 32), 0.8)
    assert set(told["mean"]) == set(told["std"]) == {0.5}
    prepared = ["prepare.py", "preprocessing.json", "radiograph.py", "text_restoration.py"]
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        *prepared,
    ]
    assert "`prepare.py` prepares images as preprocessing.json says" in (folder / "README.md").read_text()
    levels = Image.fromarray(read_film(square_film(1)).round().astype(np.uint8))  # which timm does not know
    prepared = timm.data.create_transform(**told)(levels.convert("RGB" if channels != 1 else "L"))
    assert (prepared - model.preprocess(square_film(1))).abs().max() <= 2.1 / 255, "as timm rounds: one grey level"


def square_film(channels: int) -> Any:
    """A PIL image of 200 pixels: in -1..1 a grey level is 2 / 255."""
    from PIL import Image

    grey = np.random.default_rng(0).integers(0, 256, (200, 200)).astype(np.uint8)
    return Image.fromarray(grey).convert("RGB" if channels == 3 else "L")


@pytest.mark.parametrize("channels", [1, 3])
def test_the_lines_of_timms_readme_give_the_feature(
    channels: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an image that is not square; with three channels it is in colour, as the model's records were."""
    from PIL import Image

    model = trained(ModelConfig("resnet10t", "tiny", image_size=32, in_channels=channels, **SMALL))  # type: ignore[arg-type]
    model.prepare = Preprocessing(40, 32, colour=channels == 3)
    model.preprocessing = model.prepare.described()
    export_timm(model, tmp_path / "tower")
    film = np.random.default_rng(0).integers(0, 256, (70, 90, 3)).astype(np.uint8)
    Image.fromarray(film).save(tmp_path / "tower" / "film.png")
    seen = readme_names(tmp_path / "tower", monkeypatch)["features"]
    expected = model.image_encoder(model.preprocess([tmp_path / "tower" / "film.png"]))[:, 0]
    assert (seen - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> DualEncoder:
    """A dual encoder with the first layer of a BERT with a vocabulary."""
    bert = local_bert(tmp_path_factory.mktemp("bert"), WORDS)
    return trained(ModelConfig("resnet10t", str(bert), text_layers=1, image_size=32, pretrained=False, **SMALL))  # type: ignore[arg-type]


READ = """
import torch, transformers
from safetensors.torch import load_file
model, seen = LINE.eval(), load_file(FILE)
words = transformers.AutoTokenizer.from_pretrained(FOLDER)
batch = words(TEXTS, padding="max_length", truncation=True, return_tensors="pt")
assert words.model_max_length == 6
assert torch.equal(batch["attention_mask"].bool(), seen["mask"])
with torch.no_grad():
    hidden = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
assert (hidden - seen["features"])[seen["mask"]].abs().max() <= 1e-5 * seen["features"].abs().max()
assert model.config.num_hidden_layers == 1
"""
"""What transformers' user does, and what must hold."""


def read(model: DualEncoder, folder: Path) -> str:
    """``READ`` for the exported text tower, with its features here in a file beside it."""
    line = export_huggingface(model, folder / "tower")
    texts = ["no left effusion", "edema", "no basal edema left effusion no"]
    ids, mask = model.tokenizer(texts)
    with torch.no_grad():
        save_file({"mask": mask, "features": model.text_encoder(ids, mask).contiguous()}, folder / "x")
    filled = {
        "LINE": line,
        "FILE": repr(str(folder / "x")),
        "FOLDER": repr(str(folder / "tower")),
        "TEXTS": repr(texts),
    }
    code = READ
    for word, value in filled.items():
        code = code.replace(word, value)
    return code


def test_transformers_gives_the_features_of_the_text_tower(reader: DualEncoder, tmp_path: Path) -> None:
    exec(read(reader, tmp_path), {})
    for path in (tmp_path / "tower").rglob("*.json"):
        assert str(tmp_path.parent) not in path.read_text(), "no path of the machine"


def test_the_lines_of_transformers_readme_give_the_hidden_state(
    reader: DualEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder says how reports were written and how long they were, and the tokenizer here is as it was."""
    before = reader.tokenizer.tokenizer.model_max_length  # type: ignore[attr-defined]
    monkeypatch.setattr(reader, "preprocessing", Preprocessing(40, 32, CLEANED).described())
    export_huggingface(reader, tmp_path / "tower")
    assert reader.tokenizer.tokenizer.model_max_length == before > 6  # type: ignore[attr-defined]
    seen = readme_names(tmp_path / "tower", monkeypatch)
    assert seen["phrases"](["No LEFT effusion."]) == ["no left effusion"]
    assert seen["tokenizer"].model_max_length == 6
    ids, mask = reader.tokenizer(["left basal effusion", "no effusion"])
    width = seen["hidden"].shape[1]
    difference = (seen["hidden"] - reader.text_encoder(ids, mask)[:, :width])[mask[:, :width]]
    assert difference.abs().max() <= 1e-5 * seen["hidden"].abs().max()
    readme = (tmp_path / "tower" / "README.md").read_text()
    assert "texts of at most 6 tokens" in readme
    assert "`phrases` of `prepare.py`" in readme
    assert {"prepare.py", "preprocessing.json"} < {path.name for path in (tmp_path / "tower").iterdir()}


@pytest.mark.slow(seconds=15)
def test_timm_and_transformers_need_no_fedvlp(reader: DualEncoder, tmp_path: Path) -> None:
    """One after the other, each with its own half, in a process that has them and not fedvlp."""
    seen, text = tmp_path / "seen", tmp_path / "text"
    text.mkdir()
    model = trained(ModelConfig("resnet10t", "tiny", image_size=32, **SMALL))  # type: ignore[arg-type]
    line, films, features = exported(model, tmp_path)
    save_file({"films": films, "features": features}, seen)
    timm = f"""
import timm, torch
from safetensors.torch import load_file
model, seen = {line}.eval(), load_file({str(seen)!r})
with torch.no_grad():
    assert (model(seen["films"]) - seen["features"]).abs().max() <= 1e-5 * seen["features"].abs().max()
"""
    alone(timm + read(reader, text), tmp_path)


def test_what_no_other_library_has_is_refused(tmp_path: Path, reader: DualEncoder) -> None:
    tiny = ModelConfig(image_size=32, **SMALL).build(0)  # type: ignore[arg-type]
    with pytest.raises(ExportError, match="the image tower is fedvlp's own"):
        export_timm(tiny, tmp_path / "x")
    with pytest.raises(ExportError, match="the text tower is fedvlp's own"):
        export_huggingface(tiny, tmp_path / "x")
    hashed = ModelConfig("tiny", "bert-base-uncased", text_layers=1, image_size=32, **SMALL).build(0)  # type: ignore[arg-type]
    with pytest.raises(ExportError, match="the tokenizer is fedvlp's hashed words"):
        export_huggingface(hashed, tmp_path / "x")
    (tmp_path / "there").mkdir()
    with pytest.raises(ExportError, match="there exists already; name a new folder"):
        export_timm(reader, tmp_path / "there")
    with pytest.raises(ExportError, match="the folder above x does not exist"):
        export_timm(reader, tmp_path / "nowhere" / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_an_export_that_differs_is_not_written(
    tmp_path: Path, reader: DualEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here one weight is written wrongly: nothing remains, and the model's mode is as it was."""
    save = module.save_weights

    def wrongly(tensors: dict[str, torch.Tensor], folder: Path) -> None:
        save(tensors | {"conv1.0.weight": tensors["conv1.0.weight"] + 0.1}, folder)

    monkeypatch.setattr(module, "save_weights", wrongly)
    with pytest.raises(ExportError, match=r"export to timm: its features differ by .*, and was not written|may be"):
        export_timm(reader, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []
