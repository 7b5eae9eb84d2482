"""CAR-MFL (Poudel et al., 2024, https://arxiv.org/abs/2407.04011): missing modalities retrieved from a public set."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedvlp.core.aggregation import Aggregator
from fedvlp.core.client import Client, Data
from fedvlp.core.server_state import Server
from fedvlp.core.types import EVALUATE, MODALITIES, Batch, Broadcast, State, Update
from fedvlp.core.validate import require
from fedvlp.methods.math.contrast import only
from fedvlp.methods.math.neighbours import most_alike, nearest
from fedvlp.methods.mfedavg import MFedAvg, TowerMeans

LABELS = "labels"
PARTNERS, ROUNDS, MET = "partners", "partner_rounds", "partners_met"
"""A site's memory: the public item of every record [R, n] int32, one row for each of the last ``SHOWN`` rounds [R] that
it was asked; and [m, n] the different items of the rounds before, if there were any (``each_once``)."""

COMPLETE = -1
"""Stands for an item where a record lacks nothing."""

SHOWN = 6
"""Rounds of which the report shows a record's items."""


@dataclass(frozen=True)
class CARMFL(MFedAvg):
    """Each round a site without a modality imputes it: of the k public items nearest to a record by its own feature,
    both under the received model, the one with the most similar labels lends its other half.

    In the mean of a tower, a site whose inputs to it are imputed counts alpha n_k; the classifier keeps n_k. The server
    trains on the public set as one more client. ``renorm="linear", alpha=1`` weighs as FedAvg with n_k does.
    Differs: a site is sent the public features of its own modality alone, and a public image is imputed as evaluation
    sees it, not augmented. Where only some records of a site lack a half, those are imputed, and it counts n_k.
    """

    public: bool = True
    k: int = 10  # nearest public items to choose among; 1 = plain nearest neighbour
    alpha: float = 0.3  # factor of a site whose inputs to a tower are imputed, 0 to 1
    renorm: str = "softmax"  # softmax (paper: nearly uniform, spec 8.3) over w_k = n_k / n; or linear

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.public and self.private, "CAR-MFL trains on public and private records; leave both true")
        require(self.k >= 1, f"k is {self.k}; at least one neighbour")
        require(0 <= self.alpha <= 1, f"alpha is {self.alpha}; it must be in [0, 1]")
        require(self.renorm in ("softmax", "linear"), f"renorm is {self.renorm!r}; choose softmax or linear")

    # Server half
    def prepare(self, server: Server) -> None:
        """Features [P, d] of the public set by the global model, and its findings [P, L], if a site needs them."""
        super().prepare(server)
        assert server.trainer is not None
        if all(server.modalities.get(site) == MODALITIES for site in server.sites):
            return
        with server.trainer.session(server.state, server.round, "features") as client:
            for modality in MODALITIES:
                embeddings, labels = features(client, client.data, modality)
                server.memory |= {modality: embeddings.cpu(), LABELS: labels.cpu()}

    def broadcast(self, server: Server, site: str) -> Broadcast:
        held = server.modalities.get(site)  # unknown before a real site's first reply: then it is sent both
        wanted = () if held == MODALITIES or server.phase == EVALUATE else (*(held or MODALITIES), LABELS)
        return replace(super().broadcast(server, site), aux={modality: server.memory[modality] for modality in wanted})

    def share(self, held: tuple[str, ...], modality: str) -> float:
        return 1.0 if not modality or modality in held else self.alpha

    def aggregator(self, server: Server, phase: str) -> Aggregator:
        return SoftmaxMeans(self, server) if self.renorm == "softmax" else super().aggregator(server, phase)

    # Site half
    def sends(self, held: tuple[str, ...], name: str) -> bool:
        return True

    def receive(self, client: Client, message: Broadcast) -> None:
        super().receive(client, message)
        if message.phase == EVALUATE or client.public is None:
            return
        partners = torch.full((client.data.num_train,), COMPLETE, dtype=torch.int32, device=client.device)
        for modality in MODALITIES:
            rows = client.data.having("train", (modality,))
            if not len(rows):
                continue
            # A site of several kinds of records is sent no features: it has the same items and the same model.
            pool, findings = (
                (message.aux[modality], message.aux[LABELS])
                if modality in message.aux
                else features(client, client.public, modality)
            )
            mine, labels = features(client, client.data, modality, rows)
            # Of the k items nearest by feature, the one whose findings are most alike lends its other half.
            candidates = nearest(mine, pool, min(self.k, len(pool)))
            partners[rows.to(client.device)] = most_alike(labels, findings, candidates).to(torch.int32)
        if (partners != COMPLETE).any():
            client.memory = noted(client.memory, partners, message.round)

    def figures(self, client: Client, message: Broadcast) -> dict[str, float]:
        """How many different public items a record has met so far, mean over the records."""
        if PARTNERS not in client.memory:
            return {}
        items = torch.cat([client.memory[name] for name in (MET, PARTNERS) if name in client.memory])
        return {"distinct_partners": float(distinct(items[:, items[0] != COMPLETE]).double().mean())}

    def complete(self, client: Client, batch: Batch, message: Broadcast) -> Batch:
        present = {key.partition("_")[0] for key in batch}  # an image may be there as its tokens alone
        missing = [modality for modality in MODALITIES if modality not in present]
        if not missing or client.public is None:
            return batch
        rows = client.memory[PARTNERS][-1][batch["row"]]
        imputed = next(client.public.batches("train", len(rows), drop_last=False, rows=rows))
        return {**batch, **{key: tensor for key, tensor in imputed.items() if key.partition("_")[0] in missing}}


class SoftmaxMeans(TowerMeans):
    """As printed: weights are the softmax over alpha n_k / n, which needs n first, so the round's updates wait."""

    def __init__(self, method: CARMFL, server: Server) -> None:
        super().__init__(method, server)
        self._waiting: list[Update] = []

    def add(self, update: Update) -> None:
        self._waiting.append(replace(update, state={name: t.clone() for name, t in update.state.items()}))

    def write(self) -> None:
        # Now that all have come: n of w_k = n_k / n.
        total = sum(self.method.weight(self.server, update) for update in self._waiting)
        for update in self._waiting:
            samples = self.method.weight(self.server, update)
            factors = self.method.factors(self.server, update)
            towers = {modality: math.exp(f * samples / total) if samples else 0.0 for modality, f in factors.items()}
            self.fold(update, {**towers, "": samples})
        super().write()


@torch.no_grad()
def features(client: Client, data: Data, modality: str, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Unit features [n, d] of one modality of the training records, in eval mode, and their findings [n, L] bool.

    ``rows`` [n]: positions of those records; None: all.
    """
    client.model.eval()
    embeddings, labels = [], []
    for batch in data.batches("train", 96, drop_last=False, rows=rows):
        embeddings.append(getattr(client.model(only(batch, (modality,))), modality))
        labels.append(batch["labels"] == 1)
    return torch.cat(embeddings), torch.cat(labels)


def noted(memory: Mapping[str, Tensor], partners: Tensor, round: int) -> State:
    """The memory with this round's items [n] of the records. Other records than before, by number, begin anew.

    It grows no further than the public set: of a round that the report no longer shows, items that a record has had
    before are not kept again.
    """
    before = memory if PARTNERS in memory and memory[PARTNERS].shape[1] == len(partners) else {}
    now = {PARTNERS: partners[None], ROUNDS: torch.tensor([round]).to(partners.device)}
    rows = {name: torch.cat([before[name], row]) if before else row for name, row in now.items()}
    past = [items for items in (before.get(MET), rows[PARTNERS][:-SHOWN]) if items is not None and len(items)]
    met = {MET: each_once(torch.cat(past))} if past else {}
    return {name: row[-SHOWN:] for name, row in rows.items()} | met


def distinct(partners: Tensor) -> Tensor:
    """How many different items every record [n] has had over the rounds, from its partners [R, n]."""
    return (partners.sort(dim=0).values.diff(dim=0) != 0).sum(dim=0) + 1


def each_once(partners: Tensor) -> Tensor:
    """The different items of every record, [m, n] from [R, n]: m is the most that a record has, others repeat one."""
    ordered = partners.sort(dim=0).values
    again = ordered.diff(dim=0) == 0
    ordered[1:] = torch.where(again, ordered[:1], ordered[1:])
    return ordered.sort(dim=0).values[-int(distinct(partners).max()) :]
