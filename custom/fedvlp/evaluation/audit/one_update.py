"""Membership of one update: can its receiver, who knows the model before it, say which records it was trained on?

Measured where the records are, before the update leaves: on the records that it was trained on against the site's
held-out ones of as many findings and texts of like length. Scores are loss and cosine of each record after the update,
how far it moved them, and whether it went against the record's gradient (gradients.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fedvlp.core.client import Client
from fedvlp.core.seeds import seed
from fedvlp.core.site_error import SiteError
from fedvlp.core.types import MODALITIES, Batch, State
from fedvlp.evaluation.audit.gradients import ALIGNED
from fedvlp.evaluation.audit.membership import (
    MEMBERS,
    OTHERS,
    POOL,
    Batches,
    Membership,
    classifies,
    matching_weights,
    membership,
    record_directions,
    record_scores,
)

OUTGOING, MOVED = "update", ", moved"
MOST = 512
"""Records on either side, by lot; more only narrow the interval."""

REFERENCE, BATCH = 64, 32
HELD_OUT = ("val", "test")


class UnmeasuredError(SiteError, ValueError):
    """Membership of this update cannot be measured with what this site holds; the text says what is missing."""


def strongest(client: Client, before: State, sent: State, trained: Iterable[int], resamples: int = 200) -> Membership:
    """The strongest of the attacks on an update. ``before``: the whole model that it starts from, on the site.

    ``sent``: the tensors that leave. ``trained``: positions in the training split. The client's own tensors must be
    none of ``before``, and hold the model with ``sent`` in the end. Raises UnmeasuredError.
    """
    after = before | {name: tensor.detach().clone() for name, tensor in client.here(sent).items() if name in before}
    change = {name: after[name].cpu() - before[name].cpu() for name in sent if name in before}
    if not change:
        raise UnmeasuredError(public="the update holds no tensors of the model")
    batches = _batches(client, trained)
    client.set_trainable(lambda name: True)
    client.load(before)
    start = record_scores(client.model, batches)
    aligned = record_directions(client.model, batches, change).alignment()
    client.load(after)
    scores = record_scores(client.model, batches)
    scores |= {name + MOVED: score - start[name] for name, score in scores.items()}
    member, weight = _sides(batches)
    if not bool((weight > 0).any()):
        raise UnmeasuredError(public="no held-out record is like one that was trained on")
    rows = range(len(member))
    measured = [
        membership(OUTGOING, attack, client.name, of.cpu(), member, weight, rows, resamples)
        for attack, of in {**scores, ALIGNED: aligned}.items()
    ]
    return max(measured, key=lambda row: row.area.low)


def _batches(client: Client, trained: Iterable[int]) -> Batches:
    """What is compared; held-out records come first to the pool, at most a quarter of them.

    Of more than ``MOST`` records a side is a sample, always the same: the first rows of a table may be of one year or
    of one machine.
    """
    data: Any = client.data
    generator = torch.Generator().manual_seed(seed(client.seed, client.name, "membership"))
    rows = _sampled(sorted(trained), generator)
    members = list(data.batches("train", BATCH, drop_last=False, rows=rows))
    held = _sampled(range(sum(data.sizes.get(split, 0) for split in HELD_OUT)), generator)
    others: list[Batch] = []
    for split in HELD_OUT:
        size = data.sizes.get(split, 0)
        mine, held = held[held < size], held[held >= size] - size  # positions go on from one split to the next
        others += data.batches(split, 8, drop_last=False, rows=mine)
    pool = others[: min(REFERENCE // 8, len(others) // 4)]
    if not members or not pool:
        raise UnmeasuredError(public="there are too few held-out records to compare with")
    of = {MEMBERS: members, OTHERS: others[len(pool) :], POOL: pool}
    client.model.eval()
    paired = all(set(MODALITIES) <= batch.keys() for batch in (*members, *others))
    if not paired and not classifies(client.model, members):
        raise UnmeasuredError(public="records lack an image or a report")
    return of


def _sampled(rows: Sequence[int], generator: torch.Generator) -> Tensor:
    """At most ``MOST`` of the rows, [n] int64, in an order by lot."""
    order = torch.randperm(len(rows), generator=generator)[:MOST]
    return torch.tensor(rows, dtype=torch.int64)[order]


def _sides(batches: Batches) -> tuple[Tensor, Tensor]:
    """Which records are members, [N] bool, and what each weighs, so that both sides are alike."""
    asked = [*batches[MEMBERS], *batches[OTHERS]]
    count = sum(_size(batch) for batch in batches[MEMBERS])
    strata = _strata(asked)
    member = torch.arange(len(strata)) < count
    return member, matching_weights(strata, member)


def _size(batch: Batch) -> int:
    return len(batch["row"])


def _strata(batches: Sequence[Batch]) -> list[tuple[int, bool]]:
    """Of each record how many findings it has, up to three, and whether its report is longer than the median."""
    present = [(batch["labels"] == 1).sum(dim=1).cpu() if "labels" in batch else _none(batch) for batch in batches]
    words = [batch["text_mask"].sum(dim=1).cpu() if "text_mask" in batch else _none(batch) for batch in batches]
    lengths = torch.cat(words)
    longer = lengths > lengths.double().median()
    return list(zip(torch.cat(present).clamp(max=3).tolist(), longer.tolist(), strict=True))


def _none(batch: Batch) -> Tensor:
    return torch.zeros(_size(batch), dtype=torch.int64)


# Words read off an update: only the rows of words that occurred have a gradient in a word embedding (MedLeak's start).
#
# AdamW's decay shrinks every row alike, so that the rows of words that occurred are those that changed otherwise.

TOLERANCE = 4e-6
"""Largest change, relative to a row's largest number, that float32's rounding makes of a shrunk row."""


def standing_out(before: Tensor, after: Tensor) -> Tensor:
    """[V] bool: the rows of an embedding [V, W] that changed otherwise than by the decay that all rows share."""
    before, after = before.double(), after.double()
    norms = before.square().sum(dim=1)
    known = norms > 0
    shrunk = ((after * before).sum(dim=1)[known] / norms[known]).median() if bool(known.any()) else torch.tensor(1.0)
    rest = (after - shrunk * before).abs().amax(dim=1)
    return rest > TOLERANCE * before.abs().amax(dim=1)
