"""What frozen towers make of each record, computed once instead of at every step (``Training.cache_features``).

With towers that are frozen whole (``ModelConfig.adapters=lora``, ``adapter_rank=0``) a record's tokens never change, so
that training costs what alignment modules and heads cost. Films are then cropped at the centre, as in evaluation.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Generator, nn

from fedvlp.core.device import moved
from fedvlp.core.types import IMAGE_TOKENS, TEXT_TOKENS, Batch

log = logging.getLogger(__name__)

ROWS = 32  # records that go through the towers at a time
BEAT = 60.0  # seconds between lines that say how far it is: towers take minutes, and a log is silent meanwhile


def refuse_towers(config: Any) -> None:
    """Raises ValueError for the configuration of a model whose towers change, or that has none."""
    if not getattr(config, "adapters", "") or config.adapter_rank:
        raise ValueError(
            "training.cache_features: the towers are trained, so what they make of a record changes; set "
            "model.adapters=lora and model.adapter_rank=0, or cache_features to false"
        )


def refuse(model: nn.Module, objective: nn.Module) -> None:
    """Raises ValueError for a model, or for an objective, whose records' tokens change."""
    config: Any = getattr(model, "config", None)
    refuse_towers(config)
    needs = getattr(objective, "needs", ())
    if hasattr(objective, "draw") or "sentences" in needs or ("attention" in needs and not config.alignment):
        raise ValueError(
            "training.cache_features: this objective draws another film or sentence at every step, or reads the "
            "towers' attention; set cache_features to false"
        )


@dataclass(frozen=True, eq=False)
class _Tokens:
    """Of the n records of a split; None for a modality that it lacks."""

    image: np.ndarray | None  # [n, M, W] float32
    text: np.ndarray | None  # [n, T, W] float32


class FrozenFeatures:
    """Data on the CPU, whose batches go to the model's device with the towers' tokens in the place of films.

    Everything else is the data's own. Of a training batch's films one alone is read, for its size: what is drawn for
    all of them is drawn as if they were there.

    The tokens of a split are computed when it is first asked for: 4 (M + T) W bytes a record on disk, e.g. 0.4 MB for
    EfficientNet-Lite0 at 224 pixels and MiniLM at 112 tokens. They lie in ``folder``, by what they were made of (the
    towers' weights, the films, the reports), and outlast the run; without one, in files that end with the process.
    """

    def __init__(self, data: Any, model: Any, folder: Path | None = None) -> None:
        self._data, self._model, self._folder = data, model, folder
        self._splits: dict[str, _Tokens] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def train_batches(self, steps: int, batch_size: int, generator: Generator) -> Iterator[Batch]:
        """As the data's own, with tokens."""
        self._data.share_images(lambda count: slice(0, 1))
        return (self._with_tokens("train", batch) for batch in self._data.train_batches(steps, batch_size, generator))

    def share_images(self, share: object) -> None:
        """There are no images to share among processes: every one has the tokens of all records."""

    def batches(self, split: str, batch_size: int, **options: Any) -> Iterator[Batch]:
        """As the data's own, with tokens."""
        return (self._with_tokens(split, batch) for batch in self._data.batches(split, batch_size, **options))

    def _with_tokens(self, split: str, batch: Batch) -> Batch:
        if split not in self._splits:
            self._splits[split] = self._read(split)
        tokens, rows = self._splits[split], batch["row"].numpy()
        batch = {name: tensor for name, tensor in batch.items() if name != "image"}
        if tokens.image is not None:
            batch[IMAGE_TOKENS] = torch.from_numpy(tokens.image[rows])
        if tokens.text is not None and "text" in batch:
            batch[TEXT_TOKENS] = torch.from_numpy(tokens.text[rows, : batch["text"].shape[1]])
        return moved(batch, self._device)

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    def _read(self, split: str) -> _Tokens:
        """The tokens of a split from its folder, computed first where they are not there."""
        if self._folder is None:
            with tempfile.TemporaryDirectory(prefix="fedvlp-") as folder:
                return self._computed(split, Path(folder))  # its files have no name any more, and are there as mapped
        target = self._folder / f"features-{self._key(split)}"
        if not target.is_dir():
            self._folder.mkdir(parents=True, exist_ok=True)
            draft = Path(tempfile.mkdtemp(prefix=".features-", dir=self._folder))
            try:
                self._computed(split, draft)
                draft.rename(target)
            except OSError:
                if not target.is_dir():  # no other process was first
                    raise
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        image, text = (target / f"{name}.npy" for name in (IMAGE_TOKENS, TEXT_TOKENS))
        return _Tokens(
            *(np.load(file, mmap_mode="r", allow_pickle=False) if file.is_file() else None for file in (image, text))
        )

    def _key(self, split: str) -> str:
        """A hash of what the tokens of a split are made of."""
        hashed = hashlib.sha256(self._model.towers_digest().encode())
        for batch in self._data.batches(split, ROWS, drop_last=False):
            for name in sorted(batch.keys() & {"image", "text", "text_mask"}):
                hashed.update(name.encode() + batch[name].contiguous().numpy().tobytes())
        return hashed.hexdigest()[:32]

    @torch.no_grad()
    def _computed(self, split: str, folder: Path) -> _Tokens:
        """The tokens of all records of a split by the towers in eval mode, in files of ``folder``."""
        encoders = [child for name, child in self._model.named_children() if name.endswith("_encoder")]
        modes = [encoder.training for encoder in encoders]
        for encoder in encoders:
            encoder.eval()
        image = text = None
        size, longest = self._data.sizes[split], self._model.tokenizer.max_tokens
        done, told = 0, time.monotonic()
        for batch in self._data.batches(split, ROWS, drop_last=False):
            rows, encoded = batch["row"].numpy(), self._model.towers(moved(batch, self._device))
            if encoded.image is not None:
                if image is None:
                    image = _file(folder / f"{IMAGE_TOKENS}.npy", size, *encoded.image.shape[1:])
                image[rows] = encoded.image.float().cpu().numpy()
            if encoded.text is not None:
                if text is None:
                    text = _file(folder / f"{TEXT_TOKENS}.npy", size, longest, encoded.text.shape[2])
                text[rows, : encoded.text.shape[1]] = encoded.text.float().cpu().numpy()
            done += len(rows)
            if time.monotonic() - told >= BEAT:
                log.warning("features of frozen towers, %s: %d of %d records", split, done, size)
                told = time.monotonic()
        for encoder, mode in zip(encoders, modes, strict=True):
            encoder.train(mode)
        return _Tokens(image, text)


def _file(path: Path, *shape: int) -> np.ndarray:
    """Zeros [*shape] float32 in a file."""
    return np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
