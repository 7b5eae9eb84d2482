"""Towers of a trained model as other libraries load them, without fedvlp: the image tower in timm, the text tower in
transformers.

A tower ends before the alignment block and the projection head, which neither library has. What is equal is therefore
the tower's feature of a film or a report, with which one goes on training, and not the vectors of ``encode_image`` and
``encode_text``. Every export is loaded with the other library and compared before it counts as written.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedvlp.models.dual_encoder import WEIGHTS, DualEncoder
from fedvlp.models.use import evaluating

TOLERANCE = 1e-5
"""Greatest difference of a feature in the other library, as a share of the greatest feature."""

TRIALS = 2
"""Random films or reports that are compared."""


class ExportError(ValueError):
    """The model cannot be exported to this library, or the library's features of it differ."""


def export_timm(model: DualEncoder, out: Path) -> str:
    """Writes the image tower in timm's layout into the new folder ``out``; returns the line that loads it.

    timm's model gives the feature [B, W] of prepared films [B, C, S, S], grey repeated to C channels. Raises
    ExportError for a tower that timm has not, where timm pools in another way, and for a folder that is there.
    """
    tower: Any = model.image_encoder
    described = tower.architecture()
    if "name" not in described:
        raise ExportError("export to timm: the image tower is fedvlp's own (tiny), which timm does not have")
    channels, size = tower.in_channels, tower.image_size
    args = {**described["args"], "global_pool": "token" if tower.has_summary else "avg"}
    if channels != 3:
        args["in_chans"] = channels
    longest = model.preprocessing.get("longest_side", size)
    config = {
        "architecture": described["name"],
        "num_classes": 0,
        "num_features": tower.width,
        "model_args": args,
        "pretrained_cfg": {
            "num_classes": 0,
            "input_size": [channels, size, size],
            "fixed_input_size": "img_size" in args,
            "crop_pct": size / longest,
            "crop_mode": "center",
            "mean": [0.5] * channels,
            "std": [0.5] * channels,
        },
    }

    def write(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        _save_weights(tower.model, folder)

    def difference(folder: Path) -> float:
        import timm

        loaded = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        films = torch.randn(TRIALS, channels, size, size, generator=torch.Generator().manual_seed(0))
        return _greatest(loaded(films), tower(films)[:, 0])

    _export(model, "timm", Path(out), write, difference)
    return f'timm.create_model("local-dir:{out}", pretrained=True)'


def export_huggingface(model: DualEncoder, out: Path) -> str:
    """Writes the text tower with its tokenizer for transformers into the new folder ``out``; returns how to load it.

    The last hidden state [B, T, W] is the tower's; a pooler, which transformers may add, is untrained. Raises
    ExportError for a tower or a tokenizer that transformers has not, and for a folder that is there.
    """
    tower: Any = model.text_encoder
    if not hasattr(tower, "model"):
        raise ExportError("export to huggingface: the text tower is fedvlp's own, which transformers does not have")
    tokenizer = getattr(tower.tokenizer, "tokenizer", None)
    if tokenizer is None:
        raise ExportError(
            "export to huggingface: the tokenizer is fedvlp's hashed words, which transformers does not have; train "
            "with a text tower that has a vocabulary (model.pretrained=true, or a folder)"
        )

    def write(folder: Path) -> None:
        tower.model.save_pretrained(folder, safe_serialization=True)
        tokenizer.save_pretrained(folder)

    def difference(folder: Path) -> float:
        from transformers import AutoModel, AutoTokenizer

        loaded = AutoModel.from_pretrained(folder, local_files_only=True, trust_remote_code=False).eval()
        words = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        texts = ["no pleural effusion or pneumothorax", "left basal opacity"]
        length = model.config.max_tokens
        seen = words(texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
        ids, mask = tower.tokenizer(texts)
        if not (torch.equal(seen["input_ids"], ids) and torch.equal(seen["attention_mask"].bool(), mask)):
            return float("inf")
        hidden = loaded(input_ids=seen["input_ids"], attention_mask=seen["attention_mask"]).last_hidden_state
        return _greatest(hidden[mask], tower(ids, mask)[mask])

    _export(model, "huggingface", Path(out), write, difference)
    return f'transformers.AutoModel.from_pretrained("{out}")'


EXPORTS: dict[str, Callable[[DualEncoder, Path], str]] = {"timm": export_timm, "huggingface": export_huggingface}
"""Library -> what writes a tower for it."""


@torch.no_grad()
def _export(
    model: DualEncoder, library: str, out: Path, write: Callable[[Path], None], difference: Callable[[Path], float]
) -> None:
    """Writes beside ``out``, compares, and renames: the folder is there only if it is right."""
    if out.exists():
        raise ExportError(f"export to {library}: {out.name} exists already; name a new folder")
    if not out.absolute().parent.is_dir():
        raise ExportError(f"export to {library}: the folder above {out.name} does not exist; make it first")
    draft = Path(tempfile.mkdtemp(prefix=".exporting-", dir=out.absolute().parent))
    try:
        write(draft)
        with evaluating(model):
            seen = difference(draft)
        if not seen <= TOLERANCE:
            raise ExportError(
                f"export to {library}: its features differ by {seen:.2g}, at most {TOLERANCE:g} may be; this "
                "architecture is pooled or tokenised there in another way, and was not written"
            )
        draft.chmod(0o755)
        draft.rename(out)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _save_weights(module: nn.Module, folder: Path) -> None:
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in module.state_dict().items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def _greatest(one: Tensor, other: Tensor) -> float:
    """The greatest difference, as a share of the greatest of ``other``; infinite where their shapes differ."""
    if one.shape != other.shape:
        return float("inf")
    return float((one.double() - other.double()).abs().max() / other.double().abs().max())
