"""The command line of fedvlp. Each command says what it wrote, where."""

from __future__ import annotations

import shlex
import sys
from io import TextIOWrapper
from pathlib import Path
from tempfile import gettempdir
from typing import Annotated

import typer

from fedvlp.cli import (
    hints,
    job_commands,
    laboratory,
    new_command,
    panels,
    preset_commands,
    run_commands,
    site_commands,
    start_commands,
    stopping,
    sweep_command,
    use_commands,
)
from fedvlp.core.disk import fullest, is_full

HELP = """Federated vision-language pre-training for chest X-rays, on NVIDIA FLARE.

\b
fedvlp simulate feddra                           trains at five simulated hospitals
fedvlp simulate fedavg --data table:pairs.csv    trains on your own images and reports
fedvlp compare runs/feddra/001 runs/fedavg/001   puts finished runs beside each other
"""

app = typer.Typer(
    cls=hints.Commands,
    context_settings={"help_option_names": ["--help", "-h"]},
    no_args_is_help=True,
    help=HELP,
    pretty_exceptions_enable=False,
)
app.add_typer(preset_commands.app)
app.add_typer(run_commands.app)
app.add_typer(use_commands.app)
app.add_typer(sweep_command.app)
app.add_typer(laboratory.app)
app.add_typer(start_commands.app)
app.add_typer(site_commands.app)
app.add_typer(start_commands.towers_app, name="towers", rich_help_panel=panels.TRAIN)
app.add_typer(job_commands.app, name="jobs", rich_help_panel=panels.HOSPITALS)
app.add_typer(new_command.app, name="new", rich_help_panel=panels.EXTEND)
app.add_typer(site_commands.policy, name="site", rich_help_panel=panels.HOSPITALS)


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
    """Options of ``fedvlp`` itself."""


def _stop(number: int, frame: object) -> None:
    raise stopping.Stopped


def main() -> None:
    """Entry point. A mistake of the user prints one line and exits with 2; Ctrl-C and SIGTERM exit with 130.

    A run that stops because its quorum is lost exits with 2 and can be resumed.
    """
    import signal

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # the name of a file need not be text
    try:
        laboratory.add_installed()
        app()
    except stopping.Stopped:
        print(f"fedvlp: {stopping.said()}", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        said = _in_our_words(error)
        if said is None:
            raise
        from fedvlp.core.validate import printable

        print("\n".join(map(printable, f"fedvlp: {said}".split("\n"))), file=sys.stderr)
        sys.exit(2)


def _in_our_words(error: Exception) -> str | None:
    """What the user is told of an error; None for one that is no mistake of theirs.

    Imports are here, and those with torch last: `--help` and a mistake in the arguments do not wait for it.
    """
    if is_full(error) and not type(error).__module__.startswith("fedvlp"):
        return fullest([Path.cwd(), Path(gettempdir()), *map(Path, sys.argv[1:])])
    if isinstance(error, OSError) and error.errno is not None:  # the disk, a folder, a permission
        file = Path(str(error.filename or "")).absolute()
        given = [word for word in sys.argv[1:] if error.filename and file.is_relative_to(Path(word).absolute())]
        return f"{max(given, key=len)}: {error.strerror}" if given else str(error.strerror)
    if isinstance(error, (ValueError, FileExistsError)):
        data = hints.value_of("--data", sys.argv)
        return str(error).replace("fedvlp prepare DATA", f"fedvlp prepare {shlex.quote(data) if data else 'DATA'}")
    from fedvlp.core.checkpoint import CheckpointError
    from fedvlp.federation.loop import QuorumLostError
    from fedvlp.models.fetched import NoWeightsError
    from fedvlp.training.settings import DeviceError

    ours = (CheckpointError, QuorumLostError, NoWeightsError, DeviceError)
    return str(error) if isinstance(error, ours) else None
