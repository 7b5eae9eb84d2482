"""Towers of a trained model as other libraries load them: the image tower in timm, the text tower in transformers.

A tower ends before the alignment block and the projection head, which neither library has. What is equal is therefore
the tower's feature of an image or a report, for further training, and not the vectors of ``encode_image`` and
``encode_text``.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fedvlp.models.dual_encoder import DualEncoder
from fedvlp.models.export.written import (
    NEEDS,
    TEXTS,
    ExportError,
    greatest,
    save_weights,
    statistics_of,
    trial_films,
    write_preparation,
    written,
)

TIMM_README = """# Image tower for timm

In this folder, after `pip install timm {needs}`:

```python
import timm, torch
from prepare import films

tower = timm.create_model("local-dir:.", pretrained=True).eval()
with torch.no_grad():
    features = tower(torch.from_numpy(films(["film.png"])).expand(-1, {channels}, -1, -1))
print(features.shape)  # [1, {width}]
```

The tower ends before the model's alignment block and projection head, so a feature is no vector of fedvlp's
`encode_image`. `prepare.py` prepares images as preprocessing.json says, and one that is prepared in another way gets
another feature. The transform that timm makes of config.json comes near: it pads an image that is not square with grey
in place of black, does not stretch deep images, and enlarges small ones in another way. This is research software and
no medical device.
"""

TRANSFORMERS_README = """# Text tower for transformers

In this folder, after `pip install torch transformers numpy`:

```python
import torch
from prepare import phrases
from transformers import AutoModel, AutoTokenizer

tower, tokenizer = AutoModel.from_pretrained(".").eval(), AutoTokenizer.from_pretrained(".")
texts = phrases(["left basal effusion", "no effusion"])
with torch.no_grad():
    hidden = tower(**tokenizer(texts, padding=True, truncation=True, return_tensors="pt")).last_hidden_state
print(hidden.shape)  # [2, T, {width}]
```

The tower ends before the model's alignment block and projection head, so its last hidden state is no vector of fedvlp's
`encode_text`. It was trained on texts of at most {tokens} tokens, which is the tokenizer's `model_max_length`, and
`phrases` of `prepare.py` writes a text as its reports were written (`reports` in preprocessing.json). A text that is
prepared in another way gets another hidden state. This is research software and no medical device.
"""


def export_timm(model: DualEncoder, out: Path) -> str:
    """Writes the image tower in timm's layout into the new folder ``out``, with what prepares images.

    Returns the line that loads it.

    timm's model gives the feature [B, W] of prepared images [B, C, S, S], grey repeated to C channels. Raises
    ExportError for a tower that timm has not, where timm pools in another way, and for a folder that is there.
    """
    tower: Any = model.image_encoder
    described = tower.architecture()
    if "name" not in described:
        raise ExportError("export to timm: the image tower is fedvlp's own (tiny), which timm does not have")
    channels = tower.in_channels
    config = _timm_config(tower, described, model.preprocessing.get("longest_side", tower.image_size))

    def write(folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_weights(tower.model.state_dict(), folder)
        write_preparation(model, folder, texts=False, normalise=True)
        readme = TIMM_README.format(needs=NEEDS, channels=channels, width=tower.width)
        (folder / "README.md").write_text(readme, encoding="utf-8")

    def difference(folder: Path) -> float:
        import timm

        loaded = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        films, ours = trial_films(model, folder)
        given = films if model.prepare else tower.normalise(films)  # prepare.py has done it
        return greatest(loaded(given.expand(-1, channels, -1, -1)), tower(ours)[:, 0])

    written(model, "timm", Path(out), write, difference)
    return f'timm.create_model("local-dir:{out}", pretrained=True)'


def _timm_config(tower: Any, described: Mapping[str, Any], longest: int) -> dict[str, Any]:
    """config.json in timm's layout, of a tower whose images were decoded to ``longest`` pixels."""
    channels, size = tower.in_channels, tower.image_size
    args = {**described["args"], "global_pool": "token" if tower.has_summary else "avg"}
    if channels != 3:
        args["in_chans"] = channels
    return {
        "architecture": described["name"],
        "num_classes": 0,
        "num_features": tower.width,
        "model_args": args,
        "pretrained_cfg": {
            "num_classes": 0,
            "input_size": [channels, size, size],
            "fixed_input_size": "img_size" in args,
            "crop_pct": size / longest,
            "crop_mode": "border",  # the longer side is resized, as here; but the padding is grey
            "interpolation": "box",  # the mean of the area
            "mean": [0.5] * channels,
            "std": [0.5] * channels,
            **statistics_of(tower),
        },
    }


def export_huggingface(model: DualEncoder, out: Path) -> str:
    """Writes the text tower with its tokenizer, and what prepares phrases, into the new folder ``out``.

    Returns how transformers loads it. The last hidden state [B, T, W] is the tower's; a pooler, which transformers may
    add, is untrained. Raises ExportError for a tower or a tokenizer that transformers has not, and for a folder that is
    there.
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
        cutting = copy.deepcopy(tokenizer)
        cutting.model_max_length = model.config.max_tokens
        cutting.save_pretrained(folder)
        write_preparation(model, folder, texts=False)
        readme = TRANSFORMERS_README.format(tokens=model.config.max_tokens, width=tower.width)
        (folder / "README.md").write_text(readme, encoding="utf-8")

    def difference(folder: Path) -> float:
        from transformers import AutoModel, AutoTokenizer

        loaded = AutoModel.from_pretrained(folder, local_files_only=True, trust_remote_code=False).eval()
        words = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        seen = words(list(TEXTS), padding="max_length", truncation=True, return_tensors="pt")
        ids, mask = tower.tokenizer(TEXTS)
        if not (torch.equal(seen["input_ids"], ids) and torch.equal(seen["attention_mask"].bool(), mask)):
            return float("inf")
        hidden = loaded(input_ids=seen["input_ids"], attention_mask=seen["attention_mask"]).last_hidden_state
        return greatest(hidden[mask], tower(ids, mask)[mask])

    written(model, "huggingface", Path(out), write, difference)
    return f'transformers.AutoModel.from_pretrained("{out}")'
