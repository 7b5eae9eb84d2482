"""Results of finished cells as tables, to be committed: the figures and what made them.

They hold no weights, no texts and no paths of data, so that a ledger that takes hours can go on at another time and on
another machine. A line counts where its experiment is the one that is wanted: with the same plugins, and with the same
records where these are read from a disk.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

from fedvlp.core.checkpoint import save_text
from fedvlp.core.metric_keys import BYTES_DOWN, BYTES_UP
from fedvlp.core.norm_statistics import SITE
from fedvlp.data.cohort import digest
from fedvlp.data.deid import Accepted
from fedvlp.evaluation import metric_names as names
from fedvlp.models.initial import parse
from fedvlp.run import cells, folder, plugins
from fedvlp.run.cells import Cell, Cells, Figures, KnownRecords, Measure, Results, Said, is_drawn
from fedvlp.run.config import fingerprint, from_config, to_config
from fedvlp.run.experiment import Experiment
from fedvlp.run.fitting import with_paths
from fedvlp.run.folder import RunFolder
from fedvlp.run.lock import only_writer
from fedvlp.run.metrics import Record, overall
from fedvlp.run.simulate import noted_cohort

# The figures of finished cells, a method and a seed each, and where they are from.


class NotRunError(ValueError):
    """A cell that was asked for has not been run."""


class UnlikeError(NotRunError):
    """Both cells have been run, and nowhere alike: their difference would be one of machines, or of starts."""


@dataclass(frozen=True)
class Made:
    """How a run came about, as far as its figures can show it."""

    device: str  # name of the GPU that trained it; "cpu"
    torch: str
    begins: object  # the settings that decide what is measured before training
    start: Figures  # what was measured then; empty where it was not


SAME_START = 1e-3
"""Points by which figures before training may differ: rounding, where model, records and draws are the same."""


def alike(one: Made | None, other: Made | None) -> bool:
    """Whether a difference of two runs is one of their methods; None: not known, as of figures from no file.

    Two GPUs, or a GPU and a CPU, draw other numbers and round otherwise, and so may two releases of torch. Processors
    do not draw otherwise. Where models begin alike by their settings, they must have measured alike before training.
    """
    if one is None or other is None:
        return True
    if (one.device, one.torch) != (other.device, other.torch):
        return False
    both = one.start.keys() & other.start.keys() if one.begins == other.begins else ()
    return all(abs(one.start[name] - other.start[name]) <= SAME_START for name in both)


@dataclass(frozen=True)
class Origin:
    """Where the figures of a cell are from that were taken from results (studies/claims/cell_results.py)."""

    processor: str  # name of the CPU that ran it
    this_code: bool  # whether that fedvlp had the same code as this one


class Table:
    """The figures of the cells that are finished: (method, seed) -> name -> figure.

    A cell may have been run at several places. A difference pairs runs that are ``alike``, of the first place that has
    such a pair, and never two others: with other seeds it would look like any difference.
    """

    def __init__(
        self,
        cells: Mapping[Cell, Figures],
        origins: Mapping[Cell, Origin] | None = None,
        made: Mapping[Cell, Made] | None = None,
        elsewhere: Table | None = None,
    ) -> None:
        """``origins``: of the cells that were taken from files; ``elsewhere``: runs at other places."""
        self._places: list[tuple[Mapping[Cell, Figures], Mapping[Cell, Made]]] = [(cells, made or {})]
        if elsewhere:
            self._places += elsewhere._places
        self.origins = origins or {}
        self._gather()

    def _gather(self) -> None:
        """Notes the cells of all places: of one that was run at several, the run at the first."""
        self.cells = {cell: figures for place, _ in reversed(self._places) for cell, figures in place.items()}
        self.seeds = sorted({seed for _, seed in self.cells})

    def of_seeds(self, kept: Callable[[int], bool]) -> Table:
        """The table of some seeds alone."""
        table = Table({}, self.origins)
        table._places = [({c: figures for c, figures in cells.items() if kept(c[1])}, m) for cells, m in self._places]
        table._gather()
        return table

    def seeds_of(self, *methods: str) -> list[int]:
        """The seeds with which all of these methods have finished, at least one. Raises NotRunError."""
        seeds = [seed for seed in self.seeds if all((method, seed) in self.cells for method in methods)]
        if not seeds:
            raise NotRunError(f"claims: no seed with which {' and '.join(methods)} have finished; run them first")
        return seeds

    def values(self, method: str, figure: str) -> list[float]:
        """The figure of a method by seed. Raises NotRunError, and ValueError where a run has no such figure."""
        return [_value(self.cells, (method, seed), figure) for seed in self.seeds_of(method)]

    def has(self, method: str, figure: str) -> bool:
        """Whether the runs of a method measure the figure: one without a selector has none of what it tells."""
        return any(figure in figures for (name, _), figures in self.cells.items() if name == method)

    def difference(self, method: str, other: str, figure: str, other_figure: str = "") -> list[float]:
        """``method`` minus ``other``, by seed, of ``paired_seeds``. Raises as these and as :meth:`values`.

        Of the other, ``other_figure`` where one is given.
        """
        theirs, differences = other_figure or figure, []
        for seed in self.paired_seeds(method, other):
            place = self._place(method, other, seed)
            assert place is not None
            differences.append(_value(place, (method, seed), figure) - _value(place, (other, seed), theirs))
        return differences

    def paired_seeds(self, method: str, other: str) -> list[int]:
        """The seeds with which both have finished, and alike, at least one. Raises NotRunError and UnlikeError."""
        both = self.seeds_of(method, other)
        paired = [seed for seed in both if self._place(method, other, seed) is not None]
        if not paired:
            raise UnlikeError(
                f"claims: {method} and {other} have finished with seeds {', '.join(map(str, both))}, and with none of "
                "them on one torch and device from one start; run one of them again where the other ran"
            )
        return paired

    def _place(self, method: str, other: str, seed: int) -> Mapping[Cell, Figures] | None:
        """The first place that has both cells, and runs that are alike."""
        pair = (method, seed), (other, seed)
        for place, made in self._places:
            if all(cell in place for cell in pair) and alike(made.get(pair[0]), made.get(pair[1])):
                return place
        return None


def _value(cells: Mapping[Cell, Figures], cell: Cell, figure: str) -> float:
    if figure not in cells[cell]:
        raise ValueError(f"claims: no figure {figure} of {cell[0]} with seed {cell[1]}; its run did not measure it")
    return cells[cell][figure]


def origin(table: Table) -> str:
    """One sentence: how many cells there are, and which of them were not run here, or not with this code."""
    taken = table.origins.values()
    processors = sorted({one.processor for one in taken})
    count = len(table.cells)
    said = f"{count} cell{'s' * (count != 1)}; {len(taken)} taken from files of results"
    if processors:
        said += f" (run on {', '.join(processors)})"
    other = sum(not one.this_code for one in taken)
    return said + (f"; {other} run by a fedvlp with other code" if other else "") + "."


class Kind(Protocol):
    """What cells have in common: what is measured of each, and under which names runs and results are kept."""

    @property
    def name(self) -> str:
        """Of the table of results."""

    @property
    def figures(self) -> Measure:
        """Measures a finished run."""

    @property
    def runs(self) -> str:
        """Of the folder of runs, for kinds that measure the same runs; "": ``name``."""


def measured(
    of: Kind, wanted: Cells, root: Path, files: Path, jobs: int, said: Said, accept_phi_risk: Accepted = False
) -> Table:
    """The figures of the cells, as ``fedvlp.run.cells.measured``; what has finished is in ``files``, too.

    The runs are in ``<root>/<kind>/<seed>/<method>/``. A figure is the same whether it was measured now or read. What
    a GPU trains is kept in a table of its own, and what is in the other one is paired there.
    """
    on_gpu = any(one.training.torch_device().type == "cuda" for one in wanted.values())
    here, there = (CellResults(files, of.name + end) for end in ((GPU_TABLE, "") if on_gpu else ("", GPU_TABLE)))
    found = cells.measured(of.figures, wanted, root / (of.runs or of.name), jobs, said, accept_phi_risk, here)
    others = {cell: load for cell, one in wanted.items() if (load := there.load(cell, one, of.figures))}
    return Table(found, here.origins | there.origins, here.made(), Table(others, made=there.made()))


log = logging.getLogger(__name__)

DECIMALS = 4
LEFT_OUT = "..."
"""In place of a path."""

GPU_TABLE = "-gpu"
"""Ends the name of the table of the cells that a GPU trained."""

SETTINGS, COHORT, CODE, PROCESSOR, GPU, TORCH, SECONDS = (
    "settings",
    "cohort",
    "code",
    "processor",
    "gpu",
    "torch",
    "seconds",
)
HEAD = ("seed", "method", "round", SETTINGS, COHORT, CODE, PROCESSOR, GPU, TORCH, SECONDS)
"""Columns before the figures. A line of a round has the first three alone."""

Row = dict[str, str]
"""Column -> text, of the columns that are not empty."""


class CellResults(Results):
    """The table of the finished cells of one kind: ``<folder>/<name>.csv``, and their settings in ``settings.csv``.

    A cell has a line with its figures, and one for each round that was evaluated. Cells that differ in their name and
    seed alone share a line of settings. Raises ValueError for a table that is damaged.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.origins: dict[Cell, Origin] = {}  # of the cells that were loaded
        self._read()

    def _read(self) -> None:
        """Reads the tables as they are now; where there is none they are empty."""
        self.settings = {row.pop(SETTINGS): row for row in self._rows(SETTINGS)}
        self.cells: dict[Cell, Row] = {}
        self.rounds: dict[Cell, list[Row]] = {}
        for row in self._rows(self.name):
            try:
                cell = row["method"], int(row["seed"])
                if "round" in row:
                    self.rounds.setdefault(cell, []).append(row)
                else:
                    self.cells[cell] = row
            except (KeyError, ValueError) as error:
                raise self._damaged(self.name, error) from None

    def _rows(self, name: str) -> list[Row]:
        """The lines of a table, without the cells that are empty."""
        file = self.folder / f"{name}.csv"
        if not file.exists():
            return []
        text = file.read_bytes().decode("utf-8", "replace")
        rows: list[Any] = list(csv.DictReader(io.StringIO(text, newline=""), restkey=""))
        if not text.endswith("\n") or any("" in row or None in row.values() for row in rows):
            raise self._damaged(name, ValueError())  # a line was cut, or has more cells than there are columns
        return [{key: text for key, text in row.items() if text} for row in rows]

    def _damaged(self, name: str, error: Exception) -> ValueError:
        return ValueError(
            f"the results {name}.csv are damaged ({type(error).__name__}); restore them, or remove what is damaged to "
            "run those cells again"
        )

    def load(
        self, cell: Cell, experiment: Experiment, measure: Measure, records: KnownRecords | None = None
    ) -> Figures | None:
        """The figures of a cell, if there are some of this very experiment; ``origins`` has where they are from.

        A setting that is younger than the table counts as it has its default, as in a run's own configuration. On which
        device it trained makes no other experiment: like another processor, it is told. It is another where a plugin
        has other content now, and where records that are read from a disk have changed, which ``records`` tells; None:
        they are not read, and count as unchanged. Raises ValueError for a damaged line.
        """
        if cell not in self.cells:
            return None
        row = self.cells[cell]
        try:
            config = nested(self.settings[row[SETTINGS]], *cell)
            measured = {name: float(value) for name, value in row.items() if name not in HEAD}
            origin = Origin(
                ", ".join(row[one] for one in (PROCESSOR, GPU) if one in row),
                row[CODE] == code_of_cell(measure, experiment),
            )
        except (KeyError, ValueError) as error:
            raise self._damaged(self.name, error) from None
        if config.get("plugins", {}) != strangers(experiment):
            return None
        try:
            filed = on_device(from_config(config), experiment.training.device)
            same = fingerprint(portable(filed)) == fingerprint(portable(experiment.pinned()))
        except ValueError as error:  # it names what this fedvlp does not have, so it is another experiment
            log.warning("%s of seed %d is run again: %s", *cell, error)
            return None
        if same and records is not None:
            same = row.get(COHORT) == records.of(experiment)
        if not same:
            return None
        self.origins[cell] = origin
        return measured

    def save(self, cell: Cell, run: RunFolder, figures: Figures, measure: Measure, seconds: float = 0.0) -> Figures:
        """Writes the lines of a finished cell; ``seconds``: of measuring the figures. Returns them as they are there.

        Other processes may write the same tables: they are read again first, by one process at a time.
        """
        experiment, history = run.experiment(), run.history()
        by, rounded = machine() | gpu(experiment), _rounded(figures)
        config = to_config(portable(experiment)) | ({"plugins": others} if (others := strangers(experiment)) else {})
        flat = flattened(config, cell[1])
        of = {"method": cell[0], "seed": str(cell[1])}
        head = {
            **of,
            SETTINGS: digest(json.dumps(flat, sort_keys=True))[:8],
            COHORT: "" if is_drawn(experiment) else noted_cohort(run) or "",
            CODE: code_of_cell(measure, experiment),
            **{name: str(by[name]) for name in (PROCESSOR, GPU, TORCH) if name in by},
            SECONDS: str(round(spent(history)[PHASES] + seconds, DECIMALS)),
        }
        rounds = [
            {**of, "round": str(record["round"]), **_texts(_rounded(_in_short(record)))}
            for record in history
            if overall(record)
        ]
        with only_writer(self.folder, patience=60.0):
            self._read()
            self.settings[head[SETTINGS]] = flat
            self.cells[cell], self.rounds[cell] = {**head, **_texts(rounded)}, rounds
            self.write()
        return rounded

    def write(self) -> None:
        """Writes both tables, in an order of their own: what was run first makes no difference."""
        lines = [{SETTINGS: name, **row} for name, row in sorted(self.settings.items())]
        _write(self.folder / f"{SETTINGS}.csv", (SETTINGS,), lines)
        cells = sorted(self.cells, key=lambda cell: (cell[1], cell[0]))
        _write(
            self.folder / f"{self.name}.csv",
            HEAD,
            [row for cell in cells for row in (self.cells[cell], *self.rounds.get(cell, ()))],
        )

    def by_round(self, cell: Cell) -> dict[int, Figures]:
        """Average and worst R@1 of a cell after every round that was evaluated, 0 the start."""
        return {
            int(row["round"]): {name: float(value) for name, value in row.items() if name not in HEAD}
            for row in self.rounds.get(cell, ())
        }

    def made(self) -> dict[Cell, Made]:
        """How each cell came about."""
        begins = {name: self._begins(name) for name in {row[SETTINGS] for row in self.cells.values()}}
        return {
            cell: Made(row.get(GPU, "cpu"), row.get(TORCH, ""), begins[row[SETTINGS]], self.by_round(cell).get(0, {}))
            for cell, row in self.cells.items()
        }

    def _begins(self, settings: str) -> object:
        """The settings before training, of any seed; None where this fedvlp does not have them.

        Pooled records have the statistics of all sites where each site has its own.
        """
        try:
            one = from_config(nested(self.settings[settings], "any", 0))
        except (KeyError, ValueError):
            return None
        pooled = one.method.pooled and one.norm_statistics == SITE
        return one.model, one.site_models, one.data, one.partition, one.norm_statistics, pooled

    def seconds(self) -> dict[str, list[float]]:
        """Method -> seconds that it took, with measuring, one for each seed that has finished."""
        by_method: dict[str, list[float]] = {}
        for (method, _), row in self.cells.items():
            by_method.setdefault(method, []).append(float(row[SECONDS]))
        return by_method


def _write(file: Path, first: Sequence[str], rows: Sequence[Row]) -> None:
    """One line a row; the columns ``first``, then all others that some row has, by name."""
    others = sorted({name for row in rows for name in row} - set(first))
    text = io.StringIO()
    writer = csv.DictWriter(text, [*first, *others], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    save_text(file, text.getvalue())


def _texts(figures: Figures) -> Row:
    return {name: str(value) for name, value in figures.items()}


GONE = {"args.wire.args.difference": "false", "args.wire.args.skip_unchanged": "false"}
"""Settings that there are no longer, with the value that is how it is now: tables of before are read all the same."""

OTHERWISE = {"args.partition.args.retrieve": {"false": "0", "true": "1"}}
"""Settings whose values were written otherwise in tables of before, and how they are now."""

OF_CELL = "of the cell"
"""In place of the seed of a cell, and of its name: settings that are one line for all seeds."""


def flattened(config: Mapping[str, Any], seed: int) -> Row:
    """ "args.method.args.mu" -> the setting as text: a string as it is, unless JSON reads something else in it."""
    row: Row = {}

    def add(key: str, value: Any) -> None:
        if isinstance(value, dict) and value and not any("." in name for name in value):
            for name, inner in value.items():
                add(f"{key}.{name}" if key else name, inner)
        elif key == "args.name" or (key.endswith(".seed") and value == seed):
            row[key] = OF_CELL
        elif isinstance(value, str) and value not in ("", OF_CELL) and _read(value) is value:
            row[key] = value
        else:
            row[key] = json.dumps(value)

    add("", config)
    return row


def nested(row: Row, method: str, seed: int) -> dict[str, Any]:
    """The configuration of a cell whose settings are ``row``: the reverse of :func:`flattened`."""
    config: dict[str, Any] = {}
    for key, text in row.items():
        if GONE.get(key) == text:
            continue
        text = OTHERWISE.get(key, {}).get(text, text)
        *groups, name = key.split(".")
        group_of = config
        for group in groups:
            group_of = group_of.setdefault(group, {})
        group_of[name] = (method if key == "args.name" else seed) if text == OF_CELL else _read(text)
    return config


def _read(text: str) -> Any:
    """What JSON reads in ``text``, or the very text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


PHASES = "seconds of phases"
"""What the phases of a run took, evaluations among them."""


def spent(history: list[Record]) -> dict[str, float]:
    """Seconds of all phases, and bytes on the wire to and from all sites."""
    return {
        PHASES: sum(record["seconds"] for record in history),
        **{name: sum(record.get("bytes", {}).get(name, 0) for record in history) for name in (BYTES_DOWN, BYTES_UP)},
    }


def machine() -> dict[str, str]:
    """What decides the last bits of a sum: the processor, its vector unit, and torch."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    processor = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {
        "processor": processor or platform.machine(),
        "simd": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
    }


def gpu(experiment: Experiment) -> dict[str, str]:
    """The name of the GPU that it trains on, if any."""
    device = experiment.training.torch_device()
    return {GPU: torch.cuda.get_device_name(device)} if device.type == "cuda" else {}


def on_device(experiment: Experiment, device: str) -> Experiment:
    """The same experiment, trained on ``device`` (``training.device``), also at the server."""
    server = experiment.server_training
    return replace(
        experiment,
        training=replace(experiment.training, device=device),
        server_training=replace(server, device=device) if server else None,
    )


def portable(experiment: Experiment) -> Experiment:
    """The same without the paths of this machine: a folder of data may be moved, and is nobody's business elsewhere.

    The records' fingerprint says which they are (``KnownRecords``). Of a folder that models start from its own name
    stays; the checksum says which weights it holds.
    """

    def moved(model: Any) -> Any:
        init = parse(model.init)
        return replace(model, init=str(init._replace(name=Path(init.name).name)))

    apart = tuple((site, moved(model)) for site, model in experiment.site_models)
    data = with_paths(experiment.data, lambda path: LEFT_OUT)
    return replace(experiment, data=data, model=moved(experiment.model), site_models=apart)


OWN = "studies."
"""Begins the names of the plugins that are of this repository: their content is code, as that of fedvlp is."""


def strangers(experiment: Experiment) -> dict[str, str]:
    """The digests of the plugins that the experiment is made of, by name, but for those of this repository."""
    return {name: one for name, one in plugins.digests(experiment).items() if not name.startswith(OWN)}


def code_of_cell(measure: Measure, experiment: Experiment) -> str:
    """A digest of the code that decides a cell's figures: a cell of other code may differ, and the page says so."""
    ours = [one for name, one in plugins.digests(experiment).items() if name.startswith(OWN)]
    return digest(code(measure), *ours)[:16] if ours else code(measure)


@cache
def code(measure: Measure) -> str:
    """A digest of fedvlp and of the file that measures."""
    return digest(folder.code(), Path(str(sys.modules[measure.__module__].__file__)).read_bytes())[:16]


def _in_short(record: Record) -> dict[str, float]:
    """Average and worst R@1 of both held-out splits, by which a plateau can be told."""
    measured = overall(record)
    wanted = [
        names.over_sites(names.recall(split, 1, scope), kind)
        for split in ("val", "test")
        for scope in (names.IN_BATCH, names.WHOLE_SET)
        for kind in (names.AVERAGE, names.WORST)
    ]
    return {name: measured[name] for name in wanted if name in measured}


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    """The finite figures of both directions together; those of one direction alone would double the file."""
    one_way = tuple(f"/{direction}/" for direction in (names.I2T, names.T2I))
    return {
        name: round(value, DECIMALS)
        for name, value in sorted(figures.items())
        if math.isfinite(value) and not any(mark in name for mark in one_way)
    }
