"""The folder of a run: configuration, versions, metrics, checkpoints and the trained model."""

from __future__ import annotations

import csv
import io
import logging
import platform
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Any

import fedvlp
from fedvlp.core import norm_statistics
from fedvlp.core.checkpoint import (
    CheckpointError,
    load_header,
    save_bytes,
    save_json,
    save_tensors,
    save_text,
    writing,
)
from fedvlp.core.client import OBJECTIVE, frozen_tensors
from fedvlp.core.json_file import read_json
from fedvlp.core.method import stays_initial
from fedvlp.core.server_state import Server
from fedvlp.core.types import State, is_private
from fedvlp.data.cohort import digest
from fedvlp.federation.loop import QuorumLostError
from fedvlp.models.findings import FindingHeads
from fedvlp.models.serialization import CARD
from fedvlp.run import finding_heads, plugins
from fedvlp.run.config import described, fingerprint, from_config
from fedvlp.run.experiment import Experiment
from fedvlp.run.metrics import Record, scalars, summary
from fedvlp.run.model_card import card
from fedvlp.run.model_use import class_prompts, preprocessing
from fedvlp.run.status import FILE as STATUS_FILE
from fedvlp.run.status import FINISHED

log = logging.getLogger(__name__)

PACKAGES = ("fedvlp", "torch", "numpy", "safetensors", "nvflare", "monai", "timm", "transformers")


def seen_from_here(path: Path) -> str:
    """Return the path as a command run here takes it: a page that is handed on shows no more of this machine."""
    here = Path.cwd()
    return str(path.absolute().relative_to(here)) if path.absolute().is_relative_to(here) else str(path)


class UnreadableRunError(ValueError):
    """A run that has not finished cannot be read, so nobody can say whether it is the one to resume."""


@dataclass(frozen=True)
class RunFolder:
    """Where a run keeps everything; never inside FLARE's own workspace, which is emptied at every start."""

    path: Path
    above: tuple[Path, ...] = field(default=(), repr=False, compare=False)  # folders made for this one, innermost first

    @staticmethod
    def open(root: Path, experiment: Experiment) -> RunFolder:
        """The run of ``experiment`` to resume, as :meth:`latest` finds it, or a new one."""
        return RunFolder.latest(root, experiment) or RunFolder.create(root, experiment)

    @staticmethod
    def create(root: Path, experiment: Experiment) -> RunFolder:
        """A new folder ``<root>/<name>/<number>`` with the resolved configuration and its plugins' files in it.

        Raises ValueError where a link leads the folder out of ``root``, or the weights to start from are not there.
        """
        experiment = experiment.pinned()
        runs = root / experiment.name
        if not runs.resolve().is_relative_to(root.resolve()):
            raise ValueError(f"the runs of {experiment.name} lie outside of the folder of runs; remove the link there")
        above = tuple(parent for parent in (runs, *runs.parents) if not parent.exists())
        runs.mkdir(parents=True, exist_ok=True)
        number = max((int(entry.name) for entry in runs.glob("[0-9]*") if entry.name.isdigit()), default=0) + 1
        while True:
            folder = RunFolder(runs / f"{number:03d}", above)
            try:
                folder.path.mkdir()
                break
            except FileExistsError:  # another process has just taken the number
                number += 1
        for plugin in plugins.of(experiment):
            if plugin.source is not None:
                save_bytes(folder.plugin(plugin.name), plugin.source)
        save_json(folder.environment, {**environment(experiment), "id": secrets.token_hex(16)})
        save_json(folder.config, described(experiment))
        return folder

    @contextmanager
    def removed_unless_begun(self) -> Iterator[None]:
        """Around a new run: its folder goes where an error comes before the first phase is complete.

        With it go the folders above it that were made for it. A run that lost its quorum or found no space on the disk
        stays, since it can be resumed, and so does one that was stopped.
        """
        try:
            yield
        except (QuorumLostError, CheckpointError):
            raise
        except Exception:
            if not self.checkpoint.exists():
                shutil.rmtree(self.path, ignore_errors=True)
                for parent in self.above:
                    with suppress(OSError):  # it holds other runs
                        parent.rmdir()
            raise

    @staticmethod
    def latest(root: Path, experiment: Experiment) -> RunFolder | None:
        """The newest run of this very configuration if it has not finished, or None.

        Raises UnreadableRunError naming a run that has not finished and cannot be read.
        """
        folder = RunFolder.newest(root, experiment)
        return None if folder is None or folder.finished else folder

    @staticmethod
    def newest(root: Path, experiment: Experiment) -> RunFolder | None:
        """The newest run of this very configuration, or None.

        Raises UnreadableRunError naming a run that has not finished and cannot be read.
        """
        experiment = experiment.pinned()
        entries = [entry for entry in (root / experiment.name).glob("[0-9]*") if entry.name.isdigit()]
        for entry in sorted(entries, key=lambda entry: int(entry.name), reverse=True):
            folder = RunFolder(entry)
            if folder.is_of(experiment):
                return folder
        return None

    def is_of(self, experiment: Experiment) -> bool:
        """Whether this is a run of that configuration, with the same content of its plugins."""
        if not self.config.exists() and not self.checkpoint.exists():
            return False  # killed before it began
        name = f"{self.path.parent.name}/{self.path.name}"
        try:
            config = self._config()
        except ValueError as error:
            if self.finished:
                return False  # finished: nothing to resume
            raise UnreadableRunError(
                f"run {name} has not finished, and its configuration cannot be read: {error}. It may be the run to "
                f"resume, so no new one is begun. Restore {self.config.name} there, or move the folder elsewhere to "
                "begin a new run"
            ) from None
        if config.get("plugins", {}) != plugins.digests(experiment):
            return False
        try:
            return fingerprint(self.experiment()) == fingerprint(experiment)
        except ValueError as error:  # it names what this fedvlp does not have, so it is another configuration
            log.warning("run %s is passed over: %s", name, error)
            return False

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def environment(self) -> Path:
        """Versions, seed and fingerprint, and the run's id."""
        return self.path / "environment.json"

    @property
    def id(self) -> str:
        """What tells this run from another one in a folder of the same name; "" of a run of an older fedvlp."""
        return str(_read(self.environment).get("id", ""))

    @property
    def code(self) -> str:
        """``code()`` of the fedvlp that began it; "" where it noted none."""
        return str(_read(self.environment).get("code", ""))

    @property
    def status_file(self) -> Path:
        """How far the run is and which sites answered, or how it ended (run/status.py)."""
        return self.path / STATUS_FILE

    def status(self) -> dict[str, Any]:
        """What the status file says; empty where there is none that can be read."""
        return _read(self.status_file)

    @property
    def finished(self) -> bool:
        """Whether the run is complete: its model is here, or its server said so, which has none of an encrypted run."""
        return self.model.exists() or self.status().get("status") == FINISHED

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoints" / "server.safetensors"

    @property
    def model(self) -> Path:
        """The trained weights: there when the run has finished, but for an encrypted one."""
        return self.path / "model" / "model.safetensors"

    def page(self, films: bool = False) -> Path:
        """The report; with ``films``, the one with images and reports of the records."""
        return self.path / ("report-films.html" if films else "report.html")

    def plugin(self, name: str) -> Path:
        """The run's own copy of a plugin that is one file."""
        return self.path / "plugins" / f"{name}.py"

    def experiment(self) -> Experiment:
        """The configuration that this run was started with.

        Raises PluginError (a ValueError) unless its plugins are here with the content that the run began with.
        """
        config = self._config()
        recorded = config.get("plugins", {})
        for name, content in recorded.items():
            self._refuse_other(name, content, plugins.admitted(name))
        experiment: Experiment = from_config(config)
        unrecorded = plugins.digests(experiment).keys() - recorded.keys()
        if unrecorded:
            raise plugins.PluginError(
                f"{self.path}: config.json names classes of {', '.join(sorted(unrecorded))} and no digest of it, so "
                "nobody can say whether this is the plugin that the run began with; begin a new run"
            )
        return experiment

    def _config(self) -> dict[str, Any]:
        """config.json as it stands. Raises ValueError where it is missing or damaged."""
        try:
            config = read_json(self.config)
        except FileNotFoundError:
            raise ValueError(f"{self.path} holds no run: config.json is missing there") from None
        except ValueError as error:
            raise ValueError(f"config.json is no JSON: {error}") from None
        if not isinstance(config, dict):
            raise ValueError(f"config.json holds a {type(config).__name__}, expected an object")
        return config

    def _refuse_other(self, name: str, digest: str, plugin: plugins.Plugin | None) -> None:
        """Raises PluginError unless the plugin ``name`` was found, with the content that the run began with."""
        copy = self.plugin(name)
        remedy = f"give the run's own copy, --plugin {copy}" if copy.exists() else f"install the {name} it began with"
        if plugin is None:
            raise plugins.PluginError(
                f"{self.path} was begun with the plugin {name}, which is neither given nor installed here; {remedy}. "
                "Read it first if the run is not yours: it is a program"
            )
        if plugin.digest != digest:
            raise plugins.PluginError(
                f"{self.path} was begun with a plugin {name} of digest {digest}; {plugin.file} has {plugin.digest}. "
                f"To resume, {remedy}; with what is there now, begin a new run"
            )

    def server(self) -> tuple[Server, int] | None:
        """The server as the last complete phase left it, and the next phase; None before there is one.

        Raises CheckpointError for a damaged checkpoint.
        """
        return Server.load(self.checkpoint) if self.checkpoint.exists() else None

    def history(self) -> list[Record]:
        """The records of the phases that are complete."""
        saved = self.server()
        return saved[0].history if saved else []

    @property
    def table(self) -> Path:
        """Every figure of every phase, one a line."""
        return self.path / "metrics.csv"

    def note_all(self, history: list[Record]) -> None:
        """Writes the table anew: when a run begins, or resumes after a kill that may have cut it."""
        rows = (row for record in history for row in _rows(record))
        save_text(self.table, _as_csv(chain([COLUMNS], rows)))

    def note(self, record: Record) -> None:
        """Appends the figures of a phase to the table. Raises CheckpointError where the disk takes no more."""
        lines = _as_csv(_rows(record))
        appended = writing(self.table, len(lines), "The checkpoint")
        with appended, open(self.table, "a", encoding="utf-8", newline="") as file:
            file.write(lines)

    def finish(
        self,
        experiment: Experiment,
        state: State,
        history: list[Record],
        labels: Sequence[str] | None = None,
        findings: FindingHeads | None = None,
    ) -> None:
        """Writes the trained model so that ``load_model`` reads it, with its model card, and the summary.

        A model that is there stays as it is: people write in its card, and so does an audit.
        Adapters are added to the weights of their towers. Its config.json says how images are prepared for it, the
        prompts of its classes (those of ``labels``, the records', where they are known here) and of which records its
        running statistics are. Where sites keep theirs and the server has no public set, ``state`` is without: the
        model then has the initial ones, and ``load_model`` asks for others. ``findings``: the classifier that the
        server solved, calibrated; None: as its checkpoint has it, if it has one.
        """
        if self.model.exists():
            return
        model = experiment.model.build(experiment.rounds.seed)
        frozen = frozen_tensors(model)
        initial = {name: t for name, t in model.state_dict().items() if name not in state.keys() | frozen.keys()}
        trained = {n: t for n, t in state.items() if not n.startswith(OBJECTIVE)}
        site_only = norm_statistics.site_only(experiment.norm_statistics, experiment.method, {**state, **initial})
        given = {name: t for name, t in initial.items() if name in site_only}
        model.load_state_dict(trained | given | frozen)
        if frozen:
            model.merge_adapters()
        rest = {n: t for n, t in state.items() if n.startswith(OBJECTIVE)}
        own_norms = frozenset(name for name in site_only if not is_private(name))
        statistics = _statistics(model.state_dict(), own_norms & initial.keys(), own_norms)
        prepared = preprocessing(experiment)
        model.preprocessing = prepared.described() if prepared else {}
        model.prompts = class_prompts(experiment, labels)
        saved = self.server() if getattr(experiment.method, "findings", ()) else None
        heads = findings or finding_heads.solved(experiment, saved[0] if saved else None)

        def beside(folder: Path) -> None:
            if rest:
                save_tensors(folder / "objective.safetensors", rest)
            if heads is not None:
                heads.save(folder)
            unchanged = stays_initial(experiment.method, state)
            said = card(experiment, model, self._samples(), history, statistics, bool(rest), unchanged)
            save_text(folder / CARD, said)

        save_json(self.path / "summary.json", summary(history))
        model.save(self.path / "model", statistics, beside)

    def _samples(self) -> dict[str, int]:
        """Training records by site, as the last checkpoint has them."""
        return dict(load_header(self.checkpoint).get("samples", {})) if self.checkpoint.exists() else {}


def _read(file: Path) -> dict[str, Any]:
    """A JSON object; empty where there is none that can be read."""
    with suppress(OSError, ValueError):
        content = read_json(file)
        if isinstance(content, dict):
            return content
    return {}


def _statistics(names: Iterable[str], initial: frozenset[str], site_only: frozenset[str]) -> str:
    """Of which records the running statistics of a saved model are; "" where it has none."""
    if not norm_statistics.normalisation(names):
        return ""
    if initial:
        return norm_statistics.INITIAL
    return norm_statistics.PUBLIC_SET if site_only else norm_statistics.OF_SERVER


COLUMNS = ("round", "phase", "site", "metric", "value")
"""Of metrics.csv."""


def _rows(record: Record) -> Iterator[tuple[Any, ...]]:
    """The lines of a phase in metrics.csv."""
    for site, values in scalars(record).items():
        for tag, value in values.items():
            yield record["round"], record["phase"], site, tag, value


def _as_csv(rows: Iterable[tuple[Any, ...]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def environment(experiment: Experiment) -> dict[str, Any]:
    """Versions, seed and fingerprint, for whoever wants to repeat the run."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "seed": experiment.rounds.seed,
        "fingerprint": fingerprint(experiment),
        "code": code(),
        "python": platform.python_version(),
        "packages": versions,
    }


ROOMS = ("core", "training", "federation", "models", "objectives", "data", "methods", "evaluation", "run")
"""Whose code decides a run's figures."""


@cache
def code() -> str:
    """A digest of the code that decides a run's figures: a run of other code may differ, and tables say so."""
    package = Path(fedvlp.__file__).parent
    files = sorted(file for room in ROOMS for file in (package / room).rglob("*.py"))
    return digest(*(piece for file in files for piece in (file.relative_to(package).as_posix(), file.read_bytes())))[
        :16
    ]
