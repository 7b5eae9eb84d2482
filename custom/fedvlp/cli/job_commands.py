"""`fedvlp jobs`: job folders for FLARE, and what becomes of a job that was submitted."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedvlp.cli import known
from fedvlp.cli.overrides import DATA, Plugins, Seed, Setting, Start, configured, use_plugins
from fedvlp.cli.use_commands import printable

if TYPE_CHECKING:
    from fedvlp.run.experiment import Experiment

app = typer.Typer(no_args_is_help=True, help="FLARE job folders: build the committed ones, export one to submit.")


@app.command("build")
def jobs_build(
    folder: Annotated[Path, typer.Option(help="Where the job folders are.")] = Path("jobs"),
    check: Annotated[bool, typer.Option("--check", help="Only tell whether they are up to date.")] = False,
    plugins: Plugins = None,
) -> None:
    """Writes the committed job folders from the presets; with --plugin, a job for each preset of the plugins."""
    from fedvlp.flare.jobs import COMMITTED, folder_of, job_files, write_job
    from fedvlp.run import presets

    use_plugins(plugins)
    stale = []
    for name in presets.of_plugins() if plugins else COMMITTED:
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


@app.command("export")
def jobs_export(
    preset: Annotated[str, typer.Argument(help="Name of a preset.")],
    out: Annotated[Path, typer.Argument(help="Folder to write the job to.")],
    data: Annotated[
        str | None,
        typer.Option(help=DATA + " or named:NAME (the sites' own), with a public set named:NAME,public=SET."),
    ] = None,
    sites: Annotated[int | None, typer.Option(help="Number of sites.")] = None,
    at: Annotated[list[str] | None, typer.Option("--at", help="A site that takes part; may be repeated.")] = None,
    settings: Setting = None,
    seed: Seed = None,
    start: Start = None,
    child: Annotated[bool, typer.Option("--child", help="Train in a process of its own: a crash costs a task")] = False,
    processes: Annotated[
        int, typer.Option(min=1, help="With --child: processes a task trains in, where the site does not say how many.")
    ] = 1,
    link_mbit: Annotated[
        float | None, typer.Option(help="Speed of the slowest site's link in Mbit/s; sets all timeouts for this model.")
    ] = None,
    server_mbit: Annotated[
        float | None, typer.Option(help="With --link-mbit: the server's own line, which all sites share at once.")
    ] = None,
    task_minutes: Annotated[
        int | None,
        typer.Option(min=1, help="Minutes a site's task may take, by default 60; with --link-mbit without transfers."),
    ] = None,
    encrypted: Annotated[
        bool, typer.Option("--encrypted", help="The server adds ciphertexts: the sites' own filters must encrypt.")
    ] = False,
    gpus: Annotated[int, typer.Option(min=0, help="GPUs that each site reserves for the job.")] = 0,
    gpu_memory: Annotated[float, typer.Option(min=0, help="With --gpus: GiB that the job takes of each GPU.")] = 0,
    bundled: Annotated[bool, typer.Option("--bundled", help="Put the package into the job (sites need BYOC).")] = False,
    installed: Annotated[
        bool, typer.Option("--installed", help="No custom folder: sites have fedvlp and allow its classes.")
    ] = False,
    plugins: Plugins = None,
) -> None:
    """Writes a FLARE job with your settings, to simulate or to submit."""
    use_plugins(plugins)
    if bundled and installed:
        raise ValueError("--bundled and --installed exclude each other")
    if processes > 1 and not child:
        raise ValueError("--processes needs --child: the job's own process at a site trains alone")
    experiment = configured(preset, data, sites, settings, travels=True, start=start, seed=seed)
    from fedvlp.deploy.named_data import NamedData
    from fedvlp.flare.jobs import write_job
    from fedvlp.flare.timeouts import Timeouts, model_bytes
    from fedvlp.run.assembly import Assembly
    from fedvlp.run.cautions import drawn_data
    from fedvlp.run.fitting import for_sites

    _refuse_sites_without_records(experiment, at or [])
    if isinstance(experiment.data, NamedData):
        experiment = for_sites(experiment, at or [])
    longest = 60 * (task_minutes or 60)
    timeouts = None
    if link_mbit is not None:
        shared = _shared(link_mbit, server_mbit, len(at or Assembly(experiment).sites()))
        timeouts = Timeouts.of(model_bytes(experiment), shared, longest)
    elif server_mbit is not None:
        raise ValueError("--server-mbit needs --link-mbit, the speed of the slowest site's link")
    waits = {"timeouts": timeouts, "task_timeout": longest if task_minutes else 0}
    options: dict[str, Any] = {"sites": at or (), "child": child, "encrypted": encrypted, **waits}
    options |= {"gpus": gpus, "gpu_memory": gpu_memory}
    for sentence in drawn_data(experiment):
        print(f"CAUTION: {sentence}.", file=sys.stderr)
    print(write_job(experiment, out, custom=not installed, bundled=bundled, processes=processes, **options))


def _shared(link: float, server: float | None, sites: int) -> float:
    """Mbit/s that a site has while all transfer at once, which it says: they begin a phase together."""
    each = min(link, server / sites) if server is not None else link
    asks = "" if server is not None else "; if its line has less, give --server-mbit"
    print(f"timeouts: {each:g} Mbit/s a site, {each * sites:g} at the server with all {sites}{asks}", file=sys.stderr)
    return each


def _refuse_sites_without_records(experiment: Experiment, at: list[str]) -> None:
    """Raises ValueError where the records are the synthetic cohort's and ``--at`` names a site without any."""
    from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
    from fedvlp.run.assembly import Assembly

    if not at or not isinstance(experiment.data, SyntheticCohort):
        return
    there = Assembly(experiment).sites()
    if strangers := [site for site in at if site not in there]:
        raise ValueError(
            f"--at {', '.join(strangers)}: the synthetic cohort has no such site; it has {', '.join(there)}. Name "
            "those, more of them with --sites, or give --data named:NAME, the sites' own"
        )


@app.command("resubmit")
def jobs_resubmit(
    job_id: Annotated[str, typer.Argument(help="Id of a job that ended, or whose server died.")],
    kit: Annotated[Path, typer.Option(help="Startup kit of the lead (or an admin).")],
    folder: Annotated[Path | None, typer.Option(help="Job folder to submit; default: the job as it was.")] = None,
    abort: Annotated[bool, typer.Option("--abort", help="End it first if it runs, e.g. to take back a site.")] = False,
) -> None:
    """Resumes a job: says what became of it and submits it again; it continues after its last complete phase."""
    from fedvlp.flare import job_status

    with job_status.session(kit) as opened:
        verdict, new = job_status.resubmit(opened, job_id, folder, abort=abort)
    print(f"{verdict.finding}\nsubmitted again as {new}\nfollow it: nvflare job monitor {new}")


@app.command("keep")
def jobs_keep(
    job_id: Annotated[str, typer.Argument(help="Id of a submitted job.")],
    kit: Annotated[Path, typer.Option(help="Startup kit of the lead (or an admin).")],
    attempts: Annotated[int, typer.Option(min=0, help="How often it is submitted again at most.")] = 5,
    every: Annotated[float, typer.Option(min=0.5, help="Seconds between two looks.")] = 10.0,
    patience: Annotated[float, typer.Option(min=0, help="Seconds that a finding must last.")] = 60.0,
) -> None:
    """Watches a job to its end, and resubmits it when its server dies, it ends early or a lost site is back."""
    from fedvlp.flare.job_supervisor import supervise

    verdict = supervise(kit, job_id, partial(print, flush=True), attempts=attempts, every=every, patience=patience)
    print(verdict.finding)
    if not verdict.complete:
        raise typer.Exit(1)


@app.command("rollback")
def jobs_rollback(
    folder: Annotated[
        Path,
        typer.Argument(help="Folder of a run, of `fedvlp simulate` or of the FLARE server.", callback=known.run_in),
    ],
    round: Annotated[int, typer.Option(min=0, help="The first round that is undone; 0 = begin again.")],
    plugins: Plugins = None,
) -> None:
    """Undoes the last rounds of a run, e.g. after a poisoned update; resumed, the run does them anew."""
    from fedvlp.run.folder import RunFolder
    from fedvlp.run.rollback import rollback

    use_plugins(plugins)
    was = rollback(RunFolder(folder), round)
    print(f"{folder} was in round {was} and continues with round {round}: submit the same job again, or resume it")


@app.command("status")
def jobs_status(
    job: Annotated[str, typer.Argument(help="A run's folder, or a downloaded job; with --kit, the id of a job.")],
    kit: Annotated[Path | None, typer.Option(help="Startup kit of the lead: the server is asked for the job.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="All fields, for programs.")] = False,
) -> None:
    """Says how far a run is, which sites answered, or how it ended, whatever FLARE calls the job's end.

    Exit code 0: it runs or is complete, with all sites. 3: it does so without a site. 1: it ended early.
    """
    from fedvlp.run import status as run_status

    told, alive = _status_of_job(job, kit) if kit else _status_in(Path(job))
    if told.get("schema") != run_status.SCHEMA:
        form = printable(str(told.get("schema")))
        raise ValueError(
            f"the status has form {form}, this fedvlp reads {run_status.SCHEMA}: use the one that wrote it"
        )
    if not alive:
        told |= {"summary": f"{told['status']}, but no process writes this run: it was killed, or this is a copy"}
    if as_json:
        print(json.dumps(told, indent=2))
    else:
        print("\n".join(printable(line) for line in run_status.in_words(told)))
    if code := run_status.exit_code(told, alive):
        raise typer.Exit(code)


@app.command("board")
def jobs_board(
    runs: Annotated[Path, typer.Argument(help="Where runs are kept; at a server runs/ of its kit.")] = Path("runs"),
    kit: Annotated[Path | None, typer.Option(help="Startup kit of the lead: the server is asked for its jobs.")] = None,
    port: Annotated[int, typer.Option(help="0 = any free one.")] = 7870,
    every: Annotated[int, typer.Option(min=1, help="Seconds between two looks.")] = 10,
) -> None:
    """Serves one page over all runs to this machine alone, and their figures for Prometheus at /metrics."""
    from fedvlp.report import board

    read = partial(_status_of_jobs, kit) if kit else partial(board.statuses, runs)
    with board.served(read, port, every) as server:
        print(f"{board.where(server)}  (Ctrl-C ends it)", flush=True)
        server.serve_forever()


def _status_of_jobs(kit: Path) -> dict[str, dict[str, Any]]:
    """All jobs of the server: what FLARE says of each, and of those that run what their run says."""
    from fedvlp.flare import job_status

    try:
        with redirect_stdout(StringIO()), job_status.session(kit) as opened:
            return job_status.all_jobs(opened)
    except ValueError as error:
        return {"server": {"status": "unknown", "summary": str(error)}}


def _status_of_job(job: str, kit: Path) -> tuple[dict[str, Any], bool]:
    """What the server says of the run of a job, and whether it is still running where it is said to run."""
    from fedvlp.flare import job_status
    from fedvlp.run.status import RUNNING

    # FLARE prints that it connects; standard output is for the status alone.
    with redirect_stdout(sys.stderr), job_status.session(kit) as opened:
        told, runs = job_status.job_status(opened, job)
    if not told:
        raise ValueError(f"the run of job {job} has told nothing yet; its server and its sites may still be starting")
    return told, runs or told.get("status") != RUNNING


def _status_in(folder: Path) -> tuple[dict[str, Any], bool]:
    """What a folder says of a run, and whether a process writes it where it is said to run."""
    from fedvlp.run.status import FILE, RUNNING

    told = {}
    if folder.is_dir():
        from fedvlp.flare.job_status import read_status
        from fedvlp.run.lock import in_use

        told = read_status(folder)
    if not told:
        raise ValueError(f"{folder} holds no {FILE}: no run of fedvlp, or one that never began")
    return told, told.get("status") != RUNNING or bool(in_use(folder))
