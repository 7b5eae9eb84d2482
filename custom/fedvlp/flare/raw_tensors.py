"""Tensors as bytes, for a process that passes them on and has no torch: FLARE's serialiser, and safetensors' format.

A visit of the simulator to a site (flare/site_executor.py) hands its task to a trainer and passes the answer on. It
would import torch, for more than a second, only to hold tensors meanwhile. The bytes are those of ``tensor_stream``:
the other end cannot tell which of the two it talks to.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nvflare.fuel.f3.streaming.cacheable import CacheableObject, ItemConsumer
from nvflare.fuel.f3.streaming.download_service import download_object
from nvflare.fuel.utils.fobs import dots
from nvflare.fuel.utils.fobs.datum import DatumManager
from nvflare.fuel.utils.fobs.decomposers.via_downloader import ViaDownloaderDecomposer

from fedvlp.flare.pieces import grouped, most_bytes, name_of_piece, shape_of
from fedvlp.flare.retrying_cell import RetryingCell

if TYPE_CHECKING:
    from fedvlp.core.types import State

WIDEST = 2 << 30
"""FLARE's own limit of a chunk; smaller ones are asked for in its settings."""


class RawTensorError(ValueError):
    """Bytes that should hold tensors do not."""


@dataclass(frozen=True, eq=False)
class RawTensor:
    """A tensor as safetensors has it: ``dtype`` is "F32", "I64", ...; ``data`` are its values, row by row."""

    dtype: str
    shape: tuple[int, ...]
    data: Any  # bytes or a view of them

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
    """The tensors of safetensors' format, as views of ``content``. Raises RawTensorError for anything else."""
    view = memoryview(content)
    try:
        begin = 8 + int.from_bytes(view[:8], "little")
        header = json.loads(bytes(view[8:begin]))
        header.pop("__metadata__", None)
        tensors = {}
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            if not 0 <= first <= last <= len(view) - begin:
                raise RawTensorError("tensors of a message are cut off")
            tensors[name] = RawTensor(entry["dtype"], tuple(entry["shape"]), view[begin + first : begin + last])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RawTensorError(f"a message holds no tensors in safetensors' format ({type(error).__name__})") from None
    return tensors


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
