"""Both encoders of a trained model in ONNX, with alignment blocks and heads, and with what prepares their inputs."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedvlp.models.dual_encoder import DualEncoder
from fedvlp.models.export.written import (
    CHANNELS,
    NEEDS,
    TEXTS,
    ImageEncoder,
    TextEncoder,
    apart,
    channels_of,
    films_of,
    require,
    trial_films,
    write_preparation,
    written,
)
from fedvlp.models.tiny import HashTokenizer

OPSET = 17
"""Of ONNX; ONNX Runtime has it since 1.12."""

README = """# Image and text encoder for ONNX Runtime

`image.onnx` maps `image`, float32 [N, {channels}, {size}, {size}] in -1..1 ({named}), and `text.onnx` `ids`, int64
[N, {tokens}], with `mask`, bool [N, {tokens}], to `vectors`, float32 [N, {width}] of unit length: those of fedvlp's
`encode_image` and `encode_text`, for any N. In this folder, after `pip install onnxruntime {needs}`:

```python
from onnxruntime import InferenceSession
from prepare import films, tokens

image, text = InferenceSession("image.onnx"), InferenceSession("text.onnx")
shown = image.run(None, {{"image": films(["film.png"])}})[0]
said = text.run(None, tokens(["left basal effusion", "no effusion"]))[0]
print(shown @ said.T)  # cosines [1, 2]
```

`preprocessing.json` says how images and phrases are prepared, `tokenization.json` how words become ids, and
`prepare.py` does both. An image that is prepared in another way gets a wrong vector. This is research software and no
medical device.
"""

CLASSIFIER = """
The classifier of findings, for which the vectors were trained, is not among these files: their cosines mean nothing.
"""


def export_onnx(model: DualEncoder, out: Path) -> str:
    """Writes image.onnx, text.onnx, what prepares their inputs, and how to use them into the new folder ``out``.

    Returns the line that loads the first. Both give the vectors [N, d] of ``encode_image`` and ``encode_text``, for any
    N; a classifier of findings is left out. Raises ExportError where onnx or onnxruntime is not installed, where the
    vectors differ, and for a folder that is there.
    """
    require("onnx", "onnx", "onnxruntime")
    config, hashed = model.config, isinstance(model.tokenizer, HashTokenizer)
    channels = channels_of(model)

    def write(folder: Path) -> None:
        films, (ids, mask) = films_of(config.image_size, channels), model.tokenizer(TEXTS)
        _trace(ImageEncoder(model), {"image": films[:-1]}, folder / "image.onnx")
        _trace(TextEncoder(model), {"ids": ids[:-1], "mask": mask[:-1]}, folder / "text.onnx")
        write_preparation(model, folder)
        needs = NEEDS if hashed else f"{NEEDS} transformers"
        sizes = {"size": config.image_size, "tokens": config.max_tokens, "width": config.embedding_dim}
        said = README.format(needs=needs, channels=channels, named=", ".join(CHANNELS[channels]), **sizes)
        (folder / "README.md").write_text(said + ("" if model.contrastive else CLASSIFIER), encoding="utf-8")

    def difference(folder: Path) -> float:
        (films, ours), (ids, mask) = trial_films(model, folder), model.tokenizer(TEXTS)
        shown = _run(folder / "image.onnx", {"image": films})
        said = _run(folder / "text.onnx", {"ids": ids, "mask": mask})
        return max(apart(shown, ImageEncoder(model)(ours)), apart(said, TextEncoder(model)(ids, mask)))

    written(model, "onnx", Path(out), write, difference)
    return f'onnxruntime.InferenceSession("{out}/image.onnx")'


def _trace(module: nn.Module, inputs: dict[str, Tensor], file: Path) -> None:
    """Writes what ``module`` does with a batch of these, of any size.

    By tracing: the exporter of ``torch.export`` cannot take a GRU over reports of several lengths (torch 2.15).
    """
    names = [*inputs, "vectors"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of shapes that the trace holds fixed; the comparison has another batch
        torch.onnx.export(
            _with_weights(module).eval(),
            tuple(inputs.values()),
            str(file),
            input_names=list(inputs),
            output_names=["vectors"],
            dynamic_axes={name: {0: "batch"} for name in names},
            opset_version=OPSET,
            dynamo=False,
        )


def _with_weights(module: nn.Module) -> nn.Module:
    """A copy in which batch normalisation without weights has ones and zeros, which the exporter needs behind a GRU."""
    module = copy.deepcopy(module)
    for norm in module.modules():
        if isinstance(norm, nn.BatchNorm1d) and norm.weight is None:
            norm.weight, norm.bias = (nn.Parameter(fill(norm.num_features)) for fill in (torch.ones, torch.zeros))
    return module


def _run(file: Path, inputs: dict[str, Tensor]) -> Tensor:
    """What ONNX Runtime gives, on the CPU."""
    from onnxruntime import InferenceSession

    session: Any = InferenceSession(str(file), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})[0])
