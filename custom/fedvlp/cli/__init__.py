"""The command line: simulate, jobs, report, evaluate, prepare, doctor. Every command says what it wrote and where."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from fedvlp.cli import jobs
from fedvlp.cli.choices import Setting, configured

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False)
app.add_typer(jobs.app, name="jobs")

Runs = Annotated[Path, typer.Option("--runs", help="Where runs are kept.")]


def _version(asked: bool) -> None:
    if asked:
        from fedvlp import __version__

        print(f"fedvlp {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Says which version this is.")
    ] = False,
) -> None:
    """What comes before a command."""


@app.command()
def simulate(
    preset: Annotated[str, typer.Argument(help="fedavg, fedprox, local, centralized, feddra, ...")],
    data: Annotated[str | None, typer.Option(help="synthetic (default) or table:PATH.csv.")] = None,
    sites: Annotated[int | None, typer.Option(help="Number of sites to simulate.")] = None,
    settings: Setting = None,
    runs: Runs = Path("runs"),
    resume: Annotated[Path | None, typer.Option(help="Folder of a run to go on with.")] = None,
    workers: Annotated[int, typer.Option(help="Sites trained side by side; 0 = as many as cores.")] = 0,
    accept_phi_risk: Annotated[
        bool, typer.Option("--accept-phi-risk", help="Train although the scan finds identifiers in reports.")
    ] = False,
) -> None:
    """Runs an experiment on this machine, without FLARE's processes; the result has the same bytes as FLARE's."""
    import os

    from rich.console import Console

    from fedvlp.runs import RunFolder, summary
    from fedvlp.runs import simulate as run
    from fedvlp.tables import progress_line, summary_tables

    console = Console()
    if resume is not None:
        folder = RunFolder(resume)
        experiment = folder.experiment()
        if settings or data or sites:
            raise ValueError("--resume goes on with the run's own configuration; leave --set, --data and --sites out")
    else:
        experiment = configured(preset, data, sites, settings)
        folder = RunFolder.create(runs, experiment)
    console.print(f"run {folder.path} ({experiment.name})", highlight=False)
    count = workers or max(1, (os.cpu_count() or 1) // experiment.training.threads)
    history = run(
        experiment, folder, workers=count, accept_phi_risk=accept_phi_risk,
        report=lambda record: print(progress_line(record), flush=True),
    )  # fmt: skip
    console.print(*summary_tables(experiment.name, summary(history)))
    print(f"model {folder.model}\nreport {write_report(folder)}")


def write_report(folder: Any) -> Path:
    """The run's report page."""
    from fedvlp.report import write

    return write(folder)


@app.command()
def report(run: Annotated[Path, typer.Argument(help="Folder of a run.")]) -> None:
    """Writes one page with the curves, the sites and the weights of a run."""
    from rich.console import Console

    from fedvlp.runs import RunFolder, summary
    from fedvlp.tables import summary_tables

    folder = RunFolder(run)
    experiment = folder.experiment()
    Console().print(*summary_tables(experiment.name, summary(folder.history())))
    print(f"report {write_report(folder)}")


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    what: Annotated[
        str, typer.Option(help="distortion, shallow, deep (re-training tables), similarity (curves), zero-shot.")
    ],
    steps: Annotated[int | None, typer.Option(help="Steps of re-training; default: the protocol's.")] = None,
    layers: Annotated[int | None, typer.Option(help="shallow, deep: layers per encoder; default: a third.")] = None,
    own: Annotated[bool, typer.Option("--own", help="Re-train as the run's method does, not plainly.")] = False,
) -> None:
    """Measures more of a run than its summary has, and writes CSV and PNG into its folder."""
    from fedvlp.config import nearest
    from fedvlp.evaluate import WHAT, Choices
    from fedvlp.runs import RunFolder

    if what not in WHAT:
        raise ValueError(f"--what is {what!r}{nearest(what, list(WHAT))}; there are: {', '.join(WHAT)}")
    for file in WHAT[what](RunFolder(run), Choices(steps, layers, own)):
        print(f"wrote {file}")


@app.command()
def prepare(
    source: Annotated[str, typer.Argument(help="table, candid_ptx, chexpert, mimic_cxr, nih_cxr14, openi, rsna.")],
    root: Annotated[Path, typer.Option(help="Folder of the images.")],
    out: Annotated[Path, typer.Option(help="Folder for the decoded images: the cache, in local/fedvlp.json.")],
    path: Annotated[str | None, typer.Option(help="The table, below root; default: as published.")] = None,
    image_size: Annotated[int, typer.Option(help="Side of the decoded squares; jobs must ask for the same.")] = 256,
    settings: Setting = None,
    workers: Annotated[int, typer.Option(help="Processes that decode; 0 = as many as cores.")] = 0,
    samples: Annotated[int, typer.Option(help="Images on the contact sheet.")] = 24,
) -> None:
    """Decodes a data set once, and says what is in it. What was interrupted goes on where it stopped."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from fedvlp.data.overview import contact_sheet
    from fedvlp.prepare import prepared, source_of
    from fedvlp.tables import prepared_tables

    console = Console()
    chosen = source_of(source, root, out, path, image_size, settings or [])
    columns = ("decoding", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("decoding", total=None)
        done = prepared(chosen, workers, lambda ready, rows: bar.update(task, completed=ready, total=rows))
    console.print(*prepared_tables(done.cohort, done.summary, done.built))
    if any(done.cohort.has_image()):
        sheet = out / "contact-sheet.png"
        print(f"{contact_sheet(done.cohort, sheet, samples)} samples in {sheet}: look at them")


@app.command()
def doctor(
    site: Annotated[Path | None, typer.Option(help="Startup kit of a site, to check that as well.")] = None,
) -> None:
    """Checks that this machine can run fedvlp; with --site, that the site of a startup kit is ready for jobs."""
    from itertools import chain

    from fedvlp.doctor import checks
    from fedvlp.site_doctor import site_checks

    failed = False
    for check in chain(checks(), site_checks(site) if site else ()):
        failed |= check.ok is False
        print(f"{'ok  ' if check.ok else 'FAIL' if check.ok is False else 'note'}  {check.what}: {check.found}")
    if failed:
        raise typer.Exit(1)


class Stopped(BaseException):
    """Ctrl-C or SIGTERM: not an error, and not for the command-line library to swallow."""


def _stop(number: int, frame: object) -> None:
    raise Stopped


def main() -> None:
    """Entry point: mistakes are one line and exit code 2, Ctrl-C is 130, a stopped run is 2 and can be resumed."""
    import signal

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    try:
        app()
    except Stopped:
        print("fedvlp: stopped; go on with --resume and the run's folder", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if not _in_our_words(error):
            raise
        print(f"fedvlp: {error}", file=sys.stderr)
        sys.exit(2)


def _in_our_words(error: Exception) -> bool:
    """Whether the text of the error is meant for the person at the terminal. Imported here: `--help` needs no torch."""
    from fedvlp.core.checkpoint import CheckpointError
    from fedvlp.core.server import QuorumLostError

    return isinstance(error, (ValueError, FileExistsError, CheckpointError, QuorumLostError))
