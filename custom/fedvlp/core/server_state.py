"""What the server knows: the model, the method's memory and the records of the run."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from fedvlp.core import history
from fedvlp.core.aggregation import Averaging, Mean
from fedvlp.core.change import EXACT_NUMEL
from fedvlp.core.checkpoint import CheckpointError, load_tensors, save_tensors, unread
from fedvlp.core.history import Written
from fedvlp.core.snapshots import APART
from fedvlp.core.tensor_file import PARK_BYTES, TensorFile, write_tensors
from fedvlp.core.types import State

if TYPE_CHECKING:
    from fedvlp.core.client import Client
    from fedvlp.core.method import Method


class Trainer(Protocol):
    """The server as a trainee, on the public set (federation/server_trainer.py)."""

    client: Client

    def stop_when(self, asked: Callable[[], bool]) -> None: ...

    def threads(self) -> AbstractContextManager[None]: ...

    def session(self, state: Mapping[str, Tensor], *purpose: object) -> AbstractContextManager[Client]: ...

    def train(
        self, method: Method, server: Server, phase: str, aux: State | None = None, lr_scale: float = 1.0
    ) -> None: ...

    def trained(self, method: Method, server: Server, phase: str) -> State: ...

    def as_client(self, method: Method, server: Server, phase: str) -> State: ...

    def measure(self, state: State, splits: int) -> dict[str, float]: ...

    def served(self, state: State) -> State: ...


def _at_once(write: Callable[[], None]) -> None:
    write()


@dataclass
class Server:
    """What the server knows; ``memory`` is the method's.

    Large groups of the memory, such as each site's own model, are in files of their own (:meth:`remember`).
    A checkpoint holds all of it but ``trainer``, ``modalities`` and ``averaging``, which follow from the experiment
    (``Assembly.equip``, ``Federation``), and ``metrics``, which is in the history. The history is in a file beside it,
    of which the checkpoint says how much belongs to it (core/history.py).
    """

    sites: tuple[str, ...]  # sorted by name
    state: State  # the global model
    memory: State = field(default_factory=dict)
    round: int = 0
    phase: str = ""
    samples: dict[str, int] = field(default_factory=dict)  # training samples by site, as last reported
    enrolled: dict[str, int] = field(default_factory=dict)  # training samples by site, as first reported in the run
    missed: dict[str, int] = field(default_factory=dict)  # phases missed in a row
    history: list[dict[str, Any]] = field(default_factory=list)  # one record per phase
    spare: State = field(default_factory=dict)  # tensors of an earlier round, free to be overwritten
    metrics: dict[str, float] = field(default_factory=dict)  # the server's own figures of this phase
    modalities: dict[str, tuple[str, ...]] = field(default_factory=dict)  # of each site: as it says in its replies
    averaging: Averaging = field(default_factory=Averaging)  # how updates are averaged
    written: Written = field(default_factory=Written)  # the part of the history that is in its file
    apart: dict[str, str] = field(default_factory=dict)  # groups of the memory that have a file of their own, by name
    sums: dict[str, int] = field(default_factory=dict)  # CRC-32 of these files, by their name
    folder: Path | None = None  # of the checkpoint, and of these files in it
    make_room: Callable[[Callable[[], None]], None] = _at_once  # writes, on a full disk in older files' place
    trainer: Trainer | None = None  # trains and measures the server's model on the public set, if there is one

    def copy(self, group: str, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """A copy of a group of tensors, to be changed and then remembered (:meth:`remember`).

        It is in memory, or a :class:`TensorFile` where the group has more than ``PARK_BYTES`` and the run a folder: a
        new file in every phase, so that the checkpoint's own stays as it is. Raises CheckpointError.
        """
        if self.folder is None or sum(t.numel() * t.element_size() for t in tensors.values()) <= PARK_BYTES:
            return {name: tensor.clone() for name, tensor in tensors.items()}
        number = hashlib.sha256(group.encode()).hexdigest()[:16]
        path = self.folder / APART / f"{self.round:05d}-{self.phase or 'start'}-{number}.safetensors"
        made: list[TensorFile] = []
        self.make_room(lambda: made.append(write_tensors(path, tensors)))
        return made[0]

    def remember(self, group: str, tensors: Mapping[str, Tensor]) -> None:
        """Takes a group of tensors, none of which is changed from now on, as ``<group>/<name>`` into the memory.

        Those of a :class:`TensorFile` stay there, and the checkpoint names the file.
        """
        if isinstance(tensors, TensorFile):
            tensors.sync()
            self.apart = self.apart | {group: tensors.path.name}
            self.sums[tensors.path.name] = tensors.checksum()
            for name in tensors:
                self.memory.pop(f"{group}/{name}", None)  # where a run resumes that had it in memory
        else:
            self.memory |= {f"{group}/{name}": tensor for name, tensor in tensors.items()}

    def remembered(self, group: str, names: Iterable[str]) -> State:
        """The tensors of a group that it has of ``names``; those of a file are mapped, and read where they are used."""
        if group in self.apart and self.folder is not None:
            tensors = load_tensors(self.folder / APART / self.apart[group])[0]
            return {name: tensors[name] for name in names if name in tensors}
        keys = ((name, f"{group}/{name}") for name in names)
        return {name: self.memory[key] for name, key in keys if key in self.memory}

    def replace(self, tensors: State) -> None:
        """Commits new values for some tensors of the model; an empty dict keeps the model.

        The replaced tensors of a large model become the next mean's accumulator, so no reference to ``state`` may be
        kept across two aggregations.
        """
        if sum(tensor.numel() for tensor in tensors.values()) > EXACT_NUMEL:
            self.spare = self.spare | {name: self.state[name] for name in tensors}
        self.state = self.state | tensors

    def mean(self, reference: State, expected_weight: float = 1.0, spare: State | None = None) -> Mean:
        """An average of states, of the kind that the run's settings ask for; a method averages with this alone."""
        return self.averaging.begin(reference, expected_weight, spare)

    def save(self, path: Path, next_phase: int) -> None:
        """Checkpoints everything; ``next_phase`` is the index of the phase of ``round`` that comes next.

        Of the history only what is not yet in its file is written, so a record must not be changed afterwards.
        """
        tensors = {f"state/{n}": t for n, t in self.state.items()} | {f"memory/{n}": t for n, t in self.memory.items()}
        new = self.history[self.written.records :]
        self.written = history.append(path.with_name(history.FILE), self.written, new)
        header = {
            "sites": list(self.sites),
            "round": self.round,
            "next_phase": next_phase,
            "samples": self.samples,
            "enrolled": self.enrolled,
            "missed": self.missed,
            "history": asdict(self.written),
        }
        if self.apart:
            header[APART], header["crc32"] = self.apart, {file: self.sums[file] for file in self.apart.values()}
        save_tensors(path, tensors, header)

    @staticmethod
    def load(path: Path, newest: Path | None = None) -> tuple[Server, int]:
        """The server as :meth:`save` left it, and the index of the next phase.

        ``newest`` is the run's checkpoint where ``path`` is an older one that was kept: the history lies beside it.
        """
        tensors, header = load_tensors(path)
        if "next_phase" not in header:
            raise CheckpointError(f"{path.name} in {path.parent} is no server checkpoint; give one that a run wrote")
        tensors_of: dict[str, dict[str, Tensor]] = {"state": {}, "memory": {}}
        for name, tensor in tensors.items():
            kind, _, rest = name.partition("/")
            tensors_of[kind][rest] = tensor
        server = Server(tuple(header["sites"]), tensors_of["state"], tensors_of["memory"], header["round"])
        server.samples, server.missed = header["samples"], header["missed"]
        server.enrolled = header["enrolled"]
        server.apart, server.folder = header.get(APART, {}), (newest or path).parent
        server.sums = header.get("crc32", {})
        for file in set(server.apart.values()):
            beside = TensorFile(server.folder / APART / file)  # which says so if it is missing or cut
            if beside.checksum() != server.sums.get(file):
                raise unread(beside.path, ValueError("its tensors are not as they were written"))
        server.written = Written(**header["history"])
        server.history = history.read((newest or path).with_name(history.FILE), server.written)
        return server, header["next_phase"]
