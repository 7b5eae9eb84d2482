"""What a table of a paper is here: rows, columns, the values that the paper prints, and the study that measures it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from studies.claims.cell_results import Figures
from studies.reproduce.printed import Printed, tables

UNPRINTED = "not printed"
"""In place of a value that the paper does not print."""

DEMO, SMALLEST, PAPER = "demo", "smallest", "paper"
"""Sizes: minutes a cell, seconds a cell (on either's records), and the paper's own on its own data."""


@dataclass(frozen=True)
class Size:
    """At what size a table is run, and on which records."""

    name: str  # DEMO; PAPER, with a root; or SMALLEST, with or without
    root: Path | None = None  # folder with a folder for each data set of the paper, named as its source
    elsewhere: Mapping[str, Sequence[str]] = field(default_factory=dict)  # data set -> its folder, then "SETTING=VALUE"
    cache: Path | None = None  # folder for the decoded images of these

    def folder(self, name: str) -> Path:
        """Where the data set ``name`` lies."""
        assert self.root is not None
        return Path(self.elsewhere[name][0]) if name in self.elsewhere else self.root / name

    @property
    def demo(self) -> bool:
        """Whether the records are the built-in cohort's."""
        return self.root is None

    @property
    def quick(self) -> bool:
        """Whether a cell takes only a step or two, on tiny towers."""
        return self.name == SMALLEST

    @property
    def label(self) -> str:
        """In the names of folders and files: other records are another size."""
        return self.name if self.demo or not self.quick else f"{PAPER}-{SMALLEST}"


@dataclass(frozen=True)
class Column:
    """One column: a figure of the cells of the rows."""

    title: str
    figure: str  # its name, after what a row is about
    cell: str = ""  # ends the name of the row's cell, where columns differ in what is run


@dataclass(frozen=True)
class Row:
    """One row: a cell, or one of the models or records that it has figures of."""

    title: str
    cell: str  # name of the experiment in the study, without the column's end
    about: str = ""  # begins the names of its figures
    printed: str = ""  # the paper's values, one for each column, parted by blanks; "-" where none is printed
    why_not: str = ""  # why it does not run; "": it does


@dataclass(frozen=True)
class Study:
    """What measures the cells of one or more tables."""

    name: str  # of the folder of its results
    runs: str  # of the folder of its runs; studies that measure the same runs share it
    experiments: Callable[[Size, int], Mapping[str, Experiment]]  # size, seed -> cell -> experiment
    figures: Callable[[Size], Callable[[RunFolder], Figures]]
    drawn: Callable[[Size, int], Figures] | None = None  # seed -> figures that need no run; there is no experiment then
    sources: tuple[str, ...] = ()  # the paper's data sets, each a folder below the root; none: they are not read
    stands_in: str = ""  # what the demo takes in place of the paper's data, beside the built-in cohort
    differs: str = ""  # what is known to be unlike the paper on its own data

    without: Study | None = None  # measures the same runs where only what this one reads more is absent

    def absent(self, size: Size) -> list[str]:
        """The data sets that are not there, where ``size`` has a root."""
        return [name for name in self.sources if size.root and not size.folder(name).is_dir()]

    def refuse_absent(self, size: Size) -> None:
        """Raises ValueError where ``size`` has a root, and nothing here reads the paper's data or they are absent.

        Paths are left out of what it says.
        """
        if size.root is None:
            return
        if not self.sources:
            raise ValueError(
                f"reproduce: nothing here runs {self.name} on the paper's own data yet (docs/reproduce.md says what is "
                "missing); leave --root out and give --demo"
            )
        if strange := [name for name in size.elsewhere if name not in self.sources]:
            raise ValueError(
                f"reproduce: --data names {', '.join(strange)}, which {self.name} does not read; it reads "
                f"{', '.join(self.sources)}"
            )
        if absent := self.absent(size):
            raise ValueError(
                f"reproduce: the folder of --root has no folder {', '.join(absent)}; expected {', '.join(self.sources)}"
                ", each a data set as it was published. Put or link them there, say where one is with --data "
                f"{absent[0]}:FOLDER, or give --demo"
            )


@dataclass(frozen=True)
class Entry:
    """One measured row of spec 17: a table or a figure, or several that show the same."""

    paper: str
    ids: tuple[str, ...]  # "2" is table 2, "f3a-c" the figures 3a to 3c
    title: str
    study: Study | None = None
    rows: tuple[Row, ...] = ()
    columns: tuple[Column, ...] = ()
    shows: tuple[str, ...] = ()  # ids of the tables of the paper that a figure draws
    why_not: str = ""  # why it does not run; "": it does
    no_demo: str = field(default="", kw_only=True)  # why it runs on the paper's data alone; "": there is a demo
    note: str = field(default="", kw_only=True)  # what to know when comparing
    digits: int = field(default=2, kw_only=True)  # decimals of its values
    table: str = field(default="", kw_only=True)  # of studies/tables, whose rows and columns it has; "": its own
    columns_at: Callable[[Size], tuple[Column, ...]] | None = field(default=None, kw_only=True)  # in place of columns
    judged: tuple[str, ...] = field(default=(), kw_only=True)  # figures of claims that it is about beside its columns

    @property
    def keys(self) -> tuple[str, ...]:
        """What a command may call it."""
        return tuple(f"{self.paper}:{name}" for name in self.ids)

    @property
    def key(self) -> str:
        """The first of its names."""
        return self.keys[0]

    @property
    def runs(self) -> bool:
        """Whether anything here measures it."""
        return not self.why_not

    @property
    def sources(self) -> tuple[str, ...]:
        """The data sets that it takes below a root; none: it takes no root."""
        return self.study.sources if self.study else ()

    def refuse(self, size: Size) -> None:
        """Raises ValueError where there is no such size of it, or its data are absent."""
        if size.demo and self.no_demo:
            raise ValueError(f"reproduce: {self.key} has no demo: {self.no_demo}; give --root with the paper's data")
        if self.study:
            self.study.refuse_absent(size)

    def at(self, size: Size) -> Entry:
        """The entry as it can be measured at a size: where data for heads alone are absent, without heads."""
        if self.columns_at:
            return replace(self, columns=self.columns_at(size), columns_at=None).at(size)
        less = self.study.without if self.study else None
        if not self.study or not less or not (absent := self.study.absent(size)) or less.absent(size):
            return self
        said = f"Heads are not measured, as --root has no folder {', '.join(absent)}."
        return replace(self, study=less, note=f"{self.note} {said}".strip())

    def cells(self) -> list[str]:
        """Names of its cells, each once."""
        rows = (row for row in self.rows if not row.why_not)
        return list(dict.fromkeys(row.cell + column.cell for row in rows for column in self.columns))

    def printed(self, row: Row, column: int) -> str:
        """The paper's value in a row and the column of that index, or ``UNPRINTED``.

        Raises ValueError where a row has not one value a column.
        """
        if self.table:
            number = self._number(row, column)
            return number.value if number else UNPRINTED
        values = row.printed.split()
        if values and len(values) != len(self.columns):
            raise ValueError(f"reproduce: {self.key}, {row.title}: {len(values)} values, {len(self.columns)} columns")
        return values[column] if values and values[column] != "-" else UNPRINTED

    def spread(self, row: Row, column: int) -> str:
        """The standard deviation that the paper prints with its value; "": none."""
        number = self._number(row, column)
        return number.spread if number else ""

    def doubt(self, row: Row, column: int) -> str:
        """Why the paper's value may be a misprint or misread; "": nothing speaks against it."""
        number = self._number(row, column)
        return number.doubt if number else ""

    def _number(self, row: Row, column: int) -> Printed | None:
        return tables().get(self.table, {}).get((row.title, self.columns[column].title))
