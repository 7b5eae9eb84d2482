"""Protocols that the papers' tables alone read, as a plugin of a clone: ``fedvlp evaluate RUN --what distortion``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from studies.protocols.distortion import deep, distort, shallow, similarity
from studies.protocols.vqa import answer

EVALUATIONS: dict[str, Callable[[Any, Any], list[Path]]] = {
    "distortion": distort,
    "shallow": shallow,
    "deep": deep,
    "similarity": similarity,
    "vqa": answer,
}
"""Evaluations by name; the type of ``choices`` says what each can be told."""
