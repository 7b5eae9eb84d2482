"""CreamFL (Yu et al., 2023, https://arxiv.org/abs/2302.08888): sites contrast with, servers distil, representations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count

import torch
from torch import Generator, Tensor

from fedvlp.core.client import Client
from fedvlp.core.server_state import Server
from fedvlp.core.types import EVALUATE, Batch, Broadcast, State, Update, VLOutput
from fedvlp.core.validate import require
from fedvlp.methods.ensemble import GLOBAL, PREVIOUS, PublicEnsemble, one_pass, public_pass, trainer
from fedvlp.methods.math.contrast import contrast_scores, inter_contrast, intra_contrast, opposite, representations

AGGREGATIONS = ("gca", "mean", "avg", "iot")


@dataclass(frozen=True)
class CreamFL(PublicEnsemble):
    """For public item k, a site's representation r, the server's g, its own of the round before p, temperature T:

        inter  -log exp(r_k . g^opp_k / T) / sum_j exp(r_k . g^opp_j / T)                                 (LCR)
        intra  -log exp(r_k . g^same_k / T) / (exp(r_k . g^same_k / T) + exp(r_k . p_k / T))              (LCR)
        gca    weights softmax_c(s_kc), s_kc = log exp(r_kc . g^opp_k) / sum_{j != k} exp(r_kc . g^opp_j) (Eq. 4-6)

    ``inter=intra=False`` with ``aggregation`` mean, avg (by samples), iot (multimodal sites count ``iot_alpha``
    times) or gca are the reamFL variants.
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

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.gamma >= 0, f"gamma is {self.gamma}; the weight must not be negative")
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
            device = trainer(server).client.device
            paired = server.memory[GLOBAL + opposite(modality)].to(device)
            return contrast_scores(sent.to(device), paired, self.gca_temperature, self.gca_exclude_positive).cpu()
        if self.aggregation == "mean":
            return super().log_weights(server, update, modality, sent)
        multimodal = self.aggregation == "iot" and len(update.state) > 1
        samples = update.num_samples * (self.iot_alpha if multimodal else 1.0)
        return sent.new_full((len(sent),), samples).log()

    def receive(self, client: Client, message: Broadcast) -> None:
        super().receive(client, message)
        first = not any(name.startswith(PREVIOUS) for name in client.memory)
        if first and message.phase != EVALUATE and self.intra:  # p is of the model that the round starts from
            own = representations(client, client.data.modalities)
            client.memory = client.memory | {PREVIOUS + name: tensor for name, tensor in own.items()}

    def local_batches(self, client: Client, message: Broadcast, size: int, generator: Generator) -> Iterator[Batch]:
        if not (self.joint and message.aux):
            yield from super().local_batches(client, message, size, generator)
            return
        steps = self.local_epochs * (self.local_steps or one_pass(client.data.num_train, size))
        public = chain.from_iterable(public_pass(client, size, generator) for _ in count())
        for private in client.data.train_batches(steps, size, generator):
            yield private | next(public)

    def public_losses(self, client: Client, output: VLOutput, rows: Tensor, message: Broadcast) -> dict[str, Tensor]:
        own = {name: getattr(output, name) for name in client.data.modalities}
        terms = {}
        if self.inter:
            pairs = [(r, message.aux[opposite(name)]) for name, r in own.items()]
            inter = [inter_contrast(r, g, rows, self.temperature).mean() for r, g in pairs]
            terms["inter"] = self.gamma * torch.stack(inter).sum()
        if self.intra:
            known = [(r, message.aux[name][rows], client.memory[PREVIOUS + name][rows]) for name, r in own.items()]
            intra = [intra_contrast(r, g, p, self.temperature) for r, g, p in known]
            terms["intra"] = self.gamma * torch.cat(intra).mean()
        return terms
