"""What an attacker who holds the trained model of a finished run learns of its records: `fedvlp audit`.

Like the recalls (run/recalls.py), this is measured where the records are, and the file holds figures alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedvlp.core.checkpoint import save_json, save_text
from fedvlp.core.client import Client
from fedvlp.core.json_file import read_json
from fedvlp.core.metric_keys import RECORD_EPSILON, SITE_EPSILON
from fedvlp.core.types import State
from fedvlp.core.validate import require
from fedvlp.evaluation import distortion
from fedvlp.evaluation.audit.canaries import MEMORISED, UNSEEN, Exposure, train_on
from fedvlp.evaluation.audit.canaries import PLANTED as PLANTED_CANARIES
from fedvlp.evaluation.audit.gradients import GRADIENT, Inversion
from fedvlp.evaluation.audit.membership import (
    MEMBERS,
    OTHERS,
    POOL,
    RATES,
    Membership,
    largest_area,
    largest_rate,
    matching_weights,
    membership,
    record_directions,
    record_scores,
    standardised,
)
from fedvlp.evaluation.audit.one_update import SiteInference, Words
from fedvlp.evaluation.intervals import Interval
from fedvlp.models.multimodal import MultimodalConfig
from fedvlp.models.serialization import CARD
from fedvlp.run import measurements
from fedvlp.run.assembly import Assembly
from fedvlp.run.audit_updates import LEAK_RATE, LEAK_STEPS, SENT, Updates, representation_scores
from fedvlp.run.evaluate import last_server, loader, own_models, trained_state
from fedvlp.run.folder import RunFolder
from fedvlp.run.metrics import largest_by_site
from fedvlp.run.model_card import CLASSES, with_block

UNTRAINED, TRAINED, OWN, PLANTED = "untrained", "trained", "sites' own", "planted leak"
"""Models that are attacked: the first and the last are the controls."""

GAINED = ", gained"
"""After the name of a score: how far training moved it for this record."""

MOST = 2000  # records of a site on either side; more only narrow the intervals
REFERENCE = 64  # held-out pairs among which the loss of a pair is counted; never others
LEAKED = 64  # records that the planted leak is trained on
LEAK_BATCH = 32
DELTA = 1e-5
"""Of the bound, where a site told epsilon: its delta stays in its own policy (the shipped one has this)."""

CHANCE_WITHIN, LEAK_ABOVE = 3.0, 90.0


FOUND = tuple(f"found at {rate:.0%} false" for rate in RATES)
COLUMNS = ("model", "score", "site", "members", "others", "area, %", *FOUND)
RECORD, DATA_SET = "one record", "whole data set"
BOUNDS = ("site", "epsilon", "unit", "delta", "area, %", *FOUND)
"""Heads of the tables of attacks and of bounds."""


@dataclass(frozen=True)
class Bound:
    """What the epsilon of one site leaves to any attack, percent."""

    site: str
    epsilon: float
    unit: str  # whose: RECORD or DATA_SET
    delta: float
    area: float
    rates: tuple[float, ...]  # at each of ``RATES``


KINDS = {"words": Words, "canaries": Exposure, "sites": SiteInference, "inversion": Inversion}
TITLES = {
    "words": "words that the server reads off an update without a policy",
    "canaries": "canaries: how far random reports that were planted in one more round are exposed",
    "sites": "whose update it is, told by records of each site",
    "inversion": "images drawn back from the gradient of one step on few records, whose reports are known",
}
"""The attacks on one update, by their names in the file."""


@dataclass(frozen=True)
class Audit:
    """The figures of an audit."""

    round: int
    dropped: int  # records of no stratum with both members and others
    rows: tuple[Membership, ...]
    bounds: tuple[Bound, ...]  # of the sites that told an epsilon
    words: tuple[Words, ...] = ()  # what updates tell of reports, where a word embedding travels
    canaries: tuple[Exposure, ...] = ()  # these three of image-text models, where sites send weights
    sites: tuple[SiteInference, ...] = ()
    inversion: tuple[Inversion, ...] = ()  # where it was asked for

    def updates(self) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
        """The attacks on one update that were run: title, head and lines of a table of each."""
        measured: dict[str, Sequence[Any]] = {
            "words": self.words,
            "canaries": self.canaries,
            "sites": self.sites,
            "inversion": self.inversion,
        }
        return [(TITLES[name], rows[0].HEAD, [row.cells() for row in rows]) for name, rows in measured.items() if rows]

    def of(self, model: str, site: str = "") -> list[Membership]:
        """The attacks on one model, at one site or all together."""
        return [row for row in self.rows if (row.model, row.site) == (model, site)]

    def strongest(self) -> Membership:
        """The attack on what training made, at all sites together, with the largest area."""
        return max(self.of(TRAINED) + self.of(OWN) + self.of(SENT), key=lambda row: row.area.value)

    def controls(self) -> list[str]:
        """What the controls say, a sentence each; they decide whether the other figures are evidence."""
        said = []
        untrained = self.of(UNTRAINED)
        off = max(untrained, key=lambda row: abs(row.area.value - 50))
        near = abs(off.area.value - 50) <= CHANCE_WITHIN or off.area.low <= 50 <= off.area.high
        said.append(
            f"Untrained model: area {off.area.unsigned()} ({off.attack}). "
            + (
                "Members and others cannot be distinguished before training, as it must be."
                if near
                else "Members and others differ before any training, so the figures below are partly of that "
                "difference; read the scores that were gained in training."
            )
        )
        leaks = self.of(PLANTED)
        if leaks:
            leak = max(leaks, key=lambda row: row.area.value)
            said_of_leak = "The attack finds it."
            if leak.area.value <= LEAK_ABOVE:
                said_of_leak = (
                    f"The attack misses it (expected above {LEAK_ABOVE:.0f}), so low figures here prove nothing."
                )
            said.append(
                f"Planted leak, a model trained on {leak.members} records alone: area {leak.area.unsigned()} "
                f"({leak.attack}). {said_of_leak}"
            )
        else:
            said.append("No leak was planted (--no-controls), so nothing shows that the attack would find one.")
        return said + self._canaries_said()

    def _canaries_said(self) -> list[str]:
        """What the canaries say, and theirs of controls."""
        of = {row.canaries: row for row in self.canaries}
        if not of:
            return []
        planted, unseen = of[PLANTED_CANARIES], of[UNSEEN]
        said = (
            f"Canaries: {planted.count} random reports, each seen {planted.times:.1f} times among the records of "
            f"{planted.site}, have a mean exposure of {planted.mean.value:.2f} of {planted.most:.0f} bits; as many "
            f"that nobody trained on have {unseen.mean.value:.2f} (by chance {unseen.chance:.2f})"
        )
        alone = of.get(MEMORISED)
        return [said + (f", and those trained on alone {alone.mean.value:.2f}." if alone else ".")]


def row_cells(row: Membership) -> tuple[str, ...]:
    """One attack as a line of a table of ``COLUMNS``."""
    counts = (f"{row.members:,}", f"{row.others:,}")
    return row.model, row.attack, row.site or "all", *counts, *(of.unsigned() for of in (row.area, *row.rates))


def bound_cells(bound: Bound) -> tuple[str, ...]:
    """One site's bound as a line of a table of ``BOUNDS``."""
    rates = (f"{value:.1f}" for value in (bound.area, *bound.rates))
    return bound.site, f"{bound.epsilon:.3g}", bound.unit, f"{bound.delta:g}", *rates


def file_of(folder: RunFolder) -> Path:
    """Where the audit of a run is."""
    return measurements.folder_of(folder) / measurements.AUDIT


def read(folder: RunFolder) -> Audit | None:
    """The audit that ``measure`` wrote; None where there is none, or of another model. Raises ValueError for damage."""
    file = file_of(folder)
    if not file.exists() or measurements.is_of_another_model(folder, file):
        return None
    try:
        content = read_json(file)
        rows = tuple(
            Membership(**{**row, "area": _interval(row["area"]), "rates": tuple(map(_interval, row["rates"]))})
            for row in content["rows"]
        )
        bounds = tuple(Bound(**{**bound, "rates": tuple(bound["rates"])}) for bound in content["bounds"])
        others: Any = {name: tuple(_as(kind, one) for one in content.get(name, ())) for name, kind in KINDS.items()}
        return Audit(content["round"], content["dropped"], rows, bounds, **others)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ValueError(
            f"{folder.path}: evaluation/audit.json is not what fedvlp wrote there; remove it and run "
            "`fedvlp audit RUN` again"
        ) from None


def _as(kind: type, written: Mapping[str, Any]) -> Any:
    """One figure of an attack on updates as it was written; JSON's null is nan here."""
    values = {name: _interval(value) if isinstance(value, dict) else value for name, value in written.items()}
    return kind(**{name: math.nan if value is None else value for name, value in values.items()})


def _interval(written: Mapping[str, float | None]) -> Interval:
    value, low, high = (math.nan if (of := written[name]) is None else float(of) for name in ("value", "low", "high"))
    return Interval(value, low, high)


def measure(
    folder: RunFolder, controls: bool = True, resamples: int = 1000, delta: float = DELTA, invert: float = 0.0
) -> Audit:
    """Attacks the model of a finished run, writes ``evaluation/audit.json`` and says so in the model card.

    ``controls``: leaks are planted too, which takes some seconds of training. ``invert``: so many seconds are spent on
    drawing images from a gradient; 0: none. Raises ValueError for a run that has not finished, or without a site that
    has members and others to compare.
    """
    audit = _Attacked(folder).audit(controls, resamples, delta, invert)
    save_json(file_of(folder), _plain(asdict(audit)))
    measurements.note(folder, file_of(folder))
    card = folder.model.parent / CARD
    if card.exists():
        save_text(card, with_block(card.read_text(encoding="utf-8"), _sentences(audit), "audit", CLASSES))
    return audit


def _plain(value: Any) -> Any:
    """nan as null: JSON has no nan."""
    if isinstance(value, dict):
        return {name: _plain(of) for name, of in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(of) for of in value]
    return None if isinstance(value, float) and value != value else value


def _sentences(audit: Audit) -> str:
    """The audit in the model card."""
    most = audit.strongest()
    said = (
        f"Membership: the strongest of the attacks that were run ({most.attack}) tells {most.members:,} training "
        f"records from {most.others:,} others with an area under the ROC curve of {most.area.unsigned()} percent "
        f"(chance: 50); at a false positive rate of {RATES[0]:.0%} "
        f"it finds {most.rates[0].unsigned()} percent of them. "
        "Stronger attacks may exist."
    )
    return "\n\n".join([said, *audit.controls()])


class _Attacked:
    """A finished run, and the records by which it is attacked."""

    def __init__(self, folder: RunFolder) -> None:
        folder.experiment()  # says so where there is no run
        require(folder.model.exists(), f"{folder.path} has not finished, so there is no model to attack; resume it")
        self.folder, self.experiment = folder, folder.experiment()
        torch.set_num_threads(self.experiment.training.threads)
        self.assembly = Assembly(self.experiment, folder.path)
        self.server = last_server(folder)
        self.history = folder.history()
        self.classifier = isinstance(self.experiment.model, MultimodalConfig)
        self.rows = {site: rows for site in self.assembly.data_sites() if (rows := self._rows(site))}
        require(
            bool(self.rows),
            "audit: no site has training records, held-out ones and a few more for reference, whole with image and "
            "report; membership cannot be measured",
        )
        self.data = {site: self.assembly.serve(self.assembly.cohort, rows) for site, rows in self.rows.items()}

    def _rows(self, site: str) -> dict[str, np.ndarray] | None:
        """Members, others and reference pairs of a site; None where one of them would be empty.

        Reference pairs are validation records as far as there are any: whole patients, so that no other record is of
        a reference pair's patient.
        """
        cohort, rng = self.assembly.cohort, np.random.default_rng([self.experiment.rounds.seed, 2])
        usable = (
            cohort.has_image() | cohort.has_report() if self.classifier else cohort.has_image() & cohort.has_report()
        )
        if cohort.report_from is not None:
            usable = usable & np.array([not sources for sources in cohort.report_from])
        by_split = {split: cohort.rows(split, site) for split in ("train", "val", "test")}
        train, val, test = (rows[usable[rows]] for rows in by_split.values())
        held = np.concatenate([val, test])
        patients = list(dict.fromkeys(cohort.patients[row] for row in held))
        chosen: set[str] = set()
        count = 0
        for patient in patients:
            if count >= min(REFERENCE, len(held) // 4):
                break
            chosen.add(patient)
            count += sum(cohort.patients[row] == patient for row in held)
        pooled = np.array([cohort.patients[row] in chosen for row in held], dtype=bool)
        rows = {MEMBERS: train, OTHERS: held[~pooled], POOL: held[pooled]}
        if not all(len(of) for of in rows.values()):
            return None
        return {name: np.sort(rng.permutation(of)[:MOST]) for name, of in rows.items()}

    def audit(self, controls: bool, resamples: int, delta: float, invert: float) -> Audit:
        state = trained_state(self.assembly, self.server)
        own = own_models(self.assembly, self.server, state)
        initial = self.assembly.initial()
        load = loader(self.assembly)
        updates = Updates(self.assembly, state, self.rows, load)
        start = {site: self._scores(site, initial, distortion.load) for site in self.data}
        scored = {UNTRAINED: start}
        if updates.travels or not own:
            scored[TRAINED] = self._gained(start, {site: self._scores(site, state, load) for site in self.data})
        if own:
            of_own = {site: self._scores(site, own.get(site, state), load) for site in self.data}
            scored[OWN] = self._gained(start, of_own)
        scored |= representation_scores(self.assembly, self.folder, state, self.data)
        weights = self._weights(self.rows)
        rows = [row for model, of in scored.items() for row in self._measured(model, of, weights, resamples)]
        if controls:
            rows += self._planted(initial, resamples)
        dropped = sum(int((weight == 0).sum()) for weight in weights.values())
        measured = Audit(self.server.round, dropped, tuple(rows), tuple(self._bounds(delta)), tuple(updates.words()))
        if self.classifier:
            return measured
        return replace(
            measured,
            canaries=tuple(updates.canaries(controls)),
            sites=tuple(updates.sites()),
            inversion=tuple(updates.inversion(invert)) if invert else (),
        )

    def _gained(self, start: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
        """Every site's scores, and beside them how far they are above those of the untrained model."""
        return {
            site: {**scores, **{name + GAINED: score - start[site][name] for name, score in scores.items()}}
            for site, scores in after.items()
        }

    def _scores(self, site: str, state: State, load: distortion.Load) -> dict[str, Tensor]:
        """Scores [members + others] of a site's records by attack."""
        client = self.assembly.client(site, self.data[site])
        load(client, state, site)
        return self._of_model(client, self.data[site])

    def _of_model(self, client: Client, data: Any) -> dict[str, Tensor]:
        batches = {name: list(data.batches(name, LEAK_BATCH, drop_last=False)) for name in (MEMBERS, OTHERS, POOL)}
        client.set_trainable(lambda name: True)
        gradients = record_directions(client.model, batches, {})
        return {**record_scores(client.model, batches), GRADIENT: gradients.shortness()}

    def _weights(self, rows: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, Tensor]:
        """Site -> weights of its members and others."""
        out = {}
        for site, of in rows.items():
            strata = self._strata(np.concatenate([of[MEMBERS], of[OTHERS]]))
            out[site] = matching_weights(strata, _members(of))
        return out

    def _strata(self, rows: np.ndarray) -> list[tuple[object, ...]]:
        """What a record is like apart from having been trained on: its modalities, findings, length of report.

        Of the findings only how many are there, up to three: finer strata would leave few records to compare.
        """
        cohort = self.assembly.cohort
        words = np.array([len(cohort.reports[row].split()) for row in rows])
        longer = words > np.median(words)
        present = np.minimum((cohort.labels[rows] == 1).sum(axis=1), 3)
        imaged = cohort.has_image()[rows]
        return list(zip(present.tolist(), longer.tolist(), imaged.tolist(), (words > 0).tolist(), strict=True))

    def _measured(
        self, model: str, scored: Mapping[str, Mapping[str, Tensor]], weights: Mapping[str, Tensor], resamples: int
    ) -> Iterator[Membership]:
        """The attacks on one model: at all sites together, then at each."""
        sites = [site for site in scored if bool((weights[site] > 0).any())]
        require(bool(sites), "audit: at no site are members and others alike enough to be compared")
        member = {site: _members(self.rows[site]) for site in sites}
        for attack in scored[sites[0]]:
            of = {
                site: standardised(scored[site][attack], member[site], weights[site], [site] * len(member[site]))
                for site in sites
            }
            whose = {site: self._patients(self.rows[site]) for site in sites}
            of_all, member_of_all, weight_of_all = (
                torch.cat([by[site] for site in sites]) for by in (of, member, weights)
            )
            everybody = [patient for site in sites for patient in whose[site]]
            yield membership(model, attack, "", of_all, member_of_all, weight_of_all, everybody, resamples)
            for site in sites if len(sites) > 1 else ():
                yield membership(model, attack, site, of[site], member[site], weights[site], whose[site], resamples)

    def _patients(self, of: Mapping[str, np.ndarray]) -> list[str]:
        return [self.assembly.cohort.patients[row] for name in (MEMBERS, OTHERS) for row in of[name]]

    def _planted(self, initial: State, resamples: int) -> Iterator[Membership]:
        """The attacks on a model that saw few records of one site often: what they must find."""
        site = max(
            self.rows, key=lambda name: min(len(self.rows[name][MEMBERS]), LEAKED) + len(self.rows[name][OTHERS])
        )
        rows = {**self.rows[site], MEMBERS: self.rows[site][MEMBERS][:LEAKED]}
        data = self.assembly.serve(self.assembly.cohort, rows)
        client = self.assembly.client(site, data)
        distortion.load(client, initial, site)
        start = {site: self._of_model(client, data)}
        self._memorise(client, data, len(rows[MEMBERS]))
        scores = self._gained(start, {site: self._of_model(client, data)})[site]
        member = _members(rows)
        weight = torch.ones(len(member), dtype=torch.float64)
        for attack, of in scores.items():
            yield membership(PLANTED, attack, "", of.detach(), member, weight, self._patients(rows), resamples)

    def _memorise(self, client: Client, data: Any, count: int) -> None:
        """Trains on the members alone, again and again."""
        client.set_trainable(lambda name: True)
        optimizer = torch.optim.Adam([weight for _, weight in client.trainable()], lr=LEAK_RATE)
        generator = torch.Generator().manual_seed(self.experiment.rounds.seed)
        size = min(LEAK_BATCH, count)
        chosen = (torch.randperm(count, generator=generator)[:size] for _ in range(LEAK_STEPS))
        drawn = (next(iter(data.batches(MEMBERS, size, drop_last=False, rows=rows))) for rows in chosen)
        train_on(client, drawn, optimizer)

    def _bounds(self, delta: float) -> Iterator[Bound]:
        """What differential privacy leaves to an attack, by site that told its epsilon."""
        units = {RECORD: (RECORD_EPSILON, self.experiment.training.dp_delta), DATA_SET: (SITE_EPSILON, delta)}
        for unit, (name, at) in units.items():
            for site, epsilon in sorted(largest_by_site(self.history, name).items()):
                rates = tuple(100 * largest_rate(rate, epsilon, at) for rate in RATES)
                yield Bound(site, epsilon, unit, at, 100 * largest_area(epsilon, at), rates)


def _members(rows: Mapping[str, Sequence[int] | np.ndarray]) -> Tensor:
    """[members + others] bool."""
    return torch.arange(len(rows[MEMBERS]) + len(rows[OTHERS])) < len(rows[MEMBERS])
