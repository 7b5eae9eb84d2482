"""The image encoder of a trained model as a MONAI bundle (https://docs.monai.io/en/stable/mb_specification.html).

MONAI has no network like it, so the bundle holds it as TorchScript, which needs no code, and no state dictionary.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedvlp.core.checkpoint import save_json
from fedvlp.models.dual_encoder import DualEncoder
from fedvlp.models.export.written import (
    CHANNELS,
    NEEDS,
    ImageEncoder,
    apart,
    channels_of,
    films_of,
    trial_films,
    write_preparation,
    written,
)

VERSION = "1.0.0"
"""Of the bundle."""

SCHEMA = "https://github.com/Project-MONAI/MONAI-extra-test-data/releases/download/0.8.1/meta_schema_20240725.json"

README = """# Image encoder of chest radiographs

`models/model.ts` maps prepared images, float32 [N, {channels}, {size}, {size}] in -1..1 ({named}), to unit vectors,
float32 [N, {width}], those of fedvlp's `encode_image`. To train it further, in the folder
above this bundle:

```python
from monai.bundle import load

network, metadata, _ = load("{name}", bundle_dir=".", load_ts_module=True)
```

`scripts/prepare.py` prepares images as `scripts/preprocessing.json` says. This writes the vectors of all images of a
folder (PNG, JPEG or TIFF) into `eval/vectors.csv`; in this bundle, after `pip install monai pytorch-ignite fire
{needs}`:

```console
$ python -m monai.bundle run --config_file configs/inference.json --dataset_dir FOLDER
```

An image that is prepared in another way gets a wrong vector. This is research software and no medical device.
"""

INFERENCE: dict[str, Any] = {
    "imports": ["$import glob", "$import torch"],
    "bundle_root": ".",
    "device": "$torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')",
    "dataset_dir": "$@bundle_root + '/films'",
    "output_dir": "$@bundle_root + '/eval'",
    "datalist": "$sorted(glob.glob(@dataset_dir + '/*'))",
    "network_def": "$torch.jit.load(@bundle_root + '/models/model.ts', map_location=@device)",
    "network": "$@network_def.to(@device)",
    "preprocessing": {
        "_target_": "Compose",
        "transforms": [
            {
                "_target_": "Lambdad",
                "keys": "image",
                "func": {"_target_": "scripts.prepare.film", "_mode_": "callable"},
            },
            {"_target_": "EnsureTyped", "keys": "image", "device": "@device", "track_meta": False},
        ],
    },
    "dataset": {
        "_target_": "Dataset",
        "data": "$[{'image': film, 'filename_or_obj': film} for film in @datalist]",
        "transform": "@preprocessing",
    },
    "dataloader": {"_target_": "DataLoader", "dataset": "@dataset", "batch_size": 16, "num_workers": 0},
    "inferer": {"_target_": "SimpleInferer"},
    "handlers": [
        {
            "_target_": "ClassificationSaver",
            "output_dir": "@output_dir",
            "filename": "vectors.csv",
            "batch_transform": "$lambda batch: batch",
            "output_transform": "$lambda output: [item['pred'] for item in output]",
        }
    ],
    "evaluator": {
        "_target_": "SupervisedEvaluator",
        "device": "@device",
        "val_data_loader": "@dataloader",
        "network": "@network",
        "inferer": "@inferer",
        "val_handlers": "@handlers",
    },
    "run": ["$@evaluator.run()"],
}
"""configs/inference.json: images of a folder in, a table of vectors out."""


def export_monai_bundle(model: DualEncoder, out: Path) -> str:
    """Writes the image encoder, with alignment block and head, as a MONAI bundle into the new folder ``out``.

    Returns the line that loads it. Its vectors [N, d] are those of ``encode_image``. Raises ExportError where they
    differ, and for a folder that is there.
    """
    out, channels = Path(out), channels_of(model)

    def write(folder: Path) -> None:
        from monai.data import save_net_with_metadata

        for name in ("configs", "docs", "models", "scripts"):
            (folder / name).mkdir()
        said = _metadata(model)
        save_json(folder / "configs" / "metadata.json", said)
        save_json(folder / "configs" / "inference.json", INFERENCE)
        traced = _traced(model)
        save_net_with_metadata(traced, str(folder / "models" / "model.ts"), include_config_vals=False, meta_values=said)
        write_preparation(model, folder / "scripts", texts=False)
        (folder / "scripts" / "__init__.py").touch()
        sizes = {"size": model.config.image_size, "width": model.config.embedding_dim}
        named = ", ".join(CHANNELS[channels])
        readme = README.format(name=out.name, needs=NEEDS, channels=channels, named=named, **sizes)
        (folder / "docs" / "README.md").write_text(readme, encoding="utf-8")

    def difference(folder: Path) -> float:
        from monai.bundle import load

        network, *_ = load(folder.name, bundle_dir=folder.parent, load_ts_module=True, device="cpu")
        films, ours = trial_films(model, folder / "scripts")
        return apart(network(films), ImageEncoder(model)(ours))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of TorchScript's age, and of shapes that a trace holds fixed
        written(model, "monai-bundle", out, write, difference)
    return f'monai.bundle.load("{out.name}", bundle_dir="{out.parent}", load_ts_module=True)[0]'


def _traced(model: DualEncoder) -> torch.jit.ScriptModule:
    films = films_of(model.config.image_size, channels_of(model))[:-1]
    return torch.jit.trace(ImageEncoder(model).eval(), films, check_trace=False)


def _metadata(model: DualEncoder) -> dict[str, Any]:
    """metadata.json, with what MONAI's specification asks for."""
    import monai

    size, width = model.config.image_size, model.config.embedding_dim
    names = CHANNELS[channels_of(model)]
    tensor = {"dtype": "float32", "value_range": [-1, 1], "is_patch_data": False}
    image = {
        "type": "image",
        "format": "magnitude",
        "modality": "n/a",
        "num_channels": len(names),
        "spatial_shape": [size, size],
        "channel_def": {str(index): f"{name}, prepared by scripts/prepare.py" for index, name in enumerate(names)},
    }
    vectors = {"type": "tuples", "format": "latent", "modality": "n/a", "num_channels": width, "spatial_shape": []}
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "changelog": {VERSION: "exported from a run of fedvlp"},
        "monai_version": monai.__version__,
        "pytorch_version": torch.__version__.partition("+")[0],
        "numpy_version": np.__version__,
        "required_packages_version": {},
        "name": "fedvlp image encoder",
        "task": "Unit vectors of images, to compare them with one another or to train on",
        "description": "The image encoder of a dual encoder that was trained on images and reports of several sites",
        "authors": "those who trained it",
        "copyright": "those who trained it",
        "intended_use": "research; no medical device",
        "preparation": model.preprocessing,
        "network_data_format": {
            "inputs": {"image": {**image, **tensor}},
            "outputs": {"pred": {**vectors, **tensor, "channel_def": {}}},
        },
    }
