"""Ten small images and decoders of them that other processes can import, one of which dies at its task."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np

N, SIZE = 10, 8
PIXELS = np.random.default_rng(0).integers(0, 256, (N, SIZE, SIZE), dtype=np.uint8)


def pixels(row: int) -> np.ndarray:
    return PIXELS[row % N]


def dying(row: int, log: Path, last: int) -> np.ndarray:
    """Notes every row that it decodes; at row ``last`` the process is gone, as by the kernel."""
    if row == last:
        os.kill(os.getpid(), signal.SIGKILL)
    with log.open("a") as file:
        file.write(f"{row}\n")
    return pixels(row)
