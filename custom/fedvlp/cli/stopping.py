"""What a person is told when Ctrl-C or SIGTERM stops a command: the one that goes on."""

from __future__ import annotations

import shlex
import sys

_again: list[str] = []


class Stopped(BaseException):
    """Raised at Ctrl-C and SIGTERM. No Exception, so that the command-line library does not catch it."""


def goes_on_with(*words: str) -> None:
    """From here on, what is done is not lost when the command stops: these ``words`` go on with it."""
    _again[:] = words


def goes_on_as_typed() -> None:
    """The same for a command that finds what it has done, and goes on there."""
    goes_on_with("fedvlp", *sys.argv[1:])


def said() -> str:
    """The sentence for whoever stopped the command."""
    return f"stopped; resume with: {shlex.join(_again)}" if _again else "stopped"
