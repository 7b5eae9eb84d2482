"""What the tests of exported models share: a model with nobody's weights, and a process without fedvlp."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch

from fedvlp.models import DualEncoder, ModelConfig

SMALL = {"max_tokens": 6, "head_hidden": 16, "head_norm": "layer", "embedding_dim": 8}
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "no", "left", "basal", "effusion", "edema"]


def alone(code: str, folder: Path, *absent: str) -> None:
    """Runs ``code`` in ``folder``, where neither fedvlp nor what is ``absent`` can be imported."""
    hidden = f"import sys\nsys.modules |= dict.fromkeys({['fedvlp', *absent]!r})\n{code}"
    done = subprocess.run([sys.executable, "-c", hidden], cwd=folder, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]


def readme_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names that there are after the Python of an exported folder's README was run in that folder."""
    monkeypatch.chdir(folder)
    spec: Any = spec_from_file_location("prepare", folder / "prepare.py")
    prepare = module_from_spec(spec)
    spec.loader.exec_module(prepare)
    monkeypatch.setitem(sys.modules, "prepare", prepare)
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    return names


def trained(config: ModelConfig) -> DualEncoder:
    """With weights and statistics that are nobody's initial ones."""
    model = config.build(3).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(0.02 * torch.rand(tensor.shape, generator=generator))
    return model
