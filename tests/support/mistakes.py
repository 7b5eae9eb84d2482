"""Commands that are refused, as a person types them: exit code 2, and one line that says what to do."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Mapping

import pytest

from fedvlp.cli import main


def refused(arguments: str, monkeypatch: pytest.MonkeyPatch) -> object:
    """The exit code of `fedvlp` with these arguments, in this process."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["fedvlp", *shlex.split(arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def taken_otherwise(
    mistakes: Mapping[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> dict[str, tuple[object, list[str]]]:
    """Of arguments with the words of their refusal, those that are not refused so: exit code and lines."""
    wrong = {}
    for arguments, words in mistakes.items():
        code, lines = refused(arguments, monkeypatch), capsys.readouterr().err.splitlines()
        if code != 2 or len(lines) != 1 or not lines[0].startswith("fedvlp: ") or words not in lines[0]:
            wrong[arguments] = code, lines
    return wrong
