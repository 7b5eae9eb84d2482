"""Sites that count shared patients, without FLARE's processes: the real executor and filters, and every byte between.

``Between`` stands for the server and the network: it has what a hostile one would have, all messages as bytes.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.apis.utils.decomposers import flare_decomposers
from nvflare.fuel.utils import fobs

from fedvlp.core.checkpoint import save_json
from fedvlp.data.patients import normalised
from fedvlp.deploy.site_config import NamedData
from fedvlp.flare.overlap_messages import TASK, Task, to_task
from fedvlp.flare.overlap_server import OverlapTable, Reply, count_pairs, read_reply
from fedvlp.flare.overlap_site import OverlapExecutor
from fedvlp.flare.privacy_filters import AllowMetrics, UpdateFilter
from support.flare_memory import Engine

KEY = "5e" * 32
JOB = "0c7d1f2a-0000-4000-8000-000000000020"
Change = Callable[[str, Task], Task]


def people(*numbers: Iterable[int]) -> list[str]:
    """Patients by number."""
    return [f"MRN-{number:06d}" for group in numbers for number in group]


class Hospital:
    """A provisioned site with a table of patients, and rules that let them be counted unless ``rules`` is None."""

    def __init__(self, root: Path, name: str, patients: Iterable[str], rules: Mapping[str, Any] | None = None) -> None:
        self.name, self.root = name, root / name
        (self.root / "startup").mkdir(parents=True)
        (self.root / "startup" / "fed_client.json").write_text("{}")
        self.configure(rules)
        self.hold(patients)
        self.key(KEY)
        self.executor = OverlapExecutor(NamedData("registry"), ("north", "south", "east"))
        self.filters: list[UpdateFilter] = [AllowMetrics(["seconds"]), AllowMetrics([], digits=3)]

    def configure(self, rules: Mapping[str, Any] | None) -> None:
        content: dict[str, Any] = {"data": {"registry": {"source": "table", "path": "people.csv"}}}
        if rules is not None:
            content["overlap"] = {"data": ["registry"], "sites": ["north", "south", "east"], **rules}
        save_json(self.root / "local" / "fedvlp.json", content)

    def hold(self, patients: Iterable[str]) -> None:
        file = self.root / "data" / "people.csv"
        file.parent.mkdir(exist_ok=True)
        with file.open("w", newline="") as table:
            csv.writer(table).writerows([["patient_id"], *([patient] for patient in patients)])

    def key(self, text: str) -> None:
        file = self.root / "local" / "overlap.key"
        file.write_text(text)
        file.chmod(0o600)

    def context(self, job: str = JOB, task: str = TASK) -> FLContext:
        context = Engine(self.name, self.root, job).new_context()
        context.set_prop(FLContextKey.TASK_NAME, task, private=True, sticky=False)
        return context

    def answer(self, task: Shareable, job: str = JOB) -> Shareable:
        """What leaves the site, its own filters behind the executor."""
        context = self.context(job)
        reply = self.executor.execute(TASK, task, context, Signal())
        for rule in self.filters:
            reply = rule.process(reply, context)
        return reply

    def start_anew(self) -> None:
        """Another process of the same job, or of the next."""
        self.executor = OverlapExecutor(self.executor.data, self.executor.sites)


@dataclass
class Between:
    """Carries tasks and answers as bytes, and may change a task on its way."""

    sites: Mapping[str, Hospital]
    job: str = JOB
    change: Change = lambda site, task: task
    crossed: list[bytes] = field(default_factory=list)
    seen: list[tuple[str, Task, Reply]] = field(default_factory=list)

    def ask(self, tasks: Mapping[str, Task]) -> dict[str, Reply]:
        return {site: self.one(site, task) for site, task in tasks.items()}

    def one(self, site: str, task: Task) -> Reply:
        flare_decomposers.register()
        sent = fobs.dumps(to_task(self.change(site, task)))
        came = fobs.dumps(self.sites[site].answer(fobs.loads(sent), self.job))
        self.crossed += [bytes(sent), bytes(came)]
        reply = read_reply(fobs.loads(came))
        self.seen.append((site, task, reply))
        return reply

    def count(self) -> OverlapTable:
        return count_pairs(sorted(self.sites), self.ask)


def counted(table: OverlapTable) -> dict[tuple[str, str], int | None]:
    return {(pair.first, pair.second): pair.shared for pair in table.pairs}


def written(root: Path) -> str:
    """All that a site wrote, its table of patients and its key aside."""
    files = [path for path in root.rglob("*") if path.is_file() and path.name not in ("people.csv", "overlap.key")]
    return json.dumps([path.read_text(errors="replace") for path in files])


def traces(patients: Iterable[str]) -> list[bytes]:
    """What must not cross: each name as written and normalised, and its hashes without a key, as text and as bytes."""
    found = []
    for patient in patients:
        for text in {patient, normalised(patient), patient.upper()}:
            raw = text.encode()
            found.append(raw)
            for kind in ("sha256", "md5", "sha1", "sha512"):
                digest = hashlib.new(kind, raw)
                found += [digest.digest(), digest.hexdigest().encode(), digest.hexdigest()[:16].encode()]
    return found
