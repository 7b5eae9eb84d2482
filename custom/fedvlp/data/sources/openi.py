"""Open-I, Indiana University (Demner-Fushman et al., 2016, doi:10.1093/jamia/ocv080): reports, films if present."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar
from xml.etree import ElementTree

from fedvlp.data.deid import scan
from fedvlp.data.labels import CHEXPERT, OPENI, from_terms, names_of
from fedvlp.data.report_text import clean_report
from fedvlp.data.sources.published import Listing, Published, first_of, require_items, undamaged
from fedvlp.data.sources.table import BELOW_ROOT

UNINDEXED = "no indexing"


@dataclass(frozen=True)
class Report:
    """What is read of one XML file."""

    key: str  # number of the report
    sections: dict[str, str]  # label ("IMPRESSION") -> text
    headings: frozenset[str] | None  # of MeSH: the first part, and the first two, lower case; None: not indexed
    images: tuple[str, ...]  # names of its images, without suffix


@dataclass(frozen=True)
class OpenISource(Published):
    """``NLMCXR_reports.tgz`` or its folder of XML files, and the folder of the images (``NLMCXR_png``).

    The text is impression + " " + findings (spec 1.1). Labels come from the indexers' MeSH headings: a finding that
    they did not index is absent (0), and a report that they did not index at all is not labelled (nan).
    """

    table: ClassVar[str] = "NLMCXR_reports.tgz"
    cleans_reports: ClassVar[bool] = True  # by report_text.clean_report

    path: str = field(metadata=BELOW_ROOT)  # NLMCXR_reports.tgz, or a folder of XML files
    root: str | None = None  # folder of <image id>.png; None: text alone, one row per report
    labels: tuple[str, ...] | str = CHEXPERT  # the cohort's labels, in order; names without a heading are nan
    min_report_words: int = 3  # shorter reports are left out

    @classmethod
    def layout(cls, root: Path) -> dict[str, str]:
        """The reports, packed or unpacked (``ecgen-radiology``), and the films unpacked into ``NLMCXR_png``.

        The archive alone, as ``path``, is texts without films.
        """
        names = [cls.table, "ecgen-radiology"]
        require_items("openi", root, [" or ".join(names), "NLMCXR_png"])
        return {"path": str(first_of(root, names)), "root": str(root / "NLMCXR_png")}

    def listing(self) -> Listing:
        """One row per report or, with ``root``, per image that is there. Each report counts as a patient of its own.

        Raises ValueError for a ``path`` or an XML file that is not Open-I's.
        """
        wanted = names_of(self.labels)
        rows: list[tuple[Report, str, Path | None]] = []
        short = 0
        published = sorted(self.reports(), key=lambda report: report.key)
        for report in published:
            both = " ".join(report.sections.get(name, "") for name in ("IMPRESSION", "FINDINGS"))
            if text := clean_report(both, self.min_report_words):
                rows += [(report, text, file) for file in self._files(report)]
            short += not text
        files = [file for _, _, file in rows if file is not None]
        return Listing(
            source="openi",
            keys=[file.stem if file else report.key for report, _, file in rows],
            patients=[report.key for report, _, _ in rows],
            studies=[report.key for report, _, _ in rows],
            reports=[text for _, text, _ in rows],
            labels=from_terms([report.headings for report, _, _ in rows], OPENI, wanted),
            names=wanted,
            splits=[""] * len(rows),
            files=files if self.root else None,
            left_out={"report empty or too short": short},
            phi=scan(
                (" ".join(report.sections.values()) for report in published), (report.key for report in published)
            ),
        )

    def reports(self) -> Iterator[Report]:
        """Every report of the archive or folder, in the archive's order or by path."""
        path = Path(self.path)
        if path.is_dir():
            for file in sorted(path.rglob("*.xml")):
                yield parse(file.read_bytes())
        elif path.is_file():
            with undamaged("openi", path), tarfile.open(path) as archive:
                for member in archive:
                    content = archive.extractfile(member) if member.name.endswith(".xml") else None
                    if content is not None:
                        yield parse(content.read())
        else:
            raise ValueError("openi source: path is neither NLMCXR_reports.tgz nor a folder of XML files")

    def _files(self, report: Report) -> list[Path | None]:
        """The report's images that exist under root; one None without a root."""
        if self.root is None:
            return [None]
        files = (Path(self.root) / f"{Path(name).name}.png" for name in report.images)
        return [file for file in files if file.is_file()]


def parse(xml: bytes) -> Report:
    """Reads one XML file. Raises ValueError, which holds nothing of its content, if it is no report of Open-I."""
    try:
        root = ElementTree.fromstring(xml)
    except ElementTree.ParseError as error:
        raise ValueError(
            f"openi source: a file is not XML (line {error.position[0]}); download the reports again"
        ) from None
    number = root.find("uId")
    if number is None:
        raise ValueError("openi source: an XML file without uId is no Open-I report")
    texts = {node.get("Label", ""): (node.text or "").strip() for node in root.iter("AbstractText")}
    majors = [[term.strip().lower() for term in (node.text or "").split("/")] for node in root.iter("major")]
    headings = frozenset("/".join(terms[:count]) for terms in majors for count in (1, 2))
    images = tuple(node.get("id", "") for node in root.iter("parentImage"))
    return Report(number.get("id", ""), texts, None if not headings or UNINDEXED in headings else headings, images)
