"""What `drill.py` puts into its job: a model that keeps its digest, and sites that move it by a known step."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo import Echo, EchoModel
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from torch import Tensor

from fedvlp.core.types import EVALUATE, Broadcast, State, Update
from fedvlp.flare import messages
from fedvlp.flare.retrying_cell import send_again

NOTES = "FEDVLP_DRILL_NOTES"
"""Environment variable: the folder in which the job's processes note what happened. Without it they note nothing."""

SERVER = "server"
"""What the server's process notes when it is about to build the model."""


def note(what: str) -> None:
    """A file of this event: the process, its resident bytes, and when it was."""
    if NOTES not in os.environ:
        return
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    resident = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:"))
    facts = {"what": what, "pid": os.getpid(), "resident": resident, "time": time.time()}
    path = Path(os.environ[NOTES]) / f"{time.time_ns()}-{os.getpid()}"
    path.with_suffix(".part").write_text(json.dumps(facts), encoding="utf-8")
    path.with_suffix(".part").rename(path.with_suffix(".json"))


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of names and bytes."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode())
        total.update(memoryview(tensors[name].contiguous().numpy()).cast("B"))
    return total.hexdigest()


def moved(state: State, site: str) -> State:
    """The tensors, moved in their place by 1/64 times the number in the site's name: what the site calls training."""
    for tensor in state.values():
        tensor.add_(int(site.rpartition("-")[2]) / 64)
    return state


def answer(message: Broadcast, site: str) -> Update:
    """The update of a site, made of the tensors that it received."""
    state = {} if message.phase == EVALUATE else moved(message.state, site)
    return Update(site, message.round, message.phase, 10, state)


@dataclass(frozen=True)
class DrillModel(EchoModel):
    """The model of `server_memory.py`, built by the server alone, which says so."""

    def build(self, seed: int) -> Digested:
        note(SERVER)
        return Digested(self.named(), seed)


class Digested(Echo):
    """It keeps its digest in the place of itself."""

    def save(self, folder: Path, *_: Any) -> None:
        """The digest, as ``model.safetensors``."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").write_text(digest(self.state_dict()), encoding="utf-8")


class DrillSite(Executor):
    """Answers a task at once, and notes that its tensors have all come."""

    def __init__(self) -> None:
        super().__init__()
        messages.register()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """As fedvlp's executors do."""
        if event_type == EventType.START_RUN:
            send_again(fl_ctx)

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        note(task_name)
        message, _ = messages.receive_broadcast(shareable)
        return messages.send_update(answer(message, fl_ctx.get_identity_name()))
