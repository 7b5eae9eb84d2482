"""A file is the old one or the new one, whole; nothing is ever unpickled."""

from __future__ import annotations

import errno
import os
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from support.toy import same_bytes

import fedvlp.core.checkpoint as checkpoint
from fedvlp.core.checkpoint import CheckpointError, load_header, load_tensors, save_json, save_tensors, save_text
from fedvlp.core.server_state import Server
from fedvlp.federation.site_memory import SiteMemory

OLD, NEW = {"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([3.0, 4.0])}


def full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_tensors_and_header_come_back(tmp_path: Path) -> None:
    tensors = {
        "half": torch.tensor([1.5], dtype=torch.bfloat16), "whole": torch.tensor(7), "flag": torch.tensor([True]),
        "double": torch.tensor([0.1], dtype=torch.float64), "none": torch.zeros(0, 3), "turned": torch.rand(2, 3).T,
        "grad": torch.ones(2, requires_grad=True), "nan": torch.zeros(1),
    }  # fmt: skip
    header = {"round": 3, "sites": ["a", "é"], "nested": {"x": [1.5, None, True]}}
    save_tensors(tmp_path / "deep" / "file.safetensors", tensors, header)
    loaded, read = load_tensors(tmp_path / "deep" / "file.safetensors")
    same_bytes(loaded, {name: tensor.detach() for name, tensor in tensors.items()})
    assert read == header
    assert not any(tensor.requires_grad for tensor in loaded.values())


def test_the_header_is_read_alone(tmp_path: Path) -> None:
    save_tensors(tmp_path / "a", {"x": torch.zeros(3)}, {"samples": {"north": 7}})
    assert load_header(tmp_path / "a") == {"samples": {"north": 7}}
    with pytest.raises(CheckpointError, match="cannot read b in"):
        load_header(tmp_path / "b")


def test_no_header_is_an_empty_one(tmp_path: Path) -> None:
    save_tensors(tmp_path / "x", OLD)
    assert load_tensors(tmp_path / "x")[1] == {}


@pytest.mark.parametrize("where", ["save_file", "replace", "fsync"])
def test_a_full_disk_leaves_the_old_file_and_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    path = tmp_path / "server.safetensors"
    save_tensors(path, OLD, {"round": 1})
    if where == "save_file":

        def half_written(tensors: Any, file: Path, **_: Any) -> None:
            Path(file).write_bytes(b"half a file")
            full()

        monkeypatch.setattr(checkpoint, "save_file", half_written)
    else:
        monkeypatch.setattr(os, where, full)
    with pytest.raises(CheckpointError, match=r"server\.safetensors.*the disk is full.*needs 8 bytes.*intact"):
        save_tensors(path, NEW, {"round": 2})
    monkeypatch.undo()
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]
    loaded, header = load_tensors(path)
    same_bytes(loaded, OLD)
    assert header == {"round": 1}


def test_other_failures_say_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "replace", denied)
    with pytest.raises(CheckpointError, match="Permission denied"):
        save_tensors(tmp_path / "x", OLD)
    with pytest.raises(CheckpointError, match="Permission denied"):
        save_text(tmp_path / "y.csv", "text")
    assert list(tmp_path.iterdir()) == []


def test_the_new_file_is_written_beside_and_synced_before_it_replaces_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order that survives a power cut: write a temporary file, sync it, rename it, sync the folder."""
    path, done = tmp_path / "x", []
    save_tensors(path, OLD)
    fsync, rename = os.fsync, os.replace

    def synced(handle: int) -> None:
        done.append(f"sync {os.readlink(f'/proc/self/fd/{handle}')}" if os.path.exists("/proc/self/fd") else "sync")
        fsync(handle)

    def renamed(source: Path, target: Path) -> None:
        same_bytes(load_tensors(path)[0], OLD)
        same_bytes(load_tensors(source)[0], NEW)
        done.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    save_tensors(path, NEW)
    assert [entry.split()[0] for entry in done] == ["sync", "rename", "sync"]
    assert done[0].endswith(".tmp") or done[0] == "sync"
    same_bytes(load_tensors(path)[0], NEW)


@pytest.mark.parametrize("keep", [0, 4, 20, -1])
def test_a_cut_file_is_refused_by_name(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "server.safetensors"
    save_tensors(path, OLD, {"round": 1})
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"server\.safetensors.*damaged"):
        load_tensors(path)


def test_no_flipped_bit_is_read(tmp_path: Path) -> None:
    """One bit of every byte of the file, each in its turn: length, names, types, shapes, header, sums and tensors."""
    path = tmp_path / "server.safetensors"
    tensors = {"w": torch.tensor([1.0, 2.0]), "n": torch.tensor(7), "half": torch.ones(2, 1, dtype=torch.bfloat16)}
    save_tensors(path, tensors, {"round": 1, "sites": ["a"]})
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 7]) + whole[at + 1 :])
        with suppress(CheckpointError):
            loaded, header = load_tensors(path)
            same_bytes(loaded, tensors)  # a blank of the JSON was another one: nothing is lost
            assert header == {"round": 1, "sites": ["a"]}, at
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"server\.safetensors.*the tensor \w+ is not as it was written"):
        load_tensors(path)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="absent"):
        load_tensors(tmp_path / "absent")


class Canary:
    """Unpickling it makes a file."""

    def __init__(self, trap: Path) -> None:
        self.trap = trap

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.trap,)


@pytest.mark.parametrize("how", ["pickle", "torch"])
def test_a_pickle_is_refused_and_never_run(tmp_path: Path, how: str) -> None:
    trap, path = tmp_path / "sprung", tmp_path / "memory" / "00000-0.safetensors"
    path.parent.mkdir()
    if how == "pickle":
        path.write_bytes(pickle.dumps(Canary(trap)))
    else:
        torch.save({"w": torch.ones(1), "x": Canary(trap)}, path)
    for read in (load_tensors, Server.load, lambda _: SiteMemory(path.parent).before((1, 0))):
        with pytest.raises(CheckpointError, match="00000-0"):
            read(path)
    assert not trap.exists()
    pickle.loads(pickle.dumps(Canary(trap)))  # the trap works
    assert trap.exists()


def test_text_and_json_are_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "x.json"
    save_json(path, {"a": [1, "é"]})
    assert path.read_text() == '{\n  "a": [\n    1,\n    "\\u00e9"\n  ]\n}\n'
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(CheckpointError, match=r"x\.json"):
        save_json(path, {"b": 2})
    assert "a" in path.read_text()
    assert len(list(path.parent.iterdir())) == 1


@pytest.mark.parametrize("save", [lambda path: save_tensors(path, OLD), lambda path: save_text(path, "x")])
def test_a_folder_that_cannot_be_made_is_a_checkpoint_error(tmp_path: Path, save: Any) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CheckpointError):
        save(tmp_path / "file" / "server.safetensors")


@pytest.mark.parametrize("name", ["image_encoder.weight", "state/w"])
def test_a_model_file_is_no_server_checkpoint(tmp_path: Path, name: str) -> None:
    save_tensors(tmp_path / "model.safetensors", {name: torch.ones(1)})
    with pytest.raises(CheckpointError, match="model"):
        Server.load(tmp_path / "model.safetensors")


def test_an_error_in_writing_speaks_of_a_previous_file_where_there_is_one(tmp_path: Path) -> None:
    """A picture that is written once has none, and no run to resume."""
    error = PermissionError(13, "Permission denied")
    assert "What was there is intact: free space" in str(checkpoint.unwritten(tmp_path / "map.png", error, 7))
    assert str(checkpoint.unwritten(tmp_path / "map.png", error, 7)).endswith("or, where there is none, start again.")
    (tmp_path / "map.png").touch()
    assert "The previous file is intact" in str(checkpoint.unwritten(tmp_path / "map.png", error, 7))


def test_the_same_content_has_the_same_bytes(tmp_path: Path) -> None:
    """safetensors writes several entries of metadata in an order of chance, and tensors in one of its own."""
    seen = set()
    for number in range(20):
        names = "wv" if number % 2 else "vw"
        save_tensors(tmp_path / f"{number}.safetensors", {name: torch.zeros(2) for name in names}, {"round": 1})
        seen.add((tmp_path / f"{number}.safetensors").read_bytes())
    assert len(seen) == 1
