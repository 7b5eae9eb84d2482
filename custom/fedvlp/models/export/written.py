"""Writing an export: beside its folder, compared with the model in the other library, and only then renamed."""

from __future__ import annotations

import runpy
import shutil
import tempfile
from collections.abc import Callable, Mapping
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedvlp.core.checkpoint import save_json
from fedvlp.models.dual_encoder import DualEncoder
from fedvlp.models.serialization import WEIGHTS
from fedvlp.models.tiny import HashTokenizer
from fedvlp.models.use import evaluating

# What prepares images and phrases for an exported model, in files beside it: JSON, and Python without fedvlp.

NEEDS = "numpy pillow opencv-python-headless"
"""Packages that ``prepare.py`` imports for images, as pip calls them."""

CHANNELS = {1: ("grey",), 3: ("red", "green", "blue")}
"""Number of an image's channels -> their names."""


def channels_of(model: DualEncoder) -> int:
    """Of the images that are prepared for a model: 3 in colour, else 1, which the image tower repeats."""
    return 3 if model.preprocessing.get("colour") is True else 1


def statistics_of(tower: Any) -> dict[str, Any]:
    """The mean and std of each channel that an image tower normalises by itself; empty for those of every image."""
    said = tower.architecture()
    return {key: said[key] for key in ("mean", "std") if key in said}


def write_preparation(model: DualEncoder, folder: Path, texts: bool = True, normalise: bool = False) -> None:
    """Writes preprocessing.json, prepare.py and what that reads, and with ``texts`` tokenization.json and tokenizer/.

    With ``normalise``, for an image tower as its own library has it, prepare.py gives images the mean and std that the
    tower was made for; otherwise what is exported does that itself. radiograph.py and text_restoration.py are this
    package's, so that an image is decoded and a phrase restored as here.
    """
    said = statistics_of(model.image_encoder) if normalise else {}
    save_json(folder / "preprocessing.json", model.preprocessing and model.preprocessing | said)
    sources = {"prepare.py": "models/export/prepare.py.txt"}
    sources |= {name: f"data/{name}" for name in ("radiograph.py", "text_restoration.py")}
    for name, source in sources.items():
        code = files("fedvlp").joinpath(source).read_text(encoding="utf-8")
        (folder / name).write_text(code, encoding="utf-8")
    if not texts:
        return
    tokenizer: Any = model.tokenizer
    if isinstance(tokenizer, HashTokenizer):
        save_json(folder / "tokenization.json", tokenizer.described())
        return
    save_json(folder / "tokenization.json", {"kind": "transformers", "max_tokens": tokenizer.max_tokens})
    tokenizer.tokenizer.save_pretrained(folder / "tokenizer")


TOLERANCE = 1e-5
"""Greatest difference in the other library: of a feature as a share of the greatest, of a unit vector as it is."""

TRIALS = 3
"""Random images that an encoder is traced with."""

TEXTS = ("No pleural effusion or pneumothorax.", "left basal opacity", "")
"""Reports that are compared."""


class ImageEncoder(nn.Module):
    """Prepared images [N, C, S, S] -> unit vectors [N, d], as ``encode_image``: what a program that traces is given."""

    def __init__(self, model: DualEncoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> Tensor:
        """Vectors [N, d]."""
        return self.model.project(self.model.towers({"image": image})).image  # type: ignore[return-value]


class TextEncoder(nn.Module):
    """ids and mask [N, T] -> unit vectors [N, d], as ``encode_text``."""

    def __init__(self, model: DualEncoder) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Vectors [N, d]."""
        return self.model.project(self.model.towers({"text": ids, "text_mask": mask})).text  # type: ignore[return-value]


class ExportError(ValueError):
    """The model cannot be exported to this library, or the library's features of it differ."""


@torch.no_grad()
def written(
    model: DualEncoder, library: str, out: Path, write: Callable[[Path], None], difference: Callable[[Path], float]
) -> None:
    """Writes beside ``out``, compares, and renames: the folder is there only if it is right.

    ``write`` fills the folder that it is given, and ``difference`` is that of the other library's features, loaded from
    there, as ``greatest`` or ``apart`` measures it. Both see the model in evaluation mode. Raises ExportError.
    """
    if out.exists():
        raise ExportError(f"export to {library}: {out.name} exists already; name a new folder")
    if not out.absolute().parent.is_dir():
        raise ExportError(f"export to {library}: the folder above {out.name} does not exist; make it first")
    draft = Path(tempfile.mkdtemp(prefix=".exporting-", dir=out.absolute().parent))
    try:
        with evaluating(model):
            write(draft)
            seen = difference(draft)
        if not seen <= TOLERANCE:
            raise ExportError(
                f"export to {library}: its features differ by {seen:.2g}, at most {TOLERANCE:g} may be; this "
                "architecture is pooled or tokenised there in another way, or prepare.py reads an image in another "
                "way, and was not written"
            )
        draft.chmod(0o755)
        draft.rename(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def save_weights(tensors: Mapping[str, Tensor], folder: Path, name: str = WEIGHTS) -> None:
    """Writes tensors into a safetensors file of ``folder``, as PyTorch's libraries expect it."""
    from safetensors.torch import save_file

    own = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
    save_file(own, folder / name, metadata={"format": "pt"})


def greatest(one: Tensor, other: Tensor) -> float:
    """The greatest difference, as a share of the greatest of ``other``; infinite where their shapes differ."""
    if one.shape != other.shape:
        return float("inf")
    return float((one.double() - other.double()).abs().max() / other.double().abs().max())


def apart(one: Tensor, other: Tensor) -> float:
    """The greatest difference of unit vectors in any component; infinite where their shapes differ."""
    return float((one - other).abs().max()) if one.shape == other.shape else float("inf")


def films_of(size: int, channels: int = 1) -> Tensor:
    """Random images [TRIALS, C, S, S], the same every time."""
    return torch.randn(TRIALS, channels, size, size, generator=torch.Generator().manual_seed(0))


def trial_films(model: DualEncoder, folder: Path) -> tuple[Tensor, Tensor]:
    """Images [N, C, S, S] to compare with, of image files of every kind: by prepare.py of ``folder``, and by fedvlp.

    Of a model that does not say how images are prepared: random ones, twice. Raises ValueError where its images were
    decoded otherwise than this fedvlp, whose decoding prepare.py has, does.
    """
    if model.prepare is None:
        films = films_of(model.config.image_size)
        return films, films
    prepare = runpy.run_path(str(folder / "prepare.py"))
    with tempfile.TemporaryDirectory() as drawn:
        files = model.prepare.samples(Path(drawn))
        return torch.from_numpy(prepare["films"](files)), model.prepare.films(files)


def require(library: str, *packages: str) -> None:
    """Raises ExportError where a package of the extra ``fedvlp[library]`` is not installed."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise ExportError(
            f"export to {library}: {' and '.join(missing)} is not installed here; pip install 'fedvlp[{library}]'"
        )
