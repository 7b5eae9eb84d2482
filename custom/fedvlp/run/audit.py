"""What an attacker who holds the trained model of a finished run learns of its records: `fedvlp audit`.

Like the recalls (run/recalls.py), this is measured where the records are, and the file holds figures alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedvlp.core.checkpoint import save_json, save_text
from fedvlp.core.client import Client
from fedvlp.core.json_file import read_json
from fedvlp.core.method import Method
from fedvlp.core.metric_keys import RECORD_EPSILON, SITE_EPSILON
from fedvlp.core.types import MODALITIES, State
from fedvlp.core.validate import require
from fedvlp.evaluation.audit.gradients import GRADIENT
from fedvlp.evaluation.audit.membership import (
    GUESSED,
    MEMBERS,
    OTHERS,
    POOL,
    RATES,
    Membership,
    guessed_cosines,
    largest_area,
    largest_rate,
    matching_weights,
    membership,
    record_directions,
    record_scores,
    standardised,
)
from fedvlp.evaluation.intervals import Interval
from fedvlp.evaluation.retrieval import embed
from fedvlp.federation.site_memory import SiteMemory
from fedvlp.methods.ensemble import MODEL
from fedvlp.methods.math.contrast import representations
from fedvlp.models.multimodal import MultimodalConfig
from fedvlp.models.serialization import CARD
from fedvlp.run import measurements
from fedvlp.run.assembly import Assembly
from fedvlp.run.evaluate import Load, last_server, load_shared, loader, own_models, trained_state
from fedvlp.run.folder import RunFolder
from fedvlp.run.metrics import largest_by_site
from fedvlp.run.model_card import CLASSES, with_block

UNTRAINED, TRAINED, OWN = "untrained", "trained", "sites' own"
"""Models that are attacked: the first is the control."""

GAINED = ", gained"
"""After the name of a score: how far training moved it for this record."""

MOST = 2000  # records of a site on either side; more only narrow the intervals
REFERENCE = 64  # held-out pairs among which the loss of a pair is counted; never others
BATCH = 32  # records that are scored at a time
DELTA = 1e-5
"""Of the bound, where a site told epsilon: its delta stays in its own policy (the shipped one has this)."""

CHANCE_WITHIN = 3.0


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


@dataclass(frozen=True)
class Audit:
    """The figures of an audit."""

    round: int
    dropped: int  # records of no stratum with both members and others
    rows: tuple[Membership, ...]
    bounds: tuple[Bound, ...]  # of the sites that told an epsilon

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
        said.append(
            "No leak was planted, so nothing here shows that the attacks would find one; `fedvlp attack`, in a clone, "
            "plants one."
        )
        return said


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
            Membership(**{**row, "area": interval_of(row["area"]), "rates": tuple(map(interval_of, row["rates"]))})
            for row in content["rows"]
        )
        bounds = tuple(Bound(**{**bound, "rates": tuple(bound["rates"])}) for bound in content["bounds"])
        return Audit(content["round"], content["dropped"], rows, bounds)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ValueError(
            f"{folder.path}: evaluation/audit.json is not what fedvlp wrote there; remove it and run "
            "`fedvlp audit RUN` again"
        ) from None


def interval_of(written: Mapping[str, float | None]) -> Interval:
    """Return the interval that was written; JSON's null is nan here."""
    value, low, high = (math.nan if (of := written[name]) is None else float(of) for name in ("value", "low", "high"))
    return Interval(value, low, high)


def measure(folder: RunFolder, resamples: int = 1000, delta: float = DELTA) -> Audit:
    """Attacks the model of a finished run, writes ``evaluation/audit.json`` and says so in the model card.

    Raises ValueError for a run that has not finished, or without a site that
    has members and others to compare.
    """
    audit = Attacked(folder).audit(resamples, delta)
    save_json(file_of(folder), plain(asdict(audit)))
    measurements.note(folder, file_of(folder))
    card = folder.model.parent / CARD
    if card.exists():
        save_text(card, with_block(card.read_text(encoding="utf-8"), _sentences(audit), "audit", CLASSES))
    return audit


def plain(value: Any) -> Any:
    """nan as null: JSON has no nan."""
    if isinstance(value, dict):
        return {name: plain(of) for name, of in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(of) for of in value]
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


class Attacked:
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

    def audit(self, resamples: int, delta: float) -> Audit:
        """Attack every model of the run; ``delta``: of the bounds of sites that told an epsilon."""
        state = trained_state(self.assembly, self.server)
        own = own_models(self.assembly, self.server, state)
        initial = self.assembly.initial()
        load = loader(self.assembly)
        start = {site: self._scores(site, initial, load_shared) for site in self.data}
        scored = {UNTRAINED: start}
        if travelling(self.experiment.method, state) or not own:
            scored[TRAINED] = self.gained(start, {site: self._scores(site, state, load) for site in self.data})
        if own:
            of_own = {site: self._scores(site, own.get(site, state), load) for site in self.data}
            scored[OWN] = self.gained(start, of_own)
        scored |= representation_scores(self.assembly, self.folder, state, self.data)
        weights = self._weights(self.rows)
        rows = [row for model, of in scored.items() for row in self._measured(model, of, weights, resamples)]
        dropped = sum(int((weight == 0).sum()) for weight in weights.values())
        return Audit(self.server.round, dropped, tuple(rows), tuple(self._bounds(delta)))

    def gained(self, start: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
        """Every site's scores, and beside them how far they are above those of the untrained model."""
        return {
            site: {**scores, **{name + GAINED: score - start[site][name] for name, score in scores.items()}}
            for site, scores in after.items()
        }

    def _scores(self, site: str, state: State, load: Load) -> dict[str, Tensor]:
        """Scores [members + others] of a site's records by attack."""
        client = self.assembly.client(site, self.data[site])
        load(client, state, site)
        return self.of_model(client, self.data[site])

    def of_model(self, client: Client, data: Any) -> dict[str, Tensor]:
        """Score the records of ``data`` by attack, [members + others] each, with the model that the client has."""
        batches = {name: list(data.batches(name, BATCH, drop_last=False)) for name in (MEMBERS, OTHERS, POOL)}
        client.set_trainable(lambda name: True)
        gradients = record_directions(client.model, batches, {})
        return {**record_scores(client.model, batches), GRADIENT: gradients.shortness()}

    def _weights(self, rows: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, Tensor]:
        """Site -> weights of its members and others."""
        out = {}
        for site, of in rows.items():
            strata = self._strata(np.concatenate([of[MEMBERS], of[OTHERS]]))
            out[site] = matching_weights(strata, members(of))
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
        member = {site: members(self.rows[site]) for site in sites}
        for attack in scored[sites[0]]:
            of = {
                site: standardised(scored[site][attack], member[site], weights[site], [site] * len(member[site]))
                for site in sites
            }
            whose = {site: self.patients(self.rows[site]) for site in sites}
            of_all, member_of_all, weight_of_all = (
                torch.cat([by[site] for site in sites]) for by in (of, member, weights)
            )
            everybody = [patient for site in sites for patient in whose[site]]
            yield membership(model, attack, "", of_all, member_of_all, weight_of_all, everybody, resamples)
            for site in sites if len(sites) > 1 else ():
                yield membership(model, attack, site, of[site], member[site], weights[site], whose[site], resamples)

    def patients(self, of: Mapping[str, np.ndarray]) -> list[str]:
        """Return the patient of each member, then of each other record."""
        return [self.assembly.cohort.patients[row] for name in (MEMBERS, OTHERS) for row in of[name]]

    def _bounds(self, delta: float) -> Iterator[Bound]:
        """What differential privacy leaves to an attack, by site that told its epsilon."""
        units = {RECORD: (RECORD_EPSILON, self.experiment.training.dp_delta), DATA_SET: (SITE_EPSILON, delta)}
        for unit, (name, at) in units.items():
            for site, epsilon in sorted(largest_by_site(self.history, name).items()):
                rates = tuple(100 * largest_rate(rate, epsilon, at) for rate in RATES)
                yield Bound(site, epsilon, unit, at, 100 * largest_area(epsilon, at), rates)


def members(rows: Mapping[str, Sequence[int] | np.ndarray]) -> Tensor:
    """Return which of a site's records are members: [members + others] bool."""
    return torch.arange(len(rows[MEMBERS]) + len(rows[OTHERS])) < len(rows[MEMBERS])


def travelling(method: Method, state: State) -> bool:
    """Return whether sites send any weight of the model; those of frozen towers are no part of its state."""
    return any(method.shares(name, phase) for name in state for phase in method.phases(0))


# The attack on the representations that sites of a finished run sent last (evaluation/audit/membership.py).

BEFORE, SENT = "representations, untrained", "representations"
"""Of the sites' models before and after training; the first is the control."""

Scores = dict[str, dict[str, dict[str, Tensor]]]
"""Whose scores -> site -> attack -> scores [members + others]."""


@torch.no_grad()
def representation_scores(assembly: Assembly, folder: RunFolder, state: State, data: Mapping[str, Any]) -> Scores:
    """Of the sites with images and reports whose models stay with them, with a public set; the server attacks.

    ``state``: the server's model. ``data``: site -> its records, as the server's model reads them.
    """
    scores: Scores = {}
    for site, records in data.items() if assembly.has_public else ():
        memory = SiteMemory(folder.path / "sites" / site).newest()
        own = {name.removeprefix(MODEL): tensor for name, tensor in memory.items() if name.startswith(MODEL)}
        if not own or set(records.modalities) != set(MODALITIES):
            continue
        server = assembly.client("server", records)
        server.load(state)
        known = _on_cpu(server)
        asked = (batch for name in (MEMBERS, OTHERS) for batch in records.batches(name, 32, drop_last=False))
        film, report = embed(server.model, asked)
        client = assembly.client(site, records, site)
        assert client.initial is not None
        for whose, weights in ((BEFORE, client.initial()), (SENT, own)):
            client.load(weights)
            score = guessed_cosines(known, _on_cpu(client), {"image": film, "text": report})
            scores.setdefault(whose, {})[site] = {GUESSED: score}
    return scores


def _on_cpu(client: Client) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in representations(client, MODALITIES).items()}
