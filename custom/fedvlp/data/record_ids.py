"""Ids of private records as others may see them: keyed hashes, whose key never leaves this machine.

Record numbers are short, so whoever has a plain hash finds the number by trying all of them. In memory, ids are plain
hashes: splits, retrieved reports and the order of patients follow from them, on every machine alike. Whatever writes
an id to a file or says it takes :func:`as_written`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fedvlp.data.cohort import PUBLIC, Cohort

NAME = "record-key"
BYTES = 32


class RecordKeyError(ValueError):
    """The key for record ids cannot be made or used; the message says what to do."""


def own_folder() -> Path:
    """This user's folder for the key: ``fedvlp`` in $XDG_DATA_HOME, or in ~/.local/share. Raises RecordKeyError."""
    if given := os.environ.get("XDG_DATA_HOME"):
        return Path(given) / "fedvlp"
    try:
        return Path.home() / ".local" / "share" / "fedvlp"
    except RuntimeError:  # an account of a container: no HOME, and no entry in passwd
        raise RecordKeyError(
            "this account has no home folder to keep the key for record ids in: set XDG_DATA_HOME (or HOME) to a "
            "folder of its own that stays"
        ) from None


def key_in(folder: Path) -> bytes:
    """The key in ``folder``, made at the first use and readable by its owner alone from its first byte on.

    Of two processes that make it at once one wins, and both use that one's. Raises RecordKeyError.
    """
    file = folder / NAME
    try:
        if not file.exists():
            _make(file)
        key, mode = file.read_bytes(), file.stat().st_mode
    except OSError as error:
        raise RecordKeyError(
            f"the key for record ids cannot be kept ({error.strerror}): set XDG_DATA_HOME to a folder of your own"
        ) from None
    if len(key) != BYTES:
        raise RecordKeyError(
            f"the key for record ids has {len(key)} bytes, expected {BYTES}; remove {NAME} for a new one"
        )
    if mode & 0o077:
        raise RecordKeyError(f"others may read the key for record ids (mode {mode & 0o777:03o}): chmod 600 {NAME}")
    return key


def _make(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    own = file.with_name(f".{NAME}.{secrets.token_hex(8)}")
    handle = os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(secrets.token_bytes(BYTES))
            out.flush()
            os.fsync(out.fileno())
        with contextlib.suppress(FileExistsError):  # another process was first
            os.link(own, file)
    finally:
        own.unlink()


def hidden(ids: Sequence[str], key: bytes) -> tuple[str, ...]:
    """Each id as a keyed hash (BLAKE2b) of 32 hex digits."""
    return tuple(hashlib.blake2b(name.encode(), key=key, digest_size=16).hexdigest() for name in ids)


def as_written(cohort: Cohort) -> dict[str, str]:
    """Every id of a cohort -> how a file may have it: a keyed hash, for private records; a public record's own id.

    Raises RecordKeyError.
    """
    if not cohort.private:
        return {name: name for name in cohort.ids}
    sites = cohort.sites or ("",) * len(cohort)
    own = [name for name, site in zip(cohort.ids, sites, strict=True) if site != PUBLIC]
    shown = dict(zip(own, hidden(own, key_in(own_folder())), strict=True))
    return {name: shown.get(name, name) for name in cohort.ids}


# Numbers of patients and studies as a table writes them: one patient is one however spelled.

_MANGLED = re.compile(
    r"[+-]?\d(?:[.,]\d*)?e\+\d+|#(?:N/?A|REF!|VALUE!|NAME\?|NUM!|DIV/0!|NULL!)|#{3,}", re.ASCII | re.IGNORECASE
)
_AS_DECIMAL = re.compile(r"0*(\d+?)(?:[.,]0+)?", re.ASCII)
_AS_TEXT = re.compile(r"'(\d+)|=\"(.*)\"", re.ASCII)  # how a spreadsheet is told that a number is a text


def normalised(name: str) -> str:
    """A name as two tables should agree on it: Unicode NFKC, no case, no space around it and one at most within."""
    if told := _AS_TEXT.fullmatch(name.strip()):
        name = told[1] or told[2]
    return " ".join(unicodedata.normalize("NFKC", name).casefold().split())


_TRANSLITERATED = str.maketrans(
    {"\u00e4": "ae", "\u00f6": "oe", "\u00fc": "ue", "\u00f8": "oe", "\u00e5": "aa", "\u00e6": "ae"}
)
_NOT_IN_A_FOLDER = re.compile(r"[^\w.-]+")  # of a site, whose name is also a folder's


NO_SITES = ("server", "pooled")
"""Names that a run has for others than sites."""


def one_spelling(names: Sequence[str], known: Sequence[str] = ()) -> dict[str, str]:
    """Each name of a site -> how it is called: one name for K\u00f6ln, k\u00f6ln and KOELN, which a folder can have.

    Signs that no folder's name should have become "-"; "" where nothing is left of a name. ``known`` names are called
    as they are. Of several spellings the commonest is taken, one with accents before one without.
    """
    called: dict[str, str] = {}
    counts = Counter(names)
    order = sorted(counts, key=lambda name: (name not in known, name.isascii(), -counts[name], name))
    spelled: dict[str, str] = {}  # form of a name -> what it is called
    for name in [*known, *order]:
        folded = normalised(name)
        bare = "".join(letter for letter in unicodedata.normalize("NFKD", folded) if not unicodedata.combining(letter))
        forms = [_NOT_IN_A_FOLDER.sub("-", form) for form in (folded, folded.translate(_TRANSLITERATED), bare)]
        own = _NOT_IN_A_FOLDER.sub("-", " ".join(unicodedata.normalize("NFC", name).split())).strip("-.")
        own = own if any(map(str.isalnum, own)) else ""
        own = f"{own}-site" if own.casefold() in NO_SITES else own
        called[name] = next((spelled[form] for form in forms if form in spelled), own)
        for form in forms:
            spelled.setdefault(form, called[name])
    return {name: called[name] for name in counts}


def mangled(names: Sequence[str]) -> int:
    """How many of the N ``names`` a spreadsheet has put something in the place of, that others of them have as well.

    It shortens a long number to 1.23457E+11, shows one that is wider than its column as ####, or an error as #N/A.
    """
    counts = Counter(name.strip().casefold() for name in names if _MANGLED.fullmatch(name.strip()))
    return sum(count for count in counts.values() if count > 1)


def one_number(names: Sequence[str]) -> list[str]:
    """The N ``names`` with "100.0" and "00100" as "100" where some are "100".

    A column with a gap becomes one of decimals, and a spreadsheet takes the zeros before a number away.
    """
    names = [normalised(name) for name in names]
    known = set(names)

    def whole(name: str) -> str:
        match = _AS_DECIMAL.fullmatch(name)
        return match[1] if match and match[1] in known else name

    return [whole(name) for name in names]
