"""What the simulator's trainer does while nobody asks it: tasks of the phase whose sites FLARE has not visited yet.

This is speculative execution. FLARE sleeps before each visit and then starts a process for it, while the processor
idles. So the controller tells the trainer what it sends to whom as soon as a phase begins. The trainer answers these
tasks, one at a time, and keeps the answers. A visit that brings the same task, byte for byte, is given its answer at
once. Any other visit is answered as if nothing had been done ahead. No harm is done where a task is done twice: a site
keeps what it remembers by task (federation/site_memory.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedvlp.flare.raw_tensors import RawTensor, packed

TOLD = "ahead"
"""What a message to the trainer has where it is no task, but tells of tasks that will be asked."""


@dataclass
class Task:
    """A task as a visit brings it: what is asked (JSON) and the tensors."""

    asked: dict[str, Any]
    tensors: Mapping[str, RawTensor]

    @property
    def site(self) -> str:
        """The name of the site that is asked; empty where the message names none."""
        return str(self.asked.get("paths", {}).get("site", ""))

    @cached_property
    def digest(self) -> bytes:
        """Equal for tasks with the same answer."""
        content = hashlib.blake2b(json.dumps(self.asked, sort_keys=True).encode(), digest_size=16)
        content.update(packed({name: self.tensors[name] for name in sorted(self.tensors)}))
        return content.digest()


Said = tuple[dict[str, Any], Mapping[str, RawTensor]]
"""An answer: JSON and tensors."""


def told(messages: Mapping[str, tuple[dict[str, Any], Mapping[str, Any]]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The message that tells of the header and the tensors of each site's task; a tensor of several sites goes once."""
    names: dict[int, str] = {}
    tensors: dict[str, Any] = {}
    tasks = {}
    for site, (header, own) in messages.items():
        for tensor in own.values():
            tensors[names.setdefault(id(tensor), str(len(names)))] = tensor
        tasks[site] = {"message": header, "tensors": {name: names[id(tensor)] for name, tensor in own.items()}}
    return {TOLD: tasks}, tensors


class LookAhead:
    """The tasks that a trainer knows of before it is asked, and its answers to them."""

    def __init__(self) -> None:
        self._asked: dict[
            str, dict[str, Any]
        ] = {}  # what each site asked last, without the message; the latest comes last
        self._tasks: dict[str, Task] = {}
        self._answers: dict[bytes, Said] = {}

    def tell(self, content: Mapping[str, Any], tensors: Mapping[str, RawTensor]) -> None:
        """Takes a message of :func:`told` in place of the one before.

        Of a site that has not asked yet nothing can be begun: a task names folders and settings that only it knows.
        """
        tasks = content[TOLD]
        self._answers.clear()
        self._tasks = {
            site: Task(
                {**asked, "message": tasks[site]["message"]},
                {name: tensors[key] for name, key in tasks[site]["tensors"].items()},
            )
            for site, asked in self._asked.items()
            if site in tasks
        }

    def next(self) -> Task | None:
        """A task to begin now, or None; tasks come in the order in which their sites asked last."""
        return self._tasks.pop(next(iter(self._tasks))) if self._tasks else None

    def store(self, task: Task, said: Said) -> None:
        """Stores an answer for its visit. A task that failed or was left is done again then."""
        if not said[0].get("failure") and not said[0]["aborted"]:
            self._answers[task.digest] = said

    def visited(self, task: Task) -> Said | None:
        """The answer to a visit's task, if it is there; nothing is begun for its site in this phase any more."""
        self._asked.pop(task.site, None)
        self._asked[task.site] = {name: value for name, value in task.asked.items() if name != "message"}
        self._tasks.pop(task.site, None)
        return self._answers.pop(task.digest, None)
