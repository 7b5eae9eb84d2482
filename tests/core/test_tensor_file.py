"""Tensors on disk, read and written in place and piece by piece."""

from __future__ import annotations

import errno
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from support.toy import same_bytes

from fedvlp.core import tensor_file
from fedvlp.core.checkpoint import CheckpointError, save_tensors
from fedvlp.core.tensor_file import Spool, TensorFile, write_tensors

FULL = "No space left on device"
TENSORS = {
    "w": torch.arange(11.0).reshape(1, 11), "turned": torch.rand(3, 2).T, "half": torch.rand(5).bfloat16(),
    "wide": torch.rand(2).double(), "n": torch.tensor(7), "mask": torch.tensor([True]), "none": torch.zeros(0, 3),
}  # fmt: skip


def test_what_was_written_is_read_whole_and_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "PIECE", 4)
    file = write_tensors(tmp_path / "new" / "file", TENSORS)
    same_bytes({name: file[name] for name in file}, TENSORS)
    assert list(file.pieces("w")) == [(0, 4), (4, 8), (8, 11)]
    assert (list(file.pieces("n")), list(file.pieces("none"))) == ([(0, 1)], [])
    assert torch.cat([file.read("w", *piece) for piece in file.pieces("w")]).tolist() == list(range(11))


def test_it_reads_what_save_tensors_wrote_with_its_header(tmp_path: Path) -> None:
    save_tensors(tmp_path / "file", TENSORS, {"round": 3})
    file = TensorFile(tmp_path / "file")
    same_bytes({name: file[name] for name in file}, TENSORS)


def test_pieces_are_replaced_in_place(tmp_path: Path) -> None:
    file = write_tensors(tmp_path / "file", TENSORS)
    file.write("w", 4, torch.tensor([-1.0, -2.0]))
    file.write("half", 0, TENSORS["half"] + 1)
    file.write("none", 0, torch.zeros(0))
    file.sync()
    changed = TENSORS["w"].clone()
    changed[0, 4:6] = torch.tensor([-1.0, -2.0])
    same_bytes(load_file(tmp_path / "file"), {**TENSORS, "w": changed, "half": TENSORS["half"] + 1})


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_tensors(path, TENSORS)
    whole = path.read_bytes()
    for content in (b"", whole[:5], whole[:40], whole[:-1], b"\x08" + b"\0" * 7 + b"[1, 2]  ", b"x" * 100):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"cannot read file in .*It is damaged or not a fedvlp file"):
            TensorFile(path)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot read file"):
        TensorFile(path)


def test_a_file_that_is_cut_while_it_is_used_is_named(tmp_path: Path) -> None:
    file = write_tensors(tmp_path / "file", {"w": torch.zeros(100)})
    (tmp_path / "file").write_bytes((tmp_path / "file").read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="8 bytes of w are missing"):
        file["w"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, FULL), SafetensorError(f"I/O error: {FULL}")])
def test_a_full_disk_is_said_and_no_half_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Whether Python or safetensors notices it; also of tensors that wait for their turn."""

    def full(*given: Any) -> None:
        Path(given[1]).write_bytes(b"half")
        raise error

    monkeypatch.setattr(tensor_file, "save_file", full)
    monkeypatch.setattr(tensor_file, "PARK_BYTES", 0)
    for write in (partial(write_tensors, tmp_path / "file"), Spool(tmp_path).put):
        with pytest.raises(CheckpointError, match="the disk is full; it needs 400 bytes") as raised:
            write({"w": torch.zeros(100)})  # type: ignore[operator]
        assert raised.value.full
        assert not list(tmp_path.iterdir())
