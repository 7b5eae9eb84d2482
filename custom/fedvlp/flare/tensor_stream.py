"""Tensors on FLARE's wire: in pieces, so that no process holds more of a transfer than it must; large ones on disk.

FLARE moves a tensor as one block, copied several times at both ends and once more for every site, and fetches all of a
reply's tensors into memory before anybody may look at it. Here large tensors travel in pieces, and the updates of large
models wait on the server's disk and are read one tensor at a time. Both ends need it (flare/messages.py registers it).
"""

from __future__ import annotations

import ctypes
import gc
import logging
import math
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from nvflare.app_opt.pt.decomposers import TensorDecomposer
from nvflare.app_opt.pt.lazy_tensor_dict import LazyTensorDict
from nvflare.app_opt.pt.tensor_downloader import TensorDownloadable, download_tensors_to_disk
from nvflare.fuel.f3.streaming.download_service import Downloadable
from nvflare.fuel.utils.app_config_utils import get_positive_int_var
from nvflare.fuel.utils.memory_utils import cleanup_memory
from safetensors import safe_open
from safetensors.torch import load, save
from torch import Tensor

from fedvlp.core.tensor_file import DTYPES
from fedvlp.core.types import LazyState, State, size_of
from fedvlp.flare.retrying_cell import RetryingCell

logger = logging.getLogger(__name__)

PIECE = 8 << 20
"""Most bytes of a piece, or of small tensors that travel as one, where the job does not say."""

SETTING = "fedvlp_piece_bytes"
"""Where a job's configuration says it, at the top level of either side (flare/timeouts.py)."""

M_MMAP_THRESHOLD = -3  # of glibc's mallopt
MAPPED_BYTES = 1 << 18
"""Blocks of this size and more are mapped one by one, and unmapped when they are freed."""

MAPPED_BYTES_SMALL = 1 << 22
"""The same where models are small: FLARE's frames of 1 MB are reused then, which saves transfers a quarter of their
time, and would cost a model of 100 MB 1.4 times its memory."""


class PieceDecomposer(TensorDecomposer):
    """FLARE's decomposer of tensors, in pieces; what comes is put into the folder ``root`` once there is one."""

    root: Path | None = None
    _collect_at = 0.0

    def __init__(self, at_server: bool = False) -> None:
        """``at_server``: an update that does not arrive costs its site the phase, and not the job its process."""
        super().__init__()
        self._at_server = at_server

    def spool_to(self, root: Path) -> None:
        """From now on what comes waits in ``root``, which is emptied, and what is freed goes back to the system."""
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        self.root = root
        return_freed_memory()

    def tidy(self) -> None:
        """To be called again and again while a large model is under way.

        FLARE's transfers leave cycles that hold their bytes, and Python collects by number of objects, not by size.
        """
        if self.root and time.monotonic() > self._collect_at:
            gc.collect()
            self._collect_at = time.monotonic() + 1.0

    def to_downloadable(self, items: dict[str, Tensor], max_chunk_size: int, fobs_ctx: dict[str, Any]) -> Downloadable:
        return TensorDownloadable(in_pieces(items), most_bytes())  # small ones together: each request has its price

    def recompose(self, data: Any, manager: Any = None) -> Any:
        """A tensor, or what stands for one that is on its way. FLARE's own has no docstring."""
        try:
            return super().recompose(data, manager)
        except Exception as raised:
            return self._undelivered(raised)

    def download(self, *args: Any, cell: Any, fobs_ctx: Any = None, **options: Any) -> tuple[str, Any]:
        try:
            error, tensors = self._fetched(*args, cell=RetryingCell(cell), fobs_ctx=fobs_ctx, **options)
        except Exception as raised:
            return "", self._undelivered(raised)
        return ("", Undelivered()) if error and self._at_server else (error, tensors)

    def _undelivered(self, raised: Exception) -> Undelivered:
        """What stands for a site's tensors that are wrong in any way. At a site raises ``raised`` again."""
        if not self._at_server:
            raise raised
        logger.warning("an update could not be fetched: %s", type(raised).__name__)
        return Undelivered()

    def _fetched(self, *args: Any, fobs_ctx: Any, **options: Any) -> tuple[str, Any]:
        """FLARE's error and the tensors, whole."""
        if self.root is None:
            error, pieces = super().download(*args, fobs_ctx=fobs_ctx, **options)
            names = {} if error else grouped(pieces)
            return error, {key: joined(map(pieces.pop, group), group) for key, group in names.items()}
        error, on_disk = download_tensors_to_disk(*args, root_dir=str(self.root), **options)
        return error, {} if error else OnDisk(on_disk)


class UndeliveredError(RuntimeError):
    """A site's update did not arrive whole."""


class Undelivered:
    """Stands for the tensors of an update that did not arrive; reading one raises UndeliveredError.

    FLARE 2.9 ends the server's job process when it cannot read what a site hands in. So it reads this, and the update
    costs its site the phase.
    """

    def __contains__(self, key: object) -> bool:
        return True

    def __len__(self) -> int:
        return 0

    def make_lazy_ref(self, key: str) -> Undelivered:
        return self

    def materialize(self) -> Tensor:
        """No tensor: raises."""
        raise UndeliveredError("the update did not arrive whole; the log of the server's job says why")


def most_bytes() -> int:
    """Most bytes of a piece that this process sends."""
    of_job: int | None = get_positive_int_var(SETTING, None)  # None: FLARE would remember any other default
    return of_job or PIECE


def name_of_piece(name: str, index: int, shape: Iterable[int]) -> str:
    """The name of piece ``index`` of the tensor ``name``."""
    return f"{name}|{index}|{'x'.join(map(str, shape))}"


def grouped(names: Iterable[str]) -> dict[str, list[str]]:
    """Names of pieces by the tensor they belong to, in order."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.partition("|")[0], []).append(name)
    return {
        key: sorted(group, key=lambda name: int(name.split("|")[1]) if "|" in name else 0)
        for key, group in groups.items()
    }


def shape_of(name: str) -> list[int] | None:
    """The shape of the tensor that a piece belongs to; None for a whole tensor."""
    fields = name.split("|")
    return [int(length) for length in fields[2].split("x")] if len(fields) == 3 else None


def in_pieces(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of more bytes than a piece may have as slices of themselves, ``<name>|<number>|<shape>``; no copy."""
    pieces: dict[str, Tensor] = {}
    most = most_bytes()
    for name, tensor in tensors.items():
        count = -(-tensor.numel() * tensor.element_size() // most)
        if count <= 1:
            pieces[name] = tensor
            continue
        for index, piece in enumerate(tensor.detach().contiguous().reshape(-1).tensor_split(count)):
            pieces[name_of_piece(name, index, tensor.shape)] = piece
    return pieces


def joined(pieces: Iterable[Tensor], names: Sequence[str]) -> Tensor:
    """The tensor that :func:`in_pieces` cut, its pieces taken one by one. Raises RuntimeError when some are missing."""
    pieces, shape = iter(pieces), shape_of(names[0])
    first = next(pieces)
    if shape is None:
        return first
    rest = torch.empty(math.prod(shape), dtype=first.dtype)
    whole = rest.view(shape)
    for piece in chain((first,), pieces):
        rest[: piece.numel()] = piece
        rest = rest[piece.numel() :]
    if rest.numel():
        raise RuntimeError(f"{rest.numel()} values are missing of a tensor of {whole.numel()}")
    return whole


def to_files(tensor: Tensor) -> list[bytes]:
    """A tensor as files of safetensors, one for each piece, as FLARE moves them."""
    return [save({name: piece.detach().contiguous()}) for name, piece in in_pieces({"t": tensor}).items()]


def from_files(files: Iterable[bytes]) -> Tensor:
    """The tensor of :func:`to_files`. Raises RuntimeError when pieces are missing."""
    pieces = {name: piece for file in files for name, piece in load(file).items()}
    (names,) = grouped(pieces).values()
    return joined(map(pieces.pop, names), names)


def _numel(reference: Any) -> int:
    with safe_open(reference.file_path, framework="pt") as file:
        return math.prod(file.get_slice(reference.key).get_shape())


def _size(reference: Any) -> int:
    """Bytes of a tensor on disk, by the header of its file."""
    with safe_open(reference.file_path, framework="pt") as file:
        entry = file.get_slice(reference.key)
        return math.prod(entry.get_shape()) * DTYPES[entry.get_dtype()].itemsize


class OnDisk:
    """What was downloaded to disk, by tensor: the form in which FLARE asks for it."""

    def __init__(self, pieces: LazyTensorDict) -> None:
        self._pieces = pieces
        self._groups = grouped(pieces.keys())
        for key, names in self._groups.items():  # here, where an error costs a reply; later it would cost the round
            sizes = [_numel(pieces.make_lazy_ref(name)) for name in names]
            if shape_of(names[0]) is not None and sum(sizes) != math.prod(shape_of(names[0]) or ()):
                raise ValueError(f"{key} came with pieces missing or too many")

    def __contains__(self, key: object) -> bool:
        return key in self._groups

    def __len__(self) -> int:
        return len(self._groups)

    def make_lazy_ref(self, key: str) -> PiecesOnDisk:
        names = self._groups[key]
        return PiecesOnDisk([self._pieces.make_lazy_ref(name) for name in names], names)


class PiecesOnDisk:
    """One tensor on disk; its files go with the last reference to any tensor of the same message."""

    def __init__(self, pieces: Sequence[Any], names: Sequence[str]) -> None:
        self._pieces = pieces
        self._names = names

    def materialize(self) -> Tensor:
        """The tensor, read anew."""
        return joined((piece.materialize() for piece in self._pieces), self._names)

    def size(self) -> int:
        """Its bytes."""
        return sum(map(_size, self._pieces))


def spooled(values: Mapping[str, Any]) -> LazyState:
    """Named tensors, each read from disk whenever it is asked for; the files go with the last reference."""

    def made(name: str) -> Tensor:
        value = values[name]
        tensor: Tensor = value.materialize() if isinstance(value, PiecesOnDisk) else value
        return tensor

    def size(name: str) -> int:
        return values[name].size() if isinstance(values[name], PiecesOnDisk) else size_of(made(name))

    return LazyState(values, made, size)


def return_freed_memory(mapped: int = MAPPED_BYTES) -> None:
    """glibc would keep freed tensors for reuse, in an arena for every thread: models of it after some rounds."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, mapped)
    cleanup_memory()
    gc.freeze()  # so that collecting takes no time over what stays anyway


def loaded(data: State) -> State:
    """``data`` as it is, or, where some of it is on disk, a view of the disk (not a dict, but to be read as one).

    Raises UndeliveredError for an update that did not arrive.
    """
    for value in data.values():
        if isinstance(value, Undelivered):
            value.materialize()
    on_disk = any(isinstance(value, PiecesOnDisk) for value in data.values())
    return cast("State", spooled(dict(data))) if on_disk else data
