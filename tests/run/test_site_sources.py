"""Several data sets as the sites of one run: whose records are whose, what is refused, and that a run finds them."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.laboratory import SOURCES
from support.presets import SMALL
from support.published import COLLECTIONS

from fedvlp.data.cohort import PUBLIC
from fedvlp.data.sources.table import TableSource
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.data.synthetic.files import write
from fedvlp.federation.loop import Rounds
from fedvlp.methods import FedAvg
from fedvlp.models.tiny import HashTokenizer
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.run.config import from_config, to_config
from fedvlp.run.experiment import Experiment
from fedvlp.run.fitting import fitted
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import OtherDataError, simulate
from fedvlp.run.site_sources import SiteSources


def published(name: str, root: Path) -> object:
    """The texts and labels of a collection, whose images no test here needs."""
    root.mkdir()
    COLLECTIONS[name](root)
    return replace(SOURCES[name].at(root, image_size=32), root=None)  # type: ignore[union-attr]


def two(folder: Path) -> SiteSources:
    """NIH in the north, RSNA in the south."""
    return SiteSources(
        (("north", published("nih_cxr14", folder / "nih")), ("south", published("rsna", folder / "rsna")))  # type: ignore[arg-type]
    )


def test_each_data_set_is_one_sites(tmp_path: Path) -> None:
    """12 films in the north and 4 in the south; a label that only one of them has is blank at the other."""
    cohort = two(tmp_path).build()
    assert cohort.sites == ("north",) * 12 + ("south",) * 4
    edema, pneumonia = (cohort.labels[:, cohort.label_names.index(name)] for name in ("Edema", "Pneumonia"))
    assert np.isnan(edema[12:]).all()
    assert pneumonia.tolist() == [0.0] * 12 + [0.0, 1.0, 0.0, 1.0]


def test_a_site_is_one_whatever_its_table_says(tmp_path: Path) -> None:
    table = write(SyntheticCohort(sites=3, size=30, image_size=32), tmp_path / "table")
    cohort = SiteSources((("only", TableSource(str(table), image_size=32)),)).build()
    assert set(cohort.sites or ()) == {"only"}
    assert len(cohort) == 30


def test_the_public_set_may_be_a_data_set_of_its_own(tmp_path: Path) -> None:
    sites = two(tmp_path).sites
    data = SiteSources(((PUBLIC, sites[0][1]), sites[1]))
    assembly = Assembly(Experiment("public", FedAvg(), SMALL.model, data=data))
    assert assembly.has_public
    assert assembly.sites() == ("south",)


def test_records_at_two_sites_are_refused_and_so_are_two_sites_of_a_name(tmp_path: Path) -> None:
    north = two(tmp_path).sites[0][1]
    with pytest.raises(ValueError, match="12 records are at north and at south; give each record to one site"):
        SiteSources((("north", north), ("south", north))).build()
    with pytest.raises(ValueError, match="north has two data sets"):
        SiteSources((("north", north), ("north", north)))
    with pytest.raises(ValueError, match="no sites given"):
        SiteSources(())


def hospital(folder: Path, seed: int, size: int = 40) -> TableSource:
    """A table whose files and patients are named as every other hospital's."""
    table = write(SyntheticCohort(sites=2, size=size, image_size=32, seed=seed), folder)
    content = table.read_text(encoding="utf-8")
    for kind in ("patient", "study"):
        content = content.replace(f"syn-{kind}-{seed}-", "")
    table.write_text(content, encoding="utf-8")
    return TableSource(str(table), image_size=32, burned_in="accept")


def test_two_hospitals_may_name_files_and_number_patients_alike(tmp_path: Path) -> None:
    """Each patient counts once at each of them, and their splits are each one's own."""
    north, south = hospital(tmp_path / "a", 1), hospital(tmp_path / "b", 2)
    own = [north.build(), south.build()]
    assert own[0].ids == own[1].ids
    assert set(own[0].patients) & set(own[1].patients)
    joined = SiteSources((("north", north), ("south", south))).build()
    assert len(set(joined.ids)) == len(joined) == 80
    assert len(set(joined.patients)) == sum(len(set(cohort.patients)) for cohort in own)
    assert len(set(joined.studies)) == sum(len(set(cohort.studies)) for cohort in own)
    assert joined.splits.tolist() == [*own[0].splits, *own[1].splits]


def test_a_public_table_has_the_same_ids_whoever_joins_it(tmp_path: Path) -> None:
    """The server has it alone, each site beside its own: both compare a hash of the ids."""
    public, own = hospital(tmp_path / "a", 1), hospital(tmp_path / "b", 2)
    ids = {
        SiteSources(sites).build().ids[:40]
        for sites in (((PUBLIC, public),), ((PUBLIC, public), ("north", own)), ((PUBLIC, public), ("south", own)))
    }
    assert len(ids) == 1


def test_one_table_at_two_sites_is_refused(tmp_path: Path) -> None:
    """And so are two tables of one folder that share films, or a patient who is held out at one of them alone."""
    table = hospital(tmp_path / "a", 1)
    with pytest.raises(ValueError, match="40 records are at north and at south"):
        SiteSources((("north", table), ("south", replace(table, root=f"{tmp_path}/a/../a")))).build()
    with Path(table.path).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for name, own in (("one", rows[:20]), ("two", rows[20:])):
        with (tmp_path / "a" / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows({**row, "patient_id": str(index)} for index, row in enumerate(own))
    one, two = (replace(table, path=str(tmp_path / "a" / f"{name}.csv"), split_column="") for name in ("one", "two"))
    with pytest.raises(ValueError, match="patients are in more than one split"):
        SiteSources((("north", one), ("south", replace(two, seed=1)))).build()


def test_a_configuration_comes_back_from_json(tmp_path: Path) -> None:
    data = two(tmp_path)
    written = json.loads(json.dumps(to_config(data)))
    assert written["path"] == "fedvlp.SiteSources"
    assert from_config(written) == data


# What a run notes of its data


def run_of(folder: Path, table: Path) -> tuple[Experiment, RunFolder]:
    """A run of one round on a table at two sites."""
    data = TableSource(str(table), image_size=SMALL.data.image_size)
    experiment = replace(
        SMALL, method=FedAvg(local_steps=1), data=data, rounds=Rounds(rounds=1, evaluate_every=0), name="table"
    )
    return experiment, RunFolder.create(folder / "runs", experiment)


def test_a_run_goes_on_with_its_own_data_alone(tmp_path: Path) -> None:
    """Resumed on the same table nothing is said; with one word of one report changed, it is refused."""
    table = write(SyntheticCohort(sites=2, size=40, image_size=SMALL.data.image_size), tmp_path / "table")
    experiment, folder = run_of(tmp_path, table)
    simulate(experiment, folder)
    simulate(experiment, folder)
    content = table.read_text(encoding="utf-8")
    table.write_text(content.replace("effusion", "canary", 1), encoding="utf-8")
    with pytest.raises(OtherDataError, match="40 records then, 40 now, and their fingerprints differ") as caught:
        simulate(experiment, folder)
    assert "canary" not in str(caught.value)
    table.write_text(content, encoding="utf-8")
    simulate(experiment, folder)


def test_a_process_that_is_started_again_tokenises_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds the tokens beside the decoded films."""
    table = write(SyntheticCohort(sites=2, size=40, image_size=SMALL.data.image_size), tmp_path / "table")
    experiment, _ = run_of(tmp_path, table)
    experiment = replace(experiment, data=replace(experiment.data, cache=str(tmp_path / "cache")))
    batches = [next(Assembly(experiment).data("site-1").batches("train", 4, drop_last=False))]
    monkeypatch.setattr(HashTokenizer, "__call__", None)
    batches.append(next(Assembly(experiment).data("site-1").batches("train", 4, drop_last=False)))
    assert torch.equal(batches[0]["text"], batches[1]["text"])


def test_a_run_of_an_older_version_goes_on(tmp_path: Path) -> None:
    table = write(SyntheticCohort(sites=2, size=40, image_size=SMALL.data.image_size), tmp_path / "table")
    experiment, folder = run_of(tmp_path, table)
    folder.path.mkdir(parents=True, exist_ok=True)
    (folder.path / "partition.json").write_text(json.dumps({"ids": ["a"], "settings": {"sites": "x"}}))
    simulate(experiment, folder)
    assert json.loads((folder.path / "partition.json").read_text())["settings"]["cohort"]


def test_a_collection_with_a_file_of_classes_is_a_site_of_creamfl() -> None:
    """RSNA's setting ``classes`` is a file's name, and was called as what tells a collection's classes."""
    rsna = SOURCES["rsna"](path="labels.csv", classes="detailed.csv")  # type: ignore[call-arg]
    asked = replace(presets.get("creamfl"), data=SiteSources((("north", rsna),)))
    assert fitted(asked).partition.sites == 1
