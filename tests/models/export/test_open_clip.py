"""A dual encoder in open_clip: its vectors are those of ``encode_image`` and ``encode_text``, without network."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.exports import WORDS, alone, readme_names, trained
from support.towers import local_bert

from fedvlp.data.preprocessing import CLEANED, Preprocessing
from fedvlp.models import DualEncoder, ModelConfig, MultimodalConfig
from fedvlp.models.export import ExportError, export_open_clip
from fedvlp.models.export import open_clip as module

pytestmark = pytest.mark.skipif(find_spec("open_clip") is None, reason="pip install 'fedvlp[open_clip]'")

LINEAR: dict[str, Any] = {"alignment": False, "head_hidden": None, "embedding_dim": 8, "max_tokens": 6}
PHRASES = ["no left effusion", "edema", "", "no basal edema left effusion no"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(local_bert(tmp_path_factory.mktemp("bert"), WORDS))


def model_of(image: str, bert: str, **changes: Any) -> DualEncoder:
    """With a text head whose bias is as large as what its weights give."""
    model = trained(ModelConfig(image, bert, text_layers=1, **{"image_size": 32, **LINEAR, **changes}))
    with torch.no_grad():
        model.text_head[0].bias += torch.arange(8) / 8  # type: ignore[index,union-attr]
    model.prepare = Preprocessing(model.config.image_size, model.config.image_size, CLEANED)
    model.preprocessing = model.prepare.described()
    return model


@pytest.mark.parametrize(
    ("name", "size", "pooling"),
    [("resnet10t", 32, "summary"), ("resnet10t", 40, "mean"), ("vit_tiny_patch16_224", 224, "mean")],
)
def test_open_clip_gives_the_vectors(
    name: str, size: int, pooling: str, bert: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import open_clip

    model = model_of(name, bert, image_size=size, text_pooling=pooling)
    line = export_open_clip(model, tmp_path / "out")
    assert line == f'open_clip.create_model_from_pretrained("local-dir:."), in the folder {tmp_path / "out"}'
    monkeypatch.chdir(tmp_path / "out")
    loaded, transform = open_clip.create_model_from_pretrained("local-dir:.")
    films = torch.randn(3, 1, size, size, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        shown = loaded.eval().encode_image(films.repeat(1, 3, 1, 1), normalize=True)
        said = loaded.encode_text(open_clip.get_tokenizer("local-dir:.")(PHRASES), normalize=True)
    assert (shown - model.encode_image(films)).abs().max() <= 1e-5
    assert (said - model.encode_text(PHRASES)).abs().max() <= 1e-5
    assert (tuple(transform.transforms[-1].mean), tuple(transform.transforms[-1].std)) == ((0.5,) * 3, (0.5,) * 3)
    for path in (tmp_path / "out").rglob("*.json"):
        assert str(tmp_path.parent) not in path.read_text(), "no path of the machine"


def test_a_model_of_colour_sees_colour(bert: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the lines of the README."""
    from PIL import Image

    model = model_of("resnet10t", bert)
    model.prepare = Preprocessing(32, 32, CLEANED, colour=True)
    model.preprocessing = model.prepare.described()
    export_open_clip(model, tmp_path / "out")
    film = np.random.default_rng(0).integers(0, 256, (70, 90, 3)).astype(np.uint8)
    film[..., 0] = 0
    Image.fromarray(film).save(tmp_path / "out" / "film.png")
    seen = readme_names(tmp_path / "out", monkeypatch)
    assert (seen["shown"][0] - model.encode_image(Path("film.png"))).abs().max() <= 1e-5
    assert (seen["shown"][0] - model.encode_image(Image.fromarray(film).convert("L"))).abs().max() > 1e-4


@pytest.mark.slow(seconds=15)
def test_the_lines_of_the_readme_need_no_fedvlp(bert: str, tmp_path: Path) -> None:
    from PIL import Image

    model = model_of("resnet10t", bert)
    export_open_clip(model, tmp_path / "out")
    film = np.random.default_rng(0).integers(0, 256, (70, 90)).astype(np.uint8)
    Image.fromarray(film).save(tmp_path / "out" / "film.png")
    (code,) = re.findall(r"```python\n(.*?)```", (tmp_path / "out" / "README.md").read_text(), re.DOTALL)
    alone(code + "torch.save([shown, said], 'seen.pt')\n", tmp_path / "out")
    shown, said = torch.load(tmp_path / "out" / "seen.pt", weights_only=True)
    assert (shown[0] - model.encode_image(tmp_path / "out" / "film.png")).abs().max() <= 1e-5
    assert (said - model.encode_text(["left basal effusion", "no effusion"])).abs().max() <= 1e-5


FAULTS: dict[str, dict[str, Any]] = {
    r"it has alignment blocks \(model.alignment=false": {"alignment": True},
    r"its projection heads have a hidden layer \(model.head_hidden=null": {"head_hidden": 16},
    r"its image tower is fedvlp's own \(tiny\)": {"image_tower": "tiny"},
    "its image tower sees 1 channels, and not 3": {"in_channels": 1},
    "its image tower is built with img_size, which": {"image_tower": "vit_tiny_patch16_224"},
    "its text tower is fedvlp's own": {"text_tower": "tiny", "text_layers": None},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_open_clip_cannot_hold_is_refused(fault: str, bert: str, tmp_path: Path) -> None:
    config = ModelConfig("resnet10t", bert, text_layers=1, image_size=32, **LINEAR)
    with pytest.raises(ExportError, match=f"export to open_clip: {fault}.*; open_clip holds .*--to onnx takes any"):
        export_open_clip(replace(config, **FAULTS[fault]).build(0), tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_all_that_is_in_the_way_is_said(tmp_path: Path) -> None:
    classifier = MultimodalConfig("resnet10t", "bert-base-uncased", text_layers=1, image_size=32, labels=("a",))
    expected = "it is a classifier, whose .*; its tokenizer is fedvlp's hashed words; open_clip holds"
    with pytest.raises(ExportError, match=expected):
        export_open_clip(classifier.build(0), tmp_path / "x")


def test_a_bias_that_no_feature_reaches_is_refused(bert: str, tmp_path: Path) -> None:
    """Of a head [40, 32]: open_clip's has none, and 32 numbers of a feature cannot give any 40."""
    model = trained(ModelConfig("resnet10t", bert, text_layers=1, image_size=32, **{**LINEAR, "embedding_dim": 40}))
    with pytest.raises(ExportError, match=r"its text head \[40, 32\] has a bias that no feature reaches"):
        export_open_clip(model, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_the_shift_by_which_weights_give_a_bias() -> None:
    """W = [[2, 0], [0, 4]] and b = [1, 1] give c = [1/2, 1/4], and W = [[3, 4]] with b = [5] the shortest, b W / 25."""
    shift = module._reaching(torch.tensor([[2.0, 0.0], [0.0, 4.0]]), torch.ones(2))
    assert torch.allclose(shift, torch.tensor([0.5, 0.25]))
    assert torch.allclose(module._reaching(torch.tensor([[3.0, 4.0]]), torch.tensor([5.0])), torch.tensor([0.6, 0.8]))


def test_weights_that_do_not_fit_are_one_sentence(bert: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = module._weights
    monkeypatch.setattr(module, "_weights", lambda model: weights(model) | {"visual.more": torch.ones(1)})
    with pytest.raises(ExportError, match="it builds one of these towers otherwise, so the weights do not fit"):
        export_open_clip(model_of("resnet10t", bert), tmp_path / "x")
    assert list(tmp_path.iterdir()) == []
