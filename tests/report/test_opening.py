"""What a report says first: made of the run's own figures, with an interval where that was measured."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from support.report_pages import SITES, page_of, recalls, record, robust, run_of

from fedvlp.evaluation.intervals import Interval
from fedvlp.report.html import ABSENT
from fedvlp.report.opening import sentences
from fedvlp.report.run import Run
from fedvlp.run.beside import CHANCE, Beside
from fedvlp.run.compare import INITIAL
from fedvlp.run.folder import RunFolder
from fedvlp.run.metrics import Record
from fedvlp.run.recalls import COLUMNS, FROM_AVERAGE, GAIN, SITE, TRAINED, file_of


def said(folder: RunFolder) -> list[str]:
    return sentences(Run.read(folder))


def note(folder: RunFolder, gain: Interval, distances: dict[str, Interval], together: Interval | None = None) -> None:
    """Writes a file of recalls with these differences, and made-up intervals of both models.

    ``together``: among the studies of all sites, beside a source oracle of 2.
    """
    over = {INITIAL: Interval(4, 3, 5), TRAINED: Interval(8, 7, 9), GAIN: gain}
    rows = [[figure, "average", "", *of] for figure, interval in over.items() for of in [(interval,)]]
    rows += [[FROM_AVERAGE, SITE, site, interval] for site, interval in distances.items()]
    lines = [",".join(COLUMNS)]
    for figure, kind, site, interval in rows:
        chance = math.nan if figure in (GAIN, FROM_AVERAGE) else 3.125
        lines.append(f"{figure},{kind},{site},,1,64,{interval.value},{interval.low},{interval.high},{chance},nan")
    if together is not None:
        lines.append(f"trained,together,,all/,1,192,{together.value},{together.low},{together.high},0.5,2.0")
    file_of(folder).parent.mkdir()
    file_of(folder).write_text("\n".join(lines) + "\n")


def on_val(*averages: float) -> list[Record]:
    return [record(r, "train", {s: recalls(value, "val") for s in SITES}) for r, value in enumerate(averages)]


def test_without_intervals_the_figures_stand_alone(tmp_path: Path) -> None:
    """Of robust(): test R@1 3, 4, 5 at the start and 6, 8, 10 at the end; val at three moments only."""
    assert said(run_of(tmp_path, robust())) == [
        "R@1 rose from 4.0 to 8.0 on average over 3 sites after 2 rounds (test, in batches of 32; chance 3.1).",
        "site-1 is the lowest: R@1 6.0 against 8.0 on average. Without intervals nobody can say whether that is "
        "significant.",
    ]


def test_a_site_is_left_behind_where_its_whole_interval_is_below_the_average(tmp_path: Path) -> None:
    folder = run_of(tmp_path, robust())
    below, around, above = Interval(-2, -3.5, -0.5), Interval(0, -1, 1), Interval(2, 1, 3)
    note(folder, Interval(4, 2.5, 5.5), {"site-1": below, "site-2": around, "site-10": above})
    assert said(folder) == [
        "site-1 is left behind: R@1 6.0 against 8.0 on average, a difference of -2.0 [-3.5, -0.5].",
        "R@1 rose from 4.0 [3.0, 5.0] to 8.0 [7.0, 9.0] on average over 3 sites after 2 rounds, by +4.0 [+2.5, +5.5] "
        "(test, in batches of 32; chance 3.1; in brackets the 95 % interval over test patients).",
    ]
    page = page_of(folder)
    assert "site-1 is left behind" in page.text[: page.text.index("in progress")], "the sentence comes first"


def test_bounds_that_are_not_there_decide_nothing(tmp_path: Path) -> None:
    """At a site with one patient nobody knows how far others would move a figure: no bracket, and no verdict."""
    folder = run_of(tmp_path, robust())
    nan = math.nan
    note(folder, Interval(4, nan, nan), dict.fromkeys(SITES, Interval(-2, nan, nan)), Interval(6, nan, nan))
    lines = said(folder)
    assert lines[0].startswith("R@1 does not differ significantly from the initial model's: from 4.0 [3.0, 5.0]")
    assert "by +4.0 (test" in lines[0]
    assert lines[1].startswith("site-1 is the lowest")
    assert "Without intervals nobody can say" in lines[1]
    assert not [line for line in lines if "knowing the site" in line]
    assert "nan" not in page_of(folder).text


def test_what_is_no_more_than_chance_does_not_rise(tmp_path: Path) -> None:
    """The initial heads were below chance, by luck: 4.0 to 8.0 is a gain for certain, and worth nothing."""
    folder = run_of(tmp_path, robust())
    note(folder, Interval(4, 2.5, 5.5), {})
    run = Run.read(folder)
    for side, begins in ((1, "R@1 rose from 4.0"), (0, "R@1 is no more than chance although it went from 4.0")):
        chance = Beside("R@1", Interval(8, 7, 9), CHANCE, 3.125, side)
        first, gained, *_ = sentences(replace(run, beside=[chance]))
        assert first.startswith("This run is worth more than chance" if side else "This run shows no more than chance")
        assert gained.startswith(begins)


def test_a_closed_form_has_no_initial_model(tmp_path: Path) -> None:
    """Its heads are solved for: the random ones, which reach 23 % by luck, took no part and stand nowhere."""
    history = [
        record(0, "moments", {site: recalls(23.45, "val", "test") for site in SITES}),
        record(1, "evaluate", {site: recalls(7.5, "val", "test") for site in SITES}),
    ]
    folder = run_of(tmp_path, history, preset="one-round-cca-real")
    assert said(folder)[0] == (
        "R@1 is 7.5 on average over 3 sites after 1 round without a training step (test, in batches of 32; chance 3.1)."
    )
    lines = [",".join(COLUMNS), "trained,average,,,1,64,7.5,6,9,3.125,nan"]
    file_of(folder).parent.mkdir()
    file_of(folder).write_text("\n".join(lines))
    assert said(folder)[0].startswith("R@1 is 7.5 [6.0, 9.0] on average over 3 sites after 1 round")
    page = page_of(folder)
    assert page.tables["R@1 on the test split, in batches of 32 (%), with 95 % intervals"] == [
        ["", "test pairs", "trained", "from the average", "chance"],
        ["average over sites", "64", "7.5 [6.0, 9.0]", ABSENT, "3.1"],
    ]
    for word in ("23.4", "rose", "fell", "Before training", "1 rounds"):
        assert word not in page.text


def test_the_source_oracle_is_what_a_model_must_exceed(tmp_path: Path) -> None:
    for name, together, expected in (
        ("above", Interval(6, 2.5, 9), "is above what knowing the site alone would give: 6.0 [2.5, 9.0] against 2.0."),
        ("not", Interval(6, 1.5, 9), "shows no more than knowing the site would: 6.0 [1.5, 9.0] against 2.0."),
    ):
        folder = run_of(tmp_path / name, robust())
        note(folder, Interval(4, 2.5, 5.5), {}, together)
        assert said(folder)[-1] == f"Among the studies of all sites R@1 {expected}"
        table = page_of(folder).tables["Test split with intervals"]
        row = [
            "R@1, whole set, studies of all sites in one set",
            "192",
            ABSENT,
            "6.0 [{:.1f}, 9.0]",
            ABSENT,
            "0.5",
            "2.0",
        ]
        row[3] = row[3].format(together.low)
        assert table[-1] == row


def test_intervals_stand_beside_the_recalls(tmp_path: Path) -> None:
    folder = run_of(tmp_path, robust())
    assert f"fedvlp report {folder.path} --intervals" in page_of(folder).text
    note(folder, Interval(4, 2.5, 5.5), {})
    page = page_of(folder)
    assert page.tables["R@1 on the test split, in batches of 32 (%), with 95 % intervals"] == [
        ["", "test pairs", "initial", "trained", "gained", "from the average", "chance"],
        ["average over sites", "64", "4.0 [3.0, 5.0]", "8.0 [7.0, 9.0]", "+4.0 [+2.5, +5.5]", ABSENT, "3.1"],
    ]  # fmt: skip
    assert "Test split with intervals" not in page.tables, "no other recall was measured"
    assert page.text.index("What to do next") < page.text.index("Recall@K (R@K)"), "on the first screen"
    drawn = page.tables["R@1, test split, in batches of 32 (%)"]
    assert drawn[0] == [
        "",
        *(f"{of}{end}" for of in ("initial", "trained", "chance") for end in ("", ", low", ", high")),
    ]
    assert drawn[1] == ["average over sites", "4", "3", "5", "8", "7", "9", "3.125", ABSENT, ABSENT]
    assert f"Compare with each site alone: fedvlp simulate local --like {folder.path}" in page.text
    assert "--intervals" not in page.text


def test_sites_that_are_not_told_apart_and_a_gain_that_is_none(tmp_path: Path) -> None:
    folder = run_of(tmp_path, robust())
    note(folder, Interval(4, -0.5, 8.5), dict.fromkeys(SITES, Interval(-2, -4, 0.5)))
    gained, alike = said(folder)
    assert gained.startswith(
        "R@1 does not differ significantly from the initial model's: from 4.0 [3.0, 5.0] to 8.0 [7.0, 9.0]"
    )
    assert alike == (
        "No site is left behind: the lowest, site-1, has 6.0 against 8.0 on average, a difference of -2.0 [-4.0, +0.5]."
    )


@pytest.mark.parametrize(
    ("averages", "expected"),
    [
        ((4, 10, 14, 17, 20), "On val the average still rises, by 3.0 since round 3: more rounds may help."),
        ((4, 15, 20, 20.25, 20.5), "On val the average no longer rises: +0.2 since round 3."),
        ((4, 20, 15, 14, 13), "On val the average was highest after 1 round: 20.0; now it is 13.0."),
        ((4, 3, 2, 3, 2), "On val no round is above the start, 4.0."),
    ],
)
def test_how_val_goes_on(tmp_path: Path, averages: tuple[float, ...], expected: str) -> None:
    lines = said(run_of(tmp_path, on_val(*averages)))
    assert lines[1] == f"All sites have the same R@1, {averages[-1]:.1f}."
    assert lines[2] == expected


def test_few_evaluations_and_one_site(tmp_path: Path) -> None:
    assert len(said(run_of(tmp_path / "three", on_val(4, 5, 6)))) == 2, "three evaluations are no course"
    assert said(run_of(tmp_path / "start", on_val(4))) == [
        "Before training, R@1 is 4.0 on average over 3 sites (val, in batches of 32; chance 3.1).",
        "All sites have the same R@1, 4.0.",
    ]
    one = [record(r, "train", {"site-1": recalls(5 - r, "val", scopes=("all/",))}) for r in (0, 1)]
    assert said(run_of(tmp_path / "one", one)) == ["R@1 fell from 5.0 to 4.0 at site-1 after 1 round (val, whole set)."]


def test_a_classifier_and_a_run_without_figures(tmp_path: Path) -> None:
    assert said(run_of(tmp_path / "none", [record(0, "train", {})])) == ["No evaluation so far."]
    history = [record(r, "train", {}, server={"test/auc/macro": area}) for r, area in enumerate((0.5, 0.75))]
    assert said(run_of(tmp_path / "areas", history)) == [
        "The server's macro AUC on the public set (test; chance 0.5) rose from 0.500 to 0.750."
    ]
    assert said(run_of(tmp_path / "begun", history[:1])) == [
        "Before training, the server's macro AUC on the public set (test; chance 0.5) is 0.500."
    ]


def test_a_classifier_without_a_server_on_a_public_set_is_told_by_its_sites(tmp_path: Path) -> None:
    """It was said to have no evaluation so far. Sites 0.5 and 0.7 on average 0.6, then 0.7 and 0.9."""

    def at(round: int, phase: str, *areas: float) -> Record:
        sites = {site: {"val/auc/macro": area, "test/auc/macro": area} for site, area in zip("ab", areas, strict=True)}
        return record(round, phase, sites, server={})

    history = [at(0, "train", 0.5, 0.7), at(1, "train", 0.6, 0.7), at(2, "evaluate", 0.7, 0.9)]
    rose = "The sites' mean macro AUC (test; chance 0.5) rose from 0.600 to 0.800."
    assert said(run_of(tmp_path / "whole", history)) == [rose]
    assert said(run_of(tmp_path / "begun", history[:1])) == [
        "Before training, the sites' mean macro AUC (test; chance 0.5) is 0.600."
    ]
    assert said(run_of(tmp_path / "alone", history, "local")) == [
        rose, "Each site measured the model that it trained alone, and not the server's.",
    ]  # fmt: skip
    for name in ("a", "b"):
        history[1]["sites"][name].pop("test/auc/macro")
    assert said(run_of(tmp_path / "under way", history[:2])) == [
        "The sites' mean macro AUC (val; chance 0.5) rose from 0.600 to 0.650."
    ]


@pytest.mark.parametrize(
    ("preset", "whose", "intervals"),
    [
        ("creamfl", "its own model", "such models are not measured again"),
        ("local", "the model that it trained alone", "--intervals"),
        ("fedema", "a mixture of its own model and the server's", "--intervals"),
    ],
)
def test_a_page_says_whose_figures_the_sites_sent(tmp_path: Path, preset: str, whose: str, intervals: str) -> None:
    """And it advises intervals only where they can be measured: the sites' own models of CreamFL are not loaded."""
    folder = run_of(tmp_path, robust(), preset)
    gained, told, *_ = said(folder)
    assert gained.startswith("R@1 rose from 4.0 to 8.0")
    assert told == f"Each site measured {whose}, and not the server's."
    text = page_of(folder).text
    assert intervals.replace("RUN", str(folder.path)) in text
    assert ("--intervals" in text) == ("--intervals" in intervals)


def test_intervals_of_the_servers_model_are_none_of_what_fedemas_sites_measured(tmp_path: Path) -> None:
    """The first sentence is of the mixtures, without intervals; the table of the server's model says that it is."""
    folder = run_of(tmp_path, robust(), "fedema")
    note(folder, Interval(4, 2.5, 5.5), {"site-1": Interval(-2, -3.5, -0.5)})
    assert said(folder)[0] == (
        "R@1 rose from 4.0 to 8.0 on average over 3 sites after 2 rounds (test, in batches of 32; chance 3.1)."
    )
    assert "These metrics are of the server's model; those that the sites sent are not." in page_of(folder).text


def test_a_damaged_file_is_named_with_its_remedy(tmp_path: Path) -> None:
    folder = run_of(tmp_path, robust())
    note(folder, Interval(4, 2, 6), {})
    file_of(folder).write_text(file_of(folder).read_text().replace("4", "four"))
    with pytest.raises(ValueError, match=r"evaluation/recall.csv is not what fedvlp wrote there; remove it"):
        said(folder)
