"""A data set whose reports have been read and searched for identifiers, before any of its images is decoded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from fedvlp.data.cohort import Cohort

Summary = dict[str, int]
"""What is counted (rows, used, "skipped: <reason>") -> how many."""

SKIPPED = "skipped: "
"""How the keys of a summary begin that count rows which are not used, before the reason."""


@dataclass(frozen=True, eq=False)
class Screened:
    """What is known of a data set before its images are decoded, and what decodes them."""

    phi: Mapping[str, int]  # kind of identifier -> reports that hold one (data/deid.py)
    records: int
    prepare: Callable[[], tuple[Cohort, Summary]]  # decodes the images
    # reason -> rows that cannot be used, by number or by name; prepare adds those whose images cannot be read
    skipped: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Counts only, as of a cohort."""
        return f"Screened({self.records} records)"

    def build(self) -> Cohort:
        """The records, with their images."""
        return self.prepare()[0]


class Source(Protocol):
    """A configured data set."""

    def build(self) -> Cohort:
        """Its records."""
        ...


@runtime_checkable
class Screening(Protocol):
    """A data set that can say what its reports hold before it decodes an image."""

    def screen(self) -> Screened:
        """Its reports, searched."""
        ...


def screen(source: Source) -> Screened:
    """``source`` with its reports searched; one that has no images to decode, or cannot wait, is built at once."""
    if isinstance(source, Screening):
        return source.screen()
    cohort = source.build()
    return Screened(cohort.phi, len(cohort), lambda: (cohort, {}))


def screen_all(sources: Sequence[Source], join: Callable[[Sequence[Cohort]], Cohort]) -> Screened:
    """Several data sets as the one that ``join`` makes of their records; all are searched before any is decoded."""
    screened = [screen(source) for source in sources]
    counts: dict[str, int] = {}
    for one in screened:
        for kind, number in one.phi.items():
            counts[kind] = counts.get(kind, 0) + number
    records = sum(one.records for one in screened)

    def prepare() -> tuple[Cohort, Summary]:
        made = [one.prepare() for one in screened]
        together = Counter[str]()
        for _, summary in made:
            together.update(summary)
        return join([cohort for cohort, _ in made]), dict(together)

    return Screened(counts, records, prepare)


def rows_used(summary: Summary) -> str:
    """How many rows of a data set are used, and why others are left out; "" where nothing is counted."""
    if "rows" not in summary:
        return ""
    reasons = {name.removeprefix(SKIPPED): count for name, count in summary.items() if name.startswith(SKIPPED)}
    left_out = ", ".join(f"{reason} {count}" for reason, count in reasons.items() if count)
    return f"{summary['used']} of {summary['rows']} rows are used" + (f"; left out: {left_out}" if left_out else "")
