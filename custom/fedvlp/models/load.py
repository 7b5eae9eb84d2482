"""A trained model from the folder of its run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from fedvlp.core import norm_statistics
from fedvlp.core.checkpoint import load_tensors
from fedvlp.core.client import OBJECTIVE
from fedvlp.core.json_file import read_json
from fedvlp.core.types import Batch, is_private, modality
from fedvlp.models.adapters import merge_private
from fedvlp.models.dual_encoder import DualEncoder
from fedvlp.models.initial import load_initial, parse
from fedvlp.models.multimodal import MultimodalClassifier


def load_model(folder: str | Path, statistics: str | Path | Iterable[Batch] | None = None) -> DualEncoder:
    """The model of a finished run, on the CPU, in evaluation mode: a DualEncoder or a MultimodalClassifier.

    ``folder`` is that of a run, or one that ``DualEncoder.save`` wrote. ``statistics`` are those of its batch
    normalisation, where each site keeps its own (``norm_statistics=site``): what a site keeps (its name in a simulated
    run, or the folder ``sites/<site>`` of the run at that site), or batches of records to estimate them on, at least 2
    records each; those of towers that were frozen in the run stay. A site's name or folder also adds its private
    adapters (``model.adapter_private``). Raises ValueError where the folder holds no model, where it has no statistics
    and none are given, and for batches without a modality that the model normalises.
    """
    run, folder = Path(folder), _inside(Path(folder))
    saved = _described(folder)
    settings = saved["model"]
    kind = MultimodalClassifier if "labels" in settings else DualEncoder
    model = kind.from_pretrained(folder)
    if isinstance(statistics, (str, Path)):
        inside = run / "sites" / statistics
        own = _of_site(inside if inside.is_dir() else Path(statistics))
        private = {name: own.pop(name) for name in list(own) if is_private(name)}
        model.load_state_dict(model.state_dict() | own)
        merge_private(model, private, settings["adapter_alpha"] / max(1, settings["adapter_rank"]) if private else 0.0)
    elif statistics is not None:
        _estimate(model, statistics)
    elif saved.get("statistics") == norm_statistics.INITIAL:
        raise ValueError(
            f"{folder}: each site of this run keeps the statistics of its batch normalisation, and the model has none; "
            "give a site's name or folder: --statistics SITE of predict, search, embed, explain, explore and export "
            "(in Python statistics=, which also takes batches of your records to estimate them on)"
        )
    return model


def _estimate(model: DualEncoder, batches: Iterable[Batch]) -> None:
    """Sets the running statistics of a model, but for those of frozen towers, to their means over these batches.

    Raises ValueError where no batch reaches some of them.
    """
    prefixes = tuple(f"{module}." for module in model.frozen_statistics)
    names = [name for name in model.state_dict() if not name.startswith(prefixes)]
    missed = norm_statistics.set_statistics(norm_statistics.normalising(model, names), model, batches)
    lacking = sorted({modality(name) for name, layer in model.named_modules() if layer in missed})
    if lacking:
        raise ValueError(
            f"statistics: no batch has {' or '.join(lacking)}, and the model's batch normalisation of that has no "
            "statistics yet; give batches of records with image and text, at least one"
        )


def load_encoders(folder: str | Path) -> DualEncoder:
    """As ``load_model``, and also of weights to start from (models/initial.py: a name, or a folder).

    Those hold encoders alone, so all else of the model is then random: for what reads the encoders only.
    """
    inside = _inside(parse(str(folder)).folder)
    saved = _described(inside)
    if "weights" not in saved:
        return load_model(folder)
    model = DualEncoder.config_class(**saved["model"]).build()
    load_initial(model, str(folder))
    return model.eval()


def input_size(folder: str | Path) -> int:
    """Pixels, the side of the square that the model in a folder sees. Raises ValueError where there is no model."""
    return int(_described(_inside(parse(str(folder)).folder))["model"]["image_size"])


def preprocessing(folder: str | Path) -> dict[str, Any]:
    """What the folder of a model says of how images are prepared for it; empty where it says nothing.

    Raises ValueError where there is no model.
    """
    return dict(_described(_inside(parse(str(folder)).folder)).get("preprocessing") or {})


def _inside(folder: Path) -> Path:
    """The folder of the model itself: of a run, that below it."""
    return folder / "model" if (folder / "model").is_dir() else folder


def _described(folder: Path) -> dict[str, Any]:
    """What config.json says. Raises ValueError where it is none of a model."""
    try:
        saved = read_json(folder / "config.json")
        if isinstance(saved["model"], dict):
            return dict(saved)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise ValueError(f"{folder} holds no trained model; give the folder of a run that has finished") from None


def _of_site(folder: Path) -> dict[str, Tensor]:
    """What a site keeps of the trained model: its normalisation and private adapters. Raises ValueError without any."""
    files = sorted(folder.glob("[0-9]*-[0-9]*.safetensors"))
    tensors = norm_statistics.own(load_tensors(files[-1])[0], norm_statistics.SERVED) if files else {}
    if not tensors:
        raise ValueError(
            f"{folder} holds no normalisation of a trained model; the run must have ended with an evaluation there, "
            "with norm_statistics=site or model.adapter_private=true"
        )
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(OBJECTIVE)}
