"""Programs are run by hand, so a name that moved would be missed until then: each of them is imported here."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import programs
from support.pretend_streams import Entry
from torch import nn

from fedvlp.data.cohort import PUBLIC
from fedvlp.evaluation.audit.membership import Membership
from fedvlp.evaluation.intervals import Interval, over_seeds
from fedvlp.evaluation.retrieval import embed
from fedvlp.federation.site_memory import SiteMemory
from fedvlp.methods.car_mfl import PARTNERS
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.run.folder import RunFolder
from fedvlp.run.simulate import simulate
from fedvlp.run.terms import terms
from studies import page
from studies.claims import ensembles
from studies.claims.cell_results import Table
from studies.claims.ledger import alignment, ladder, missing

pytestmark = pytest.mark.slow(seconds=1)
"""They are run by hand, so what breaks one may wait for the slow rest."""

PROGRAMS = Path(__file__).parents[2] / "studies" / "programs"


def test_every_benchmark_finds_what_it_imports() -> None:
    names = sorted(path.stem for path in PROGRAMS.glob("*.py"))
    assert len(names) > 15
    code = f"import importlib\nfor name in {names!r}:\n    importlib.import_module(name)"
    done = programs.forked(["python", "-c", code], PROGRAMS, os.environ)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_page_is_of_these_results_and_programs() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "python -m studies.page writes it anew"
    assert len(page.PAGE.read_bytes()) <= 10_300


def test_what_make_bench_runs_is_there() -> None:
    loop = next(
        line for line in Path(PROGRAMS.parents[1] / "Makefile").read_text().splitlines() if "for program in" in line
    )
    names = loop.partition(" in ")[2].partition(";")[0].split()
    assert len(names) > 15
    assert {name for name in names if not (PROGRAMS / f"{name}.py").is_file()} == set()


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports a program as a module."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(PROGRAMS))
    yield importlib.import_module
    for name in {path.stem for path in PROGRAMS.glob("*.py")} - before:
        sys.modules.pop(name, None)


@pytest.fixture
def ablation(imported: Callable[[str], Any]) -> Any:
    return imported("ablation")


@pytest.fixture
def car_mfl(imported: Callable[[str], Any]) -> Any:
    return imported("car_mfl")


def test_the_mixes_begin_with_the_ledgers_own_cells(car_mfl: Any) -> None:
    """No two rows are one experiment or share a file, and what the ledger has run is not run under another name."""
    rows = car_mfl.rows_of(["4:0:1", "0:4:1", "2:2:1"], [0.05, 0.3], [10, 1000])
    ledger = missing(3)
    assert len(rows) == 3 * 4 + 3 + 2 * 3 + 3
    experiments = {name: car_mfl.experiment(row, 3) for name, row in rows.items()}
    assert {name: experiments[name] for name in ledger} == ledger
    assert [replace(one, name=name).name for name, one in experiments.items()] == list(rows)
    assert len({repr(replace(one, name="same")) for one in experiments.values()}) == len(rows)
    other: Any = experiments["car-mfl-2-2-1"]
    assert (other.partition.image_only, other.partition.text_only, other.data.sites) == (2, 2, 5)
    more: Any = experiments["mfedavg-p-public-0-3"]
    assert (more.partition.public, more.partition.image_only) == (0.3, 4)
    pooled, paired = experiments["pooled"], experiments["mfedavg-p-paired"]
    assert (pooled.method.private, pooled.method.local_steps) == (False, paired.method.local_steps)
    assert pooled.training.batch_size == (paired.data.sites + 1) * paired.training.batch_size  # the server is the sixth
    assert experiments["car-mfl-linear"].method.renorm == "linear"
    assert (experiments["car-mfl"].method.k, experiments["car-mfl-0-4-1-k-1000"].method.k) == (10, 1000)


def test_strange_findings_are_those_of_the_last_rounds_lent_halves_that_a_record_has_not(
    car_mfl: Any, tmp_path: Path
) -> None:
    """Every record is lent one item with one finding, so the share is that of the records without that finding.

    Site-2 has films alone and site-3 reports alone; the item of an earlier round counts no more.
    """
    preset: Any = presets.get("car-mfl")
    few = replace(preset.partition, image_only=1, text_only=1)
    one = replace(preset, data=replace(preset.data, size=240, sites=3), partition=few)
    folder = RunFolder.create(tmp_path, one)
    cohort = Assembly(one).cohort
    findings = cohort.labels == 1
    single, several = (
        next(item for item, row in enumerate(cohort.rows("train", PUBLIC)) if wanted(findings[row].sum()))
        for wanted in (lambda found: found == 1, lambda found: found > 1)
    )
    (finding,) = findings[cohort.rows("train", PUBLIC)[single]].nonzero()[0]
    expected = {}
    for site, lacking in (("site-2", "text"), ("site-3", "image")):
        own = cohort.rows("train", site)
        expected[lacking] = 1 - findings[own, finding].mean()
        partners = torch.tensor([[several], [single]], dtype=torch.int32).repeat(1, len(own))
        SiteMemory(folder.path / "sites" / site).after((1, 0), {PARTNERS: partners})
    assert 0 < expected["text"] != expected["image"] < 1
    assert car_mfl.strange(folder) == pytest.approx(expected)


def test_fourteen_sites_have_the_ledgers_settings_and_more_records_than_the_public_set(
    imported: Callable[[str], Any],
) -> None:
    rows = imported("creamfl_teachers").experiments(3)
    few, many = rows["creamfl"], rows["creamfl-many"]
    assert (many.method, many.training, many.rounds, many.model) == (few.method, few.training, few.rounds, few.model)
    assert {model for _, model in many.site_models} == {model for _, model in few.site_models}
    assembly = Assembly(many)
    kinds = [assembly.data(site).modalities for site in assembly.data_sites()]
    assert [kinds.count(kind) for kind in (("image",), ("text",), ("image", "text"))] == [4, 4, 6]
    public = len(assembly.cohort.rows("train", PUBLIC))
    assert sum(assembly.data(site).num_train for site in assembly.data_sites()) > 12 * public


@pytest.mark.slow(seconds=30)
def test_sites_of_one_model_know_together_what_each_of_them_knows(
    imported: Callable[[str], Any], tmp_path: Path
) -> None:
    """The server's and the sites' figures are the ledger's of that run, on studies with both modalities."""
    program = imported("creamfl_teachers")
    whole: Any = ladder(100)["creamfl"]
    one = replace(whole, data=replace(whole.data, size=400), rounds=replace(whole.rounds, rounds=2))
    folder = RunFolder.create(tmp_path, one)
    simulate(one, folder)
    memory = SiteMemory(folder.path / "sites" / "site-1").newest()
    for site in Assembly(one).data_sites():
        SiteMemory(folder.path / "sites" / site).after((2, 1), memory)
    found, ledgers = program.figures(folder), ensembles.of_run(folder)
    assert found[program.SERVER] == pytest.approx(ledgers[ensembles.RSUM])
    assert found[program.SITE] == pytest.approx(ledgers[ensembles.SITE_RSUM])
    assert found[program.TOGETHER] == pytest.approx(found[program.SITE])


def test_a_server_is_distilled_towards_the_wanted_vectors_of_its_rows(imported: Callable[[str], Any]) -> None:
    """Two orthogonal vectors by turns: a server that took those of other rows could not tell them apart."""
    program = imported("creamfl_teachers")
    whole: Any = ladder(100)["creamfl"]
    one = replace(whole, data=replace(whole.data, size=400), rounds=replace(whole.rounds, rounds=12))
    assembly = Assembly(one)
    data = program.Records(assembly).served(None)[program.ON_PUBLIC]
    server = assembly.client("student", None)
    server.load(assembly.initial(None))
    turns = torch.arange(data.num_train) % 2
    wanted, others = (torch.eye(one.model.embedding_dim)[rows] for rows in (turns, 1 - turns))
    program.distil(server.model, data, (wanted, wanted), one)
    for vectors in embed(server.model, data.batches("train", 64, drop_last=False)):
        assert (vectors * wanted).sum(1).mean() > (vectors * others).sum(1).mean() + 0.2


def test_a_server_listens_more_to_a_site_whose_halves_are_where_its_own_are(imported: Callable[[str], Any]) -> None:
    """By hand, four items: a site with pairs sends the server's own vectors, one with films those of other items."""
    program = imported("creamfl_teachers")
    settled = replace(ladder(100)["reamfl-gca"].method, gca_temperature=1.0)  # type: ignore[call-arg]
    one = replace(ladder(100)["reamfl-gca"], method=settled)
    own, others = torch.eye(4), torch.eye(4).roll(1, 0)
    made = {"pairs": (own, own), "films": (others, others)}
    kinds = {"pairs": ("image", "text"), "films": ("image",)}
    found = program.listened(made, kinds, (own, own), one)
    apart = 1 - math.log(3) + math.log(math.e + 2)  # of the two scores of a film (Eq. 4)
    assert found[program.COSINE] == pytest.approx((1 + 0 + 1) / 3)
    assert found[program.WEIGHT] == pytest.approx((2 / (1 + math.exp(-apart)) + 1) / 2)


def attacked(state: str, area: float) -> Membership:
    return Membership(state, "loss", "", 10, 10, Interval(area, area, area), ())


@pytest.fixture
def audits(imported: Callable[[str], Any]) -> Any:
    return imported("audits")


def test_a_seed_counts_once_in_the_interval_of_a_state(audits: Any) -> None:
    """By hand, of two seeds: 60 and 62 are 61 +- 12.7, with one degree of freedom.

    With the areas of the sites' own models among them there were three.
    """
    of = audits.audits
    found = [
        of.Audit(1, 0, (attacked(of.UNTRAINED, 50.0), attacked(of.TRAINED, trained), attacked(of.OWN, own)), ())
        for trained, own in ((60.0, 70.0), (62.0, 74.0))
    ]
    (line,) = audits.over_runs(found)
    expected = [over_seeds(values).unsigned() for values in ([50.0, 50.0], [60.0, 62.0], [70.0, 74.0])]
    assert line == ["loss", *expected]
    assert expected[1].startswith("61.0 [48.3, 73.7]")
    assert len(line) == 1 + len(audits.STATES)
    without = [replace(one, rows=one.rows[:2]) for one in found]
    assert audits.over_runs(without)[0][-1] == audits.NOT_RUN


def test_films_are_drawn_where_an_audit_has_none_and_a_run_of_other_settings_is_not_gone_on_with(
    audits: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An audit without films once was taken whatever --invert said; a stopped run, whatever its settings were."""
    began: list[RunFolder] = []
    measured: list[float] = []

    def simulated(chosen: Any, folder: RunFolder, **_: object) -> None:
        began.append(folder)
        folder.model.parent.mkdir(exist_ok=True)
        folder.model.touch()

    canary = SimpleNamespace()
    there = audits.measured.Attacks(1, canaries=(canary,))
    kept: dict[Path, Any] = {}

    def measure(folder: RunFolder, invert: float) -> Any:
        measured.append(invert)
        kept[folder.path] = replace(there, inversion=(canary,) if invert else ())
        return kept[folder.path]

    monkeypatch.setattr(audits, "simulate", simulated)
    monkeypatch.setattr(audits.measured, "measure", measure)
    monkeypatch.setattr(audits.measured, "read", lambda folder: kept.get(folder.path))
    monkeypatch.setattr(audits.audits, "read", lambda folder: canary)
    chosen = presets.get("fedavg")
    for invert in (0.0, 0.0, 60.0, 60.0, 0.0):
        audits.audited(tmp_path, chosen, invert)
    assert measured == [0.0, 60.0]
    assert len(began) == 1
    kept[began[0].path] = replace(there, canaries=())  # as of a method that sends no weights
    audits.audited(tmp_path, chosen, 60.0)
    assert measured == [0.0, 60.0]
    began[0].model.unlink()
    audits.audited(tmp_path, chosen, 0.0)
    assert began[1] == began[0], "it goes on"
    began[0].model.unlink()
    audits.audited(tmp_path, replace(chosen, rounds=replace(chosen.rounds, rounds=1)), 0.0)
    assert began[2].path == tmp_path / "fedavg" / "002"


def test_quick_noise_is_of_few_steps_on_few_records(
    imported: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = imported("privacy")
    taken: list[Any] = []

    def run(experiment: Any, clip: float | None, noise: float) -> list[object]:
        taken.append(experiment)
        return [""] * 6

    monkeypatch.setattr(program, "run", run)
    monkeypatch.setattr(sys, "argv", ["privacy.py", "--quick"])
    program.main()
    assert {(one.method.local_steps, one.data.size) for one in taken} == {(2, 1000)}


def test_rows_that_share_no_seed_or_lack_a_figure_have_an_empty_cell(imported: Callable[[str], Any]) -> None:
    """2 less 1 and 5 less 3 are 1.5 on average; a row that has not run yet must not end the program."""
    program = imported("ledger_cells")
    rows = Table({("a", 0): {"r": 1.0}, ("a", 1): {"r": 3.0}, ("b", 0): {"r": 2.0}, ("b", 1): {"r": 5.0},
                  ("c", 2): {"r": 7.0}})  # fmt: skip
    assert program.less(rows, "b", "a", "r").startswith("+1.5 [")
    assert (
        program.less(rows, "c", "a", "r")
        == program.less(rows, "a", "a", "r")
        == program.less(rows, "d", "a", "r")
        == ""
    )
    assert (program.mean(rows, "b", "r"), program.mean(rows, "b", "other")) == ("3.50", "")


@pytest.mark.parametrize("cohort", ["label-skew", "scanner-shift"])
def test_the_comparison_of_statistics_begins_from_the_shipped_encoders(
    cohort: str, imported: Callable[[str], Any]
) -> None:
    """It once asked for films that they do not fit; as many encoder steps with either schedule, batch norm in heads."""
    program = imported("norm_statistics")
    options = SimpleNamespace(steps=90, studies=1500, mu=None)
    for mu in (None, 0.5):
        constrained = program.experiment_of("feddra", cohort, 0, SimpleNamespace(**{**vars(options), "mu": mu}))
        assert constrained.method.mu == (mu or alignment(cohort, 0)["feddra"].method.mu)  # type: ignore[attr-defined]
    for method in ("fedavg", "feddra"):
        chosen = program.experiment_of(method, cohort, 0, options)
        assert chosen.rounds.rounds * terms(chosen).axes[0] == pytest.approx(90, abs=10)
        assert chosen.rounds.evaluate_every > 0, "in an evaluation sites note what they use the trained model with"
        model, _ = Assembly(chosen).modules()
        assert any(isinstance(module, nn.BatchNorm1d) for module in model.modules())


def test_the_ablation_leaves_out_every_set_of_parts_once(ablation: Any) -> None:
    """Two stages, constraint, robust weights: 2 x 2 x 2; the ledger's own rows by the ledger's names."""
    rows = ablation.experiments("feddra", "label-skew", "parts", 3)
    ledger = alignment("label-skew", 3)
    assert len({repr(one.method) for one in rows.values()}) == len(rows) == 8
    for name in ("feddra", "feddra-one-stage", "feddra-no-constraint", "feddra-no-dro"):
        assert rows[name] == ledger[name]
    bare: Any = rows["feddra-one-stage-no-constraint-no-dro"].method
    assert (bare.align_steps, bare.mu, bare.rho) == (0, 0.0, 0.0)
    assert {terms(one).axes[0] for one in rows.values()} == {terms(ledger["fedavg"]).axes[0]}


def test_what_a_part_is_worth_is_the_mean_over_all_rows_that_it_alone_tells_apart(ablation: Any) -> None:
    """Two stages add 1 with the constraint and 3 without, so 2; the seed that lacks a row does not count."""
    average, worst = ablation.AVERAGE, ablation.WORST
    cells = {}
    for name, changes in ablation.variants("feddra", "parts").items():
        figure = 50.0
        if "align_steps" not in changes:
            figure += 1 if "mu" not in changes else 3
        for seed in (0, 1):
            cells[name, seed] = {average: figure, worst: 10.0}
    cells["feddra", 2] = {average: 90.0, worst: 90.0}
    shown = ablation.effects("feddra", Table(cells)).splitlines()
    assert shown[2:] == [
        "| one-stage | +2.0 [+2.0, +2.0] | +0.0 [+0.0, +0.0] |",
        "| no-constraint | -1.0 [-1.0, -1.0] | +0.0 [+0.0, +0.0] |",
        "| no-dro | +0.0 [+0.0, +0.0] | +0.0 [+0.0, +0.0] |",
    ]
    assert len(ablation.effects("feddra", Table({("feddra", 2): cells["feddra", 2]})).splitlines()) == 2


def test_the_ablation_of_fedrgb_leaves_out_guidance_robust_weights_and_the_aligner_phase(ablation: Any) -> None:
    """Not both of the last two: the weights act on that phase alone."""
    rows = ablation.experiments("fedrgb", "scanner-shift", "parts", 3)
    assert {name: (one.method.alpha, one.method.rho, one.method.avg_aligner) for name, one in rows.items()} == {
        "fedrgb": (1.0, 0.1, False),
        "fedrgb-no-dro": (1.0, 0.0, False),
        "fedrgb-mean-aligner": (1.0, 0.1, True),
        "fedrgb-no-guidance": (0.0, 0.1, False),
        "fedrgb-no-guidance-no-dro": (0.0, 0.0, False),
        "fedrgb-no-guidance-mean-aligner": (0.0, 0.1, True),
    }
    assert rows["fedrgb"] == alignment("scanner-shift", 3)["fedrgb"]
    with pytest.raises(SystemExit, match="fedrgb has no mu"):
        ablation.experiments("fedrgb", "scanner-shift", "mu", 3)


@pytest.mark.parametrize(
    ("method", "cohort", "vary", "values"),
    [
        ("feddra", "label-skew", "mu", [5.0, 1.0, 10.0]),
        ("feddra", "scanner-shift", "mu", [1.0, 5.0, 10.0]),
        ("feddra", "scanner-shift", "rho", [0.1, 0.01, 1.0, 1.0]),
        ("feddra", "label-skew", "align_steps", [10, 20, 40]),
        ("feddra", "scanner-shift", "align_steps", [40, 10, 20]),
        ("fedrgb", "label-skew", "aligner_steps", [40, 10, 20]),
    ],
)
def test_the_grids_are_the_papers_and_the_ledgers_setting_is_its_own_row(
    method: str, cohort: str, vary: str, values: list[float], ablation: Any
) -> None:
    rows = ablation.experiments(method, cohort, vary, 100)
    assert [getattr(one.method, vary) for one in rows.values()] == values
    assert rows[method] == alignment(cohort, 100)[method]
    assert [replace(one, name=name).name for name, one in rows.items()] == list(rows)  # names with 0.01 were refused


def test_the_largest_rho_is_also_trained_without_shortening_a_change(ablation: Any) -> None:
    """The clipped row is the ledger's but for rho, and the other but for that and the clipping."""
    rows = ablation.experiments("feddra", "label-skew", "rho", 3)
    clipped, unclipped = rows["feddra-rho-1"], rows["feddra-rho-1-unclipped"]
    assert (clipped.rounds.clip_to_median, unclipped.rounds.clip_to_median) == (5, 0)
    assert replace(unclipped, rounds=clipped.rounds) == clipped
    assert replace(clipped, method=rows["feddra"].method) == rows["feddra"]


def test_rows_of_unequal_encoder_steps_are_refused(ablation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ablation.PARTS["feddra"], "one-stage", {"local_steps": 39})
    with pytest.raises(SystemExit, match="full-rate steps of the encoders differ"):
        ablation.experiments("feddra", "scanner-shift", "parts", 0)


@pytest.mark.parametrize(
    ("condition", "setting", "feddra", "all_steps"),
    [
        ("rounds", "rounds.rounds", 24, 60.0),
        ("long", "rounds.rounds", 48, 60.0),
        ("steps", "method.local_steps", 80, 100.0),
        ("moments", "training.optimizer_state", "keep", 51.25),  # warm-up and what makes up for it come once
        ("seldom", "method.align_every", 4, 48.75),  # two align phases in eight rounds
        ("start", "model.init", "other", 60.0),
    ],
)
def test_each_condition_changes_one_thing_and_has_fedavg_on_equal_terms(
    condition: str, setting: str, feddra: Any, all_steps: float, imported: Callable[[str], Any]
) -> None:
    program = imported("conditions")
    ledger = alignment("label-skew", 3)
    rows = program.experiments("feddra", "label-skew", [condition], "other", 3)
    assert [replace(one, name=name).name for name, one in rows.items()] == list(rows)
    assert {name: rows[name] for name in ledger if name in rows} == {
        name: ledger[name] for name in ("feddra", "fedavg", "fedavg-all-steps")
    }
    whole, fedavg, more = (rows[name] for name in program.names("label-skew", "feddra", condition))
    assert attrgetter(setting)(whole) == feddra
    assert (terms(whole).axes[0], terms(whole).total) == (terms(fedavg).axes[0], all_steps)
    assert terms(more).total == pytest.approx(all_steps, abs=0.5)
    part, name = setting.split(".")
    ours, theirs = asdict(getattr(whole, part)), asdict(getattr(ledger["feddra"], part))
    changed = {name: feddra} | ({"evaluate_every": 8} if condition == "long" else {})
    assert {key: ours[key] for key in ours if ours[key] != theirs[key]} == changed
    assert replace(whole, **{part: getattr(ledger["feddra"], part)}) == ledger["feddra"]


@pytest.mark.parametrize(
    ("part", "left_out"),
    [
        ("feddra-no-dro", {"rho": 0.0}),
        ("feddra-no-constraint", {"mu": 0.0}),
        ("feddra-no-constraint-no-dro", {"mu": 0.0, "rho": 0.0}),
    ],
)
def test_feddra_without_parts_meets_the_same_fedavg(
    part: str, left_out: dict[str, float], imported: Callable[[str], Any]
) -> None:
    program = imported("conditions")
    whole, without = (program.experiments(one, "label-skew", ["rounds"], "", 3) for one in ("feddra", part))
    assert without[f"{part}-rounds"].method == replace(whole["feddra"].method, **left_out)  # type: ignore[arg-type]
    own = {part, f"{part}-rounds"}
    assert {name: whole[name] for name in without if name not in own} == {
        name: one for name, one in without.items() if name not in own
    }


@pytest.mark.parametrize("quick", [False, True])
def test_rounds_are_read_from_the_files_of_the_cells(
    quick: bool, tmp_path: Path, imported: Callable[[str], Any]
) -> None:
    """Of a short run from its own folder; the ledger's 24 rounds end where its file says."""
    ledger = PROGRAMS.parent / "results"
    options = SimpleNamespace(quick=quick, runs=tmp_path, results=tmp_path / "elsewhere" if quick else ledger)
    if quick:
        (tmp_path / "quick").symlink_to(ledger)
    table = Table({("fedavg-rounds", 0): {}, ("feddra", 0): {}})
    rounds = imported("ledger_cells").by_round("label-skew", table, options)
    assert list(rounds) == list(range(25))
    figure = "val/mean/r1/average"
    assert rounds[24].values("fedavg-rounds", "test/mean/r1/average") == [80.5242]  # as the table has it
    assert [number for number in rounds if rounds[number].has("feddra", figure)] == list(range(9))


def test_differences_are_shown_after_rounds_1_2_4_8_and_the_last(imported: Callable[[str], Any]) -> None:
    """FedDRA, ahead of FedAvg by a point less with every round; three rounds as it stands, five with "rounds"."""
    program = imported("conditions")
    kinds = ("average", "worst")

    def after(number: int) -> Table:
        at = [program.LEDGERS] * (number <= 3) + ["rounds"]
        leads = {
            name: lead
            for one in at
            for name, lead in zip(program.names("label-skew", "feddra", one), (9 - number, 0, 20), strict=True)
        }
        return Table(
            {(name, 0): {f"val/mean/r1/{kind}": 50.0 + lead for kind in kinds} for name, lead in leads.items()}
        )

    rounds = {number: after(number) for number in range(6)}
    lines = program.course("label-skew", "feddra", ["rounds"], rounds).splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [(row[0], row[1]) for row in cells] == [
        *((program.LEDGERS, number) for number in "123"),
        *(("rounds", number) for number in "1245"),
    ]
    assert [row[2] for row in cells] == ["58.00", "57.00", "56.00", "58.00", "57.00", "55.00", "54.00"]
    assert [row[3][:4] for row in cells] == ["+8.0", "+7.0", "+6.0", "+8.0", "+7.0", "+5.0", "+4.0"]
    assert [row[4][:5] for row in cells][-1] == "-16.0"
    assert all(row[2:5] == row[5:] for row in cells)


@pytest.mark.parametrize("cohort", ["label-skew", "scanner-shift"])
def test_what_two_methods_call_alike_is_one_experiment(cohort: str, imported: Callable[[str], Any]) -> None:
    """They share a folder of results: with twice the steps FedDRA and FedRGB differ in all steps on either cohort."""
    program = imported("conditions")
    vary = ["rounds", "steps", "moments", "start"]
    feddra, fedrgb = (program.experiments(method, cohort, vary, "other", 3) for method in ("feddra", "fedrgb"))
    shared = feddra.keys() & fedrgb.keys()
    assert {"fedavg", *(f"fedavg-{condition}" for condition in vary)} <= shared
    assert {name: feddra[name] for name in shared} == {name: fedrgb[name] for name in shared}


def test_encoders_that_are_not_there_are_asked_for(
    imported: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["conditions.py", "--vary", "start", "--start", "nowhere", "--jobs", "0"])
    with pytest.raises(SystemExit):
        imported("conditions").main()
    assert "there are no encoders in nowhere; --help says how to make them" in capsys.readouterr().err


def test_fedrgb_has_no_phase_that_comes_seldom(imported: Callable[[str], Any]) -> None:
    with pytest.raises(SystemExit, match="fedrgb has no phase that could come more seldom"):
        imported("conditions").experiments("fedrgb", "label-skew", ["seldom"], "", 3)


@pytest.fixture
def gpu_trace(imported: Callable[[str], Any]) -> Any:
    return imported("gpu_trace")


def record(waits: bool) -> list[Any]:
    """Two steps of a task, each with an image that comes on a stream of its own, or that the host waits for."""
    task = [Entry("mark", 0, "task site-1 joint 0")]
    stream = 0 if waits else 1
    for event in (1, 2):
        film = Entry("copy", stream, bytes=1, dtype="torch.uint8", pinned=not waits, waits=waits)
        task += [
            film,
            Entry("record", stream, event=event),
            Entry("wait", 0, event=event),
            Entry("mark", 0, "step joint"),
        ]
    return [*task, Entry("fetch", 0, bytes=0, waits=True), Entry("mark", 0, "end")]


def test_a_record_on_the_clock_by_hand(gpu_trace: Any, tmp_path: Path) -> None:
    """Beside the steps: film at 0.1, step 0.1 to 1.1, the next 1.1 to 2.1: busy 2 of 2.1 seconds.

    Waited for, at one second a film: drawn 0.1, there at 1.1, step to 2.1; drawn at 1.3 (the host queued the step for
    0.1), there one second after the step, at 3.1, step to 4.1: busy 2 of 4.1.
    """
    costs = gpu_trace.Costs(joint=1.0, launch=0.1, draw=0.1, pinned=1e30, after_joint=0.0)
    film = gpu_trace.BATCH * gpu_trace.FILM**2
    beside = gpu_trace.play(record(waits=False), costs)
    assert (beside.busy(), beside.span()) == pytest.approx((2.0, 2.1))
    waited = gpu_trace.play(record(waits=True), replace(costs, pageable=film))
    assert (waited.busy(), waited.span()) == pytest.approx((2.0, 4.1))
    assert gpu_trace.play(record(waits=False), costs, "site-2").spans == []
    beside.write(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    steps = [(event["ts"], event["dur"], event["tid"]) for event in events if event["name"] == "step joint"]
    assert steps == [(100_000, 1_000_000, 1), (1_100_000, 1_000_000, 1)]


def test_a_gpu_that_waits_for_the_host_is_not_busy(gpu_trace: Any) -> None:
    """A first step that took 4 s for its kernels counts as the others do, and a measurement that drew films, too."""
    lengths = [("step joint", 4.0), ("step joint", 0.25), ("step joint", 0.25), ("measure joint", 9.0),
               ("measure joint", 0.5)]  # fmt: skip
    spans = [gpu_trace.Span("gpu", name, 10 * at, 10 * at + seconds) for at, (name, seconds) in enumerate(lengths)]
    task = gpu_trace.Span("host", "task joint", 0.0, 50.0)
    gpu_trace.without_waiting([*spans, task])
    assert [span.end - span.begin for span in spans] == [0.25, 0.25, 0.25, 0.5, 0.5]
    assert [span.end for span in spans] == [4.0, 10.25, 20.25, 39.0, 40.5]
    assert (task.begin, task.end) == (0.0, 50.0)


def test_a_record_of_two_rounds_is_made_one_of_four(gpu_trace: Any) -> None:
    tasks = [("joint", 0), ("joint", 1), ("evaluate", 2)]
    entries = [Entry("mark", 0, f"task site-1 {phase} {number}") for phase, number in tasks]
    names = [entry.name for entry in gpu_trace.repeated(entries, 4)]
    wanted = [("joint", 0), ("joint", 1), ("joint", 2), ("joint", 3), ("evaluate", 2)]
    assert names == [f"task site-1 {phase} {number}" for phase, number in wanted]


TRAINS_ELSEWHERE = """
import os, struct, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
def burn():
    while time.process_time() < 1: pass
if not os.fork():
    if os.fork(): os._exit(0)
    os.setsid()
    burn()
    (folder / "done").touch()
    time.sleep(5)
    os._exit(0)
os.wait()
if not os.fork():
    burn()
    os._exit(0)
os.wait()
while not (folder / "done").exists(): time.sleep(0.05)
(folder / "events").write_text("a 1.0 2.0")
(folder / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
"""
"""A second in a process that nobody waits for, as fedvlp's trainer is one, and a second in one that is waited for."""


def test_processor_time_of_a_process_that_nobody_waits_for_counts_and_no_other_twice(
    imported: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = imported("orchestration")
    monkeypatch.setattr(
        program, "command_of", lambda _1, _2, folder, _3: [sys.executable, "-S", "-c", TRAINS_ELSEWHERE, str(folder)]
    )
    assert 1.9 < program.run("flare-t1", program.Size())["cpu"] < 2.8


@pytest.fixture
def gpu(imported: Callable[[str], Any]) -> Any:
    return imported("gpu")


def in_forks(command: list[str], timeout: float, **_: object) -> subprocess.CompletedProcess[str]:
    """``subprocess.run`` of a program of the folder, without the seconds in which it imports."""
    return programs.forked(["python", *command[1:]], PROGRAMS, os.environ)


def test_a_piece_is_kept_only_for_the_same_card_size_and_torch(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures of a quick run on the CPU had been shown as those of a GPU."""
    file, asked = tmp_path / "gpu.json", []
    there = {"device": "cpu", "quick": True, "torch": torch.__version__}

    def measured(name: str, *_: object) -> dict[str, Any]:
        asked.append(name)
        return {"rows": [{"ms": 1}], "why": "", "seconds": 1}

    def again(*options: str) -> list[str]:
        asked.clear()
        command = ["gpu.py", "--device", "cpu", "--only", "contrast", "--resume", str(file), *options]
        monkeypatch.setattr(sys, "argv", command)
        gpu.main()
        return list(asked)

    monkeypatch.setattr(gpu, "measured", measured)
    assert again("--quick") == ["contrast"]
    (piece,) = json.loads(file.read_text()).values()
    assert piece.items() >= there.items()
    assert again("--quick") == []
    assert again() == ["contrast"], "not the quick one"
    for other in ({"device": "another card"}, {"torch": "1.0"}, {"why": "stopped"}):
        file.write_text(json.dumps({"contrast": {**piece, **other}}))
        assert again("--quick") == ["contrast"]
    file.write_text(json.dumps({"contrast": {name: piece[name] for name in ("rows", "why", "seconds", "device")}}))
    assert again("--quick") == ["contrast"], "an older file does not say"


@pytest.mark.slow(seconds=60)
def test_every_piece_of_the_gpu_benchmark_runs_and_is_not_measured_twice(
    gpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All pieces in forked processes; then one again, by the program as it is started and in a process of its own."""
    kept = tmp_path / "gpu.json"
    command = ("gpu.py", "--quick", "--device", "cpu", "--resume", str(kept), "--minutes", "14")
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "subprocess", SimpleNamespace(run=in_forks, TimeoutExpired=subprocess.TimeoutExpired))
        patch.setattr(sys, "argv", list(command))
        gpu.main()
    pieces = json.loads(kept.read_text())
    assert list(pieces) == list(gpu.PIECES)
    assert {name: piece["why"] for name, piece in pieces.items()} == dict.fromkeys(pieces, "")
    assert all(piece["rows"] for piece in pieces.values())
    pieces["contrast"]["why"] = "stopped"
    kept.write_text(json.dumps(pieces))
    done = subprocess.run(
        [sys.executable, *command], cwd=PROGRAMS, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    again = json.loads(kept.read_text())
    assert [name for name in pieces if again[name] != pieces[name]] == ["contrast"]
    assert again["contrast"]["why"] == ""


@pytest.mark.slow(seconds=20)
def test_the_trace_of_a_run_is_drawn_and_no_step_makes_the_host_wait(tmp_path: Path) -> None:
    command = ["python", "gpu_trace.py", "--quick", "--trace", str(tmp_path / "trace.json")]
    done = programs.forked(command, PROGRAMS, os.environ)
    assert done.returncode == 0, done.stderr[-2000:]
    told = done.stdout
    lines = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
    counted = next(line for line in lines if "steps" in line)
    assert counted == {"steps": 3 * 5 * (2 + 5), "waits_of_the_host_between_steps_of_a_task": 0}
    busy = [line["busy"] for line in lines if "busy" in line]
    assert len(busy) == 8
    assert all(0 < one < 1 for one in busy)
    assert (tmp_path / "trace.json").is_file()
    assert (tmp_path / "trace-hospital.json").is_file()
