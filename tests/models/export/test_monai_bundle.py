"""The image encoder as a MONAI bundle: MONAI's tools load, check and run it, and its vectors are ``encode_image``'s."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.exports import SMALL, alone, trained

from fedvlp.data.preprocessing import Preprocessing
from fedvlp.models import DualEncoder, ModelConfig, MultimodalConfig
from fedvlp.models.export import ExportError, export_monai_bundle
from fedvlp.models.export import monai_bundle as module

FILMS = torch.randn(5, 1, 32, 32, generator=torch.Generator().manual_seed(1))


def model_of(image: str, **changes: Any) -> DualEncoder:
    model = trained(ModelConfig(image, "tiny", image_size=32, **{**SMALL, **changes}))
    model.prepare = Preprocessing(40, 32)
    model.preprocessing = model.prepare.described()
    return model


@pytest.mark.slow(seconds=5)
@pytest.mark.parametrize(
    ("image", "changes"),
    [("tiny", {"head_norm": "batch"}), ("resnet10t", {"alignment": False}), ("vit_tiny_patch16_224", {})],
)
def test_monai_gives_the_vectors(image: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """In batches of other sizes than that which was traced; the weights can be trained on."""
    import monai.bundle

    model = model_of(image, **changes)
    line = export_monai_bundle(model, tmp_path / "encoder")
    network = eval(line, {"monai": monai}).to("cpu")
    for count in (1, 5):
        assert (network(FILMS[:count]) - model.encode_image(FILMS[:count])).abs().max() <= 1e-5
    network(FILMS)[:, 0].sum().backward()
    weights = dict(model.image_encoder.named_parameters())
    gradients = {name.removeprefix("model.image_encoder."): p.grad for name, p in network.named_parameters()}
    assert {name for name in weights if gradients[name] is not None and gradients[name].any()} == set(weights)
    assert 'Device = prim::Constant[value="cpu"]' not in str(network.inlined_graph), "no tensor is made on the CPU"
    for path in (tmp_path / "encoder").rglob("*"):
        assert path.is_dir() or str(tmp_path).encode() not in path.read_bytes(), "no path of the machine"


def test_monais_tools_find_what_a_bundle_has(tmp_path: Path) -> None:
    from monai.bundle import ConfigWorkflow, load, verify_net_in_out

    export_monai_bundle(model_of("tiny"), tmp_path / "encoder")
    files = {kind: str(tmp_path / "encoder" / "configs" / f"{kind}.json") for kind in ("inference", "metadata")}
    root = str(tmp_path / "encoder")
    verify_net_in_out("network", files["metadata"], files["inference"], device="cpu", bundle_root=root)
    workflow = ConfigWorkflow(files["inference"], workflow_type="inference", bundle_root=root, device="cpu")
    workflow.initialize()
    assert (workflow.version, workflow.spatial_shape) == ("1.0.0", [32, 32])
    asked = {name for name, of in workflow.properties.items() if of["required"]}
    items = json.loads(Path(files["inference"]).read_text()) | json.loads(Path(files["metadata"]).read_text())
    assert asked <= items.keys()
    assert workflow.network_def(FILMS).shape == (5, 8)
    _, metadata, _ = load("encoder", bundle_dir=tmp_path, load_ts_module=True, device="cpu")
    assert metadata == json.loads(Path(files["metadata"]).read_text())
    names = ("README.md", "__init__.py", "inference.json", "metadata.json", "model.ts", "prepare.py")
    seen = sorted(path.name for path in (tmp_path / "encoder").rglob("*") if path.is_file())
    assert seen == sorted((*names, "preprocessing.json", "radiograph.py", "text_restoration.py"))


def test_a_bundle_of_colour_sees_colour(tmp_path: Path) -> None:
    """Of photographs in three channels; the metadata name these."""
    from monai.bundle import load, verify_net_in_out

    model = model_of("resnet10t")
    model.prepare = Preprocessing(40, 32, colour=True)
    model.preprocessing = model.prepare.described()
    export_monai_bundle(model, tmp_path / "encoder")
    network, metadata, _ = load("encoder", bundle_dir=tmp_path, load_ts_module=True, device="cpu")
    photographs = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    assert (network(photographs) - model.encode_image(photographs)).abs().max() <= 1e-5
    image = metadata["network_data_format"]["inputs"]["image"]
    assert image["num_channels"] == 3
    assert [said.partition(",")[0] for said in image["channel_def"].values()] == ["red", "green", "blue"]
    said = (tmp_path / "encoder" / "docs" / "README.md").read_text()
    assert "float32 [N, 3, 32, 32] in -1..1 (red, green, blue)" in said
    files = [str(tmp_path / "encoder" / "configs" / f"{kind}.json") for kind in ("metadata", "inference")]
    verify_net_in_out("network", *files, device="cpu", bundle_root=str(tmp_path / "encoder"))


def films(folder: Path) -> list[Path]:
    from PIL import Image

    folder.mkdir()
    grey = np.random.default_rng(0).integers(0, 256, (3, 70, 90)).astype(np.uint8)
    for number, pixels in enumerate(grey):
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return sorted(folder.iterdir())


RUN = """
from monai.bundle import run
run(config_file="configs/inference.json", dataset_dir="../films", device="cpu")
"""
"""What ``python -m monai.bundle run`` calls, in the bundle's folder."""

LINES = """
import os, sys, torch
sys.path.insert(0, "encoder")
from scripts.prepare import films
prepared = films(sorted(f"films/{name}" for name in os.listdir("films")))
torch.save(network.to("cpu")(torch.from_numpy(prepared)).detach(), "seen.pt")
"""
"""What follows the lines of the bundle's README in the folder above."""


@dataclass(frozen=True)
class Used:
    """A folder in which a process without fedvlp used the bundle, the films there, and their vectors here."""

    folder: Path
    films: list[Path]
    vectors: torch.Tensor


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Used:
    """By ``RUN``, where its engine is installed, and then by the lines of the README."""
    folder = tmp_path_factory.mktemp("used")
    model = model_of("tiny")
    export_monai_bundle(model, folder / "encoder")
    paths = films(folder / "films")
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "encoder" / "docs" / "README.md").read_text(), re.DOTALL)
    run = RUN if find_spec("ignite") else ""
    alone(f"{run}\nimport os\nos.chdir('..')\n{code}{LINES}", folder / "encoder")
    return Used(folder, paths, model.encode_image(paths))


@pytest.mark.slow(seconds=20)
def test_the_lines_of_the_readme_need_no_fedvlp(used: Used) -> None:
    seen = torch.load(used.folder / "seen.pt", weights_only=True)
    assert (seen - used.vectors).abs().max() <= 1e-5


@pytest.mark.slow(seconds=20)
@pytest.mark.skipif(find_spec("ignite") is None, reason="pip install pytorch-ignite")
def test_monai_runs_the_bundle_on_a_folder_of_films(used: Used) -> None:
    """The table has a film and its vector in each line."""
    with (used.folder / "encoder" / "eval" / "vectors.csv").open(newline="") as file:
        names, *columns = zip(*csv.reader(file), strict=True)
    assert [Path(name).name for name in names] == [path.name for path in used.films]
    seen = torch.tensor([[float(value) for value in column] for column in columns]).T
    assert (seen - used.vectors).abs().max() <= 1e-5


def test_of_a_classifier_the_vectors_are_written(tmp_path: Path) -> None:
    from monai.bundle import load

    model = trained(MultimodalConfig(image_size=32, max_tokens=6, labels=("a", "b")))
    export_monai_bundle(model, tmp_path / "encoder")
    network, *_ = load("encoder", bundle_dir=tmp_path, load_ts_module=True, device="cpu")
    assert (network(FILMS) - model.encode_image(FILMS)).abs().max() <= 1e-5


def test_a_bundle_that_differs_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = model_of("tiny", head_norm="none")
    traced = module._traced
    monkeypatch.setattr(module, "_traced", lambda model: traced(other))
    with pytest.raises(ExportError, match="export to monai-bundle: its features differ by"):
        export_monai_bundle(model_of("tiny"), tmp_path / "x")
    assert list(tmp_path.iterdir()) == []
