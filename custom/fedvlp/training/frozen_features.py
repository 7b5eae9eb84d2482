"""Features of fixed towers for each record, computed once instead of at every step (``Training.cache_features``).

With towers that are frozen whole (``ModelConfig.adapters=lora``, ``adapter_rank=0``) a record's tokens never change, so
that training costs what alignment modules and heads cost (``FrozenFeatures``). Towers that are trained are fixed for a
while: as received, in a phase that does not train them and in an anchor (``FixedFeatures``). Images are then cropped at
the centre, as in evaluation.
"""

from __future__ import annotations

import hashlib
import logging
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor, nn

from fedvlp.core.client import BatchNorm, Client, digest
from fedvlp.core.device import moved
from fedvlp.core.objective import ObjectiveModule
from fedvlp.core.types import DRAWN_REPORT, IMAGE_TOKENS, TEXT_TOKENS, Batch, State, VLOutput, group
from fedvlp.training.grad_cache import LOCAL

log = logging.getLogger(__name__)

ROWS = 32  # records that go through the towers at a time
IN_MEMORY = 2 * 2**30  # bytes of tokens; a client with more, who has no folder, runs its fixed towers at every step
REPORTS = "reports"  # the name of the table of all reports of training records that have several
BEAT = 60.0  # seconds between lines that say how far it is: towers take minutes, and a log is silent meanwhile


def frozen_whole(config: Any) -> bool:
    """Whether a model of this configuration has towers that never change."""
    return bool(getattr(config, "adapters", "")) and not config.adapter_rank


def refuse_towers(config: Any) -> None:
    """Raises ValueError for the configuration of a model whose towers change, or that has none."""
    if not frozen_whole(config):
        raise ValueError(
            "training.cache_features: the towers are trained, so what they make of a record changes; set "
            "model.adapters=lora and model.adapter_rank=0, or cache_features to false"
        )


def refuse_objective(config: Any, objective: nn.Module) -> None:
    """Raises ValueError for an objective with which a record's tokens change, for a model of this configuration."""
    hooks = ObjectiveModule.of(objective)
    needs = hooks.needs
    if hooks.draws or "sentences" in needs or ("attention" in needs and not config.alignment):
        raise ValueError(
            "training.cache_features: this objective draws another image or sentence at every step, or reads the "
            "towers' attention; set cache_features to false"
        )


def with_tokens(tokens: State, batch: Batch) -> Batch:
    """The batch with ``tokens`` [n, ...] of its rows in place of images; a batch of n records or of some of them."""
    imaged, batch = "image" in batch, {name: tensor for name, tensor in batch.items() if name != "image"}
    if IMAGE_TOKENS in tokens and imaged:
        batch[IMAGE_TOKENS] = tokens[IMAGE_TOKENS][batch["row"]]
    if TEXT_TOKENS in tokens and "text" in batch:
        batch[TEXT_TOKENS] = tokens[TEXT_TOKENS][batch["row"], : batch["text"].shape[1]]
    return batch


def with_report(tokens: Tensor, batch: Batch) -> Batch:
    """The batch with ``tokens`` [M, T, W] of the reports that it drew."""
    return batch | {TEXT_TOKENS: tokens[batch[DRAWN_REPORT].to(tokens.device), : batch["text"].shape[1]]}


def tokens_of(model: Any, batch: Batch) -> State:
    """Token features of a batch from the towers."""
    encoded = model.towers(batch)
    made = {IMAGE_TOKENS: encoded.image, TEXT_TOKENS: encoded.text}
    return {name: tokens for name, tokens in made.items() if tokens is not None}


@torch.no_grad()
def table(batches: Iterable[Batch], make: Callable[[Batch], State], new: Callable[[str, Tensor], Tensor]) -> State:
    """What ``make`` makes of all records, [n, ...], in tensors that ``new`` makes for one of a batch."""
    made: State = {}
    done, told = 0, time.monotonic()
    for batch in batches:
        for name, rows in make(batch).items():
            if name not in made:
                made[name] = new(name, rows)
            where = batch["row"].to(made[name].device)
            made[name][where, : rows.shape[1]] = rows.to(made[name])  # texts are as long as a batch's longest
        done += len(batch["row"])
        if time.monotonic() - told >= BEAT:
            log.warning("features of fixed towers: %d records so far", done)
            told = time.monotonic()
    return made


class FrozenFeatures:
    """Data on the CPU, whose batches go to the model's device with the towers' tokens in the place of images.

    Everything else is the data's own. Of a training batch's images only one is read, for its size: what is drawn for
    all of them is drawn as if they were there.

    The tokens of a split are computed when it is first asked for: 4 (M + T) W bytes a record on disk, e.g. 0.4 MB for
    EfficientNet-Lite0 at 224 pixels and MiniLM at 112 tokens. They lie in ``folder``, by what they were made of (the
    towers' weights, the images, the reports), and outlast the run; without one, in files that end with the process.
    """

    def __init__(self, data: Any, model: Any, folder: Path | None = None) -> None:
        self._data, self._model, self._folder = data, model, folder
        self._splits: dict[str, State] = {}

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

    def report_batches(self, batch_size: int) -> Iterator[Batch] | None:
        """As the data's own, with tokens."""
        batches = self._data.report_batches(batch_size)
        return None if batches is None else (self._of_report(batch) for batch in batches)

    def _with_tokens(self, split: str, batch: Batch) -> Batch:
        with_all = moved(with_tokens(self._of(split), batch), self._device)
        return self._of_report(with_all) if DRAWN_REPORT in batch else with_all

    def _of_report(self, batch: Batch) -> Batch:
        return moved(with_report(self._of(REPORTS)[TEXT_TOKENS], batch), self._device)

    def _of(self, split: str) -> State:
        """The tokens of a split, or of all ``REPORTS`` of its training records that have several."""
        if split not in self._splits:
            self._splits[split] = self._read(split)
        return self._splits[split]

    def _source(self, split: str) -> Iterator[Batch]:
        """What tokens are made of, in order; of ``REPORTS`` each by its own number."""
        if split != REPORTS:
            batches: Iterator[Batch] = self._data.batches(split, ROWS, drop_last=False)
            return batches
        return ({**batch, "row": batch[DRAWN_REPORT]} for batch in self._data.report_batches(ROWS))

    @property
    def _device(self) -> torch.device:
        return next(self._model.parameters()).device

    def _read(self, split: str) -> State:
        """The tokens of a split from its folder, computed first where they are not there."""
        if self._folder is None:
            with tempfile.TemporaryDirectory(prefix="fedvlp-") as folder:
                return self._computed(split, Path(folder))  # its files have no name any more, and are there as mapped
        target = self._folder / f"features-{self._key(split)}"
        if not target.is_dir():
            self._folder.mkdir(parents=True, exist_ok=True)
            # Computed beside, then renamed: another process sees all of a table or none.
            draft = Path(tempfile.mkdtemp(prefix=".features-", dir=self._folder))
            try:
                self._computed(split, draft)
                draft.rename(target)
            except OSError:
                if not target.is_dir():  # no other process was first
                    raise
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        files = [target / f"{name}.npy" for name in (IMAGE_TOKENS, TEXT_TOKENS)]
        mapped = {file.stem: np.load(file, mmap_mode="c", allow_pickle=False) for file in files if file.is_file()}
        return {name: torch.from_numpy(array) for name, array in mapped.items()}

    def _key(self, split: str) -> str:
        """A hash of what the tokens of a split are made of."""
        hashed = hashlib.sha256(self._model.towers_digest().encode())
        for batch in self._source(split):
            for name in sorted(batch.keys() & {"image", "text", "text_mask"}):
                hashed.update(name.encode() + batch[name].contiguous().numpy().tobytes())
        return hashed.hexdigest()[:32]

    def _computed(self, split: str, folder: Path) -> State:
        """The tokens of all records of a split by the towers in eval mode, in files of ``folder``."""
        encoders = [child for name, child in self._model.named_children() if name.endswith("_encoder")]
        modes = [encoder.training for encoder in encoders]
        for encoder in encoders:
            encoder.eval()

        def new(name: str, some: Tensor) -> Tensor:
            count = (
                sum(len(batch["row"]) for batch in self._source(split)) if split == REPORTS else self._data.sizes[split]
            )
            shape = whole(name, some, count, self._model)
            path = folder / f"{name}.npy"
            return torch.from_numpy(np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape))

        tokens = table(self._source(split), lambda batch: tokens_of(self._model, moved(batch, self._device)), new)
        for encoder, mode in zip(encoders, modes, strict=True):
            encoder.train(mode)
        return tokens


def whole(name: str, some: Tensor, records: int, model: Any) -> tuple[int, ...]:
    """Shape of what is made of all records, as ``some`` [b, ...] is of b of them."""
    longest = model.tokenizer.max_tokens if name == TEXT_TOKENS else some.shape[1]
    return records, longest, *some.shape[2:]


class TooLargeError(Exception):
    """More than IN_MEMORY."""


class FixedFeatures:
    """What received encoders make of a client's training records: tokens, and features pooled after alignment.

    Kept in memory by what made them, not by who asks: stage 1 of FedDRA, its anchors and v_i share one pass. What a
    record's tokens are does not depend on who asks first: all records go through the towers in their order, ``ROWS`` at
    a time, so that a restart or another process reads equal bytes. They go when the task ends in which the encoders
    were trained. Where a client's tokens are too many, or where its encoders normalise by the batch, nothing is kept:
    the towers are run at every step, on the batch's own images.
    """

    def __init__(self) -> None:
        self._tokens: dict[Any, State] = {}  # of the encoders asked for last
        self._pooled: dict[Any, State] = {}  # of the two asked for last: the received model, and a site's own
        self._known: list[tuple[State, State | None, dict[str, str]]] = []  # hashes of states of this task
        self._too_large = False

    def encoded(self, client: Client, batch: Batch, state: State, own: State | None) -> Batch:
        """The batch with the tokens of its rows."""
        tokens = self._tokens_by(client, state, own)
        # Tokens are kept by record: one whose report was drawn anew goes through the text tower.
        return batch if tokens is None or DRAWN_REPORT in batch else with_tokens(tokens, batch)

    def pooled(self, client: Client, batch: Batch, state: State, own: State | None) -> VLOutput | None:
        """What the heads of the anchor read; None where an objective needs tokens as well."""
        if DRAWN_REPORT in batch or LOCAL & set(client.hooks.needs) or self._tokens_by(client, state, own) is None:
            return None
        key = self._key(client, state, own, "alignment")
        if key not in self._pooled:
            model = client.anchor(state, own)

            def make(block: Batch) -> State:
                aligned = model.align(model.towers(self.encoded(client, block, state, own)))
                made = {"image": aligned.image, "text": aligned.text}
                return {name: pooled for name, pooled in made.items() if pooled is not None}

            self._pooled = dict(list(self._pooled.items())[-1:]) | {key: self._table(client, make)}
        return VLOutput(**{name: pooled[batch["row"]] for name, pooled in self._pooled[key].items()})

    def release(self, client: Client) -> None:
        """Lets go of the states of a task, and of everything where it has trained the encoders."""
        self._known = []
        if any(p.requires_grad for name, p in client.model.named_parameters() if group(name) == "encoder"):
            self._tokens, self._pooled = {}, {}

    def _tokens_by(self, client: Client, state: State, own: State | None) -> State | None:
        model = client.anchor(state, own)
        # Towers that normalise by the batch make something else of a record in every batch: nothing to keep.
        norms = (name for name, module in model.named_modules() if isinstance(module, BatchNorm) and module.training)
        if self._too_large or any(group(name) in ("encoder", "alignment") for name in norms):
            return None
        key = self._key(client, state, own, "encoder")
        if key not in self._tokens:
            self._tokens = {}  # memory for the next
            try:
                self._tokens = {key: self._table(client, lambda block: tokens_of(model, block))}
            except TooLargeError:
                self._too_large = True
                return None
        return self._tokens[key]

    def _table(self, client: Client, make: Callable[[Batch], State]) -> State:
        taken = 0

        def new(name: str, some: Tensor) -> Tensor:
            nonlocal taken
            shape = whole(name, some, client.data.num_train, client.model)
            taken += math.prod(shape) * some.element_size()
            if taken > IN_MEMORY:
                raise TooLargeError
            return torch.zeros(shape, dtype=some.dtype, device=some.device)

        return table(client.data.batches("train", ROWS, drop_last=False), make, new)

    def _key(self, client: Client, state: State, own: State | None, upto: str) -> Any:
        """The encoders' tensors, ``upto`` "alignment" its own as well, and the precision in which they run."""
        known = next((hashes for one, other, hashes in self._known if one is state and other is own), None)
        if known is None:
            tensors = client.anchor(state, own).state_dict()
            known = {}
            for kind in ("encoder", "alignment"):
                known[kind] = digest(tensors, [name for name in tensors if group(name) == kind])
            self._known.append((state, own, known))
        device = client.device.type
        precision = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
        return (known["encoder"], *([known["alignment"]] if upto == "alignment" else []), precision)
