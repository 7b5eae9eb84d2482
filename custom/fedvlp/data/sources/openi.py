"""Open-I, Indiana University (Demner-Fushman et al., 2016, doi:10.1093/jamia/ocv080): reports, films if present."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from fedvlp.data.labels import CHEXPERT, OPENI, from_terms, names_of
from fedvlp.data.record import Cohort
from fedvlp.data.reports import clean_report
from fedvlp.data.sources.listing import Drawn, Listing

UNINDEXED = "no indexing"


@dataclass(frozen=True)
class Report:
    """One XML file: its number, the sections by label, MeSH headings (None: not indexed) and names of its images."""

    key: str
    sections: dict[str, str]
    headings: frozenset[str] | None
    images: tuple[str, ...]


@dataclass(frozen=True)
class OpenISource:
    """``NLMCXR_reports.tgz`` or its folder of XML files, and the folder of the images (``NLMCXR_png``).

    Text is impression + " " + findings (spec 1.1). Labels come from the indexers' MeSH headings: a finding that they
    did not index is absent (0), a report that they did not index at all is not labelled (nan).
    """

    path: str  # NLMCXR_reports.tgz, or a folder of XML files
    root: str | None = None  # folder of <image id>.png; None: text alone, one row per report
    labels: tuple[str, ...] | str = CHEXPERT  # names wanted, in order; those without a counterpart are nan
    min_report_words: int = 3  # shorter reports are left out
    image_size: int = 256  # side of the decoded square, pixels
    val_fraction: float = 0.1  # of the reports
    test_fraction: float = 0.2  # of the reports
    seed: int = 0  # of the drawn splits
    cache: str | None = None  # folder for decoded images

    def build(self) -> Cohort:
        """Reads the reports; with ``root`` one row per image found there. The collection has no patient ids."""
        wanted, rows = names_of(self.labels), []
        for report in sorted(self.reports(), key=lambda report: report.key):
            both = " ".join(report.sections.get(name, "") for name in ("IMPRESSION", "FINDINGS"))
            if text := clean_report(both, self.min_report_words):
                rows += [(report, text, file) for file in self._files(report)]
        files = [file for _, _, file in rows if file is not None]
        listing = Listing(
            source="openi",
            keys=[file.stem if file else report.key for report, _, file in rows],
            patients=[report.key for report, _, _ in rows],
            studies=[report.key for report, _, _ in rows],
            reports=[text for _, text, _ in rows],
            labels=from_terms([report.headings for report, _, _ in rows], OPENI, wanted),
            names=wanted,
            splits=[""] * len(rows),
            files=files if self.root else None,
        )
        return listing.cohort(Drawn(self.image_size, self.val_fraction, self.test_fraction, self.seed, self.cache))

    def reports(self) -> Iterator[Report]:
        """Every report of the archive or folder."""
        path = Path(self.path)
        if path.is_dir():
            for file in sorted(path.rglob("*.xml")):
                yield parse(file.read_bytes())
        elif path.is_file():
            with tarfile.open(path) as archive:
                for member in archive:
                    content = archive.extractfile(member) if member.name.endswith(".xml") else None
                    if content is not None:
                        yield parse(content.read())
        else:
            raise ValueError("openi source: path is neither NLMCXR_reports.tgz nor a folder of XML files")

    def _files(self, report: Report) -> list[Path | None]:
        if self.root is None:
            return [None]
        return [file for name in report.images if (file := Path(self.root) / f"{Path(name).name}.png").is_file()]


def parse(xml: bytes) -> Report:
    """One report file. Raises ValueError, without its content, for one that is no report."""
    try:
        root = ElementTree.fromstring(xml)
    except ElementTree.ParseError as error:
        raise ValueError(f"openi source: a file is not XML (line {error.position[0]})") from None
    number = root.find("uId")
    if number is None:
        raise ValueError("openi source: an XML file without uId is no Open-I report")
    texts = {node.get("Label", ""): (node.text or "").strip() for node in root.iter("AbstractText")}
    headings = frozenset((node.text or "").partition("/")[0].strip().lower() for node in root.iter("major"))
    images = tuple(node.get("id", "") for node in root.iter("parentImage"))
    return Report(number.get("id", ""), texts, None if not headings or UNINDEXED in headings else headings, images)
