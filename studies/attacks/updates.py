"""Attacks on one update of a finished run's sites, by somebody who sees it leave, for `fedvlp attack`.

The updates are made anew from the trained model, on the sites' own records.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedvlp.core.client import Client
from fedvlp.core.types import Batch, State, VLOutput
from fedvlp.evaluation.audit.membership import MEMBERS, OTHERS
from fedvlp.run.assembly import Assembly
from fedvlp.run.evaluate import Load
from studies.attacks.canaries import (
    CANARIES,
    CANDIDATES,
    MEMORISED,
    PLANTED,
    UNSEEN,
    Exposure,
    exposure,
    exposures,
    joined,
    own_loss,
    phrases,
    train_on,
)
from studies.attacks.inversion import FILMS, Inversion, compared, inverted
from studies.attacks.one_update import SiteInference, Words, recovered, told

FEW = 8
"""Reports of the smallest update that is attacked."""

LEAK_STEPS, LEAK_RATE = 300, 1e-3  # of what is learned by heart
STEPS = 8  # of an update whose site is guessed
HELD, BATCHES = 8, 12  # held-out records in a batch, and batches of a site, by which it is
FILMS_BESIDE = 200  # that a reconstruction is compared with

Rows = Mapping[str, Mapping[str, np.ndarray]]
"""Site -> rows of the cohort that were trained on, and that were not."""


class Updates:
    """The updates that the sites of a run would send next, and attacks on them."""

    def __init__(self, assembly: Assembly, state: State, rows: Rows, load: Load) -> None:
        """``state``: the trained model, which ``load`` puts into a client as a site has it."""
        self.assembly = _with_films(assembly)
        self.experiment = self.assembly.experiment
        self.state, self.rows, self.load = state, rows, load
        self.seed = self.experiment.rounds.seed
        self.travels = any(map(self.shared, state))  # whether sites send weights

    def shared(self, name: str) -> bool:
        """Whether sites send the tensor; those of frozen towers are no part of the state."""
        method = self.experiment.method
        return name in self.state and any(method.shares(name, phase) for phase in method.phases(0))

    def words(self) -> Iterator[Words]:
        """What the server reads off an update of each site: of one step on few reports, and of one pass over all."""
        name = self._word_embedding()
        for site, rows in self.rows.items() if name else ():
            data = self.assembly.serve(self.assembly.cohort, {MEMBERS: rows[MEMBERS]})
            if "text" not in data.modalities:
                continue
            count = len(rows[MEMBERS])
            few = min(FEW, count)
            for reports, batch in ((few, few), (count, self._batch_size(count))):
                client = self._client(site, data)
                before = client.state()[name].detach().cpu().clone()
                read = list(data.batches(MEMBERS, batch, drop_last=True))[: -(-reports // batch)]
                self._trained(client, read)
                after = client.state()[name].detach().cpu()
                seen = sum(len(batch["text"]) for batch in read)
                ids = torch.cat([batch["text"][batch["text_mask"]].cpu() for batch in read])
                yield recovered(site, before, after, ids, seen, len(read))

    def _word_embedding(self) -> str:
        """The name of the text tower's word embedding, if sites send it; "" otherwise."""
        vocabulary = getattr(getattr(self.assembly.modules()[0], "tokenizer", None), "vocabulary", 0)
        rows = (
            name
            for name, tensor in self.state.items()
            if name.startswith("text_encoder.") and tensor.ndim == 2 and len(tensor) == vocabulary
        )
        return next(filter(self.shared, rows), "")

    def _batch_size(self, count: int) -> int:
        return min(max(2, self.experiment.training.batch_size), count)

    def _client(self, site: str, data: Any) -> Client:
        """The trained model at a site, all of it to be trained."""
        client = self.assembly.client(site, data)
        self.load(client, self.state, site)
        client.set_trainable(lambda name: True)
        return client

    def _trained(self, client: Client, batches: Iterator[Batch] | Sequence[Batch]) -> None:
        """A step of the run's own optimiser on each batch."""
        optimizer = self.experiment.training.build([weight for _, weight in client.trainable()], 1.0)
        train_on(client, batches, optimizer)

    def _largest(self) -> str:
        """The site with most training records."""
        return max(self.rows, key=lambda site: len(self.rows[site][MEMBERS]))

    # Canaries

    def canaries(self, controls: bool) -> Iterator[Exposure]:
        """Planted at the site with most records, in one more round of training; their images are held-out ones."""
        site = self._largest()
        rows, cohort = self.rows[site], self.assembly.cohort
        count = min(CANARIES, len(rows[OTHERS]) // 2)
        data = self.assembly.serve(cohort, {name: rows[name] for name in (MEMBERS, OTHERS)})
        if count < 2 or not self.travels:
            return
        words = sorted({word for row in rows[MEMBERS] for word in re.findall(r"[^\W_]+", cohort.reports[row].lower())})
        own, others = phrases(2 * count, words, self.seed), phrases(CANDIDATES - 1, words, self.seed + 1)
        films = next(iter(data.batches(OTHERS, 2 * count, drop_last=True)))
        planted = self._with_reports(films, own)
        rank = partial(self._exposures, candidates=others, planted=planted)
        client = self._client(site, data)
        batches = list(self._among(data, _taken(planted, torch.arange(count)), len(rows[MEMBERS])))
        self._trained(client, (batch for batch, _ in batches))
        bits = rank(client.model)
        yield exposure(UNSEEN, site, bits[count:], 0.0, CANDIDATES)
        yield exposure(PLANTED, site, bits[:count], sum(seen for _, seen in batches) / count, CANDIDATES)
        if controls:
            client = self._client(site, data)
            optimizer = torch.optim.Adam([weight for _, weight in client.trainable()], lr=LEAK_RATE)
            train_on(client, [_taken(planted, torch.arange(count))] * LEAK_STEPS, optimizer)
            yield exposure(MEMORISED, site, rank(client.model)[:count], float(LEAK_STEPS), CANDIDATES)

    def _with_reports(self, films: Batch, reports: Sequence[str]) -> Batch:
        ids, mask = self.assembly.modules()[0].tokenizer(reports)
        device = films["image"].device
        return {"image": films["image"], "text": ids.to(device), "text_mask": mask.to(device)}

    def _among(self, data: Any, planted: Batch, members: int) -> Iterator[tuple[Batch, int]]:
        """The batches of a round of training on the members and the canaries, and how many canaries are in each."""
        count = len(planted["image"])
        size = self._batch_size(members + count)
        steps = max(self.experiment.method.steps(phase) for phase in self.experiment.method.phases(0))
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.empty(0, dtype=torch.int64)
        for _ in range(steps or -(-(members + count) // size)):
            if len(order) < size:
                order = torch.randperm(members + count, generator=generator)
            chosen, order = order[:size], order[size:]
            canaries, records = chosen[chosen >= members] - members, chosen[chosen < members]
            chunks = [_taken(planted, canaries)] if len(canaries) else []
            chunks += data.batches(MEMBERS, size, drop_last=False, rows=records)
            yield joined(chunks), len(canaries)

    @torch.no_grad()
    def _exposures(self, model: Any, candidates: Sequence[str], planted: Batch) -> Tensor:
        """Exposures of all canaries under a model."""
        model.eval()
        film, own = model({"image": planted["image"]}).image, self._texts(model, planted["text"], planted["text_mask"])
        others = self._texts(model, *model.tokenizer(candidates))
        return exposures(film.cpu(), own, others)

    def _texts(self, model: Any, ids: Tensor, mask: Tensor) -> Tensor:
        """Unit vectors [N, d] of tokenised reports."""
        chunks = zip(ids.split(64), mask.split(64), strict=True)
        return torch.cat([model({"text": chunk, "text_mask": real}).text.cpu() for chunk, real in chunks])

    # Whose update it is

    def sites(self) -> Iterator[SiteInference]:
        """Whose update it is, where there are several sites and they send weights."""
        names = list(self.rows)
        if len(names) < 2 or not self.travels:
            return
        gradients = [(number, vector) for number, site in enumerate(names) for vector in self._gradients(site)]
        if {number for number, _ in gradients} != set(range(len(names))):
            return
        moved = torch.stack([self._update(site) for site in names])  # [U, P]
        cosines = torch.stack([-(moved @ vector) / (moved.norm(dim=1) * vector.norm()) for _, vector in gradients])
        yield told(cosines, [number for number, _ in gradients])

    def _update(self, site: str) -> Tensor:
        """The change [P] of the shared weights by some steps on the site's records."""
        members = self.rows[site][MEMBERS]
        data = self.assembly.serve(self.assembly.cohort, {MEMBERS: members})
        client = self._client(site, data)
        before = self._flat(client, lambda weight: weight.detach().clone())
        batches = data.batches(MEMBERS, self._batch_size(len(members)), drop_last=True)
        self._trained(client, [batch for batch, _ in zip(batches, range(STEPS), strict=False)])
        return self._flat(client, lambda weight: weight.detach()) - before

    def _gradients(self, site: str) -> Iterator[Tensor]:
        """Gradients [P] of the trained model on batches of the site's held-out records."""
        data = self.assembly.serve(self.assembly.cohort, {OTHERS: self.rows[site][OTHERS]})
        client = self._client(site, data)
        client.model.eval()
        batches = data.batches(OTHERS, HELD, drop_last=True)
        for batch, _ in zip(batches, range(BATCHES), strict=False):
            client.model.zero_grad()
            own_loss(client.model(batch), batch).backward()
            yield self._flat(client, lambda weight: torch.zeros_like(weight) if weight.grad is None else weight.grad)

    def _flat(self, client: Client, of: Any) -> Tensor:
        weights = [of(weight).cpu().flatten() for name, weight in client.model.named_parameters() if self.shared(name)]
        return torch.cat(weights)

    # Images

    def inversion(self, seconds: float) -> Iterator[Inversion]:
        """Images of the site with most records, from the gradient of one step on few of them."""
        if not self.travels:
            return
        site = self._largest()
        rows = self.rows[site]
        others = rows[OTHERS][:FILMS_BESIDE]
        data = self.assembly.serve(self.assembly.cohort, {MEMBERS: rows[MEMBERS][:FILMS], OTHERS: others})
        (batch,) = data.batches(MEMBERS, FILMS, drop_last=True)
        model = self._client(site, data).model.eval()
        model.set_attention("explicit")  # the fused kernels have no second derivative
        try:
            reports = model({name: batch[name] for name in ("text", "text_mask")}).text.detach()
            weights = [
                weight for name, weight in model.named_parameters() if name.startswith("image_") and self.shared(name)
            ]

            def gradient(films: Tensor) -> tuple[Tensor, ...]:
                output: VLOutput = replace(model({"image": films}), text=reports)
                return torch.autograd.grad(own_loss(output, batch), used, create_graph=True)

            loss = own_loss(replace(model({"image": batch["image"]}), text=reports), batch)
            known = torch.autograd.grad(loss, weights, allow_unused=True)
            used = [weight for weight, one in zip(weights, known, strict=True) if one is not None]
            wanted = [one.detach() for one in known if one is not None]
            noise = torch.randn(batch["image"].shape, generator=torch.Generator().manual_seed(self.seed)) / 2
            drawn, steps, spent = inverted(gradient, wanted, noise.to(batch["image"].device), seconds)
        finally:
            model.set_attention("sdpa")
        beside = torch.cat([other["image"] for other in data.batches(OTHERS, 64, drop_last=False)])
        yield compared(site, drawn.cpu(), batch["image"].cpu(), beside.cpu(), steps, spent)


def _with_films(assembly: Assembly) -> Assembly:
    """The same assembly with batches of images and tokens, where its batches hold cached features."""
    experiment = assembly.experiment
    if not experiment.training.cache_features:
        return assembly
    return Assembly(replace(experiment, training=replace(experiment.training, cache_features=False)), assembly.folder)


def _taken(batch: Batch, rows: Tensor) -> Batch:
    """Some records of a batch."""
    return {name: tensor[rows.to(tensor.device)] for name, tensor in batch.items()}
