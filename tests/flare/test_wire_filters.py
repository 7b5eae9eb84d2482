"""A site's end of the wire in FLARE: floats for the site's filters, codes for the network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from nvflare.apis.fl_constant import FLContextKey, ReservedKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable

from fedvlp.core.types import Broadcast, Failure, FailureKind, Reply, Update
from fedvlp.federation.codec import Wire
from fedvlp.federation.wire import ServerEnd
from fedvlp.flare import messages as wire
from fedvlp.flare.jobs import job_files
from fedvlp.flare.wire_filters import DecodeTask, EncodeResult, WireEnd
from fedvlp.methods import FedAvg
from fedvlp.run import presets
from fedvlp.run.config import override

RUN = {"folder": "fedavg/001", "fingerprint": "abc", "version": "0"}
OPTIONS = Wire(down="bfloat16", up="int8")
STATE = {"w": torch.randn(30, 20, generator=torch.Generator().manual_seed(0)), "b": torch.ones(20)}


class Engine:
    """What the filters ask FLARE's engine for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.end = WireEnd(OPTIONS, FedAvg())

    def get_workspace(self) -> Engine:
        return self

    def get_root_dir(self) -> str:
        return str(self.root)

    def get_site_config_dir(self) -> str:
        return str(self.root / "local")

    def get_component(self, name: str) -> Any:
        return self.end if name == "wire" else None

    def fire_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """FLARE logs through events too."""


def context(root: Path) -> FLContext:
    fl_ctx = FLContext()
    fl_ctx.set_prop(ReservedKey.ENGINE, Engine(root), private=True, sticky=False)
    fl_ctx.set_prop(ReservedKey.IDENTITY_NAME, "site-1", private=False, sticky=False)
    fl_ctx.set_prop(FLContextKey.CURRENT_RUN, "job", private=False, sticky=True)
    return fl_ctx


def exchange(fl_ctx: FLContext, seen: list[Update | Broadcast]) -> Any:
    """One site behind its filters; ``seen`` gets what its executor received and what it sent."""

    def ask(messages: Any) -> Any:
        for site, message in messages.items():
            task = DecodeTask().process(wire.send_broadcast(message, RUN), fl_ctx)
            received, _ = wire.receive_broadcast(task)
            reply = Update(site, received.round, "train", 5, {n: t + 0.01 for n, t in received.state.items()})
            encoded = EncodeResult().process(wire.send_update(reply), fl_ctx)
            seen.extend([received, reply, wire.receive_update(encoded, site)])
            yield site, wire.receive_update(encoded, site)

    return ask


def round_trip(end: ServerEnd, round: int, state: dict[str, torch.Tensor]) -> Reply:
    (answer,) = [reply for _, reply in end({"site-1": Broadcast(round, "train", state)})]
    return answer


def test_what_is_between_the_filters_is_float_and_what_leaves_is_not(tmp_path: Path) -> None:
    seen: list[Any] = []
    server = ServerEnd(OPTIONS, exchange(context(tmp_path), seen))
    assert isinstance(round_trip(server, 0, STATE), Update)
    answer = round_trip(server, 1, {n: t + 0.1 for n, t in STATE.items()})
    received, reply, sent = seen[3:]
    assert received.state["w"].dtype == reply.state["w"].dtype == torch.float32
    assert torch.allclose(received.state["w"], STATE["w"] + 0.1, atol=0.02)
    assert sent.state["w"].dtype == torch.int8
    assert isinstance(answer, Update)
    assert torch.allclose(answer.state["w"], reply.state["w"], atol=1e-4)
    assert server.bytes == {"bytes_down": 2 * 600 + 4 * 20, "bytes_up": 600 + 4 * 30 + 4 * 20}


def test_what_the_site_holds_of_another_run_of_that_name_is_not_used(tmp_path: Path) -> None:
    fl_ctx = context(tmp_path)
    component = fl_ctx.get_engine().get_component("wire")
    first = component.of(RUN | {"id": "0" * 32}, fl_ctx)
    memory = first._memory.folder
    memory.mkdir(parents=True)
    assert component.of(RUN | {"id": "0" * 32}, fl_ctx) is first
    assert component.of(RUN | {"id": "1" * 32}, fl_ctx) is not first
    assert not memory.exists()


def test_errors_pass_and_whatever_is_no_update_of_tensors_is_refused(tmp_path: Path) -> None:
    fl_ctx = context(tmp_path)
    failed = wire.send_failure(Failure(FailureKind.FAILED, "no"))
    assert EncodeResult().process(failed, fl_ctx) is failed
    with pytest.raises(ValueError, match="before any task"):
        EncodeResult().process(wire.send_update(Update("site-1", 0, "train", 5, STATE)), fl_ctx)
    DecodeTask().process(wire.send_broadcast(Broadcast(0, "train", STATE), RUN), fl_ctx)
    encrypted = wire.send_update(Update("site-1", 0, "train", 5, {"w": b"secret"}))  # type: ignore[dict-item]
    with pytest.raises(AttributeError):
        EncodeResult().process(encrypted, fl_ctx)
    with pytest.raises(ValueError, match="DXO"):
        EncodeResult().process(Shareable(), fl_ctx)


def test_jobs_have_the_filters_by_task_name_only_when_asked_for() -> None:
    plain = presets.get("feddra")
    assert "WireEnd" not in "".join(job_files(plain).values())
    client = json.loads(job_files(override(plain, "wire.down", "bfloat16"))["app/config/config_fed_client.json"])
    for chain, name in (("task_data_filters", "DecodeTask"), ("task_result_filters", "EncodeResult")):
        (entry,) = client[chain]
        assert entry["tasks"] == ["align", "evaluate", "joint"]
        assert entry["filters"] == [{"path": f"fedvlp.flare.{name}", "args": {}}]
