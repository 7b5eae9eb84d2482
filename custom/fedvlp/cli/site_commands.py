"""`fedvlp prepare`, `doctor` and `site`: what a site needs before it joins, and what it lets jobs do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedvlp.cli import known, panels
from fedvlp.cli.overrides import AcceptAll, AcceptKinds, Plugins, Setting, accepted, use_plugins
from fedvlp.cli.stopping import goes_on_as_typed

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from fedvlp.data.deid import Accepted
    from fedvlp.data.screening import Screened
    from fedvlp.deploy.prepare import Prepared

app = typer.Typer()
policy = typer.Typer(no_args_is_help=True, help="A site's own rules: classes and experiments of jobs.")


@app.command(rich_help_panel=panels.HOSPITALS)
def prepare(
    source: Annotated[
        str, typer.Argument(help="As in --data: table:FILE, SOURCE:FOLDER[,SETTING=VALUE]; or its name, with --root.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for the decoded images: the cache, in local/fedvlp.json.")],
    root: Annotated[Path | None, typer.Option(help="Folder of the images.")] = None,
    path: Annotated[str | None, typer.Option(help="The table, below root; default: as published.")] = None,
    image_size: Annotated[int, typer.Option(help="Side of the decoded squares; jobs must ask for the same.")] = 256,
    settings: Setting = None,
    workers: Annotated[int, typer.Option(help="Processes that decode; 0 = as many as cores.")] = 0,
    samples: Annotated[int, typer.Option(help="Images on the contact sheet.")] = 24,
    show_findings: Annotated[
        bool,
        typer.Option("--show-findings", help="On your terminal: the words that seem to identify people, unused rows."),
    ] = False,
    accept_phi_risk: AcceptAll = False,
    accept_phi_kind: AcceptKinds = None,
    plugins: Plugins = None,
) -> None:
    """Decodes a data set once, and says what is in it. What was interrupted resumes where it stopped.

    Nothing is decoded where reports seem to identify people, unless that is accepted.
    """
    use_plugins(plugins)
    accept = accepted(accept_phi_risk, accept_phi_kind)
    if root is None:
        known.data_set(source)
    import sys

    from rich.console import Console

    from fedvlp.cli.tables import finding_lines, unused_lines

    if samples < 1:
        raise ValueError(f"--samples is {samples}; give how many images the contact sheet shows, at least 1")
    if show_findings and not sys.stdout.isatty():
        raise ValueError("--show-findings shows words of patients on a terminal alone; do not redirect what it prints")
    console = Console()

    def look(screened: Screened) -> None:
        if show_findings:
            console.print(
                *finding_lines(screened.phi), *unused_lines(screened.skipped), sep="\n", markup=False, highlight=False
            )

    goes_on_as_typed()
    done = _decoded(console, _source(source, root, path, out, image_size, settings), workers, accept, look)
    if show_findings:
        console.print(*unused_lines(done.skipped), sep="\n", markup=False, highlight=False)
    _say_prepared(console, done, out, samples)


def _source(
    source: str, root: Path | None, path: str | None, out: Path, image_size: int, settings: list[str] | None
) -> Any:
    """The data set that is asked for, with its cache in ``out``."""
    from fedvlp.cli.overrides import overridden, site_source, stored
    from fedvlp.deploy.prepare import source_of

    if root is not None:
        return source_of(source, root, out, path, image_size, settings or [])
    if path is None:
        return overridden(stored(site_source(source, image_size, "prepare"), out), settings)
    raise ValueError("--path is below --root; give that too, or SOURCE:FILE instead of both")


def _decoded(
    console: Console, source: Any, workers: int, accept: Accepted, look: Callable[[Screened], None]
) -> Prepared:
    """Decodes a data set under a bar; ``look`` is shown its reports' scan before."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    from fedvlp.deploy.prepare import prepared

    columns = ("decoding", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("decoding", total=None)

        def ready(rows: int, total: int) -> None:
            bar.update(task, completed=rows, total=total)

        return prepared(source, workers, ready, accept, look)


def _say_prepared(console: Console, done: Prepared, out: Path, samples: int) -> None:
    """Prints what is in the data set, and writes its page and a sheet of ``samples`` images beside the cache."""
    from fedvlp.cli.tables import prepared_tables
    from fedvlp.data.overview import contact_sheet
    from fedvlp.report.data_page import SHEET, write
    from fedvlp.report.figures import font_file

    console.print(*prepared_tables(done.cohort, done.summary, done.built))
    print(f"page {write(done.cohort, done.summary, done.skipped, done.built, out / 'data.html')}")
    if any(done.cohort.has_image()):
        sheet = out / SHEET
        print(f"{contact_sheet(done.cohort, sheet, samples, font=font_file())} samples in {sheet}: look at them")


@app.command(rich_help_panel=panels.HOSPITALS)
def doctor(
    site: Annotated[
        Path | None, typer.Option(exists=True, help="Startup kit of a site or of the server, to check that as well.")
    ] = None,
) -> None:
    """Checks that this machine can run fedvlp; with --site, that the site of a startup kit is ready for jobs.

    Of the server's kit it says what guards it.
    """
    from itertools import chain

    from fedvlp.deploy.machine import checks
    from fedvlp.deploy.site_doctor import site_checks
    from fedvlp.flare.class_list import needed

    failed = False
    for check in chain(checks(), site_checks(site, needed) if site else ()):
        failed |= check.ok is False
        print(f"{'ok  ' if check.ok else 'FAIL' if check.ok is False else 'note'}  {check.what}: {check.found}")
    if failed:
        raise typer.Exit(1)


@app.command(rich_help_panel=panels.HOSPITALS)
def kit(
    kits: Annotated[list[Path], typer.Argument(help="Folders of sites and of the server, as provisioning wrote them.")],
    out: Annotated[Path, typer.Option(help="Folder for the archives.")] = Path("send"),
    provisioning: Annotated[Path, typer.Option(help="The policies, pages and container files.")] = Path("provisioning"),
) -> None:
    """Makes what the lead sends to a site or the server: the kit with policies, containers and the guide, one archive.

    Read the SHA-256 out by telephone. Nothing else of this repository is needed there.
    """
    from fedvlp.deploy.kit import make

    for folder in kits:
        made = make(folder, provisioning, out)
        print(f"{made.role} {made.name} {'reaches' if made.role == 'site' else 'is'} {made.server}")
        print(f"  {made.archive}\n  SHA-256 {made.sha256}")
        for file in made.differing:
            print(
                f"  kept local/{file} of the kit, which differs from {provisioning.name}/{made.role}/{file}; to send "
                f"that one, remove local/{file} and the archive, and make it again"
            )


@policy.command("classes")
def site_classes(
    server: Annotated[bool, typer.Option("--server", help="The server's list instead of a site's.")] = False,
    into: Annotated[Path | None, typer.Option(help="A resources.json whose list is replaced by it.")] = None,
) -> None:
    """Prints the classes that jobs of fedvlp need, one a line; with --into, writes them as the policy's list."""
    from fedvlp.flare import class_list

    side = "server" if server else "client"
    if into is None:
        print("\n".join(class_list.needed(side)))
        return
    removed = class_list.write(side, into)
    print(f"{into}: {len(class_list.needed(side))} classes")
    if removed:
        print(f"removed, since fedvlp's own jobs do not need them: {', '.join(removed)}. Add again what you want there")


@policy.command("accept")
def site_accept(
    job: Annotated[Path, typer.Argument(help="Folder of the job, as the lead sent it.")],
    kit: Annotated[Path, typer.Option(help="Startup kit of the site.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Shows what is unusual in a job's experiment and, if you agree, lets it run at the site, with no other setting."""
    from fedvlp.core.validate import printable
    from fedvlp.deploy.envelope import differences
    from fedvlp.deploy.site_config import accept
    from fedvlp.flare.jobs import experiment_of
    from fedvlp.run.config import fingerprint

    experiment = experiment_of(job)
    mark = fingerprint(experiment)
    unusual = map(printable, differences(experiment))  # a line of a job must not hide another from the engineer
    print(f"experiment {mark} ({printable(experiment.name)})", *unusual, sep="\n  ")
    if said := experiment.method.discloses():
        print(f"it shows single records: {printable(said)}")
    if not yes and not typer.confirm("Let it run here?"):
        raise typer.Exit(1)
    accept(kit / "local", mark)
    print(f"added {mark} to envelope.accepted in local/fedvlp.json; others run only if they are named there as well")
