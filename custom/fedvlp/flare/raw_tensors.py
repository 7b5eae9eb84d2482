"""Tensors as bytes, for a process that passes them on and has no torch, and how pieces of a large one are called.

A visit of the simulator to a site (flare/site_executor.py) hands its task to a trainer and passes the answer on. It
would import torch, for more than a second, only to hold tensors meanwhile. The bytes are those of ``tensor_stream``:
the other end cannot tell which of the two it talks to.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvflare.fuel.f3.streaming.cacheable import CacheableObject, ItemConsumer
from nvflare.fuel.f3.streaming.download_service import download_object
from nvflare.fuel.utils.app_config_utils import get_positive_int_var
from nvflare.fuel.utils.fobs import dots
from nvflare.fuel.utils.fobs.datum import DatumManager
from nvflare.fuel.utils.fobs.decomposers.via_downloader import ViaDownloaderDecomposer
from safetensors import SafetensorError, deserialize

from fedvlp.flare.retrying_cell import RetryingCell

if TYPE_CHECKING:
    from fedvlp.core.types import State

PIECE = 8 << 20
"""Most bytes of a piece, where the job does not say."""

SETTING = "fedvlp_piece_bytes"
"""Where a job's configuration says it, at the top level of either side (flare/timeouts.py)."""

WIDEST = 2 << 30
"""FLARE's own limit of a chunk; smaller ones are asked for in its settings."""


class RawTensorError(ValueError):
    """Bytes that should hold tensors do not."""


@dataclass(frozen=True, eq=False)
class RawTensor:
    """A tensor as safetensors has it: ``dtype`` is "F32", "I64", ...; ``data`` are its values, row by row."""

    dtype: str
    shape: tuple[int, ...]
    data: Any  # bytes, or something like them

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return len(self.data)


def packed(tensors: Mapping[str, RawTensor]) -> bytes:
    """The tensors in safetensors' format."""
    header, begin = {}, 0
    for name, tensor in tensors.items():
        end = begin + tensor.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the values begin at a multiple of 8
    return b"".join((len(text).to_bytes(8, "little"), text, *(tensor.data for tensor in tensors.values())))


def unpacked(content: bytes) -> dict[str, RawTensor]:
    """The tensors of safetensors' format. Raises RawTensorError for anything else."""
    try:
        entries = deserialize(bytes(content))
    except SafetensorError:
        raise RawTensorError("a message holds no tensors in safetensors' format") from None
    return {name: RawTensor(entry["dtype"], tuple(entry["shape"]), entry["data"]) for name, entry in entries}


def raw(value: Any) -> RawTensor:
    """A tensor of torch as bytes; one that is bytes already, as it is."""
    if isinstance(value, RawTensor):
        return value
    from safetensors.torch import save

    return unpacked(save({"t": value.detach().contiguous()}))["t"]


def with_torch(tensors: Mapping[str, Any]) -> State:
    """The tensors as torch has them, for a process that must answer by itself. They share no memory with the bytes."""
    from safetensors.torch import load

    held = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, RawTensor)}
    return {**tensors, **(load(packed(held)) if held else {})}


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


def in_pieces(tensors: Mapping[str, RawTensor]) -> dict[str, RawTensor]:
    """Tensors of more bytes than a piece may have as slices, as ``tensor_stream.in_pieces`` names them."""
    pieces: dict[str, RawTensor] = {}
    most = most_bytes()
    for name, tensor in tensors.items():
        if tensor.nbytes <= most:
            pieces[name] = tensor
            continue
        width = tensor.nbytes // math.prod(tensor.shape)
        step = most // width * width
        view = memoryview(tensor.data)
        for index, begin in enumerate(range(0, tensor.nbytes, step)):
            piece = view[begin : begin + step]
            pieces[name_of_piece(name, index, tensor.shape)] = RawTensor(tensor.dtype, (len(piece) // width,), piece)
    return pieces


def joined(pieces: Mapping[str, RawTensor]) -> dict[str, RawTensor]:
    """The tensors whose pieces these are. Raises RawTensorError when some are missing."""
    whole = {}
    for name, names in grouped(pieces).items():
        first, shape = pieces[names[0]], shape_of(names[0])
        if shape is None:
            whole[name] = first
            continue
        if sum(math.prod(pieces[piece].shape) for piece in names) != math.prod(shape):
            raise RawTensorError("a tensor came with pieces missing or too many")
        data = b"".join(pieces[piece].data for piece in names)
        whole[name] = RawTensor(first.dtype, tuple(shape), data)
    return whole


class Pieces(CacheableObject):
    """Tensors that the other end fetches piece by piece, each as a file of safetensors' format with one entry."""

    def __init__(self, pieces: dict[str, RawTensor], max_chunk_size: int) -> None:
        self._names = list(pieces)
        super().__init__(pieces, max_chunk_size)

    def get_item_count(self) -> int:
        return len(self._names)

    def produce_item(self, index: int) -> bytes:
        name = self._names[index]
        return packed({name: self.base_obj[name]})

    def get_item_size(self, index: int) -> int | None:
        held = self.base_obj
        return None if held is None else held[self._names[index]].nbytes


class _Received(ItemConsumer):
    """Collects the pieces that are fetched."""

    def consume_items(self, items: list[Any], result: Any) -> dict[str, RawTensor]:
        collected: dict[str, RawTensor] = result or {}
        for item in items:
            collected |= unpacked(item)
        return collected


def _called(name: str, kind: type) -> type:
    """``kind`` under another name: FLARE's serialiser writes the name of a value's class, and the reader goes by it."""
    kind.__module__, _, kind.__qualname__ = name.rpartition(".")
    return kind


class RawDecomposer(ViaDownloaderDecomposer):
    """What FLARE's serialiser does with tensors in this process: takes and gives bytes under the name of torch's class.

    A tensor of torch, which only a process that has imported it can hold, is sent as its bytes.
    """

    def __init__(self) -> None:
        super().__init__(WIDEST, "tensor_")

    def supported_type(self) -> type:
        return _called("torch.Tensor", RawTensor)

    def get_download_dot(self) -> int:
        number: int = dots.TENSOR_DOWNLOAD
        return number

    def to_downloadable(self, items: dict[str, Any], max_chunk_size: int, fobs_ctx: dict[str, Any]) -> Pieces:
        return Pieces(in_pieces({name: raw(value) for name, value in items.items()}), max_chunk_size)

    def download(
        self,
        from_fqcn: str,
        ref_id: str,
        per_request_timeout: float,
        cell: Any,
        secure: bool = False,
        optional: bool = False,
        abort_signal: Any = None,
        progress_cb: Callable[..., None] | None = None,
    ) -> tuple[str, dict[str, RawTensor]]:
        received = _Received()
        download_object(
            from_fqcn=from_fqcn, ref_id=ref_id, consumer=received, per_request_timeout=per_request_timeout,
            cell=RetryingCell(cell),
            secure=secure, optional=optional, abort_signal=abort_signal, progress_cb=progress_cb,
        )  # fmt: skip
        return received.error, joined(received.result or {})

    def native_decompose(self, target: Any, manager: DatumManager | None = None) -> bytes:
        return packed({"t": raw(target)})

    def native_recompose(self, data: bytes, manager: DatumManager | None = None) -> RawTensor:
        return unpacked(data)["t"]
