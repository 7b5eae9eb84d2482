"""A trained model as open_clip (Ilharco et al., https://github.com/mlfoundations/open_clip) loads it.

open_clip holds a timm tower and a transformers tower with one linear layer on each, so only a model without alignment
blocks and without hidden layers in its heads can be expressed. Its text head has no bias: the bias is moved into the
last layer norm of the text tower, whose last hidden state is therefore shifted by a constant.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedvlp.models.dual_encoder import DualEncoder
from fedvlp.models.export.written import (
    NEEDS,
    TEXTS,
    ExportError,
    ImageEncoder,
    TextEncoder,
    apart,
    require,
    save_weights,
    statistics_of,
    trial_films,
    write_preparation,
    written,
)
from fedvlp.models.tiny import HashTokenizer

CONFIG, MODEL = "open_clip_config.json", "open_clip_model.safetensors"
TEMPERATURE = 0.07  # open_clip's initial one: the model's own is its objective's, and cosines do not depend on it
ALIGNED = 1e-6  # greatest part of a text head's bias that may remain outside of what its weights reach

README = """# Dual encoder for open_clip

In this folder, after `pip install open_clip_torch transformers {needs}`:

```python
import open_clip, torch
from prepare import films, phrases

model, _ = open_clip.create_model_from_pretrained("local-dir:.")
tokenizer = open_clip.get_tokenizer("local-dir:.")
with torch.no_grad():
    film = torch.from_numpy(films(["film.png"])).expand(-1, 3, -1, -1)  # red, green, blue; equal where it is grey
    shown = model.eval().encode_image(film, normalize=True)
    said = model.encode_text(tokenizer(phrases(["left basal effusion", "no effusion"])), normalize=True)
print(shown @ said.T)  # cosines [1, 2]
```

These are the vectors of fedvlp's `encode_image` and `encode_text`. `prepare.py` prepares images and phrases as
preprocessing.json says; open_clip's own transform resizes images in another way and gives other vectors. Elsewhere than
in this folder, write its path, or the name that it has on the hub, as `hf_model_name` into {config}. The
temperature is open_clip's initial one. This is research software and no medical device.
"""


def export_open_clip(model: DualEncoder, out: Path) -> str:
    """Writes both towers with their heads, the tokenizer and what prepares images into the new folder ``out``.

    Returns the line that loads them in that folder; open_clip then gives the vectors [N, d] of ``encode_image`` and
    ``encode_text``. Raises ExportError for a model that open_clip cannot hold, where its vectors differ or it is not
    installed, and for a folder that is there.
    """
    require("open_clip", "open_clip")
    refuse(model)
    image, text = _image(model), _text(model)
    config = {"embed_dim": model.config.embedding_dim, "vision_cfg": image, "text_cfg": text}
    film: dict[str, Any] = {"mean": [0.5] * 3, "std": [0.5] * 3, "resize_mode": "longest", "fill_color": 0}
    film |= statistics_of(model.image_encoder)

    def write(folder: Path) -> None:
        said = {"model_cfg": config, "preprocess_cfg": film}
        (folder / CONFIG).write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
        save_weights(_weights(model), folder, MODEL)
        tower: Any = model.text_encoder
        tower.model.config.save_pretrained(folder)
        tower.tokenizer.tokenizer.save_pretrained(folder)
        write_preparation(model, folder, texts=False, normalise=True)
        (folder / "README.md").write_text(README.format(needs=NEEDS, config=CONFIG), encoding="utf-8")

    def difference(folder: Path) -> float:
        return _difference(model, folder, text)

    written(model, "open_clip", Path(out), write, difference)
    return f'open_clip.create_model_from_pretrained("local-dir:."), in the folder {out}'


def refuse(model: DualEncoder) -> None:
    """Raises ExportError, with all that is in the way, unless open_clip can express the model."""
    seen = [*_faults(model), *_image_faults(model.image_encoder), *_text_faults(model.text_encoder)]
    if seen:
        raise ExportError(
            f"export to open_clip: {'; '.join(seen)}; open_clip holds a timm and a transformers tower with one linear "
            "layer on each; --to onnx takes any model"
        )


def _faults(model: DualEncoder) -> Iterator[str]:
    if not model.contrastive:
        yield "it is a classifier, whose images and texts were not trained to be compared"
    if model.config.alignment:
        yield "it has alignment blocks (model.alignment=false has none)"
    if model.config.head_hidden is not None:
        yield "its projection heads have a hidden layer (model.head_hidden=null has none)"


def _image_faults(tower: Any) -> Iterator[str]:
    described = tower.architecture()
    if "name" not in described:
        yield "its image tower is fedvlp's own (tiny)"
        return
    if tower.in_channels != 3:
        yield f"its image tower sees {tower.in_channels} channels, and not 3"
    if described["args"]:
        yield f"its image tower is built with {', '.join(described['args'])}, which open_clip does not set"


def _text_faults(tower: Any) -> Iterator[str]:
    from open_clip.hf_configs import arch_dict

    if not hasattr(tower, "model"):
        yield "its text tower is fedvlp's own"
        return
    kind = tower.model.config.model_type
    if kind not in arch_dict:
        yield f"its text tower is a {kind}, which open_clip does not know"
    if isinstance(tower.tokenizer, HashTokenizer):
        yield "its tokenizer is fedvlp's hashed words"


def _image(model: DualEncoder) -> dict[str, Any]:
    """open_clip's ``vision_cfg``."""
    tower: Any = model.image_encoder
    return {
        "timm_model_name": tower.architecture()["name"],
        "timm_model_pretrained": False,
        "timm_pool": "token" if tower.has_summary else "avg",
        "timm_proj": "linear",
        "timm_proj_bias": True,
        "image_size": tower.image_size,
    }


def _text(model: DualEncoder) -> dict[str, Any]:
    """open_clip's ``text_cfg``; the text tower is described in the folder that one is in."""
    mean = model.config.text_pooling == "mean"
    return {
        "context_length": model.config.max_tokens,
        "hf_model_name": ".",
        "hf_model_pretrained": False,
        "hf_tokenizer_name": ".",
        "hf_proj_type": "linear",
        "hf_pooler_type": "mean_pooler" if mean else "cls_last_hidden_state_pooler",
    }


def _weights(model: DualEncoder) -> dict[str, Tensor]:
    """The tensors under open_clip's names."""
    towers: tuple[Any, Any] = (model.image_encoder, model.text_encoder)
    image, text = (tower.model for tower in towers)
    shown, said = (_linear(head) for head in (model.image_head, model.text_head))
    tensors = {f"visual.trunk.{name}": tensor for name, tensor in image.state_dict().items()}
    tensors |= {"visual.head.proj.weight": shown.weight, "visual.head.proj.bias": shown.bias}
    tensors |= {f"text.transformer.{name}": tensor for name, tensor in text.state_dict().items()}
    last = f"text.transformer.{_last_norm(text)}.bias"
    tensors |= {"text.proj.weight": said.weight, last: tensors[last] + _reaching(said.weight, said.bias)}
    return tensors | {"logit_scale": torch.tensor(math.log(1 / TEMPERATURE))}


def _linear(head: Any) -> nn.Linear:
    (layer,) = head
    return layer


def _last_norm(text: Any) -> str:
    """Name of the layer norm that a tower built like BERT ends with. Raises ExportError for another tower."""
    norms = [name for name, module in text.named_modules() if isinstance(module, nn.LayerNorm)]
    expected = f"encoder.layer.{text.config.num_hidden_layers - 1}.output.LayerNorm"
    if expected not in norms:
        raise ExportError(
            "export to open_clip: its text head has a bias, which open_clip's has not, and its text tower does not end "
            "with a layer norm that could take it, as BERT does; --to onnx takes any model"
        )
    return expected


def _reaching(weight: Tensor, bias: Tensor) -> Tensor:
    """The shortest shift [W] of a feature by which weights [d, W] give the bias [d]. Raises ExportError without one."""
    exact, wanted = weight.double(), bias.double()
    shift = torch.linalg.pinv(exact) @ wanted
    if (exact @ shift - wanted).abs().max() > ALIGNED * wanted.abs().max():
        raise ExportError(
            f"export to open_clip: its text head {list(weight.shape)} has a bias that no feature reaches, and "
            "open_clip's has no bias; --to onnx takes any model"
        )
    return shift.to(bias.dtype)


def _difference(model: DualEncoder, folder: Path, text: dict[str, Any]) -> float:
    """Of the vectors that open_clip gives of images and texts from those that the model has."""
    import open_clip

    here = {**text, "hf_model_name": str(folder)}
    try:
        loaded = open_clip.create_model(f"local-dir:{folder}", text_cfg=here, require_pretrained=True).eval()
    except RuntimeError as error:
        raise ExportError(
            "export to open_clip: it builds one of these towers otherwise, so the weights do not fit, and nothing was "
            "written; --to onnx takes any model"
        ) from error
    (films, ours), (ids, mask) = trial_films(model, folder), model.tokenizer(TEXTS)
    if not torch.equal(open_clip.get_tokenizer(f"local-dir:{folder}")(list(TEXTS)), ids):
        return float("inf")
    tower: Any = model.image_encoder
    films = films.expand(-1, 3, -1, -1)
    given = films if model.prepare else tower.normalise(films)  # prepare.py has done it
    shown = loaded.encode_image(given, normalize=True)
    said = loaded.encode_text(ids, normalize=True)
    return max(apart(shown, ImageEncoder(model)(ours)), apart(said, TextEncoder(model)(ids, mask)))
