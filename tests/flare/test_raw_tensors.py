"""Tensors as bytes are, for the other end, the tensors that torch would have sent; and they come back as such."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from nvflare.fuel.f3.streaming.download_service import ProduceRC
from safetensors.torch import load, save
from torch import Tensor

from fedvlp.flare import raw_tensors, tensor_stream
from fedvlp.flare.raw_tensors import (
    Pieces,
    RawTensorError,
    grouped,
    in_pieces,
    joined,
    packed,
    raw,
    unpacked,
    with_torch,
)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(raw_tensors, "PIECE", 64)


def tensors() -> dict[str, Tensor]:
    return {
        "whole": torch.randn(4, 4), "cut": torch.randn(5, 7), "half": torch.randn(3, 41).bfloat16(),
        "codes": torch.randint(-127, 127, (300,), dtype=torch.int8), "number": torch.tensor(3.5),
        "dozen": torch.randn(12, 16),  # as text its pieces 10 and 11 come before 2
        "turned": torch.randn(9, 6).T, "empty": torch.zeros(0, 3), "counts": torch.tensor([1, -(2**40)]),
        "nan": torch.tensor([float("nan"), -0.0]), "flags": torch.tensor([True, False]),
    }  # fmt: skip


def same(left: Tensor, right: Tensor) -> bool:
    """To the last bit, nan and the sign of zero included."""

    def values(tensor: Tensor) -> Tensor:
        return tensor.detach().contiguous().reshape(-1).view(torch.uint8)

    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(values(left), values(right))


def test_bytes_there_and_back_are_the_tensors() -> None:
    sent = tensors()
    held = {name: raw(tensor) for name, tensor in sent.items()}
    for received in (with_torch(held), load(packed(held)), with_torch(unpacked(packed(held)))):
        assert received.keys() == sent.keys()
        assert all(same(received[name], tensor) for name, tensor in sent.items())
    mixed = with_torch({"as it is": sent["whole"], "held": held["cut"]})
    assert mixed["as it is"] is sent["whole"]
    assert same(mixed["held"], sent["cut"])


def test_what_torch_wrote_is_read() -> None:
    sent = {name: tensor.contiguous() for name, tensor in tensors().items()}
    received = with_torch(unpacked(save(sent)))
    assert all(same(received[name], tensor) for name, tensor in sent.items())


def fetched(source: Any) -> dict[str, bytes]:
    """What a receiver is given, by piece."""
    state, found = None, {}
    while True:
        code, items, state = source.produce(state or {}, "receiver")
        if code == ProduceRC.EOF:
            return found
        for item in items:
            (name,) = load(item)
            found[name] = item


def test_the_other_end_joins_pieces_of_bytes_as_it_joins_those_of_torch() -> None:
    sent = tensors()
    source = Pieces(in_pieces({name: raw(tensor) for name, tensor in sent.items()}), 100)
    pieces = {name: load(item)[name] for name, item in fetched(source).items()}
    assert max(piece.numel() * piece.element_size() for piece in pieces.values()) <= 64
    for name, names in grouped(pieces).items():
        assert same(tensor_stream.joined([pieces[n] for n in names], names), sent[name])


def test_pieces_that_torch_cut_are_joined_as_bytes() -> None:
    sent = tensors()
    source = tensor_stream.PieceDecomposer().to_downloadable(sent, 100, {})
    pieces = {name: unpacked(item)[name] for name, item in fetched(source).items()}
    received = with_torch(joined(pieces))
    assert all(same(received[name], tensor) for name, tensor in sent.items())
    pieces.pop("cut|1|5x7")
    with pytest.raises(RawTensorError, match="pieces missing"):
        joined(pieces)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\x05", (1 << 40).to_bytes(8, "little"), (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{", packed({"w": raw(torch.ones(4))})[:-1],
        packed({"w": raw(torch.ones(4))}).replace(b"dtype", b"dtypo"),
    ],
)  # fmt: skip
def test_other_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(RawTensorError):
        unpacked(content)


SERIALISED = """
import sys
from nvflare.fuel.utils import fobs
from fedvlp.flare import messages, raw_tensors
messages.register(raw_tensors.RawDecomposer())
if sys.argv[1] == "as torch":
    import torch
    tensor = torch.tensor([[1.5, -2.0]])
else:
    tensor = raw_tensors.RawTensor("F32", (1, 2), bytes.fromhex("0000c03f000000c0"))
sent = fobs.dumps({"w": tensor})
assert fobs.loads(sent)["w"].data == raw_tensors.raw(tensor).data
assert ("torch" in sys.modules) == (sys.argv[1] == "as torch")
print(sent.hex())
"""


@pytest.mark.parametrize("kind", ["as bytes", "as torch"])
def test_flares_serialiser_takes_them_for_torchs(kind: str) -> None:
    """In a process that has no torch, and in one where a filter of the site has put a tensor of torch into a reply."""
    from nvflare.fuel.utils import fobs

    from fedvlp.flare import messages

    done = subprocess.run([sys.executable, "-c", SERIALISED, kind], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    messages.register()
    assert torch.equal(fobs.loads(bytes.fromhex(done.stdout))["w"], torch.tensor([[1.5, -2.0]]))
