"""What is said of a run before it is believed: drawn films under a paper's name, batches larger than a split."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from support.presets import SMALL

from fedvlp.data.cohort import PUBLIC
from fedvlp.data.sources.table import TableSource
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.federation.loop import Rounds
from fedvlp.methods import Centralized, CreamFL, FedAvg, FedDRA
from fedvlp.report.run_page import write
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.run.cautions import FILE, cautions, train_sizes
from fedvlp.run.config import override
from fedvlp.run.experiment import POOLED
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate
from fedvlp.run.site_sources import SiteSources

COHORT = SyntheticCohort(sites=2, size=60, image_size=36).build()
SIZES = train_sizes(COHORT)


def batches_of(size: int, experiment: presets.Experiment = SMALL) -> presets.Experiment:
    """The experiment with batches of ``size`` records, those by which a method weighs sites as well."""
    if experiment.method.probe_records():
        experiment = override(experiment, "method.dro_batch", str(size))
    return replace(experiment, training=replace(experiment.training, batch_size=size))


def test_presets_with_published_towers_are_a_papers_or_for_real_films() -> None:
    published = {name for name, preset in presets.PRESETS.items() if preset.model.pretrained}
    assert {*presets.PAPERS, *presets.OF_REAL_FILMS} == published
    assert len(presets.OF_REAL_FILMS) == 6


def test_a_preset_of_real_films_on_drawn_ones_says_so() -> None:
    for name in presets.OF_REAL_FILMS:
        preset = batches_of(2, presets.get(name))
        shown = [f"{name}: {preset.method.discloses()}"] if preset.method.discloses() else []
        (said,) = (one for one in cautions(preset, COHORT) if one not in shown)
        assert said.startswith(f"{name} is for real images and reports")
        assert said.endswith("give --data")
        assert cautions(replace(preset, data=TableSource("pairs.csv")), COHORT) == shown


def test_a_papers_preset_on_drawn_films_says_so() -> None:
    """And says nothing of the kind on somebody's table; drawn films at one site of several are drawn films."""
    for name in presets.PAPERS:
        preset = batches_of(2, presets.get(name))
        preset = replace(preset, server_training=None)
        (said,) = cautions(preset, COHORT)
        assert said.startswith(f"{name} has a paper's towers and schedule, but these are not the paper's data")
        table = TableSource("pairs.csv")
        assert cautions(replace(preset, data=table), COHORT) == []
        mixed = SiteSources((("north", table), ("south", SyntheticCohort(1))))
        assert len(cautions(replace(preset, data=mixed), COHORT)) == 1


def test_a_demo_on_drawn_films_needs_no_word() -> None:
    assert cautions(batches_of(2), COHORT) == []


def test_a_method_that_shows_records_to_other_sites_says_so() -> None:
    """FedFed's preset, by its name; OneRoundCCA shows the server moments, and no other preset shows any."""
    (said,) = cautions(batches_of(2, presets.get("fedfed")), COHORT)
    assert said.startswith("fedfed: every other site is shown 32 pairs of each site")
    assert [name for name, preset in presets.PRESETS.items() if preset.method.discloses()] == [
        "one-round-cca", "one-round-cca-real", "one-round-reports-real",
    ]  # fmt: skip


def test_sites_with_fewer_records_than_a_batch_are_named_with_their_number() -> None:
    """At the size of the smaller site nothing is said, one above it that site is named, far above both are."""
    small, large = sorted(SIZES, key=SIZES.__getitem__)
    assert SIZES[small] < SIZES[large]
    assert cautions(batches_of(SIZES[small]), COHORT) == []
    (said,) = cautions(batches_of(SIZES[small] + 1), COHORT)
    assert (
        f"a batch of {SIZES[small] + 1} is larger than the training split of {small} ({SIZES[small]} records)" in said
    )
    assert large not in said
    (said,) = cautions(batches_of(1000), COHORT)
    assert small in said
    assert large in said


def test_a_site_too_small_to_be_weighed_by_its_loss_is_named() -> None:
    """One record too few, that site alone is; with uniform weights none is, nor where sites are not weighed."""
    small, large = sorted(SIZES, key=SIZES.__getitem__)
    weighed = replace(batches_of(2), method=FedDRA(dro_batch=SIZES[small]))
    assert cautions(weighed, COHORT) == []
    (said,) = cautions(replace(weighed, method=FedDRA(dro_batch=SIZES[small] + 1)), COHORT)
    assert (
        f"batches of {SIZES[small] + 1} training records, and {small} ({SIZES[small]} records) cannot fill one" in said
    )
    assert large not in said
    assert cautions(replace(weighed, method=FedDRA(dro_batch=1000, rho=0.0)), COHORT) == []


def test_pooled_records_are_one_split() -> None:
    pooled = replace(SMALL, method=Centralized(local_steps=1))
    total = sum(SIZES.values())
    assert cautions(batches_of(total, pooled), COHORT) == []
    assert f"all sites together ({total} records)" in cautions(batches_of(total + 1, pooled), COHORT)[0]


def test_the_public_set_has_a_batch_of_its_own() -> None:
    """Where the server trains on it; no site's batch is measured by it."""
    sites = [PUBLIC if site == "site-1" else site for site in COHORT.sites or ()]
    cohort = COHORT.with_sites(sites)
    public = train_sizes(cohort)[PUBLIC]
    experiment = replace(
        batches_of(2), method=CreamFL(), server_training=replace(SMALL.training, batch_size=public + 1)
    )
    (said,) = cautions(experiment, cohort)
    assert f"the public set ({public} records)" in said
    assert cautions(replace(experiment, method=FedAvg()), cohort) == []


def test_a_run_says_it_once_before_training_and_its_report_repeats_it(tmp_path: Path) -> None:
    experiment = replace(
        batches_of(500), method=FedAvg(local_steps=1), data=replace(SMALL.data, sites=2, size=48),
        rounds=Rounds(rounds=1, evaluate_every=0),
    )  # fmt: skip
    folder = RunFolder.create(tmp_path, experiment)
    order: list[str] = []
    simulate(experiment, folder, caution=order.append, report=lambda record: order.append("trained"))
    assert order[0].startswith("a batch of 500 is larger")
    assert set(order[1:]) == {"trained"}
    assert json.loads((folder.path / FILE).read_text()) == order[:1]
    assert order[0].partition(",")[0][1:] in write(folder).read_text(encoding="utf-8")


def test_records_that_no_loss_is_for_are_said() -> None:
    """At their site, or where all are pooled; a site with films alone has no pairs, and takes part as it is."""
    first = np.flatnonzero(np.asarray(COHORT.sites) == "site-1")
    training = np.intersect1d(first, COHORT.rows("train"))
    none = np.zeros(len(COHORT), dtype=bool)
    some, all_of_it = none.copy(), none.copy()
    some[training[:3]] = True
    all_of_it[first] = True
    quiet = batches_of(2)
    pooled = replace(quiet, method=Centralized(local_steps=1))

    def untrained(experiment: presets.Experiment, lost: np.ndarray) -> dict[str, int]:
        data = SimpleNamespace(build=lambda: COHORT.without(reports=lost, images=none))
        return Assembly(replace(experiment, data=data)).untrained()

    assert untrained(quiet, some) == {"site-1": 3}
    assert untrained(quiet, all_of_it) == {}, "there is no other record, and the method may have a loss for these"
    assert untrained(pooled, all_of_it) == {POOLED: len(training)}
    assert untrained(pooled, none) == {}
    (said,) = cautions(quiet, COHORT, {"site-1": 3})
    assert "leaves out records with an image or a report alone: site-1 (3 records)" in said
    assert cautions(quiet, COHORT) == []
