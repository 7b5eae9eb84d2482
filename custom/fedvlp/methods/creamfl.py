"""CreamFL (Yu et al., 2023, https://arxiv.org/abs/2302.08888): sites contrast with, servers distil, representations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count

import torch
from torch import Generator, Tensor

from fedvlp.core.client import Client
from fedvlp.core.device import to_device
from fedvlp.core.optimizers import one_pass
from fedvlp.core.seeds import seed
from fedvlp.core.server_state import Server
from fedvlp.core.types import EVALUATE, Batch, Broadcast, State, Update, VLOutput
from fedvlp.core.validate import require
from fedvlp.methods.ensemble import GLOBAL, PREVIOUS, PUBLIC, PublicEnsemble, trainer
from fedvlp.methods.math.contrast import (
    contrast_scores,
    inter_contrast,
    intra_contrast,
    opposite,
    representations,
    sampled_contrast,
    sampled_scores,
)

AGGREGATIONS = ("gca", "mean", "avg", "iot")
OTHERS = "others"  # of a public batch [B, n / B]: the items over which the sum of inter is taken


@dataclass(frozen=True)
class CreamFL(PublicEnsemble):
    """For public item k, a site's representation r, the server's g, its own of the round before p, temperature T:

        inter  -log exp(r_k . g^opp_k / T) / sum_j exp(r_k . g^opp_j / T)                                 (LCR)
        intra  -log exp(r_k . g^same_k / T) / (exp(r_k . g^same_k / T) + exp(r_k . p_k / T))              (LCR)
        gca    weights softmax_c(s_kc), s_kc = log exp(r_kc . g^opp_k) / sum_{j != k} exp(r_kc . g^opp_j) (Eq. 4-6)

    ``inter=intra=False`` with ``aggregation`` mean, avg (by samples), iot (multimodal sites count ``iot_alpha``
    times) or gca are the reamFL variants.
    ``contrast_sample`` below the number of items P takes the sum of inter from items that are drawn for each batch:
    exp(r_k . g^opp_k / T) + (P - 1) / m sum_{j in the m drawn, j != k} exp(r_k . g^opp_j / T). That sum is unbiased and
    the loss, its logarithm, a little too small (methods/math/contrast.py; measured in studies/programs).
    ``gca_sample`` does the same with the sum of Eq. 4, for every supplier of a round with the same items.
    Differs from the released code: gamma also where one of the terms is off, each modality is distilled once, the
    positive is not in the sum of Eq. 4, every party sees the same public inputs in eval mode. From the paper: T = 0.5,
    squared distance, and the contrast is not added to the task loss but takes passes of its own (``joint=False``).
    """

    inter: bool = True  # LCR between the modalities
    intra: bool = True  # LCR within the modality
    gamma: float = 0.5  # weight of LCR, >= 0
    temperature: float = 0.5  # T of LCR, > 0 (paper: 1)
    joint: bool = False  # add the contrast of a public batch to every private step (paper) instead of passes over P
    aggregation: str = "gca"  # gca | mean | avg | iot
    iot_alpha: float = 100.0  # how often a multimodal site counts under iot
    gca_temperature: float = 1.0  # of the scores of Eq. 4
    gca_exclude_positive: bool = True  # whether the sum of Eq. 4 leaves out j = k (paper)
    contrast_sample: int = 0  # n: items drawn for each batch, over which the sum of inter is taken; 0 = all (paper)
    gca_sample: int = 0  # items drawn once a round, over which the sum of Eq. 4 is taken; 0 = all (paper)

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.gamma >= 0, f"gamma is {self.gamma}; the weight must not be negative")
        for name in ("contrast_sample", "gca_sample"):
            require(getattr(self, name) >= 0, f"{name} is {getattr(self, name)}; 0 = all items, or how many of them")
        for name in ("temperature", "gca_temperature", "iot_alpha"):
            require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}; it must be positive")
        seen = self.aggregation
        require(seen in AGGREGATIONS, f"aggregation is {seen!r}; choose one of {', '.join(AGGREGATIONS)}")

    @property
    def contrasts(self) -> bool:
        """Whether sites train on the public set at all."""
        return self.gamma > 0 and (self.inter or self.intra)

    def teachers(self, server: Server) -> State:
        return {name: server.memory[GLOBAL + name] for name in ("image", "text")} if self.contrasts else {}

    def log_weights(self, server: Server, update: Update, modality: str, sent: Tensor) -> Tensor:
        if self.aggregation == "gca":
            return self._scores(server, sent, server.memory[GLOBAL + opposite(modality)])
        if self.aggregation == "mean":
            return super().log_weights(server, update, modality, sent)
        multimodal = self.aggregation == "iot" and len(update.state) > 1
        samples = update.num_samples * (self.iot_alpha if multimodal else 1.0)
        return sent.new_full((len(sent),), samples).log()

    def _scores(self, server: Server, sent: Tensor, paired: Tensor) -> Tensor:
        """[P] Eq. 4 on the server's device; every supplier of a round is scored against the same sample of items."""
        client = trainer(server).client
        sent, paired = sent.to(client.device), paired.to(client.device)
        settings = self.gca_temperature, self.gca_exclude_positive
        if not 0 < self.gca_sample < len(paired):
            return contrast_scores(sent, paired, *settings).cpu()
        generator = torch.Generator().manual_seed(seed(client.seed, "gca", server.round))
        drawn = torch.randperm(len(paired), generator=generator)[: self.gca_sample].to(client.device)
        return sampled_scores(sent, paired, drawn, *settings).cpu()

    def receive(self, client: Client, message: Broadcast) -> None:
        super().receive(client, message)
        first = not any(name.startswith(PREVIOUS) for name in client.memory)
        if first and message.phase != EVALUATE and self.intra:  # p is of the model that the round starts from
            own = representations(client, client.modalities)
            client.memory = client.memory | {PREVIOUS + name: tensor for name, tensor in own.items()}

    def local_batches(self, client: Client, message: Broadcast, size: int, generator: Generator) -> Iterator[Batch]:
        if not (self.joint and message.aux):
            yield from super().local_batches(client, message, size, generator)
            return
        steps = self.local_epochs * (self.local_steps or one_pass(client.data.num_train, size))
        public = chain.from_iterable(self.public_batches(client, size, generator) for _ in count())
        for private in client.data.train_batches(steps, size, generator):
            yield private | next(public)

    def public_batches(self, client: Client, size: int, generator: Generator) -> Iterator[Batch]:
        """With a sample of the sum's items, some beside each row, so that rows of a batch have their part of it."""
        assert client.public is not None
        items = client.public.num_train
        for batch in super().public_batches(client, size, generator):
            if self.inter and 0 < self.contrast_sample < items:
                rows = len(batch[PUBLIC + "row"])
                each = min(-(-self.contrast_sample // rows), items // rows)
                drawn = torch.randperm(items, generator=generator)[: each * rows].view(rows, each)
                batch = batch | {PUBLIC + OTHERS: to_device(drawn, client.device)}
            yield batch

    def public_losses(self, client: Client, output: VLOutput, batch: Batch, message: Broadcast) -> dict[str, Tensor]:
        rows = batch["row"]
        own = {name: getattr(output, name) for name in client.modalities}
        terms = {}
        if self.inter:
            # r_k against the server's vectors of the other modality.
            inter = [self._inter(r, message.aux[opposite(name)], batch).mean() for name, r in own.items()]
            terms["inter"] = self.gamma * torch.stack(inter).sum()
        if self.intra:
            # r_k towards the server's vector of the same modality, and away from the site's own of the round before.
            known = [(r, message.aux[name][rows], client.memory[PREVIOUS + name][rows]) for name, r in own.items()]
            intra = [intra_contrast(r, g, p, self.temperature) for r, g, p in known]
            terms["intra"] = self.gamma * torch.cat(intra).mean()
        return terms

    def _inter(self, own: Tensor, others: Tensor, batch: Batch) -> Tensor:
        """[B]: ``own`` [B, d] against all of ``others`` [P, d], or against those of them that were drawn."""
        if OTHERS not in batch:
            return inter_contrast(own, others, batch["row"], self.temperature)
        return sampled_contrast(own, others, batch["row"], batch[OTHERS].flatten(), self.temperature)
