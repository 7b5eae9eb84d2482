"""ONNX files of both encoders: in ONNX Runtime they give the vectors of ``encode_image`` and ``encode_text``."""

from __future__ import annotations

import re
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cases import cases
from support.exports import SMALL, WORDS, alone, trained
from support.film_files import dicom
from support.towers import local_bert

from fedvlp.data.image_kinds import write_kinds
from fedvlp.data.preprocessing import AS_WRITTEN, CLEANED, PreparationError, Preprocessing
from fedvlp.data.report_text import clean_phrase
from fedvlp.models import DualEncoder, ModelConfig, MultimodalConfig
from fedvlp.models.export import EXPORTS, ExportError, export_onnx
from fedvlp.models.export import written as module
from fedvlp.models.export.written import write_preparation

needs_onnx = pytest.mark.skipif(
    find_spec("onnx") is None or find_spec("onnxruntime") is None, reason="pip install 'fedvlp[onnx]'"
)
PHRASES = [
    "No left effusion.", "", "edema", "No. Basal edema 2. left effusion, no left basal effusion", "édema",
    "Herzgröße normal, kein Erguß.", "Bez płynu w jamie opłucnej", "Hjertestørrelse normal", "Œdème pulmonaire",
]  # fmt: skip


def model_of(image: str, text: str, reports: str = AS_WRITTEN, colour: bool = False, **changes: Any) -> DualEncoder:
    model = trained(ModelConfig(image, text, image_size=32, **{**SMALL, **changes}))
    model.prepare = Preprocessing(40, 32, reports, colour=colour)
    model.preprocessing = model.prepare.described()
    return model


def differs(one: np.ndarray, other: torch.Tensor) -> float:
    assert one.shape == tuple(other.shape)
    return float(np.abs(one - other.numpy()).max())


TOWERS = {
    "tiny": ("tiny", "tiny"),
    "GRU, batch statistics": ("tiny", "gru"),
    "pixels and words": ("pixels", "words"),
    "ResNet and BERT": ("resnet10t", "bert"),
    "ViT, mean of the tokens": ("vit_tiny_patch16_224", "tiny"),
}


@needs_onnx
@pytest.mark.parametrize("case", cases(TOWERS, often=list(TOWERS)[:2]))
def test_onnx_runtime_gives_the_vectors(case: str, tmp_path: Path) -> None:
    """In batches of other sizes than that which was traced."""
    from onnxruntime import InferenceSession

    image, text = TOWERS[case]
    changes: dict[str, Any] = {"head_norm": "batch"} if "statistics" in case else {}
    changes |= {"text_pooling": "mean"} if "mean" in case else {}
    if text == "bert":
        text, changes = str(local_bert(tmp_path / "bert", WORDS)), {"text_layers": 1, "alignment": False}
    model = model_of(image, text, **changes)
    line = export_onnx(model, tmp_path / "out")
    shown = eval(line, {"onnxruntime": __import__("onnxruntime")})
    said = InferenceSession(str(tmp_path / "out" / "text.onnx"))
    ids, mask = model.tokenizer(PHRASES)
    films = torch.randn(5, 1, 32, 32, generator=torch.Generator().manual_seed(1))
    for count in (1, 5):
        vectors = shown.run(None, {"image": films[:count].numpy()})[0]
        assert differs(vectors, model.encode_image(films[:count])) <= 1e-5
        vectors = said.run(None, {"ids": ids[:count].numpy(), "mask": mask[:count].numpy()})[0]
        assert differs(vectors, model.encode_text(PHRASES[:count])) <= 1e-5
    for path in (tmp_path / "out").rglob("*.json"):
        assert str(tmp_path.parent) not in path.read_text(), "no path of the machine"


@needs_onnx
def test_of_a_classifier_the_vectors_are_written(tmp_path: Path) -> None:
    from onnxruntime import InferenceSession

    model = trained(MultimodalConfig(image_size=32, max_tokens=6, labels=("a", "b")))
    export_onnx(model, tmp_path / "out")
    films = torch.randn(2, 1, 32, 32, generator=torch.Generator().manual_seed(1))
    (seen,) = InferenceSession(str(tmp_path / "out" / "image.onnx")).run(None, {"image": films.numpy()})
    assert differs(seen, model.encode_image(films)) <= 1e-5
    assert "The classifier of findings" in (tmp_path / "out" / "README.md").read_text()


def pictures(folder: Path) -> list[Path]:
    """Films of every kind that ``prepare.py`` reads: those that the export is compared on, and odder ones."""
    from PIL import Image

    rows = np.random.default_rng(0).integers(0, 256, (70, 90, 3)).astype(np.uint8)
    grey = rows[..., 0]
    turned = Image.Exif()
    turned[0x0112] = 6
    write_kinds(folder)
    Image.fromarray(grey.T[:, :20]).save(folder / "high.tiff")
    Image.fromarray(grey).save(folder / "turned.jpg", exif=turned)
    Image.fromarray(grey.astype(np.uint16) // 4 + 500).save(folder / "flat.png")
    Image.fromarray(grey[:20, :30]).save(folder / "small.png")
    white_is_zero = {0x0106: 0, 0x0112: 6}  # and turned
    Image.fromarray(grey.astype(np.uint16) * 16 + rows[..., 1]).save(folder / "inverted.tiff", tiffinfo=white_is_zero)
    Image.fromarray(grey.astype(np.float32) / 7).save(folder / "fractions.tiff", tiffinfo=white_is_zero)
    return sorted(path for path in folder.iterdir() if path.is_file())


def prepared(model: DualEncoder, folder: Path) -> dict[str, Any]:
    """The functions of the ``prepare.py`` that is written for a model."""
    write_preparation(model, folder)
    return runpy.run_path(str(folder / "prepare.py"))


@needs_onnx
@pytest.mark.parametrize("reports", [AS_WRITTEN, CLEANED])
@pytest.mark.parametrize("text", ["tiny", "bert"])
def test_what_lies_beside_prepares_as_fedvlp_does(text: str, reports: str, tmp_path: Path) -> None:
    (tmp_path / "films").mkdir()
    paths = pictures(tmp_path / "films")
    tower = str(local_bert(tmp_path / "bert", WORDS)) if text == "bert" else text
    model = model_of("tiny", tower, reports)
    export_onnx(model, tmp_path / "out")
    prepare = runpy.run_path(str(tmp_path / "out" / "prepare.py"))
    assert len(paths) == 19
    assert np.array_equal(prepare["films"](paths), model.preprocess(paths).numpy())
    ids, mask = model.tokenizer([model.prepare.text(phrase) for phrase in PHRASES])  # type: ignore[union-attr]
    seen = prepare["tokens"](PHRASES)
    assert np.array_equal(seen["ids"], ids.numpy())
    assert np.array_equal(seen["mask"], mask.numpy())


def test_every_letter_is_cleaned_as_fedvlp_does(tmp_path: Path) -> None:
    """Up to U+2FFF, where the alphabets are: the letters that have no base are a table of ``prepare.py`` too."""
    phrases = [f"left {chr(code)} a{chr(code)}b" for code in range(0x3000)]
    assert prepared(model_of("tiny", "tiny", CLEANED), tmp_path)["phrases"](phrases) == list(map(clean_phrase, phrases))


@needs_onnx
@pytest.mark.parametrize("image", ["tiny", "resnet10t"])
def test_a_model_of_colour_sees_colour(image: str, tmp_path: Path) -> None:
    """Films of which one is the other with red and blue exchanged get the two vectors that they have here."""
    from onnxruntime import InferenceSession

    (tmp_path / "films").mkdir()
    paths = pictures(tmp_path / "films")
    model = model_of(image, "tiny", colour=True, in_channels=3)
    export_onnx(model, tmp_path / "out")
    films = runpy.run_path(str(tmp_path / "out" / "prepare.py"))["films"](paths)
    assert films.shape == (19, 3, 32, 32)
    assert np.array_equal(films, model.preprocess(paths).numpy())
    exchanged = np.concatenate([films, films[:, ::-1]])
    (vectors,) = InferenceSession(str(tmp_path / "out" / "image.onnx")).run(None, {"image": exchanged})
    assert differs(vectors[:19], model.encode_image(paths)) <= 1e-5
    assert differs(vectors[19:], model.encode_image(torch.from_numpy(exchanged[19:]))) <= 1e-5
    readme = (tmp_path / "out" / "README.md").read_text()
    assert "float32 [N, 3, 32, 32] in -1..1 (red, green, blue)" in " ".join(readme.split())


def test_a_file_of_several_frames_is_refused_as_fedvlp_does(tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "films").mkdir()
    wide = Image.open(next(path for path in pictures(tmp_path / "films") if path.name == "8.png"))
    wide.save(tmp_path / "two.tiff", save_all=True, append_images=[wide.rotate(180)])
    small = wide.resize((60, 48))  # so that fedvlp decodes it in full, too
    small.save(tmp_path / "phone.jpg", "MPO", save_all=True, append_images=[small.rotate(180)])  # which is a preview
    model = model_of("tiny", "tiny")
    prepare = prepared(model, tmp_path)
    with pytest.raises(PreparationError, match="multi-frame image: 2 frames"):
        model.preprocess(tmp_path / "two.tiff")
    with pytest.raises(ValueError, match="the image cannot be used: multi-frame image: 2 frames"):
        prepare["films"]([tmp_path / "two.tiff"])
    assert np.array_equal(prepare["film"](tmp_path / "phone.jpg"), model.preprocess(tmp_path / "phone.jpg").numpy())


def test_dicom_without_pydicom_is_refused_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    film = dicom(tmp_path / "canary.dcm", np.arange(900, dtype=np.uint16).reshape(30, 30), "MONOCHROME2", 12)
    prepare = prepared(model_of("tiny", "tiny"), tmp_path)
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(ValueError, match=r"^the image cannot be used: needs the package pydicom$"):
        prepare["film"](film)


def test_films_of_a_model_that_does_not_say_how_are_not_prepared(tmp_path: Path) -> None:
    prepare = prepared(trained(ModelConfig(image_size=32, **SMALL)), tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the model that was exported did not say how images are prepared"):
        prepare["films"](["film.png"])


@needs_onnx
@pytest.mark.parametrize("text", ["tiny", pytest.param("bert", marks=pytest.mark.slow(seconds=10))])
def test_the_lines_of_the_readme_need_neither_fedvlp_nor_torch(text: str, tmp_path: Path) -> None:
    tower = str(local_bert(tmp_path / "bert", WORDS)) if text == "bert" else text
    model = model_of("tiny", tower, CLEANED)
    export_onnx(model, tmp_path / "out")
    (tmp_path / "films").mkdir()
    (film,) = (path for path in pictures(tmp_path / "films") if path.name == "8.png")
    film.rename(tmp_path / "out" / "film.png")
    readme = (tmp_path / "out" / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert ("transformers" in readme) == (text == "bert")
    alone(code + "import numpy\nnumpy.savez('seen.npz', shown, said)\n", tmp_path / "out", "torch")
    seen = np.load(tmp_path / "out" / "seen.npz")
    assert differs(seen["arr_0"][0], model.encode_image(tmp_path / "out" / "film.png")) <= 1e-5
    assert differs(seen["arr_1"], model.encode_text(["left basal effusion", "no effusion"])) <= 1e-5


@needs_onnx
def test_what_onnx_runtime_gives_otherwise_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the vector of the text without words, which is not in the batch that is traced, has another sign."""
    from fedvlp.models.export import onnx

    run = onnx._run

    def wrongly(file: Path, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        vectors = run(file, inputs)
        return torch.cat([vectors[:-1], -vectors[-1:]]) if file.name == "text.onnx" else vectors

    monkeypatch.setattr(onnx, "_run", wrongly)
    with pytest.raises(ExportError, match="export to onnx: its features differ by"):
        export_onnx(model_of("tiny", "tiny"), tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", [pytest.param("onnx", marks=needs_onnx), "timm", "monai-bundle"])
def test_what_prepares_an_image_otherwise_is_not_written(
    to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here MONOCHROME1 is not inverted, which files of the other kinds do not show."""
    model = model_of("resnet10t", "tiny")

    def wrongly(model: DualEncoder, folder: Path, *texts: bool, **how: bool) -> None:
        write_preparation(model, folder, *texts, **how)
        file = folder / "radiograph.py"
        file.write_text(file.read_text().replace('== "MONOCHROME1"', '== "NONE"'))

    monkeypatch.setattr(sys.modules[EXPORTS[to].__module__], "write_preparation", wrongly)
    with pytest.raises(ExportError, match=f"export to {to}: .* or prepare.py reads an image in another way"):
        EXPORTS[to](model, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_without_the_extra_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ExportError, match=r"onnx and onnxruntime is not installed here; pip install 'fedvlp\[onnx\]'"):
        export_onnx(model_of("tiny", "tiny"), tmp_path / "x")
    assert list(tmp_path.iterdir()) == []
