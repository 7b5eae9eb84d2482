"""The figures of finished cells, a method and a seed each, and where they are from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Figures = dict[str, float]
"""Name -> figure of one finished run."""


class NotRunError(ValueError):
    """A cell that was asked for has not been run."""


@dataclass(frozen=True)
class Origin:
    """Where the figures of a cell are from that were taken from results (run/cell_results.py)."""

    processor: str  # name of the CPU that ran it
    this_code: bool  # whether that fedvlp had the same code as this one


class Table:
    """The figures of the cells that are finished: (method, seed) -> name -> figure."""

    def __init__(
        self, cells: Mapping[tuple[str, int], Figures], origins: Mapping[tuple[str, int], Origin] | None = None
    ) -> None:
        """``origins``: of the cells that were taken from files."""
        self.cells = cells
        self.origins = origins or {}
        self.seeds = sorted({seed for _, seed in cells})

    def seeds_of(self, *methods: str) -> list[int]:
        """The seeds with which all of these methods have finished, at least one. Raises NotRunError."""
        seeds = [seed for seed in self.seeds if all((method, seed) in self.cells for method in methods)]
        if not seeds:
            raise NotRunError(f"claims: no seed with which {' and '.join(methods)} have finished; run them first")
        return seeds

    def values(self, method: str, figure: str) -> list[float]:
        """The figure of a method by seed. Raises NotRunError, and ValueError where a run has no such figure."""
        return [self._value(method, seed, figure) for seed in self.seeds_of(method)]

    def has(self, method: str, figure: str) -> bool:
        """Whether the runs of a method measure the figure: one without a selector has none of what it tells."""
        return any(figure in figures for (name, _), figures in self.cells.items() if name == method)

    def difference(self, method: str, other: str, figure: str, other_figure: str = "") -> list[float]:
        """``method`` minus ``other``, with every seed that both have. Raises as :meth:`values`.

        Of the other, ``other_figure`` where one is given.
        """
        theirs = other_figure or figure
        seeds = self.seeds_of(method, other)
        return [self._value(method, seed, figure) - self._value(other, seed, theirs) for seed in seeds]

    def _value(self, method: str, seed: int, figure: str) -> float:
        if figure not in self.cells[method, seed]:
            raise ValueError(f"claims: no figure {figure} of {method} with seed {seed}; its run did not measure it")
        return self.cells[method, seed][figure]


def origin(table: Table) -> str:
    """One sentence: how many cells there are, and which of them were not run here, or not with this code."""
    taken = table.origins.values()
    processors = sorted({one.processor for one in taken})
    said = f"{len(table.cells)} cells; {len(taken)} of them taken from files of results"
    if processors:
        said += f" (run on {', '.join(processors)})"
    other = sum(not one.this_code for one in taken)
    return said + (f"; {other} were run by a fedvlp with other code" if other else "") + "."
