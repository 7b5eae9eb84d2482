"""What attacks on updates read of a finished run's records, and a leak that is planted for `fedvlp audit` to find."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from fedvlp.core.checkpoint import save_json
from fedvlp.core.client import Client
from fedvlp.core.json_file import read_json
from fedvlp.evaluation.audit.membership import MEMBERS, OTHERS, Membership, membership
from fedvlp.run import measurements
from fedvlp.run.audit import BATCH, COLUMNS, Attacked, interval_of, members, plain, row_cells
from fedvlp.run.evaluate import load_shared, loader, trained_state
from fedvlp.run.folder import RunFolder
from studies.attacks.canaries import MEMORISED, PLANTED, UNSEEN, Exposure, train_on
from studies.attacks.inversion import Inversion
from studies.attacks.one_update import SiteInference, Words
from studies.attacks.updates import LEAK_RATE, LEAK_STEPS, Updates

LEAK = "planted leak"
"""The model that membership must be found in."""

LEAKED = 64  # records that the planted leak is trained on
LEAK_ABOVE = 90.0

KINDS: dict[str, type[Any]] = {
    "leak": Membership,
    "words": Words,
    "canaries": Exposure,
    "sites": SiteInference,
    "inversion": Inversion,
}
TITLES = {
    "leak": "membership in a model that was trained on few records alone: the attacks must find it",
    "words": "words that the server reads off an update without a policy",
    "canaries": "canaries: how far random reports that were planted in one more round are exposed",
    "sites": "whose update it is, told by records of each site",
    "inversion": "images drawn back from the gradient of one step on few records, whose reports are known",
}
"""The attacks, by their names in the file."""


@dataclass(frozen=True)
class Attacks:
    """What the attacks found; () of one that was not run, or does not apply."""

    round: int
    leak: tuple[Membership, ...] = ()
    words: tuple[Words, ...] = ()  # where a word embedding travels
    canaries: tuple[Exposure, ...] = ()  # these three of image-text models, where sites send weights
    sites: tuple[SiteInference, ...] = ()
    inversion: tuple[Inversion, ...] = ()  # where it was asked for

    def tables(self) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
        """Title, head and lines of a table of each attack that was run."""
        found: list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]] = []
        if self.leak:
            found.append((TITLES["leak"], COLUMNS, [row_cells(row) for row in self.leak]))
        others: dict[str, Sequence[Any]] = {name: getattr(self, name) for name in KINDS if name != "leak"}
        tables = [(TITLES[name], rows[0].HEAD, [row.cells() for row in rows]) for name, rows in others.items() if rows]
        return found + tables

    def sentences(self) -> list[str]:
        """What the planted leak and the canaries say."""
        said = []
        if self.leak:
            most = max(self.leak, key=lambda row: row.area.value)
            finds = "The attack finds it."
            if most.area.value <= LEAK_ABOVE:
                finds = f"The attack misses it (expected above {LEAK_ABOVE:.0f}), so low figures of it prove nothing."
            said.append(
                f"Planted leak, a model trained on {most.members} records alone: area {most.area.unsigned()} "
                f"({most.attack}). {finds}"
            )
        of = {row.canaries: row for row in self.canaries}
        if of:
            planted, unseen, alone = of[PLANTED], of[UNSEEN], of.get(MEMORISED)
            said.append(
                f"Canaries: {planted.count} random reports, each seen {planted.times:.1f} times among the records of "
                f"{planted.site}, have a mean exposure of {planted.mean.value:.2f} of {planted.most:.0f} bits; as many "
                f"that nobody trained on have {unseen.mean.value:.2f} (by chance {unseen.chance:.2f})"
                + (f", and those trained on alone {alone.mean.value:.2f}." if alone else ".")
            )
        return said


def file_of(folder: RunFolder) -> Path:
    """Return where the attacks on a run are."""
    return measurements.folder_of(folder) / "attacks.json"


def read(folder: RunFolder) -> Attacks | None:
    """Return what ``measure`` wrote; None where there is none, or of another model. Raises ValueError for damage."""
    file = file_of(folder)
    if not file.exists() or measurements.is_of_another_model(folder, file):
        return None
    try:
        content = read_json(file)
        found: dict[str, Any] = {name: tuple(_as(kind, one) for one in content[name]) for name, kind in KINDS.items()}
        return Attacks(content["round"], **found)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ValueError(
            f"{folder.path}: evaluation/attacks.json is not what fedvlp wrote there; remove it and run "
            "`fedvlp attack RUN` again"
        ) from None


def _as(kind: type, written: Mapping[str, Any]) -> Any:
    """One figure as it was written; JSON's null is nan here."""

    def value(of: Any) -> Any:
        if isinstance(of, dict):
            return interval_of(of)
        return tuple(map(value, of)) if isinstance(of, list) else math.nan if of is None else of

    return kind(**{field.name: value(written[field.name]) for field in fields(kind)})


def measure(folder: RunFolder, controls: bool = True, invert: float = 0.0, resamples: int = 1000) -> Attacks:
    """Attack a finished run and write ``evaluation/attacks.json``.

    ``controls``: a leak and canaries are planted too, which takes some seconds of training. ``invert``: so many seconds
    are spent on drawing images from a gradient; 0: none. Raises ValueError as `fedvlp audit` does.
    """
    attacked = Attacked(folder)
    state = trained_state(attacked.assembly, attacked.server)
    updates = Updates(attacked.assembly, state, attacked.rows, loader(attacked.assembly))
    pairs = not attacked.classifier
    found = Attacks(
        attacked.server.round,
        tuple(planted_leak(attacked, resamples)) if controls else (),
        tuple(updates.words()),
        tuple(updates.canaries(controls)) if pairs else (),
        tuple(updates.sites()) if pairs else (),
        tuple(updates.inversion(invert)) if pairs and invert else (),
    )
    save_json(file_of(folder), plain(asdict(found)))
    measurements.note(folder, file_of(folder))
    return found


# A leak that is planted


def planted_leak(attacked: Attacked, resamples: int) -> Iterator[Membership]:
    """The attacks on a model that saw few records of one site often: what they must find."""
    site = max(
        attacked.rows,
        key=lambda name: min(len(attacked.rows[name][MEMBERS]), LEAKED) + len(attacked.rows[name][OTHERS]),
    )
    rows = {**attacked.rows[site], MEMBERS: attacked.rows[site][MEMBERS][:LEAKED]}
    data = attacked.assembly.serve(attacked.assembly.cohort, rows)
    client = attacked.assembly.client(site, data)
    load_shared(client, attacked.assembly.initial(), site)
    start = {site: attacked.of_model(client, data)}
    _memorise(attacked, client, data, len(rows[MEMBERS]))
    scores = attacked.gained(start, {site: attacked.of_model(client, data)})[site]
    member = members(rows)
    weight = torch.ones(len(member), dtype=torch.float64)
    for attack, of in scores.items():
        yield membership(PLANTED, attack, "", of.detach(), member, weight, attacked.patients(rows), resamples)


def _memorise(attacked: Attacked, client: Client, data: Any, count: int) -> None:
    """Trains on the members alone, again and again."""
    client.set_trainable(lambda name: True)
    optimizer = torch.optim.Adam([weight for _, weight in client.trainable()], lr=LEAK_RATE)
    generator = torch.Generator().manual_seed(attacked.experiment.rounds.seed)
    size = min(BATCH, count)
    chosen = (torch.randperm(count, generator=generator)[:size] for _ in range(LEAK_STEPS))
    drawn = (next(iter(data.batches(MEMBERS, size, drop_last=False, rows=rows))) for rows in chosen)
    train_on(client, drawn, optimizer)
