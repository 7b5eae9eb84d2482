"""A public set beside the data that hospitals keep: whose machine has what, what is refused, that a run is right."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cases import cases
from support.toy import same_bytes

from fedvlp.core.types import MODALITIES
from fedvlp.data.cohort import PUBLIC, Cohort
from fedvlp.data.sources.table import TableSource
from fedvlp.data.synthetic.cases import FINDINGS
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.data.synthetic.files import write
from fedvlp.deploy.envelope import Envelope, EnvelopeError
from fedvlp.deploy.named_data import NamedData, SiteConfigError
from fedvlp.deploy.site_config import SiteConfig, at_server, at_site
from fedvlp.federation.exchange import SequentialExchange
from fedvlp.federation.loop import Federation, Rounds
from fedvlp.federation.site import Site
from fedvlp.flare.jobs import job_files
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly, public_id
from fedvlp.run.config import override
from fedvlp.run.experiment import Experiment, Partition
from fedvlp.run.fitting import for_sites, undealt
from fedvlp.run.site_sources import SiteSources

SIDE = 72
PAIRS, FILMS = "st-anna", "northgate"
DATA = NamedData("pretrain", SIDE, public="openi")


def asked(preset: str, sites: tuple[str, ...] = (PAIRS, FILMS), data: NamedData = DATA) -> Experiment:
    """The preset as `fedvlp jobs export --data named:pretrain,public=openi --at ...` has it, with two short rounds."""
    usual = presets.get(preset)
    experiment = replace(usual, data=data, partition=undealt(usual.partition), rounds=Rounds(rounds=2, quorum=1))
    experiment = for_sites(experiment, sites)
    for key, value in {"training.batch_size": "8", "method.local_steps": "2"}.items():
        experiment = override(experiment, key, value)
    return experiment


def table(kit: Path, name: str, seed: int, size: int, films_alone: bool = False) -> None:
    """A data set of this machine: a table below its root, with ids that no other seed has."""
    cohort = SyntheticCohort(sites=1, size=size, image_size=SIDE, seed=seed).build()
    if films_alone:
        cohort = cohort.without(reports=np.full(len(cohort), True), images=np.full(len(cohort), False))
    folder = kit / "data" / name
    write(cohort, folder)
    (folder / "images").rename(folder / f"films-{seed}")
    text = (folder / "pairs.csv").read_text(encoding="utf-8")
    (folder / "pairs.csv").write_text(text.replace("images/", f"films-{seed}/"), encoding="utf-8")


def kit(folder: Path, own: int = 0, films_alone: bool = False, lists: tuple[str, ...] = ("openi",)) -> Path:
    """The local folder of a machine that has the public set, and a site its own records."""
    columns = {"report_column": "report", "label_columns": list(FINDINGS)}
    entry = {"source": "table", "path": "pairs.csv", "min_report_words": 2, "burned_in": "header", **columns}
    sets = {"openi": {**entry, "root": "openi"}}
    table(folder, "openi", seed=9, size=40)
    if own:
        sets["pretrain"] = {**entry, "root": "pretrain", **({"report_column": ""} if films_alone else {})}
        table(folder, "pretrain", seed=own, size=60, films_alone=films_alone)
    local = folder / "local"
    local.mkdir()
    (local / "fedvlp.json").write_text(json.dumps({"data": sets, "public": list(lists)}), encoding="utf-8")
    return local


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("machines")
    return {
        "server": kit(root / "server"),
        PAIRS: kit(root / PAIRS, own=1),
        FILMS: kit(root / FILMS, own=2, films_alone=True),
    }


def cohort_of(experiment: Experiment) -> Cohort:
    return Assembly(experiment, accept_phi_risk=True).cohort


def test_every_machine_has_the_same_public_set_beside_its_own_records(machines: dict[str, Path]) -> None:
    at_sites = {site: cohort_of(at_site(asked("car-mfl"), site, machines[site])) for site in (PAIRS, FILMS)}
    there = cohort_of(at_server(asked("car-mfl"), machines["server"]))
    assert set(there.sites or ()) == {PUBLIC}
    for site, cohort in at_sites.items():
        assert set(cohort.sites or ()) == {PUBLIC, site}
        assert public_id(cohort) == public_id(there)
        assert cohort.label_names == there.label_names
    assert Assembly(at_site(asked("car-mfl"), FILMS, machines[FILMS])).data(FILMS).modalities == ("image",)


@pytest.mark.parametrize("preset", cases(("car-mfl", "creamfl", "fediot", "pms-fm"), often=("car-mfl",), seconds=10))
def test_machines_apart_end_with_the_bytes_of_one_that_has_all(preset: str, machines: dict[str, Path]) -> None:
    """Each machine opens its own files and no other's; the server of PMS-FM opens none."""
    experiment = asked(preset)
    of_site = {site: at_site(experiment, site, machines[site]) for site in (PAIRS, FILMS)}
    of_server = at_server(experiment, machines["server"])

    def site(name: str) -> Site:
        return Assembly(of_site[name], accept_phi_risk=True).site(name)

    apart = run(experiment, Assembly(of_server, accept_phi_risk=True), site)
    sources: dict[str, Any] = {PUBLIC: dict(of_site[PAIRS].data.sites)[PUBLIC]}  # type: ignore[attr-defined]
    sources |= {name: dict(of_site[name].data.sites)[name] for name in (PAIRS, FILMS)}  # type: ignore[attr-defined]
    whole = Assembly(replace(experiment, data=SiteSources(tuple(sources.items()))), accept_phi_risk=True)
    same_bytes(apart, run(experiment, whole, whole.site))


def run(experiment: Experiment, assembly: Assembly, site: Any) -> Any:
    server = assembly.server((FILMS, PAIRS))
    exchange = SequentialExchange(site)
    return Federation(experiment.method, server, experiment.rounds, exchange, wire=experiment.wire).run(0)


def test_a_site_lends_no_data_set_that_it_does_not_list_as_public(tmp_path: Path) -> None:
    """A job may send something about each record of a public set, so a lead must not call a hospital's own set one."""
    local = kit(tmp_path, own=1)
    for name in ("pretrain", "elsewhere"):
        with pytest.raises(SiteConfigError, match=f"no public set '{name}'") as error:
            at_site(asked("creamfl", data=NamedData("pretrain", SIDE, public=name)), PAIRS, local)
        assert str(tmp_path) not in str(error.value)
    with pytest.raises(ValueError, match="records are at"):
        cohort_of(at_site(asked("creamfl", data=NamedData("openi", SIDE, public="openi")), PAIRS, local))


def test_the_list_names_data_sets_of_the_file(tmp_path: Path) -> None:
    local = kit(tmp_path, lists=("openi", "mimic"))
    with pytest.raises(SiteConfigError, match="\"public\" names 'mimic', which is no data set"):
        SiteConfig.load(local)


def test_a_server_without_the_set_says_what_to_add(tmp_path: Path) -> None:
    with pytest.raises(SiteConfigError, match=r"no public set 'openi'; if anybody may have it, add"):
        at_server(asked("creamfl"), kit(tmp_path, lists=()))
    fedavg = replace(presets.get("fedavg"), data=NamedData("pretrain"))
    assert at_server(fedavg, tmp_path / "nowhere") == fedavg, "it needs no data"


def test_a_provisioned_server_opens_no_path_that_a_job_brings(tmp_path: Path) -> None:
    brought = replace(presets.get("creamfl"), data=TableSource(path="/etc/passwd"))
    assert at_server(brought, tmp_path / "local") == brought, "a laptop is its owner's"
    (tmp_path / "startup").mkdir()
    (tmp_path / "startup" / "fed_server.json").write_text("{}")
    with pytest.raises(SiteConfigError, match="the job brings TableSource"):
        at_server(brought, tmp_path / "local")
    assert at_server(presets.get("creamfl"), tmp_path / "local") == presets.get("creamfl")


def test_a_rehearsal_has_patients_of_its_own_for_the_public_set(tmp_path: Path) -> None:
    """The same everywhere, and at no site."""
    rehearsal = asked("car-mfl", data=NamedData("synthetic", SIDE, public="synthetic"))
    one, other = (cohort_of(at_site(rehearsal, site, tmp_path)) for site in (PAIRS, FILMS))
    assert public_id(one) == public_id(other) == public_id(cohort_of(at_server(rehearsal, tmp_path)))


def test_a_job_names_a_public_set_where_one_is_used() -> None:
    for preset, data, said in [
        ("car-mfl", "pretrain", r"car-mfl needs a public set .* --data named:pretrain,public=NAME"),
        ("creamfl", "pretrain", "creamfl needs a public set"),
        ("pms-fm", "pretrain", "pms-fm needs a public set"),  # retrieved reports are those of one
        ("fedavg", "pretrain,openi", "fedavg has no use for a public set; leave public=openi out"),
    ]:
        name, _, public = data.partition(",")
        experiment = asked(preset, data=NamedData(name, SIDE, public))
        with pytest.raises(SiteConfigError, match=said):
            job_files(experiment, custom=False, sites=(PAIRS, FILMS))


def test_what_sites_keep_is_not_dealt() -> None:
    for setting in ["image_only=1", "text_only=1", "public=0.1"]:
        key, _, value = setting.partition("=")
        experiment = override(asked("car-mfl"), f"partition.{key}", value)
        with pytest.raises(SiteConfigError, match=f"partition.{key} is for records that are partitioned"):
            job_files(experiment, custom=False, sites=(PAIRS, FILMS))


def test_a_public_sets_name_is_plain() -> None:
    for name in ["Chest", "../x", "a b", "x" * 65]:
        with pytest.raises(ValueError, match="the name of a public set is"):
            NamedData("pretrain", public=name)


def test_a_selector_of_more_sites_than_any_consortium_has_is_not_the_presets() -> None:
    """It would fill the memory of a hospital that runs presets alone."""
    usual = presets.get("pms-fm")
    data = NamedData("pretrain", usual.data.image_size, public="openi")  # type: ignore[attr-defined]
    experiment = replace(usual, data=data, partition=undealt(usual.partition))
    for sites, admitted in ((1000, True), (10**9, False)):
        asked_for = replace(experiment, extra=replace(usual.extra, sites=sites))  # type: ignore[type-var]
        envelope = Envelope(presets=("pms-fm",))
        if admitted:
            envelope.admit(asked_for)
        else:
            with pytest.raises(EnvelopeError, match=r"extra\.sites is beyond 1000"):
                envelope.admit(asked_for)


def test_each_site_has_the_model_of_a_site_with_pairs_and_a_selector_as_many_classes() -> None:
    creamfl, pms_fm = for_sites(presets.get("creamfl"), ("a", "b")), for_sites(presets.get("pms-fm"), ("a", "b", "c"))
    paired = presets.get("creamfl").site_models[0][1]
    assert creamfl.site_models == (("a", paired), ("b", paired))
    assert pms_fm.extra.sites == 3  # type: ignore[union-attr]
    assert pms_fm.site_models == ()


@pytest.mark.parametrize("preset", ["car-mfl", "creamfl", "pms-fm"])
def test_a_site_that_runs_a_preset_runs_it_on_its_own_records(preset: str) -> None:
    """And no other settings under the preset's name."""
    usual = presets.get(preset)
    data = NamedData("pretrain", usual.data.image_size, public="openi")  # type: ignore[attr-defined]
    experiment = for_sites(replace(usual, data=data, partition=undealt(usual.partition)), (PAIRS, FILMS))
    Envelope(presets=(preset,)).admit(experiment)
    for changed in (
        override(experiment, "method.local_steps", "7"),
        override(experiment, "training.lr", "0.5"),
        replace(experiment, site_models=((PAIRS, replace(usual.model, embedding_dim=32)),)),
    ):
        with pytest.raises(EnvelopeError):
            Envelope(presets=(preset,)).admit(changed)


# A public set of reports alone
def words(folder: Path, lost: int = 0) -> Path:
    """The local folder of a machine that lists public reports without images, and images without reports of its own."""
    local = kit(folder, own=2, films_alone=True)
    with (folder / "data/openi/pairs.csv").open(encoding="utf-8", newline="") as file:
        rows = [{name: cell for name, cell in row.items() if name != "image"} for row in csv.DictReader(file)]
    (folder / "data/words").mkdir()
    with (folder / "data/words/reports.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows[: len(rows) - lost])
    settings = json.loads((local / "fedvlp.json").read_text(encoding="utf-8"))
    entry = {
        "source": "table",
        "path": "reports.csv",
        "root": "words",
        "image_column": "",
        "label_columns": [*FINDINGS],
    }
    settings["data"]["words"] = entry
    settings["public"].append("words")
    (local / "fedvlp.json").write_text(json.dumps(settings), encoding="utf-8")
    return local


def test_a_public_set_of_reports_alone_gives_reports_to_the_images_of_each_site(tmp_path: Path) -> None:
    """The same list wherever its file lies; a machine with another list is found by the hash of the ids."""
    data = NamedData("pretrain", SIDE, public="words")
    given = replace(asked("one-round-cca", (FILMS,), data), partition=Partition(retrieve=1))
    here, there, other = (
        at_site(given, FILMS, words(tmp_path / name, lost)) for name, lost in (("a", 0), ("b", 0), ("c", 1))
    )
    cohort = cohort_of(here)
    public = np.asarray(cohort.sites) == PUBLIC
    assert cohort.has_report()[public].all()
    assert not cohort.has_image()[public].any()
    rows = cohort.rows("train", FILMS)
    assert cohort.has_image()[rows].all()
    assert cohort.has_report()[rows].all()
    assert {name for row in rows for name in (cohort.report_from or ())[row]} <= set(
        np.asarray(cohort.ids)[public].tolist()
    )
    assert not cohort.has_report()[cohort.rows("test", FILMS)].any(), "held-out images are judged without them"
    assert public_id(cohort_of(there)) == public_id(cohort) != public_id(cohort_of(other))
    job_files(given, sites=(FILMS,))
    client = Assembly(here, accept_phi_risk=True).client(FILMS, Assembly(here, accept_phi_risk=True).data(FILMS))
    assert client.modalities == MODALITIES


def test_a_data_set_that_is_not_listed_as_public_gives_no_report(tmp_path: Path) -> None:
    local = words(tmp_path)
    settings = json.loads((local / "fedvlp.json").read_text(encoding="utf-8"))
    (local / "fedvlp.json").write_text(json.dumps({**settings, "public": ["openi"]}), encoding="utf-8")
    with pytest.raises(SiteConfigError, match="offers no public set 'words'"):
        at_site(asked("one-round-cca", (FILMS,), NamedData("pretrain", SIDE, public="words")), FILMS, local)
