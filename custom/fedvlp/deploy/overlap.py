"""What a site lets jobs learn of the patients that it shares with others: nothing, unless its own file says so.

The rules stand under "overlap" in the site's ``local/fedvlp.json``; the key that the sites share, and the server has
not, is ``local/overlap.key``.
"""

from __future__ import annotations

import fcntl
import json
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedvlp.core.checkpoint import save_json
from fedvlp.core.gate import plain
from fedvlp.core.validate import require, require_name

KEY = "overlap.key"
BOOK = Path("privacy") / "overlap.json"
KEY_BYTES = 32


class OverlapError(ValueError):
    """The overlap of patients is not counted. The text names sites, settings and numbers, and goes to the lead."""


@dataclass(frozen=True)
class Overlap:
    """The site's rules for counting the patients that it shares with another site."""

    data: tuple[str, ...] = ()  # data sets whose patients may be counted
    sites: tuple[str, ...] = ()  # other sites with whom
    column: str = ""  # of the table: what all sites know a patient by; "" = its patient_column
    least_patients: int = 64  # in this site's set and in the other's
    least_shared: int = 5  # a smaller number of shared patients leaves as "fewer than 5", and one that leaves fewer of
    #                        the smaller set out as "at least": all but 4; 0 = every number as it is
    jobs: int = 3  # in which this site takes part, ever; the engineer raises it for more

    def __post_init__(self) -> None:
        for name in ("data", "sites"):
            texts = getattr(self, name)
            good = isinstance(texts, tuple) and all(isinstance(text, str) for text in texts)
            require(good, f"overlap.{name} is no list of texts")
        for name in self.data:
            require_name("a data set of overlap.data", name)
        require(self.least_patients >= 2, f"overlap.least_patients is {self.least_patients}; one is a named patient")
        require(self.least_shared >= 0, f"overlap.least_shared is {self.least_shared}; 0 = every number as it is")
        require(self.jobs >= 0, f"overlap.jobs is {self.jobs}; 0 = none")

    def admit(self, data: str) -> None:
        """Raises OverlapError unless the patients of this data set may be counted."""
        if data not in self.data:
            raise OverlapError(f"this site counts no patients of data set {plain(data)}; overlap.data does not name it")

    def admit_site(self, peer: str) -> None:
        """Raises OverlapError unless patients may be counted with this site."""
        if peer not in self.sites:
            raise OverlapError(f"this site counts no patients with {plain(peer)}; overlap.sites does not name it")

    def admit_size(self, patients: int, whose: str) -> None:
        """Raises OverlapError for a set that is so small that the count tells of single patients."""
        if patients < self.least_patients:
            raise OverlapError(
                f"{whose} has {patients} patients; this site counts none in a set of fewer than {self.least_patients}"
            )

    def in_words(self) -> str:
        """For the engineer who looks at the site's rules."""
        return (
            f"of {', '.join(self.data) or 'no data set'}, with {', '.join(self.sites) or 'no site'}, in sets of at "
            f"least {self.least_patients} patients; fewer than {self.least_shared} leave as that, and all but fewer "
            f'than {self.least_shared} as "at least"; at most {self.jobs} jobs'
        )


OWN_MACHINE = Overlap(least_patients=2, least_shared=0)
"""What a simulation counts by: all of it is one person's."""


def make_key(local: Path) -> Path:
    """Writes a new key, for its owner alone, into the folder of settings. Raises OverlapError where there is one."""
    file = local / KEY
    try:
        file.touch(mode=0o600, exist_ok=False)
    except FileExistsError:
        raise OverlapError(f"there is a local/{KEY} already; the sites count with it, so it stays") from None
    except OSError as error:
        raise OverlapError(
            f"local/{KEY} cannot be made ({type(error).__name__}); give the folder of the site's kit, which has local/"
        ) from None
    file.write_text(secrets.token_hex(KEY_BYTES) + "\n", encoding="ascii")
    return file


def read_key(local: Path) -> bytes:
    """The key that the sites share. Raises OverlapError, with the remedy, where it is missing, short or open to all."""
    file = local / KEY
    try:
        key = bytes.fromhex(file.read_text(encoding="ascii"))
        open_to_others = stat.S_IMODE(file.stat().st_mode) & 0o077
    except OSError:
        raise OverlapError(
            f"this site has no local/{KEY}: one site makes it (`fedvlp site overlap-key`), the others copy it"
        ) from None
    except ValueError:
        raise OverlapError(f"local/{KEY} is no key; copy it again from the site that made it") from None
    if len(key) < KEY_BYTES:
        raise OverlapError(f"local/{KEY} has {len(key)} bytes; a key has {KEY_BYTES}")
    if open_to_others:
        raise OverlapError(f"local/{KEY} can be read by others on this machine; chmod 600")
    return key


def note_job(kit: Path, job: str, data: str, patients: int, limit: int) -> int:
    """Writes down that the site takes part in this job, before anything leaves; returns in how many it has.

    A job that comes again under the same id, to a new process, counts again: it could ask anew. Raises OverlapError
    beyond ``limit``, or where the book cannot be read.
    """
    file = kit / BOOK
    with _locked(file):
        book = _book(file)
        if len(book) >= limit:
            raise OverlapError(
                f"this site took part in {len(book)} jobs that count patients and lets {limit} (overlap.jobs)"
            )
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        save_json(file, [*book, {"job": job, "data": data, "patients": patients, "time": now}])
    return len(book) + 1


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """One process at a time: several jobs may come at once, and each would read the book before any writes into it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file.with_suffix(".lock"), "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # let go when the file is closed, also by a kill
        yield


def _book(file: Path) -> list[dict[str, object]]:
    try:
        book = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError):
        raise OverlapError("this site's list of jobs that counted patients cannot be read") from None
    if not (isinstance(book, list) and all(isinstance(entry, dict) and "job" in entry for entry in book)):
        raise OverlapError("this site's list of jobs that counted patients is damaged")
    return book


def pairs_of(sites: Sequence[str]) -> list[tuple[str, str]]:
    """Every two of the sites, in the order of their names."""
    names = sorted(set(sites))
    return [(first, second) for index, first in enumerate(names) for second in names[index + 1 :]]
