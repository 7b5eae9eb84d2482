"""Tensors between two processes: the same bytes in a file or in the pipe, one copy, nothing left."""

from __future__ import annotations

import os
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch
from support.toy import same_bytes

from fedvlp.core.types import LazyState, State
from fedvlp.federation import frames
from fedvlp.federation.frames import Shared, frame, receive, send

TENSORS = {
    "w": torch.rand(3, 5), "turned": torch.rand(3, 2).T, "half": torch.rand(7).bfloat16(), "n": torch.tensor(7),
    "mask": torch.tensor([True, False]), "none": torch.zeros(0, 3), "learns": torch.rand(2, requires_grad=True),
}  # fmt: skip


def through(state: State, spool: Path | None = None) -> State:
    here, there = Pipe()
    with here, there:
        sent = frame(state, spool)
        send(here, sent)
        if isinstance(sent, Shared):
            sent.close()
        return receive(there)


@pytest.mark.parametrize(("least", "most", "kind"), [(1, 10**9, dict), (1, 0, LazyState), (10**9, 10**9, dict)])
def test_every_dtype_and_shape_comes_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: int, most: int, kind: type
) -> None:
    monkeypatch.setattr(frames, "PIPE_BYTES", least)
    monkeypatch.setattr(frames, "MEMORY_BYTES", most)
    seen = through(TENSORS, tmp_path / "spool")
    assert isinstance(seen, kind)
    same_bytes(dict(seen), {name: tensor.detach() for name, tensor in TENSORS.items()})
    assert through({}) == {}
    assert not (tmp_path / "spool").exists() or not list((tmp_path / "spool").iterdir())


def test_a_file_is_copied_once_and_read_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The views of two receivers are pages of one file: 64 MB sent twice take 64 MB."""
    files = len(os.listdir("/dev/fd"))
    state = {"w": torch.ones(16_000_000)}
    here, there = Pipe()
    with here, there:
        sent = frame(state)
        assert isinstance(sent, Shared)
        before = anonymous()
        send(here, sent)
        first = receive(there)
        send(here, sent)
        second = receive(there)
        sent.close()
        assert float(first["w"].sum()) == float(second["w"].sum()) == 16_000_000
        assert anonymous() - before < 8_000_000
        first["w"][0] = 5.0  # a page of its own
        assert second["w"][0] == 1.0
        assert anonymous() - before < 8_000_000
    del first, second
    assert len(os.listdir("/dev/fd")) == files


def anonymous() -> int:
    """Bytes of this process that no file backs."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))
