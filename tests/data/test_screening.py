"""Reports are searched before images are decoded: a refusal comes before hours of decoding, whatever asks for it."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedvlp.data import images
from fedvlp.data.cohort import Cohort
from fedvlp.data.deid import PHIError
from fedvlp.data.screening import DataSource, Screened, screen, screen_all
from fedvlp.data.sources.table import TableSource
from fedvlp.data.sources.tabular import CandidPTXSource
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.data.synthetic.files import write
from fedvlp.deploy.prepare import prepared
from fedvlp.deploy.site_config import OwnData
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.run.dry_run import dry_run
from fedvlp.run.experiment import Experiment
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate
from fedvlp.run.site_sources import PatientSites, SiteSources
from studies.collections.creamfl_collections import JoinedSource

SIZE = 40
NAMED = " Discussed with Dr. Ferreira."


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def save(path: Path, rows: list[dict[str, str]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def table(folder: Path, sentence: str = NAMED, **columns: str) -> TableSource:
    """A table of 12 films at two sites, with ``sentence`` in the first report; ``columns`` are the same in all rows."""
    path = write(SyntheticCohort(sites=2, size=12, image_size=32), folder)
    rows = read(path)
    rows[0]["report"] += sentence
    save(path, [{**row, **columns} for row in rows])
    return TableSource(str(path), image_size=SIZE)


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The image files that are decoded, one after the other."""
    opened: list[Path] = []
    decode = images.decode_stored

    def counted(file: Path, *rest: Any) -> np.ndarray:
        opened.append(file)
        return decode(file, *rest)

    monkeypatch.setattr(images, "decode_stored", counted)
    return opened


def experiment(data: Any) -> Experiment:
    return replace(presets.get("fedavg"), data=data)


def test_no_image_is_decoded_where_the_gate_refuses(tmp_path: Path, files: list[Path]) -> None:
    """By simulate, by its dry run, at a site's start and by prepare; accepted, the very same decode all 12."""
    source = table(tmp_path / "a")
    chosen = experiment(source)
    folder = RunFolder.create(tmp_path / "runs", chosen)
    of_site = experiment(OwnData(replace(source, site_column=""), "site-1"))
    for refused in (
        lambda: simulate(chosen, folder),
        lambda: dry_run(chosen),
        lambda: Assembly(chosen).gate(),
        lambda: Assembly(of_site).site("site-1"),
        lambda: prepared(replace(source, cache=str(tmp_path / "cache")), 1, lambda rows, total: None),
    ):
        with pytest.raises(PHIError, match=r"12 records: name with title in 1\)"):
            refused()
    assert files == []
    assert not (tmp_path / "cache").exists()
    prepared(replace(source, cache=str(tmp_path / "cache")), 1, lambda rows, total: None, accept=["name with title"])
    assert len(files) == 12
    Assembly(chosen, accept_phi_risk=True).gate()
    Assembly(of_site, accept_phi_risk=("name with title",)).site("site-1")
    assert len(files) == 3 * 12, "in memory: every assembly decodes for itself"


def test_all_data_sets_are_searched_before_one_of_them_is_decoded(tmp_path: Path, files: list[Path]) -> None:
    """The first is clean, so that it would have been decoded; kinds and records are those of both."""
    clean, named = table(tmp_path / "clean", ""), table(tmp_path / "named")
    for both in (
        SiteSources((("north", clean), ("south", named))),
        PatientSites(((clean, (("north", 0),)), (named, (("south", 0),)))),
        JoinedSource(clean, named, clean, clean),
    ):
        with pytest.raises(PHIError, match=r"name with title in 1\)"):
            Assembly(experiment(both)).gate()
    assert files == []
    assert len(SiteSources((("north", clean),)).build()) == len(files) == 12


def test_a_published_collection_is_searched_before_it_is_decoded(tmp_path: Path, files: list[Path]) -> None:
    """The report is called by its film's name; the image that cannot be read is named after it was tried."""
    films = table(tmp_path / "t")
    rows = read(Path(films.path))
    for number, row in enumerate(rows):
        (tmp_path / "t" / row["image"]).rename(tmp_path / f"film{number}.png")
    (tmp_path / "film7.png").write_bytes(b"broken")
    published = [(f"film{number}", "-1", row["report"]) for number, row in enumerate(rows)]
    columns = ("SOPInstanceUID", "EncodedPixels", "Report")
    save(tmp_path / "reports.csv", [dict(zip(columns, row, strict=True)) for row in published])
    source = CandidPTXSource(str(tmp_path / "reports.csv"), str(tmp_path), image_size=SIZE)
    screened = source.screen()
    assert (screened.phi, screened.records, files) == ({"name with title": 1}, 12, [])
    assert [finding.where for finding in screened.phi.shown] == ["film0"]  # type: ignore[attr-defined]
    cohort, summary = screened.prepare()
    assert len(files) == 12
    assert screened.skipped == {"unsupported image format": ["film7"]}
    assert (len(cohort), summary["skipped: unsupported image format"]) == (11, 1)
    assert not hasattr(cohort.phi, "shown"), "the words are forgotten"
    assert "film" not in repr(screened)


def test_only_the_column_of_reports_is_searched(tmp_path: Path) -> None:
    """A column that credits the author of a published film names no patient; in a report the same words do."""
    credit = "Photographed by Dr. Ferreira, 03/11/2019"
    assert table(tmp_path / "a", "", credit=credit).screen().phi == {}
    in_report = table(tmp_path / "b", f" {credit}", credit=credit).screen()
    assert in_report.phi == {"name with title": 1, "date": 1}
    assert {finding.where for finding in in_report.phi.shown} == {"1"}  # type: ignore[attr-defined]


def test_rows_that_are_not_used_have_their_numbers_in_the_table(tmp_path: Path) -> None:
    """Row 1 is below the header. Row 3 has the image of row 1, row 5 has no file, row 6 no image in its file."""
    source = table(tmp_path / "a")
    path = Path(source.path)
    rows = read(path)
    rows[2]["image"] = rows[0]["image"]
    (path.parent / rows[4]["image"]).unlink()
    (path.parent / rows[5]["image"]).write_bytes(b"broken")
    save(path, rows)
    screened = replace(source, max_skipped=0.5).screen()
    assert screened.skipped == {"duplicate image": ["3"], "missing image": ["5"]}
    assert len(screened.build()) == 9
    assert screened.skipped == {
        "duplicate image": ["3"],
        "missing image": ["5"],
        "unsupported image format": ["6"],
    }


def test_a_source_that_cannot_be_searched_first_is_built() -> None:
    """One of somebody else's: its own count is the gate's."""
    cohort = replace(SyntheticCohort(sites=2, size=8, image_size=32).build(), phi={"date": 2})

    class Own:
        def build(self) -> Cohort:
            return cohort

    of = DataSource.of(Own())
    assert (of.modalities, of.in_colour, of.by_site(), of.class_names()) == (("image", "text"), False, {}, ())
    screened = screen(Own())
    assert (screened.phi, screened.records, screened.build()) == ({"date": 2}, 8, cohort)

    def join(cohorts: Sequence[Cohort]) -> Cohort:
        assert list(cohorts) == [cohort, cohort]
        return cohort

    twice = screen_all([Own(), Own()], join)
    assert isinstance(twice, Screened)
    assert (twice.phi, twice.records, twice.build()) == ({"date": 4}, 16, cohort)
