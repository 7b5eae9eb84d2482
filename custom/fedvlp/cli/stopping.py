"""What a person is told when Ctrl-C or SIGTERM stops a command: the one that resumes it."""

from __future__ import annotations

import shlex
import sys

_again: list[str] = []


class Stopped(BaseException):
    """Raised at Ctrl-C and SIGTERM. No Exception, so that the command-line library does not catch it."""


def goes_on_with(*words: str) -> None:
    """From here on, what is done is not lost when the command stops: these ``words`` resume it."""
    _again[:] = words


def goes_on_as_typed() -> None:
    """The same for a command that resumes from finished work when it is typed again."""
    goes_on_with("fedvlp", *sys.argv[1:])


def said() -> str:
    """The sentence for whoever stopped the command."""
    return f"stopped; resume with: {shlex.join(_again)}" if _again else "stopped"
