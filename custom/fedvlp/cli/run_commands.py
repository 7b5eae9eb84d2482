"""`fedvlp simulate`, `runs`, `report`, `audit`, `compare` and `evaluate`: runs here, and what they reached."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedvlp.cli import known, panels
from fedvlp.cli.overrides import (
    DATA,
    AcceptAll,
    AcceptKinds,
    ConfigFile,
    Data,
    OwnSources,
    Plugins,
    Seed,
    Setting,
    Sites,
    Start,
    accepted,
    configured,
    given,
    overridden,
    read_config_file,
    records_of,
    resumed,
    typed_again,
    use_plugins,
)
from fedvlp.cli.stopping import goes_on_with

if TYPE_CHECKING:
    from fedvlp.data.deid import Accepted
    from fedvlp.run.folder import RunFolder

Runs = Annotated[Path, typer.Option("--runs", help="Where runs are kept.")]


app = typer.Typer()


WITH_RESUME = {"preset", "resume", "workers", "accept_phi_risk", "accept_phi_kind", "plugins"}
"""The options of ``simulate`` that are read where a run resumes; the command that is printed at Ctrl-C has them."""


@app.command(rich_help_panel=panels.TRAIN)
def simulate(
    context: typer.Context,
    preset: Annotated[
        str | None, typer.Argument(help="fedavg, fedprox, local, centralized, feddra, ..., or a plugin's.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Preset and settings as a file: TOML, or a run's config.json.")
    ] = None,
    data: Data = None,
    sites: Sites = None,
    site: OwnSources = None,
    cache: Annotated[
        Path | None, typer.Option(help="Folder for decoded images; default: in memory, with frozen towers RUNS/cache.")
    ] = None,
    settings: Setting = None,
    seed: Seed = None,
    start: Start = None,
    runs: Runs = Path("runs"),
    like: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a run: all but the method is that run's, with as many steps.", callback=known.run_if_given
        ),
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Folder of a run to resume.", callback=known.run_if_given)] = None,
    workers: Annotated[int, typer.Option(help="Sites trained side by side; 0 = as many as cores.")] = 0,
    accept_phi_risk: AcceptAll = False,
    accept_phi_kind: AcceptKinds = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Says what a run would take, after a few steps; leaves nothing but the cache."),
    ] = False,
    plugins: Plugins = None,
) -> None:
    """Runs an experiment on this machine, without FLARE's processes; the result is bit-identical to FLARE's."""
    use_plugins(plugins)
    accept = accepted(accept_phi_risk, accept_phi_kind)
    if workers < 0:
        raise ValueError(f"--workers is {workers}; give how many sites train side by side, or 0 = as many as cores")
    again = ["--workers", str(workers)] if workers else []
    again += typed_again(accept_phi_risk, accept_phi_kind, plugins)
    if resume is not None:
        folder, experiment = resumed(context, resume, preset, WITH_RESUME, "the preset")
        return show_run(experiment, folder, workers, accept, again)
    asked = asked_for(preset, config, data, sites, site, cache, settings, like, start, seed)
    if not asked.rounds.rounds:
        raise ValueError("rounds.rounds is 0, so nothing would be trained; give --set rounds.rounds=1, or more")
    experiment = with_features_kept(asked, runs)
    if dry_run:
        return tell_dry_run(experiment, workers, accept)
    from fedvlp.run.folder import RunFolder

    folder = RunFolder.create(runs, experiment)
    with folder.removed_unless_begun():
        show_run(experiment, folder, workers, accept, again)


def show_run(experiment: Any, folder: RunFolder, workers: int, accept: Accepted, again: list[str]) -> None:
    """Runs ``experiment``, or resumes it, and shows it; ``again``: options that are to be typed again to resume."""
    from rich.console import Console

    from fedvlp.cli.tables import RunBar, progress_line, show_beside, summary_tables
    from fedvlp.core.validate import printable
    from fedvlp.run.metrics import summary
    from fedvlp.run.simulate import simulate as run

    console = Console()
    print(f"run {folder.path} ({experiment.name})")
    goes_on_with("fedvlp", "simulate", "--resume", str(folder.path), *again)
    bar = RunBar(console, experiment.rounds.rounds)

    def caution(sentence: str) -> None:
        console.print(f"CAUTION: {printable(sentence).rstrip('.')}.", style="bold red", markup=False, highlight=False)

    def say(sentence: str) -> None:
        console.print(printable(sentence), markup=False, highlight=False, soft_wrap=True)

    def report(record: dict[str, Any]) -> None:
        bar.note(record)
        console.print(progress_line(record), markup=False, highlight=False, soft_wrap=True)

    history = run(
        experiment,
        folder,
        workers=workers or default_workers(experiment),
        accept_phi_risk=accept,
        report=report,
        caution=caution,
        say=say,
        watch=bar.showing,
    )
    page = write_report(folder, say=say)  # measures
    console.print(*summary_tables(experiment.name, summary(history, experiment.takes_steps)))
    show_beside(console, folder)
    print(f"model {folder.model}\nreport {page}")
    print(f"with images and reports, for the eyes of their owner alone: fedvlp report {folder.path} --films")


def asked_for(
    preset: str | None,
    config: Path | None,
    data: str | None,
    sites: int | None,
    site: list[str] | None,
    cache: Path | None,
    settings: list[str] | None,
    like: Path | None,
    start: str | None = None,
    seed: int | None = None,
) -> Any:
    """The experiment of ``simulate``'s options; what they say goes before what the file of ``--config`` says."""
    file = read_config_file(config) if config else ConfigFile()
    if file.data and site:
        raise ValueError("--config has data, and --site gives every site its data set; leave one of them out")
    return configured(
        file.base(preset),
        data or file.data,
        file.sites if sites is None else sites,
        [*file.settings, *(settings or [])],
        site,
        cache,
        like,
        start=start,
        seed=seed,
    )


def with_features_kept(experiment: Any, runs: Path) -> Any:
    """The experiment with a cache beside the runs, where frozen towers take minutes for what would be thrown away.

    A dry run fills it, and every run on the same records finds it there.
    """
    from dataclasses import replace

    data = experiment.data
    if not experiment.crops_centres or getattr(data, "cache", "none") is not None:
        return experiment
    return replace(experiment, data=replace(data, cache=str(runs.absolute() / "cache")))


def default_workers(experiment: Any) -> int:
    """As many sites at a time as this machine has cores for."""
    import os

    return max(1, (os.cpu_count() or 1) // int(experiment.training.threads))


def tell_dry_run(experiment: Any, workers: int, accept: Accepted) -> None:
    """Prints what the run would take."""
    from rich.console import Console

    from fedvlp.cli.panels import plain_table
    from fedvlp.cli.tables import dry_run_lines
    from fedvlp.run.dry_run import dry_run

    plan = dry_run(experiment, accept)
    splits = ("train", "val", "test")
    rows = [(site, *(str(counts[split]) for split in splits)) for site, counts in plan.records.items()]
    console = Console()
    console.print(plain_table(f"{experiment.name}: records", ("site", *splits), rows))
    for line in dry_run_lines(plan, workers or default_workers(experiment)):
        console.print(line, markup=False, highlight=False)


def write_report(folder: Any, intervals: bool = False, films: bool = False, say: Callable[[str], None] = print) -> Path:
    """Writes the run's report page and returns its path; measured with ``intervals``, or where few records are."""
    from fedvlp.report.run_page import write
    from fedvlp.run import beside

    (beside.measure if intervals else beside.measure_unasked)(folder, say)
    with beside.timed(say, "writing the report"):
        return write(folder, films)


@app.command("runs", rich_help_panel=panels.JUDGE)
def listing(
    root: Annotated[Path | None, typer.Argument(help="Where runs are kept; default: runs.")] = None,
    runs: Runs = Path("runs"),
) -> None:
    """Lists the runs in a folder: state, last phase, recall on the test split, megabytes.

    To delete a run, remove its folder; RUNS/cache holds decoded images alone, and is made again.
    """
    root = root or runs
    if not any(root.glob("*/*/config.json")):
        raise ValueError(f"no run in {root}; expected {root}/<preset>/<number>, as simulate makes them")
    from rich.console import Console

    from fedvlp.cli.panels import plain_table
    from fedvlp.run.listing import listed

    rows = [
        (run.name, run.state, run.phases, *(_percent(value) for value in (run.average, run.worst)), run.bytes // 10**6)
        for run in listed(root)
    ]
    columns = ("run", "state", "last phase", "R@1 average", "R@1 worst site", "MB")
    Console().print(plain_table(f"runs in {root}", columns, rows))


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1f}"


@app.command(rich_help_panel=panels.JUDGE)
def report(
    run: Annotated[Path, typer.Argument(help="Folder of a run.", callback=known.run_in)],
    intervals: Annotated[
        bool, typer.Option("--intervals", help="Measures the test records again, with intervals over patients.")
    ] = False,
    films: Annotated[
        bool,
        typer.Option(
            "--films", help="Writes report-films.html, with images and reports: for their owner's eyes alone."
        ),
    ] = False,
    plugins: Plugins = None,
) -> None:
    """Writes one page on a run: its metrics beside baselines, the sites, curves, costs and settings."""
    from rich.console import Console

    from fedvlp.cli.tables import show_beside, summary_tables
    from fedvlp.run.folder import RunFolder
    from fedvlp.run.metrics import summary

    use_plugins(plugins)
    folder = RunFolder(run)
    experiment, history = folder.experiment(), folder.history()
    if not history:
        print(f"{run} has no complete phase yet, so there is nothing to report; resume it with --resume {run}")
        raise typer.Exit(1)
    page = write_report(folder, intervals, films)
    tables = summary_tables(experiment.name, summary(history, experiment.takes_steps))
    if tables:
        Console().print(*tables)
        show_beside(Console(), folder)
    else:  # as at hospitals under privacy-dp.json
        print("no recall left the sites (their policy), or none was measured")
    print(f"report {page}")


def tell_outgoing(folder: RunFolder) -> None:
    """Prints, for every site, what ``envelope.most_membership`` would be compared with."""
    from fedvlp.deploy.outgoing import rehearsed

    for site, row in rehearsed(folder):
        told = row if isinstance(row, str) else f"AUC {row.area.unsigned()} by {row.attack}"
        print(f"{site}: {told}")
    print("an update is refused where the lower end is above envelope.most_membership in local/fedvlp.json")


@app.command(rich_help_panel=panels.JUDGE)
def audit(
    run: Annotated[Path, typer.Argument(help="Folder of a finished run.", callback=known.run_in)],
    outgoing: Annotated[
        bool,
        typer.Option("--outgoing", help="Only shows what a site's limit on membership would measure."),
    ] = False,
    plugins: Plugins = None,
) -> None:
    """Tests membership inference on a run's model; report and model card say the result."""
    from rich.console import Console

    from fedvlp.cli.tables import audit_tables
    from fedvlp.run import audit as audits
    from fedvlp.run.folder import RunFolder

    use_plugins(plugins)
    folder = RunFolder(run)
    if outgoing:
        return tell_outgoing(folder)
    measured = audits.measure(folder)
    console = Console()
    console.print(*audit_tables(measured))
    for sentence in measured.controls():
        console.print(sentence, markup=False, highlight=False)
    print(f"wrote {audits.file_of(folder)}\nreport {write_report(folder)}")


@app.command(rich_help_panel=panels.JUDGE)
def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of finished runs; the last is compared with the others.",
            callback=lambda runs: list(map(known.run_in, runs)),
        ),
    ],
    k: Annotated[int, typer.Option(help="Recall@K.")] = 1,
    markdown: Annotated[bool, typer.Option("--markdown", help="Prints Markdown.")] = False,
    html: Annotated[Path | None, typer.Option("--html", help="Also writes one page for all runs to this file.")] = None,
    plugins: Plugins = None,
) -> None:
    """Shows runs on the same records beside each other: average and worst site, with intervals over test patients."""
    from rich.console import Console

    from fedvlp.cli import tables
    from fedvlp.core.validate import printable
    from fedvlp.report import comparison_page
    from fedvlp.run.compare import compare as measured
    from fedvlp.run.folder import RunFolder

    use_plugins(plugins)
    folders = [RunFolder(run) for run in runs]
    compared = measured(folders, k)
    for title, columns, rows in comparison_page.tables(compared):
        if markdown:
            print(tables.markdown(title, columns, rows), end="\n\n")
        else:
            Console().print(panels.plain_table(title, columns, rows))
    print(printable(comparison_page.verdict(compared)))
    if html is not None:
        print(f"page {comparison_page.write(compared, folders, html)}")


@app.command(rich_help_panel=panels.JUDGE)
def evaluate(
    context: typer.Context,
    run: Annotated[
        Path,
        typer.Argument(help="Folder of a run; linear-probe, segmentation, retrieval, zero-shot: of a model too."),
    ],
    what: Annotated[
        str, typer.Option(help="linear-probe, zero-shot, ... or a plugin's; a name that is none of them lists all.")
    ],
    data: Annotated[
        str | None, typer.Option(help=DATA + "; of a downstream evaluation or zero-shot; default: the run's own.")
    ] = None,
    settings: Setting = None,
    against: Annotated[
        list[Path] | None, typer.Option("--against", help="Another run or model to compare with; may be repeated.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of training at most; default: the protocol's.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where the files of a downstream evaluation go; default: the run's folder.")
    ] = None,
    plugins: Plugins = None,
) -> None:
    """Evaluates a run or a model further: linear probe, segmentation, zero-shot and more, with tables and figures.

    --set reaches the records and the protocol, e.g. data.label_columns=finding or probe.fractions=[0.1,1].
    """
    use_plugins(plugins)
    known.refuse_evaluation(what, run)
    from rich.console import Console

    from fedvlp.cli.tables import table_of_file
    from fedvlp.run.config import choose
    from fedvlp.run.evaluate import EVALUATIONS, choices_of
    from fedvlp.run.folder import RunFolder
    from fedvlp.run.model_use import decoded_size

    measure = choose("evaluation", what, "EVALUATIONS", EVALUATIONS)
    kind = choices_of(measure)
    refuse_unread(what, given(context), settings or [], kind.reads)
    folder = RunFolder(run)
    chosen = None if data is None else records_of(data, decoded_size(run))
    if chosen is None and folder.config.exists() and any(one.startswith("data.") for one in settings or []):
        chosen = folder.experiment().data  # the run's own records, read otherwise
    choices = kind(steps, chosen, tuple(against or ()), out)
    console = Console(markup=False, highlight=False)
    for file in measure(folder, overridden(choices, settings)):
        if (table := table_of_file(file)) is not None:
            console.print(table)
        print(f"wrote {file}")


def refuse_unread(
    what: str, options: Mapping[str, str], settings: Sequence[str], reads: frozenset[str] | None = None
) -> None:
    """Raises ValueError for an option or setting that the evaluation does not read, and where --set names an option.

    ``options``: name of each that was given -> as it is typed. ``reads``: those that a plugin's evaluation reads; None:
    it does not say.
    """
    from fedvlp.run.evaluate import EVALUATIONS, READ_BY

    typed = {name: option for name, option in options.items() if name in READ_BY}
    for setting in settings:
        key = setting.partition("=")[0]
        if key in ("steps", "data", "against", "out"):
            raise ValueError(f"--set {key}: that is an option and no setting; give --{key}")
        head = key.partition(".")[0]
        typed.setdefault(head, f"--set {key}")
    for name, option in typed.items():
        readers = READ_BY.get(name)
        if readers and what in EVALUATIONS and what not in readers:
            others = [other for other in EVALUATIONS if other in readers]
            raise ValueError(f"{option} is read by --what {', '.join(others)}; leave it out with --what {what}")
        if readers and reads is not None and name not in reads:
            raise ValueError(f"{option} is not read by --what {what}; leave it out")
