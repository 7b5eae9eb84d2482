"""The command line: simulate, jobs, report, evaluate, prepare, doctor, site. A command says what it wrote and where."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from fedvlp.cli import jobs, runs, sites

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__, pretty_exceptions_enable=False)
app.add_typer(runs.app)
app.add_typer(sites.app)
app.add_typer(jobs.app, name="jobs")
app.add_typer(sites.policy, name="site")


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
    from fedvlp.federation.loop import QuorumLostError

    return isinstance(error, (ValueError, FileExistsError, CheckpointError, QuorumLostError))
