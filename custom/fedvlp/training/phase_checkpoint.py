"""A long phase that survives its process: what ``train`` needs to resume in the middle, in one file at the site."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedvlp.core.checkpoint import CheckpointError, load_tensors, save_tensors
from fedvlp.core.client import Client
from fedvlp.core.types import Broadcast, State, header, without_prefix
from fedvlp.training import distributed
from fedvlp.training.step import Stepper

STATE, MEMORY, OPTIMIZER, HISTORY, RANDOM = "state/", "memory/", "optimizer/", "history/", "random/"


class PhaseCheckpoint:
    """The checkpoint of one task; that of any other task is as good as none. Rank 0 alone writes.

    The batches drawn so far are drawn again and skipped, so that their generator needs no place in the file.
    """

    def __init__(self, path: Path, task: str, every: int) -> None:
        """``task``: what :func:`identity` makes of it; ``every``: steps between two checkpoints."""
        self.path, self.task, self.every = path, task, every
        self._found = self._read()

    @property
    def steps(self) -> int:
        """How many steps of this task are done."""
        return self._found[1]["numbers"]["done"] if self._found else 0

    def restore(self, client: Client, stepper: Stepper) -> list[dict[str, Tensor]]:
        """Puts model, memory, optimiser and random numbers where they were; the loss terms of the steps until then."""
        assert self._found is not None
        tensors, header = self._found
        self._found = None
        client.load(without_prefix(tensors, STATE))
        client.memory = {name: t.to(client.device) for name, t in without_prefix(tensors, MEMORY).items()}
        stepper.restore(without_prefix(tensors, OPTIMIZER), header["numbers"])
        torch.set_rng_state(tensors[RANDOM + "cpu"])
        if RANDOM + "cuda" in tensors:
            torch.cuda.set_rng_state(tensors[RANDOM + "cuda"], client.device)
        values = {name: t.to(client.device) for name, t in without_prefix(tensors, HISTORY).items()}
        return [{name: values[name][index] for name, index in step.items()} for step in header["history"]]

    def save(self, client: Client, stepper: Stepper, history: list[dict[str, Tensor]]) -> None:
        """Writes the file, atomically, after every ``every`` steps."""
        if stepper.done % self.every:
            return
        stepper.agree()
        if distributed.rank() != 0:
            return
        columns: dict[str, list[Tensor]] = {}
        columns_of_steps = []  # of every step's terms in their columns; a step may lack a term
        for terms in history:
            columns_of_steps.append({name: len(columns.setdefault(name, [])) for name in terms})
            for name, term in terms.items():
                columns[name].append(term)
        tensors = {
            **{STATE + name: t for name, t in client.state().items()},
            **{MEMORY + name: t for name, t in client.memory.items()},
            **{OPTIMIZER + name: t for name, t in stepper.tensors().items()},
            **{HISTORY + name: torch.stack(values) for name, values in columns.items()},
            RANDOM + "cpu": torch.get_rng_state(),
        }
        if client.device.type == "cuda":
            tensors[RANDOM + "cuda"] = torch.cuda.get_rng_state(client.device)
        apart = {name: t.detach().cpu().clone() for name, t in tensors.items()}  # memory may share the model's tensors
        save_tensors(self.path, apart, {"task": self.task, "numbers": stepper.numbers(), "history": columns_of_steps})

    def remove(self) -> None:
        """The task has ended."""
        if distributed.rank() == 0:
            self.path.unlink(missing_ok=True)

    def _read(self) -> tuple[State, dict[str, Any]] | None:
        try:
            tensors, header = load_tensors(self.path)
        except CheckpointError:  # absent or damaged: the phase begins at its first step
            return None
        return (tensors, header) if header.get("task") == self.task else None


def identity(message: Broadcast, memory: State, settings: object) -> str:
    """A hash of everything that a task depends on; ``settings`` are frozen dataclasses."""
    content = hashlib.blake2b(digest_size=16)
    content.update(json.dumps([header(message), repr(settings)], sort_keys=True).encode())
    for kind, tensors in (("state", message.state), ("aux", message.aux), ("memory", memory)):
        for name in sorted(tensors):
            tensor = tensors[name].detach().cpu().contiguous()
            content.update(f"{kind} {name} {tensor.dtype} {list(tensor.shape)}".encode())
            content.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return content.hexdigest()
