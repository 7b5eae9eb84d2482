"""FedFed (Yang et al., 2023, https://arxiv.org/abs/2310.05077): distils of each image what is worth sharing.

Adapted to image-text pairs: where the paper asks a classifier, the objective asks the paired report (spec 9).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedvlp.core.aggregation import Aggregator
from fedvlp.core.client import EXTRA, Client
from fedvlp.core.gate import objection_to_rows
from fedvlp.core.method import Method
from fedvlp.core.seeds import seed
from fedvlp.core.server_state import Server
from fedvlp.core.types import Batch, Broadcast, Expected, State, Update, VLOutput
from fedvlp.core.validate import require

GREY_RANGE = 2.0
"""Images are in [-1, 1], and so is what the distiller makes of them, as far as it learnt to."""

DELTA = 1e-5


@dataclass(frozen=True)
class FedFed(Method):
    """An image is x = q(x) + x_s. Round 0 begins with ``distil-1`` .. ``distil-n``, which train q and the model:

        recon |x - q(x)|^2 (mean) + kl KL + residual L(x_s + noise, report) + plain L(x, report)

    so that the small x_s keeps what is informative about the report. ``train`` then minimises L(x) + L(x_s + noise)
    with q frozen. With ``share``, ``give`` first sends the server ``shared`` pairs (x_s + noise, text embedding) of
    every site, and ``train`` adds L of pairs from the pool of all sites, which each keeps in its memory. That shows
    other sites parts of images of patients: noise is no guarantee, hence off by default; the preset, which is the
    paper's method, has it on and prints what it costs (``discloses``).
    q is ``Experiment.extra``, a VAE (``DistillerConfig``); without one FedFed is FedAvg.
    Differs: the paper trains stage B afresh, on two noise levels; here the distilled model is kept, with one.
    """

    reads_films: ClassVar[bool] = True

    distil_phases: int = 15  # of round 0, each aggregated; 0 = none
    distil_steps: int = 20  # of each
    share: bool = False  # true is the paper
    shared: int = 32  # pairs that every site gives to the pool
    noise: float = 0.25  # standard deviation; images are in [-1, 1]
    recon: float = 5.0  # weight of the reconstruction
    residual: float = 2.0  # weight of L(x_s + noise), the paper's CE of x_s
    kl: float = 0.005  # weight of the divergence
    plain: float = 0.4  # weight of L(x), the paper's CE of x
    image_size: int = field(default=64, metadata={"follows": "model.image_size"})  # pixels of the shared images
    embedding_dim: int = field(default=128, metadata={"follows": "model.embedding_dim"})  # d of the shared embeddings

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("distil_phases", "distil_steps", "noise", "recon", "residual", "kl", "plain"):
            require(getattr(self, name) >= 0, f"{name} is {getattr(self, name)}; it must not be negative")
        for name in ("shared", "image_size", "embedding_dim"):
            require(getattr(self, name) >= 1, f"{name} is {getattr(self, name)}; at least 1")

    def phases(self, round: int) -> tuple[str, ...]:
        distil = tuple(f"distil-{index + 1}" for index in range(self.distil_phases))
        return (*distil, *(("give",) if self.share else ()), "train") if round == 0 else ("train",)

    def discloses(self) -> str:
        """The epsilon of the noise, for two images as different as grey levels allow: the Gaussian mechanism.

        With sensitivity s, deviation sigma and mu = s / sigma, delta < Phi(mu / 2 - epsilon / mu) (Balle and Wang,
        2018, https://arxiv.org/abs/1805.06530, Theorem 8, without its negative term), so that
        epsilon = mu^2 / 2 + mu Phi^-1(1 - delta) is enough. It holds against those who do not know the run's seed,
        from which the noise is drawn.
        """
        if not self.share:
            return ""
        said = (
            f"every other site is shown {self.shared} pairs of each site: what the distiller leaves of an image, with "
            f"noise of standard deviation {self.noise:g}, and the embedding of its report without noise"
        )
        if self.noise:
            mu = GREY_RANGE * 2 * self.image_size / self.noise  # two residuals: each pixel apart by 2 ranges at most
            epsilon = mu * mu / 2 + mu * NormalDist().inv_cdf(1 - DELTA)
            said += f". The noise gives an image an epsilon of {epsilon:.3g} at delta {DELTA:g}, which protects nothing"
        return f"{said}; --set method.share=false keeps the pairs at the site"

    def steps(self, phase: str) -> int:
        return {"train": self.local_steps, "give": 0}.get(phase, self.distil_steps)

    def trains(self, name: str, phase: str) -> bool:
        return phase.startswith("distil") or not name.startswith(EXTRA)

    def shares(self, name: str, phase: str) -> bool:
        return phase != "give" and self.trains(name, phase)

    # Server half
    def broadcast(self, server: Server, site: str) -> Broadcast:
        due = server.phase == "train" and (server.round == 0 or server.missed.get(site, 0) > 0)
        pool = server.memory if due else {}  # again to a site that may never have had it
        return replace(super().broadcast(server, site), aux=dict(pool))

    def expects(self, server: Server, site: str) -> Expected:
        if server.phase != "give":
            return super().expects(server, site)
        image = torch.empty(self.shared, 1, self.image_size, self.image_size)
        return Expected({"image": image, "text": torch.empty(self.shared, self.embedding_dim)})

    def objection(self, server: Server, update: Update) -> str | None:
        """Every site trains on the pool: an image in it is of no other size than a residual with its noise."""
        if server.phase != "give":
            return None
        most, largest = 2 * GREY_RANGE + 6 * self.noise, float(update.state["image"].abs().max())
        if not largest <= most:
            return f"image: a grey level of the distilled image is {largest:.3g}, expected at most {most:.3g}"
        return objection_to_rows("text", update.state["text"])

    def aggregator(self, server: Server, phase: str) -> Aggregator:
        return Pool(server) if phase == "give" else super().aggregator(server, phase)

    # Site half
    def receive(self, client: Client, message: Broadcast) -> None:
        super().receive(client, message)
        client.memory = message.aux or client.memory

    def losses(self, client: Client, batch: Batch, message: Broadcast) -> dict[str, Tensor]:
        output, distiller = client.model(batch), client.extra
        terms: dict[str, Tensor] = client.objective(output, batch)
        if distiller is None or "image" not in batch:
            return terms
        # The distiller takes from an image what need not be shared; the residual is what is left for the text to match.
        distils = message.phase != "train"
        with torch.set_grad_enabled(distils):
            distilled, divergence = distiller(batch["image"], sample=distils)
        residual = self._noised(batch["image"] - distilled)
        if distils:
            terms = {name: self.plain * term for name, term in terms.items()}
            terms |= {"recon": self.recon * (batch["image"] - distilled).square().mean(), "kl": self.kl * divergence}
        terms["residual"] = (self.residual if distils else 1.0) * _match(client, residual, output.text, batch)
        # In training, residuals of all sites stand beside the site's own records.
        if not distils and client.memory:
            rows = torch.randperm(len(client.memory["image"]))[: len(residual)]
            terms["pool"] = _match(client, client.memory["image"][rows], client.memory["text"][rows], {})
        return terms

    def _noised(self, residual: Tensor) -> Tensor:
        return residual + self.noise * torch.randn_like(residual)

    def upload(self, client: Client, message: Broadcast) -> State:
        return self._pairs(client, message) if message.phase == "give" else super().upload(client, message)

    @torch.no_grad()
    def _pairs(self, client: Client, message: Broadcast) -> State:
        """``shared`` pairs of this site, some of them twice only where it has fewer records."""
        generator = torch.Generator().manual_seed(seed(client.seed, client.name, "pool"))
        order = torch.randperm(client.data.num_train, generator=generator)
        rows = order.repeat(-(-self.shared // len(order)))[: self.shared]
        model: Any = client.frozen(message.state)
        distiller: Any = client.extra
        require(distiller is not None, "FedFed shares what its distiller leaves; set Experiment.extra")
        batches = list(client.data.batches("train", 32, drop_last=False, rows=rows))
        residuals = [batch["image"] - distiller(batch["image"])[0] for batch in batches]
        image, text = self._noised(torch.cat(residuals)), torch.cat([model(batch).text for batch in batches])
        return {"image": image, "text": text}


class Pool:
    """Aggregator of the ``give`` phase: everybody's pairs, one site after the other."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._given: list[State] = []

    def add(self, update: Update) -> None:
        self._given.append({name: tensor.clone() for name, tensor in update.state.items()})

    def commit(self) -> None:
        pool = {name: torch.cat([pairs[name] for pairs in self._given]) for name in ("image", "text")}
        self._server.memory |= pool


def _match(client: Client, image: Tensor, text: Tensor | None, batch: Batch) -> Tensor:
    """The objective between images [B, 1, S, S] and text embeddings [B, d] of the same studies."""
    terms = client.objective(VLOutput(client.model({"image": image}).image, text), batch)
    return torch.stack([torch.zeros((), device=client.device), *terms.values()]).sum()
