"""A data set whose reports have been read and searched for identifiers, before any of its images is decoded."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from fedvlp.core.checkpoint import CheckpointError, save_bytes
from fedvlp.core.types import MODALITIES
from fedvlp.data.burned_in import REASON
from fedvlp.data.cohort import Cohort
from fedvlp.data.deid import KINDS, Findings, scan
from fedvlp.data.loader import Tokenize

Summary = dict[str, int]
"""What is counted (rows, used, "skipped: <reason>") -> how many."""

SKIPPED = "skipped: "
"""How the keys of a summary begin that count rows which are not used, before the reason."""


@dataclass(frozen=True, eq=False)
class Screened:
    """What is known of a data set before its images are decoded, and what decodes them."""

    phi: Mapping[str, int]  # kind of identifier -> reports that hold one (data/deid.py)
    records: int
    prepare: Callable[[], tuple[Cohort, Summary]]  # decodes the images
    # reason -> rows that cannot be used, by number or by name; prepare adds those whose images cannot be read
    skipped: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Counts only, as of a cohort."""
        return f"Screened({self.records} records)"

    def build(self) -> Cohort:
        """The records, with their images."""
        return self.prepare()[0]


class Source(Protocol):
    """A configured data set."""

    def build(self) -> Cohort:
        """Its records."""
        ...


class DataSource:
    """What a data set tells of itself before it is read: base class of fedvlp's own, with defaults."""

    modalities: ClassVar[tuple[str, ...]] = MODALITIES  # of its records

    @staticmethod
    def of(source: object) -> DataSource:
        """The data set; for one of another library, which has ``build`` alone, one that has the defaults."""
        return source if isinstance(source, DataSource) else DataSource()

    @property
    def in_colour(self) -> bool:
        """Whether images have three channels."""
        return False

    def by_site(self) -> dict[str, Any]:
        """Site -> its own data set, where it deals its records to sites itself ("public" is the public set)."""
        return {}

    def class_names(self) -> tuple[str, ...]:
        """The classes of which each record has one, where that is so."""
        return ()

    def written(self) -> dict[str, str]:
        """Id of a record -> its report as somebody wrote it, for its owner's eyes, where that is not the cohort's."""
        return {}


@runtime_checkable
class Screening(Protocol):
    """A data set that can say what its reports hold before it decodes an image."""

    def screen(self) -> Screened:
        """Its reports, searched."""
        ...


def screen(source: Source) -> Screened:
    """``source`` with its reports searched; one that has no images to decode, or cannot wait, is built at once."""
    if isinstance(source, Screening):
        return source.screen()
    cohort = source.build()
    return Screened(cohort.phi, len(cohort), lambda: (cohort, {}))


def screen_all(sources: Sequence[Source], join: Callable[[Sequence[Cohort]], Cohort]) -> Screened:
    """Several data sets as the one that ``join`` makes of their records; all are searched before any is decoded."""
    screened = [screen(source) for source in sources]
    counts: dict[str, int] = {}
    for one in screened:
        for kind, number in one.phi.items():
            counts[kind] = counts.get(kind, 0) + number
    records = sum(one.records for one in screened)

    def prepare() -> tuple[Cohort, Summary]:
        made = [one.prepare() for one in screened]
        together = Counter[str]()
        for _, summary in made:
            together.update(summary)
        return join([cohort for cohort, _ in made]), dict(together)

    return Screened(counts, records, prepare)


BY_VIEW = f"{REASON}, view "
"""How the keys of a summary begin that count the images of a view that are left out since they hold text."""

KEEP = "look at some; data.burned_in=header keeps all but those whose header says so, accept keeps all"


def rows_used(summary: Summary) -> str:
    """How many rows of a data set are used, and why others are left out; "" where nothing is counted."""
    if "rows" not in summary:
        return ""
    reasons = {name.removeprefix(SKIPPED): count for name, count in summary.items() if name.startswith(SKIPPED)}
    views = [f"{name.removeprefix(BY_VIEW)} {count}" for name, count in summary.items() if name.startswith(BY_VIEW)]
    by_view = f"by view: {', '.join(views)}; " if views else ""
    more = {REASON: f" ({by_view}{KEEP})"}
    left_out = ", ".join(f"{reason} {count}{more.get(reason, '')}" for reason, count in reasons.items() if count)
    return f"{summary['used']} of {summary['rows']} rows are used" + (f"; left out: {left_out}" if left_out else "")


# On-disk cache of tokenised reports and of scans for identifiers, in the site's cache folder.
#
# A file is named by a hash of all that it was made of. Tokens are as confidential as the reports: they are for their
# owner alone, and lie where the decoded images lie (data/cache.py).


class KeptTokens:
    """``tokenizer``, which is asked once for the same texts; later their ids and masks are read from ``folder``.

    ``identity`` is all that its answer depends on beside the texts.
    """

    def __init__(self, tokenizer: Tokenize, identity: str, folder: Path) -> None:
        self._tokenizer, self._identity, self._folder = tokenizer, identity, folder
        self.truncated, self.unknown = 0, getattr(tokenizer, "unknown", None)

    def __call__(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """ids [N, T] int64 and mask [N, T] bool of N texts."""
        file = self._folder / f"tokens-{_hash([self._identity], texts)}.safetensors"
        tensors: dict[str, Tensor] = {}
        with contextlib.suppress(OSError, SafetensorError):  # none there, or a damaged one, which is written anew
            tensors = load_file(file)
        if not tensors:
            before = getattr(self._tokenizer, "truncated", 0)
            ids, mask = self._tokenizer(texts)
            cut = torch.tensor(getattr(self._tokenizer, "truncated", 0) - before)
            tensors = {"ids": ids.to(torch.int32), "mask": mask, "cut": cut}
            with contextlib.suppress(CheckpointError):  # a full disk costs time at the next start, and no run
                save_bytes(file, save(tensors), private=True)
        self.truncated += int(tensors["cut"])
        return tensors["ids"].to(torch.int64), tensors["mask"]


def kept_tokens(tokenizer: Any, folder: Path | None) -> Tokenize:
    """The tokenizer with a memory in ``folder``, where there is one and it says all that its answer depends on."""
    identity = getattr(tokenizer, "identity", lambda: "")()
    return KeptTokens(tokenizer, identity, folder) if folder and identity else tokenizer


def searched(folder: str | None, reports: Sequence[str], where: Iterable[object]) -> Findings:
    """:func:`data.deid.scan`, which is not repeated where these reports were searched before and nothing was found."""
    if not folder:
        return scan(reports, where)
    patterns = [json.dumps([kind, pattern.pattern, pattern.flags]) for kind, pattern in KINDS.items()]
    file = Path(folder) / f"searched-{_hash(patterns, reports)}.json"
    if file.is_file():
        return Findings({})
    counts = scan(reports, where)
    if not counts:
        with contextlib.suppress(CheckpointError):
            save_bytes(file, json.dumps({"reports": len(reports)}).encode(), private=True)
    return counts


def _hash(*lists: Iterable[str]) -> str:
    """Of lists of texts: which they are, and where each ends."""
    hashed = hashlib.blake2b(digest_size=16)
    for texts in lists:
        for text in texts:
            content = text.encode("utf-8", "surrogatepass")
            hashed.update(len(content).to_bytes(8, "little") + content)
        hashed.update(b"\xff" * 8)
    return hashed.hexdigest()
