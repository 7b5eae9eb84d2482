"""Tensors in pieces, and on disk: what arrives is what was sent, however it travels, and what is damaged is refused."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from nvflare.app_opt.pt.lazy_tensor_dict import LazyTensorDict
from nvflare.app_opt.pt.tensor_downloader import DiskTensorConsumer, TensorConsumer
from nvflare.fuel.f3.streaming.download_service import ProduceRC
from nvflare.fuel.utils.fobs.datum import DatumManager
from nvflare.fuel.utils.fobs.decomposers.via_downloader import EncKey, EncType
from safetensors.torch import save_file
from torch import Tensor

from fedvlp.core.aggregation import StreamingMean, in_site_order, payload
from fedvlp.core.change import WEIGHTS, Change
from fedvlp.core.gate import check, check_tensors
from fedvlp.core.types import Expected, Failure, FailureKind, LazyState, Update
from fedvlp.federation.codec import PLAIN, Wire, decode
from fedvlp.flare import messages, tensor_stream
from fedvlp.flare.controller import FederatedController
from fedvlp.flare.tensor_stream import (
    OnDisk,
    PieceDecomposer,
    PiecesOnDisk,
    UndeliveredError,
    grouped,
    in_pieces,
    joined,
    name_of_piece,
    spooled,
)


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_stream, "PIECE", 64)


def tensors() -> dict[str, Tensor]:
    """Of no piece, of some, of more than ten ("10" comes before "2" as text) and of more than a hundred."""
    return {
        "whole": torch.randn(4, 4), "cut": torch.randn(5, 7), "half": torch.randn(3, 41).bfloat16(),
        "dozen": torch.randn(12, 16), "hundred": torch.randn(103, 16),
        "turned": torch.randn(9, 6).T, "codes": torch.randint(-127, 127, (300,), dtype=torch.int8),
        "number": torch.tensor(3.5), "empty": torch.zeros(0, 3),
    }  # fmt: skip


def transferred(sent: dict[str, Tensor], consumer: Any) -> Any:
    """Through FLARE's own producer and ``consumer``."""
    source, state, result = PieceDecomposer().to_downloadable(sent, 100, {}), None, None
    while True:
        code, items, state = source.produce(state or {}, "receiver")
        if code == ProduceRC.EOF:
            return result
        assert sum(map(len, items)) < 400, "a message holds pieces, not tensors"
        result = consumer.consume_items(items, result)


def same(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)


def test_pieces_are_views_of_what_is_sent() -> None:
    source = torch.randn(5, 7)
    pieces = in_pieces({"cut": source})
    assert [piece.numel() for piece in pieces.values()] == [12, 12, 11]
    assert next(iter(pieces.values())).data_ptr() == source.data_ptr()


def test_small_tensors_travel_together_up_to_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever FLARE would put into one answer, here 100 bytes: asking for each costs more than it weighs."""
    monkeypatch.setattr(tensor_stream, "PIECE", 4096)
    source = PieceDecomposer().to_downloadable({str(number): torch.zeros(4) for number in range(20)}, 100, {})
    assert len(source.produce({}, "receiver")[1]) == 20


@pytest.mark.parametrize("seed", range(3))
def test_pieces_are_put_in_order_by_their_number_however_they_come(seed: int) -> None:
    """123 pieces of one tensor among 12 of another; names of tensors may hold digits, dots and one another."""
    sent = {name: [name_of_piece(name, index, (123, 2)) for index in range(n)] for name, n in (("w.1", 123), ("w", 12))}
    sent["w.10"] = ["w.10"]
    mixed = [name for names in sent.values() for name in names]
    random.Random(seed).shuffle(mixed)
    assert grouped(mixed) == sent


def test_what_is_joined_in_memory_is_what_was_cut() -> None:
    sent = tensors()
    pieces = transferred(sent, TensorConsumer(None, {}))
    groups = grouped(reversed(list(pieces)))
    assert groups.keys() == sent.keys()
    for name, names in groups.items():
        assert same(joined([pieces[n] for n in names], names), sent[name])
    with pytest.raises(RuntimeError, match="11 values are missing of a tensor of 35"):
        joined([pieces["cut|0|5x7"], pieces["cut|1|5x7"]], groups["cut"])


def test_what_is_read_from_disk_is_what_was_cut_and_goes_with_the_last_reference(tmp_path: Path) -> None:
    sent = tensors()
    folder = tmp_path / "spool"
    folder.mkdir()
    on_disk = OnDisk(LazyTensorDict(transferred(sent, DiskTensorConsumer(str(folder))), str(folder)))
    assert len(on_disk) == len(sent)
    assert "cut" in on_disk
    references = {name: on_disk.make_lazy_ref(name) for name in sent}
    del on_disk
    for name, reference in references.items():
        assert same(reference.materialize(), sent[name])
    references.clear()
    del reference
    assert not folder.exists()


@pytest.mark.parametrize("damage", ["missing", "extra", "truncated"])
def test_damaged_pieces_are_refused_before_anybody_reads_them(damage: str, tmp_path: Path) -> None:
    found = transferred({"cut": torch.randn(5, 7)}, DiskTensorConsumer(str(tmp_path)))
    if damage == "missing":
        found.pop("cut|1|5x7")
    elif damage == "extra":
        found["cut|3|5x7"] = found["cut|0|5x7"][0], "cut|0|5x7"
    else:
        file = Path(found["cut|1|5x7"][0])
        file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(Exception, match=r"pieces missing|Error"):
        OnDisk(LazyTensorDict(found, str(tmp_path)))


def test_an_update_on_disk_is_read_once_by_the_check_and_its_norm_and_once_by_the_mean() -> None:
    """Also when it is to be decoded; asking for a name or for all names reads nothing."""
    read: list[str] = []

    class Counted(PiecesOnDisk):
        def __init__(self, name: str, tensor: Tensor) -> None:
            self.name, self.tensor = name, tensor

        def size(self) -> int:
            return self.tensor.nbytes

        def materialize(self) -> Tensor:
            read.append(self.name)
            return self.tensor

    state = {"w": torch.randn(4, 3), "b": torch.randn(4)}
    halves = {name: tensor.bfloat16() if name == "w" else tensor for name, tensor in state.items()}
    for sent, wired in ((state, PLAIN), (halves, Wire(up="bfloat16"))):
        view = decode(spooled({name: Counted(name, tensor) for name, tensor in sent.items()}), state, wired)
        read.clear()
        assert "w" in view
        assert "v" not in view
        assert set(view) == {"w", "b"}
        assert not read
        change = Change(state)
        assert check_tensors(view, state, change.finite) is None
        assert change.norms()[WEIGHTS] < 0.1
        mean = StreamingMean(state)
        mean.add(view, 1.0)
        assert sorted(read) == ["b"] * 2 + ["w"] * 2


def test_updates_on_disk_give_the_same_mean_and_wait_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As FLARE hands them over: references for some tensors, others in memory."""
    state = {"w": torch.randn(40, 30), "b": torch.randn(7), "n": torch.tensor(3)}

    def arrived(site: str, shift: float) -> Update:
        folder = tmp_path / site
        folder.mkdir()
        save_file({"w": state["w"] + shift}, folder / "chunk.safetensors")
        lazy = LazyTensorDict({"w": (str(folder / "chunk.safetensors"), "w")}, str(folder))
        values = {**state, "w": OnDisk(lazy).make_lazy_ref("w")}
        return messages.receive_update(messages.send_update(Update("x", 0, "train", 5, values)), site)

    updates = {"a": arrived("a", 1.0), "b": arrived("b", 3.0)}
    assert all(isinstance(update.state, LazyState) for update in updates.values())
    with monkeypatch.context() as patch:  # bytes are counted without reading them
        patch.setattr(PiecesOnDisk, "materialize", lambda self: pytest.fail("it was read"))
        assert payload(updates["a"]) == 4 * (40 * 30 + 7) + 8
    for site, update in updates.items():
        assert check(update, site=site, round=0, phase="train", expected=Expected(state), max_samples=9) is None
    mean = StreamingMean(state)
    for _, update in in_site_order([("b", updates["b"]), ("a", updates["a"])], ["a", "b"], tmp_path / "spool"):
        assert isinstance(update, Update)
        mean.add(update.state, 1.0)
    assert torch.allclose(mean.result()["w"], state["w"] + 2.0)
    assert not (tmp_path / "spool").exists()
    del update
    updates.clear()
    assert not list(tmp_path.rglob("*.safetensors"))


class Source(dict[str, Any]):
    """Stands for FLARE's transfer of ``pieces``: into memory, or into files below ``root_dir``."""

    def to_memory(self, *_: Any, **__: Any) -> tuple[str, Any]:
        return "", dict(self)

    def to_disk(self, *_: Any, root_dir: str, **__: Any) -> tuple[str, Any]:
        return "", LazyTensorDict(transferred(tensors(), DiskTensorConsumer(root_dir)), root_dir)


class Cell:
    """Stands for FLARE's, of which a transfer here needs nothing."""

    def register_request_cb(self, **_: Any) -> None:
        """FLARE's downloads listen on it."""


def failing(*_: Any, **__: Any) -> tuple[str, Any]:
    return "error requesting data", None


def garbled(*_: Any, **__: Any) -> tuple[str, Any]:
    raise ValueError("/a/path came with pieces missing")


@pytest.mark.parametrize("fetch", [failing, garbled])
def test_an_update_that_does_not_arrive_costs_its_site_the_phase(fetch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """FLARE ends the server's job process where an update cannot be read; at a site it asks for the task again."""
    monkeypatch.setattr(tensor_stream.TensorDecomposer, "download", fetch)
    at_site, at_server = (PieceDecomposer(at_server=there) for there in (False, True))
    try:
        assert at_site.download("from", "id", cell=Cell(), fobs_ctx={})[0] == "error requesting data"
    except ValueError:
        assert fetch is garbled
    error, nothing = at_server.download("from", "id", cell=Cell(), fobs_ctx={})
    assert error == ""
    assert "w" in nothing
    reply = messages.send_update(Update("x", 0, "train", 5, {"w": nothing.make_lazy_ref("w")}))
    with pytest.raises(UndeliveredError, match="did not arrive whole; the log of"):
        messages.receive_update(reply, "a")
    answer = FederatedController._reply(reply, "a")
    assert isinstance(answer, Failure)
    assert answer == Failure(FailureKind.LOST, "the update did not arrive whole; the log of the server's job says why")


def test_a_download_gives_whole_tensors_in_memory_and_once_there_is_a_folder_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    sent = tensors()
    source = Source(transferred(sent, TensorConsumer(None, {})))
    monkeypatch.setattr(tensor_stream.TensorDecomposer, "download", source.to_memory)
    monkeypatch.setattr(tensor_stream, "download_tensors_to_disk", source.to_disk)
    decomposer = PieceDecomposer()
    error, whole = decomposer.download("from", "id", cell=Cell(), fobs_ctx={})
    assert error == ""
    assert all(same(whole[name], tensor) for name, tensor in sent.items())

    left = tmp_path / "spool" / "left by a run that was killed"
    left.mkdir(parents=True)
    monkeypatch.setattr(tensor_stream, "return_freed_memory", lambda: None)
    decomposer.spool_to(tmp_path / "spool")
    try:
        assert not left.exists()
        torch.manual_seed(0)
        _, on_disk = decomposer.download("from", "id", cell=Cell(), fobs_ctx={})
        assert isinstance(on_disk, OnDisk)
        assert all(same(on_disk.make_lazy_ref(name).materialize(), tensor) for name, tensor in sent.items())
    finally:
        gc.unfreeze()


def test_cycles_are_collected_once_a_second_and_only_where_models_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    now, collected = [10.0], []
    monkeypatch.setattr(tensor_stream.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(tensor_stream.gc, "collect", lambda: collected.append(now[0]))
    decomposer = PieceDecomposer()
    decomposer.tidy()
    assert collected == []
    decomposer.root = Path("anywhere")
    for now[0] in (10.0, 10.5, 10.9, 11.1, 11.2):
        decomposer.tidy()
    assert collected == [10.0, 11.1]


def test_freed_tensors_go_back_to_the_system() -> None:
    """In a process of its own: 64 blocks of 1 MB, every second one freed, leave half of the memory."""
    code = """
import resource, torch
from fedvlp.flare.tensor_stream import return_freed_memory
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()
return_freed_memory()
before = resident()
blocks = [torch.ones(1 << 18) for _ in range(64)]
held = resident() - before
del blocks[::2]
print(held, resident() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    held, left = map(int, done.stdout.split())
    assert held > 60 << 20
    assert left < 0.6 * held


@pytest.mark.parametrize(
    "sent",
    [
        {EncKey.TYPE: EncType.NATIVE, EncKey.DATA: b"no file of tensors"},
        {EncKey.TYPE: EncType.REF, EncKey.DATA: "an item that nobody announced"},
        {EncKey.TYPE: "of another kind", EncKey.DATA: b"x"},
        {},
        b"no form at all",
    ],
    ids=["garbage", "unannounced", "kind", "empty", "bytes"],
)
def test_tensors_that_cannot_be_read_cost_their_site_the_phase_and_not_the_server_its_job(sent: Any) -> None:
    read = PieceDecomposer(at_server=True).recompose(sent, DatumManager())
    with pytest.raises(UndeliveredError):
        read.materialize()
    with pytest.raises(Exception):  # noqa: B017, PT011  (FLARE's, of any kind)
        PieceDecomposer().recompose(sent, DatumManager())
