"""A trained model for other libraries, which load it without fedvlp.

Every export is loaded with the other library and compared before it counts as written.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fedvlp.models.dual_encoder import DualEncoder
from fedvlp.models.export.monai_bundle import export_monai_bundle
from fedvlp.models.export.onnx import export_onnx
from fedvlp.models.export.open_clip import export_open_clip
from fedvlp.models.export.towers import export_huggingface, export_timm
from fedvlp.models.export.written import ExportError

__all__ = [
    "EXPORTS",
    "ExportError",
    "export_huggingface",
    "export_monai_bundle",
    "export_onnx",
    "export_open_clip",
    "export_timm",
]

EXPORTS: dict[str, Callable[[DualEncoder, Path], str]] = {
    "timm": export_timm,
    "huggingface": export_huggingface,
    "onnx": export_onnx,
    "open_clip": export_open_clip,
    "monai-bundle": export_monai_bundle,
}
"""Library -> what writes a model, or a tower of it, for that."""
