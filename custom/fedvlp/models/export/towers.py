"""Towers of a trained model as other libraries load them: the image tower in timm, the text tower in transformers.

A tower ends before the alignment block and the projection head, which neither library has. What is equal is therefore
the tower's feature of a film or a report, with which one goes on training, and not the vectors of ``encode_image`` and
``encode_text``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from fedvlp.models.dual_encoder import DualEncoder
from fedvlp.models.export.written import TEXTS, ExportError, films_of, greatest, save_weights, written


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
        save_weights(tower.model.state_dict(), folder)

    def difference(folder: Path) -> float:
        import timm

        loaded = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        films = films_of(size, channels)
        return greatest(loaded(films), tower(films)[:, 0])

    written(model, "timm", Path(out), write, difference)
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
        length = model.config.max_tokens
        seen = words(list(TEXTS), padding="max_length", truncation=True, max_length=length, return_tensors="pt")
        ids, mask = tower.tokenizer(TEXTS)
        if not (torch.equal(seen["input_ids"], ids) and torch.equal(seen["attention_mask"].bool(), mask)):
            return float("inf")
        hidden = loaded(input_ids=seen["input_ids"], attention_mask=seen["attention_mask"]).last_hidden_state
        return greatest(hidden[mask], tower(ids, mask)[mask])

    written(model, "huggingface", Path(out), write, difference)
    return f'transformers.AutoModel.from_pretrained("{out}")'
