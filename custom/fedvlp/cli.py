"""The command line: simulate, jobs, report, evaluate, prepare, doctor. Every command says what it wrote and where."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from fedvlp.experiment import Experiment

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False)
jobs_app = typer.Typer(no_args_is_help=True, help="FLARE job folders: build the committed ones, export one to submit.")
app.add_typer(jobs_app, name="jobs")

Setting = Annotated[
    list[str] | None, typer.Option("--set", help="Override a setting, e.g. method.rho=0.1; may be repeated.")
]
Runs = Annotated[Path, typer.Option("--runs", help="Where runs are kept.")]


def configured(preset: str, data: str | None, sites: int | None, settings: list[str] | None) -> Experiment:
    """The preset with the command line's choices. Raises ValueError."""
    from dataclasses import replace

    from fedvlp import presets
    from fedvlp.config import override
    from fedvlp.data.sources.table import TableSource
    from fedvlp.site_config import NamedData

    experiment = presets.get(preset)
    kind, _, rest = (data or "synthetic").partition(":")
    margin = experiment.model.image_size * 9 // 8
    if kind == "table" and rest:
        experiment = replace(experiment, data=TableSource(path=str(Path(rest).absolute()), image_size=margin))
    elif kind == "named" and rest:
        experiment = replace(experiment, data=NamedData(rest, margin))
    elif data not in (None, "synthetic"):
        raise ValueError(f"--data is {data!r}; give synthetic or table:PATH.csv (a job: named:NAME too)")
    if sites is not None:
        experiment = override(experiment, "partition.sites", str(sites))
        if kind == "synthetic":
            experiment = override(experiment, "data.sites", str(sites))
        if hasattr(experiment.extra, "sites"):
            experiment = override(experiment, "extra.sites", str(sites))
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"--set {setting!r} has no '='; write --set method.rho=0.1")
        experiment = override(experiment, key, value)
    return experiment


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


@jobs_app.command("build")
def jobs_build(
    folder: Annotated[Path, typer.Option(help="Where the job folders are.")] = Path("jobs"),
    check: Annotated[bool, typer.Option("--check", help="Only tell whether they are up to date.")] = False,
) -> None:
    """Writes the committed job folders from the presets."""
    from fedvlp import presets
    from fedvlp.flare.jobs import COMMITTED, folder_of, job_files, write_job

    stale = []
    for name in COMMITTED:
        experiment = presets.get(name)
        if check:
            for path, text in job_files(experiment).items():
                file = folder / folder_of(name) / path
                if not file.exists() or file.read_text(encoding="utf-8") != text:
                    stale.append(f"{folder_of(name)}/{path}")
        else:
            print(write_job(experiment, folder / folder_of(name)))
    if stale:
        raise ValueError(f"not what the presets say: {', '.join(stale)}; run `fedvlp jobs build`")


@jobs_app.command("export")
def jobs_export(
    preset: Annotated[str, typer.Argument(help="Name of a preset.")],
    out: Annotated[Path, typer.Argument(help="Folder to write the job to.")],
    data: Annotated[str | None, typer.Option(help="synthetic, table:PATH.csv or named:NAME (the sites' own).")] = None,
    sites: Annotated[int | None, typer.Option(help="Number of sites.")] = None,
    at: Annotated[list[str] | None, typer.Option("--at", help="A site that takes part; may be repeated.")] = None,
    settings: Setting = None,
    mlflow: Annotated[str, typer.Option(help="URI of an MLflow server for the sites' curves.")] = "",
    child: Annotated[bool, typer.Option("--child", help="Train in a process of its own: a crash costs a task")] = False,
    processes: Annotated[
        int, typer.Option(min=1, help="With --child: processes a task trains in, where the site does not say how many.")
    ] = 1,
    link_mbit: Annotated[
        float | None, typer.Option(help="Speed of the slowest link in Mbit/s; sets all timeouts for this model.")
    ] = None,
    encrypted: Annotated[
        bool, typer.Option("--encrypted", help="The server adds ciphertexts: the sites' own filters must encrypt.")
    ] = False,
    bundled: Annotated[bool, typer.Option("--bundled", help="Put the package into the job (sites need BYOC).")] = False,
    installed: Annotated[
        bool, typer.Option("--installed", help="No custom folder: sites have fedvlp and allow its classes.")
    ] = False,
) -> None:
    """Writes a FLARE job with your settings, to simulate or to submit."""
    from fedvlp.flare.jobs import write_job
    from fedvlp.flare.timeouts import Timeouts, model_bytes

    if bundled and installed:
        raise ValueError("--bundled and --installed exclude each other")
    experiment = configured(preset, data, sites, settings)
    timeouts = None if link_mbit is None else Timeouts.of(model_bytes(experiment), link_mbit)
    if processes > 1 and not child:
        raise ValueError("--processes needs --child: the job's own process at a site trains alone")
    options = {"sites": at or (), "mlflow": mlflow, "child": child, "timeouts": timeouts, "encrypted": encrypted}
    print(write_job(experiment, out, custom=not installed, bundled=bundled, processes=processes, **options))


@jobs_app.command("resubmit")
def jobs_resubmit(
    job_id: Annotated[str, typer.Argument(help="Id of a job that ended, or whose server died.")],
    kit: Annotated[Path, typer.Option(help="Startup kit of the lead (or an admin).")],
    folder: Annotated[Path | None, typer.Option(help="Job folder to submit; default: the job as it was.")] = None,
    abort: Annotated[bool, typer.Option("--abort", help="End it first if it runs, e.g. to take back a site.")] = False,
) -> None:
    """Goes on with a job: says what became of it and submits it again; it resumes after its last complete phase."""
    from fedvlp.flare import resubmit

    with resubmit.session(kit) as opened:
        verdict, new = resubmit.resubmit(opened, job_id, folder, abort=abort)
    print(f"{verdict.finding}\nsubmitted again as {new}\nfollow it: nvflare job monitor {new}")


@jobs_app.command("keep")
def jobs_keep(
    job_id: Annotated[str, typer.Argument(help="Id of a submitted job.")],
    kit: Annotated[Path, typer.Option(help="Startup kit of the lead (or an admin).")],
    attempts: Annotated[int, typer.Option(min=0, help="How often it is submitted again at most.")] = 5,
    every: Annotated[float, typer.Option(min=0.5, help="Seconds between two looks.")] = 10.0,
    patience: Annotated[float, typer.Option(min=0, help="Seconds that a finding must last.")] = 60.0,
) -> None:
    """Follows a job to its end and submits it again when its server dies, it ends early or a lost site is back."""
    from fedvlp.flare.keep import keep

    verdict = keep(kit, job_id, partial(print, flush=True), attempts=attempts, every=every, patience=patience)
    print(verdict.finding)
    if not verdict.complete:
        raise typer.Exit(1)


@jobs_app.command("status")
def jobs_status(folder: Annotated[Path, typer.Argument(help="A run's folder, or a downloaded job.")]) -> None:
    """Says what became of a run, whatever FLARE calls the job's end; exit code 1 unless its results are complete."""
    from fedvlp.flare.resubmit import STATUS_FILE, read_status

    status = read_status(folder)
    if not status:
        raise ValueError(f"{folder} holds no {STATUS_FILE}: no run of fedvlp, or one that never began")
    print(" ".join(f"{key}={value}" for key, value in status.items() if value != ""))
    if status["status"] != "finished":
        raise typer.Exit(1)


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

    from fedvlp.core.checkpoint import CheckpointError
    from fedvlp.core.server import QuorumLostError

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    try:
        app()
    except (ValueError, FileExistsError, CheckpointError, QuorumLostError) as error:
        print(f"fedvlp: {error}", file=sys.stderr)
        sys.exit(2)
    except Stopped:
        print("fedvlp: stopped; go on with --resume and the run's folder", file=sys.stderr)
        sys.exit(130)
