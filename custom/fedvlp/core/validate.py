"""How a configuration refuses values that cannot work."""

from __future__ import annotations

import re

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
"""What a run or a data set may be called: it becomes the name of a folder, at machines that others own."""


def require(condition: bool, message: str) -> None:
    """Raises ValueError(message) unless ``condition``: for ``__post_init__`` of hyper-parameters."""
    if not condition:
        raise ValueError(message)


def is_number(value: object) -> bool:
    """Whether it is an int or a float; True and False are neither."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def printable(text: str) -> str:
    """``text`` in one line, without what would steer a terminal: what a job, a run or a record says is shown so."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def counted(number: int, what: str) -> str:
    """Write a number with its noun, in the plural but for 1: "1 round", "1,200 records"."""
    return f"{number:,} {what}{'s' * (number != 1)}"


def require_name(what: str, name: object) -> None:
    """Raises ValueError unless ``name`` is 1 to 64 characters of a-z, 0-9 and "-", the first no dash."""
    if not (isinstance(name, str) and NAME.fullmatch(name)):
        said = repr(name) if isinstance(name, str) and len(name) <= 64 else "not a string of at most 64 characters"
        raise ValueError(
            f"{what} is {said}; it takes 1 to 64 characters of a-z, 0-9 and '-', and begins with a letter or a digit"
        )
