"""What an attacker who holds the trained model of a finished run learns of its records: `fedvlp audit`.

Like the recalls (run/recalls.py), this is measured where the records are, and the file holds figures alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedvlp.core.checkpoint import save_json, save_text
from fedvlp.core.client import Client
from fedvlp.core.metric_names import RECORD_EPSILON, SITE_EPSILON
from fedvlp.core.types import Batch, State
from fedvlp.core.validate import require
from fedvlp.evaluation import distortion
from fedvlp.evaluation.audit.membership import (
    RATES,
    TEMPERATURE,
    Membership,
    label_scores,
    largest_area,
    largest_rate,
    matching_weights,
    membership,
    pair_scores,
    standardised,
)
from fedvlp.evaluation.audit.words import Words, recovered
from fedvlp.evaluation.intervals import Interval
from fedvlp.evaluation.site_metrics import embed
from fedvlp.models.multimodal import MultimodalConfig
from fedvlp.models.serialization import CARD
from fedvlp.run.assembly import Assembly
from fedvlp.run.evaluate import last_server, loader, own_models
from fedvlp.run.folder import RunFolder
from fedvlp.run.metrics import largest_by_site
from fedvlp.run.model_card import with_audit

UNTRAINED, TRAINED, OWN, PLANTED = "untrained", "trained", "sites' own", "planted leak"
"""Models that are attacked: the first and the last are the controls."""

GAINED = ", gained"
"""After the name of a score: how far training moved it for this record."""

MOST = 2000  # records of a site on either side; more only narrow the intervals
REFERENCE = 64  # held-out pairs among which the loss of a pair is counted; never others
LEAKED = 64  # records that the planted leak is trained on
LEAK_STEPS, LEAK_RATE, LEAK_BATCH = 300, 1e-3, 32
DELTA = 1e-5
"""Of the bound, where a site told epsilon: its delta stays in its own policy (the shipped one has this)."""

MEMBERS, OTHERS, POOL = "members", "others", "reference"
CHANCE_WITHIN, LEAK_ABOVE = 3.0, 90.0


FOUND = tuple(f"found at {rate:.0%} false" for rate in RATES)
COLUMNS = ("model", "score", "site", "members", "others", "area, %", *FOUND)
RECORD, DATA_SET = "one record", "whole data set"
BOUNDS = ("site", "epsilon", "unit", "delta", "area, %", *FOUND)
WORDS = ("site", "reports", "steps", "words", "recovered, %", "right, %", "by guessing, %")
"""Heads of the tables of attacks, of bounds, and of words read off an update."""

FEW = 8
"""Reports of the smallest update that is attacked."""


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
    words: tuple[Words, ...] = ()  # what updates tell of reports, where a word embedding travels

    def of(self, model: str, site: str = "") -> list[Membership]:
        """The attacks on one model, at one site or all together."""
        return [row for row in self.rows if (row.model, row.site) == (model, site)]

    def strongest(self) -> Membership:
        """The attack on what training made, at all sites together, with the largest area."""
        return max(self.of(TRAINED) + self.of(OWN), key=lambda row: row.area.value)

    def controls(self) -> list[str]:
        """What the controls say, a sentence each; they decide whether the other figures are evidence."""
        said = []
        untrained = self.of(UNTRAINED)
        off = max(untrained, key=lambda row: abs(row.area.value - 50))
        near = abs(off.area.value - 50) <= CHANCE_WITHIN or off.area.low <= 50 <= off.area.high
        said.append(
            f"Untrained model: area {off.area.unsigned()} ({off.attack}). "
            + (
                "Members and others cannot be told apart before training, as it must be."
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
        return said


def row_cells(row: Membership) -> tuple[str, ...]:
    """One attack as a line of a table of ``COLUMNS``."""
    counts = (f"{row.members:,}", f"{row.others:,}")
    return row.model, row.attack, row.site or "all", *counts, *(of.unsigned() for of in (row.area, *row.rates))


def bound_cells(bound: Bound) -> tuple[str, ...]:
    """One site's bound as a line of a table of ``BOUNDS``."""
    rates = (f"{value:.1f}" for value in (bound.area, *bound.rates))
    return bound.site, f"{bound.epsilon:.3g}", bound.unit, f"{bound.delta:g}", *rates


def words_cells(words: Words) -> tuple[str, ...]:
    """What one update tells as a line of a table of ``WORDS``."""
    shares = ("none" if math.isnan(of) else f"{of:.1f}" for of in (words.recovered, words.right, words.guess))
    return words.site, f"{words.reports:,}", str(words.steps), f"{words.words:,}", *shares


def file_of(folder: RunFolder) -> Path:
    """Where the audit of a run is."""
    return folder.path / "evaluation" / "audit.json"


def read(folder: RunFolder) -> Audit | None:
    """The audit that ``measure`` wrote; None where there is none. Raises ValueError for a damaged file."""
    file = file_of(folder)
    if not file.exists():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        rows = tuple(
            Membership(**{**row, "area": _interval(row["area"]), "rates": tuple(map(_interval, row["rates"]))})
            for row in content["rows"]
        )
        bounds = tuple(Bound(**{**bound, "rates": tuple(bound["rates"])}) for bound in content["bounds"])
        words = tuple(Words(**_with_nan(one)) for one in content.get("words", ()))
        return Audit(content["round"], content["dropped"], rows, bounds, words)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise ValueError(
            f"{folder.path}: evaluation/audit.json is not what fedvlp wrote there; remove it and run "
            "`fedvlp audit RUN` again"
        ) from None


def _with_nan(written: Mapping[str, Any]) -> dict[str, Any]:
    """JSON's null is nan here."""
    return {name: math.nan if value is None else value for name, value in written.items()}


def _interval(written: Mapping[str, float | None]) -> Interval:
    value, low, high = (math.nan if (of := written[name]) is None else float(of) for name in ("value", "low", "high"))
    return Interval(value, low, high)


def measure(folder: RunFolder, controls: bool = True, resamples: int = 1000, delta: float = DELTA) -> Audit:
    """Attacks the model of a finished run, writes ``evaluation/audit.json`` and says so in the model card.

    ``controls``: a leak is planted too, which takes some seconds of training. Raises ValueError for a run that has not
    finished, or without a site that has members and others to compare.
    """
    audit = _Attacked(folder).audit(controls, resamples, delta)
    save_json(file_of(folder), _plain(asdict(audit)))
    card = folder.model.parent / CARD
    if card.exists():
        save_text(card, with_audit(card.read_text(encoding="utf-8"), _sentences(audit)))
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
        f"(a coin: 50); at a false positive rate of {RATES[0]:.0%} "
        f"it finds {most.rates[0].unsigned()} percent of them. "
        "Stronger attacks may exist."
    )
    return "\n\n".join([said, *audit.controls()])


class _Attacked:
    """A finished run, and the records by which it is attacked."""

    def __init__(self, folder: RunFolder) -> None:
        folder.experiment()  # says so where there is no run
        require(folder.model.exists(), f"{folder.path} has not finished, so there is no model to attack; go on with it")
        self.experiment = folder.experiment()
        torch.set_num_threads(self.experiment.training.threads)
        self.assembly = Assembly(self.experiment, folder.path)
        self.server = last_server(folder)
        self.history = folder.history()
        self.classifier = isinstance(self.experiment.model, MultimodalConfig)
        self.rows = {site: rows for site in self.assembly.data_sites() if (rows := self._rows(site))}
        require(
            bool(self.rows),
            "audit: no site has training records, held-out ones and a few more for reference, whole with film and "
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
            usable = usable & np.array([source == "" for source in cohort.report_from])
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

    def audit(self, controls: bool, resamples: int, delta: float) -> Audit:
        state = self.experiment.method.finish(self.server)
        own = own_models(self.assembly, self.server, state)
        initial = self.assembly.initial()
        start = {site: self._scores(site, initial, distortion.load) for site in self.data}
        scored = {UNTRAINED: start}
        load = loader(self.assembly)
        if any(self.experiment.method.shares(name, phase) for phase in self._phases() for name in state) or not own:
            scored[TRAINED] = self._gained(start, {site: self._scores(site, state, load) for site in self.data})
        if own:
            of_own = {site: self._scores(site, own.get(site, state), load) for site in self.data}
            scored[OWN] = self._gained(start, of_own)
        weights = self._weights(self.rows)
        rows = [row for model, of in scored.items() for row in self._measured(model, of, weights, resamples)]
        if controls:
            rows += self._planted(initial, resamples)
        dropped = sum(int((weight == 0).sum()) for weight in weights.values())
        return Audit(self.server.round, dropped, tuple(rows), tuple(self._bounds(delta)), tuple(self._words(state)))

    def _words(self, state: State) -> Iterator[Words]:
        """What the server reads off an update of each site: of one step on few reports, and of one pass over all."""
        name = self._word_embedding(state)
        for site, rows in self.rows.items() if name else ():
            data = self.assembly.serve(self.assembly.cohort, {MEMBERS: rows[MEMBERS]})
            if "text" not in data.modalities:
                continue
            count = len(rows[MEMBERS])
            few = min(FEW, count)
            size = min(max(2, self.experiment.training.batch_size), count)
            for reports, batch in ((few, few), (count, size)):
                client = self.assembly.client(site, data)
                distortion.load(client, state, site)
                before = client.state()[name].detach().cpu().clone()
                read = self._one_pass(
                    client, list(data.batches(MEMBERS, batch, drop_last=True))[: -(-reports // batch)]
                )
                after = client.state()[name].detach().cpu()
                seen = sum(len(ids) for ids, _ in read)
                ids = torch.cat([ids[mask] for ids, mask in read])
                yield recovered(site, before, after, ids, seen, len(read))

    def _word_embedding(self, state: State) -> str:
        """The name of the text tower's word embedding, if sites send it; "" otherwise."""
        method = self.experiment.method
        vocabulary = getattr(getattr(self.assembly.modules()[0], "tokenizer", None), "vocabulary", 0)
        rows = (
            name for name, tensor in state.items()
            if name.startswith("text_encoder.") and tensor.ndim == 2 and len(tensor) == vocabulary
        )  # fmt: skip
        sent = (name for name in rows if any(method.shares(name, phase) for phase in self._phases()))
        return next(sent, "")

    def _one_pass(self, client: Client, batches: Sequence[Batch]) -> list[tuple[Tensor, Tensor]]:
        """Trains on the batches once, by the run's own optimiser; returns ids and mask of what it read."""
        client.set_trainable(lambda name: True)
        optimizer = self.experiment.training.build([weight for _, weight in client.trainable()], 1.0)
        for batch in batches:
            loss = self._own_loss(client.model(batch), batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [(batch["text"].cpu(), batch["text_mask"].cpu()) for batch in batches]

    def _phases(self) -> tuple[str, ...]:
        return self.experiment.method.phases(0)

    def _gained(self, start: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
        """Every site's scores, and beside them how far they are above those of the untrained model."""
        return {
            site: {**scores, **{name + GAINED: score - start[site][name] for name, score in scores.items()}}
            for site, scores in after.items()
        }

    @torch.no_grad()
    def _scores(self, site: str, state: State, load: distortion.Load) -> dict[str, Tensor]:
        """Scores [members + others] of a site's records by attack."""
        client = self.assembly.client(site, self.data[site])
        load(client, state, site)
        return self._of_model(client.model, self.data[site])

    def _of_model(self, model: Any, data: Any) -> dict[str, Tensor]:
        batches = {name: list(data.batches(name, LEAK_BATCH, drop_last=False)) for name in (MEMBERS, OTHERS, POOL)}
        if self.classifier:
            model.eval()
            asked = [batch for name in (MEMBERS, OTHERS) for batch in batches[name]]
            logits = torch.cat([model(batch).logits.cpu() for batch in asked])
            return label_scores(logits, torch.cat([batch["labels"].cpu() for batch in asked]))
        vectors = {name: embed(model, iter(of)) for name, of in batches.items()}
        image, text = (torch.cat([vectors[MEMBERS][half], vectors[OTHERS][half]]) for half in (0, 1))
        return pair_scores(image, text, vectors[POOL])

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
                yield membership(
                    model, attack, site, of[site], member[site], weights[site], whose[site], resamples
                )  # fmt: skip

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
        start = {site: self._of_model(client.model, data)}
        self._memorise(client, data, len(rows[MEMBERS]))
        scores = self._gained(start, {site: self._of_model(client.model, data)})[site]
        member = _members(rows)
        weight = torch.ones(len(member), dtype=torch.float64)
        for attack, of in scores.items():
            yield membership(PLANTED, attack, "", of.detach(), member, weight, self._patients(rows), resamples)

    def _memorise(self, client: Client, data: Any, count: int) -> None:
        """Trains on the members alone, again and again."""
        client.set_trainable(lambda name: True)
        model = client.model
        optimizer = torch.optim.Adam([weight for _, weight in client.trainable()], lr=LEAK_RATE)
        generator = torch.Generator().manual_seed(self.experiment.rounds.seed)
        size = min(LEAK_BATCH, count)
        for _ in range(LEAK_STEPS):
            rows = torch.randperm(count, generator=generator)[:size]
            batch = next(iter(data.batches(MEMBERS, size, drop_last=False, rows=rows)))
            loss = self._own_loss(model(batch), batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def _own_loss(self, output: Any, batch: Mapping[str, Tensor]) -> Tensor:
        if self.classifier:
            labels = batch["labels"].to(output.logits.device)
            known = (labels == 0) | (labels == 1)
            target = torch.where(known, labels, 0.0)
            return F.binary_cross_entropy_with_logits(output.logits, target, weight=known.float())
        scores = output.image @ output.text.T / TEMPERATURE
        own = torch.arange(len(scores), device=scores.device)
        return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2

    def _bounds(self, delta: float) -> Iterator[Bound]:
        """What differential privacy leaves to an attack, by site that told its epsilon."""
        units = {
            RECORD: (RECORD_EPSILON, self.experiment.training.dp_delta), DATA_SET: (SITE_EPSILON, delta)
        }  # fmt: skip
        for unit, (name, at) in units.items():
            for site, epsilon in sorted(largest_by_site(self.history, name).items()):
                rates = tuple(100 * largest_rate(rate, epsilon, at) for rate in RATES)
                yield Bound(site, epsilon, unit, at, 100 * largest_area(epsilon, at), rates)


def _members(rows: Mapping[str, Sequence[int] | np.ndarray]) -> Tensor:
    """[members + others] bool."""
    return torch.arange(len(rows[MEMBERS]) + len(rows[OTHERS])) < len(rows[MEMBERS])
