"""OneRoundCCA (ridge CCA: Hotelling, 1936; Vinod, 1976): solves for linear heads from one round of second moments.

Canonical correlation analysis (CCA) needs only the mean and covariance of the records' features. The pooled mean and
covariance are weighted means of the sites' own. So one exchange without an optimiser step gives the heads that the
pooled records would give, each site's mean removed.

The combination is ours. Nearest to it, for classifiers: one-shot federated ridge regression (Alsulaimawi, 2026,
https://arxiv.org/abs/2601.08216) and GH-OFL, heads from class-conditional Gaussian moments (Turazza et al., ICLR 2026,
https://arxiv.org/abs/2602.01186).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedvlp.core.aggregation import Aggregator
from fedvlp.core.client import Client, NoLossError
from fedvlp.core.device import threads
from fedvlp.core.method import Method
from fedvlp.core.optimizers import NONE
from fedvlp.core.server_state import Server
from fedvlp.core.types import CHANGE, Broadcast, Expected, State, Update, group
from fedvlp.core.validate import require

MOMENTS = "moments"
"""The phase of round 0. Later rounds have FedAvg's, which begins with the heads of the closed form."""

IMAGE_MEAN, TEXT_MEAN, IMAGE, TEXT, CROSS = (
    f"{CHANGE}{name}" for name in ("image_mean", "text_mean", "image_image", "text_text", "image_text")
)
"""Tensors of an update: means m_x [W], m_t [V]; covariances S_xx [W, W], S_tt [V, V], S_xt [W, V] about them."""

ROWS = 64  # records that go through the towers at a time


@dataclass(frozen=True)
class OneRoundCCA(Method):
    """x: what the image tower makes of an image, [W]; t: the text tower of its report, [V]; heads are linear, to [D].

    1. Site i sends m_x, m_t and the covariances S_xx, S_tt, S_xt about its own means (``upload``).
    2. Server: means over sites, weighted by records. Differences between sites' means are in no covariance, so that
       what scanners and wording of a whole site have in common aligns nothing.
    3. (S_xx + r_x I)^(-1/2) S_xt (S_tt + r_t I)^(-1/2) = U diag(rho) V^T, singular values rho_1 >= rho_2 >= ...
    4. A = (S_xx + r_x I)^(-1/2) U_d diag(rho), B = (S_tt + r_t I)^(-1/2) V_d diag(rho): d canonical variables.
    5. Heads: A^T (x - m_x) and B^T (t - m_t), each divided by its root mean square length.

    Where ``embedding_dim`` is above the image tower's width W, the image head keeps the tower's own space beside the
    d = embedding_dim - W - 1 canonical variables: the W centred features, and one coordinate that is the same for all
    images. Reports have zeros there, so they match images by canonical variables alone, while a classifier on images
    sees all that the tower knows.

    Rounds after the first are FedAvg's, ``local_steps`` from the closed form on; a single round, or 0 steps, is the
    closed form alone.
    """

    image_ridge: float = 1e-3  # r_x / trace(S_xx), > 0: the larger, the fewer directions of images count
    text_ridge: float = 1e-3  # r_t / trace(S_tt), > 0
    tower: float = 2.0  # root mean square length of the tower's features beside the canonical variables' 1, > 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("image_ridge", "text_ridge", "tower"):
            require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}; it must be above 0")

    def refuse_settings(self, experiment: Any) -> None:
        hidden = getattr(experiment.model, "head_hidden", None)
        require(hidden is None, f"model.head_hidden is {hidden}: OneRoundCCA solves for linear heads; set it to null")
        optimizer = experiment.rounds.server_optimizer
        require(
            optimizer == NONE,
            f"rounds.server_optimizer={optimizer}: OneRoundCCA's heads are solved for, and no step towards them is "
            "left to take; set none",
        )

    def phases(self, round: int) -> tuple[str, ...]:
        return (MOMENTS,) if round == 0 else super().phases(round)

    def steps(self, phase: str) -> int:
        return 0 if phase == MOMENTS else self.local_steps

    def shares(self, name: str, phase: str) -> bool:
        if phase == MOMENTS:  # what travels in the place of the heads are the moments that they follow from
            return group(name) == "head"
        return super().shares(name, phase)

    def discloses(self) -> str:
        return (
            "the server sees the mean and covariance of the frozen towers' features over each site's images and "
            "reports; with fewer records than features these nearly determine each record's features, and no noise "
            "covers them but a site's own, which leaves nothing of them to learn from"
        )

    # Server half
    def expects(self, server: Server, site: str) -> Expected:
        expected = super().expects(server, site)
        return Expected(moments_of(server.state)) if server.phase == MOMENTS else expected

    def aggregator(self, server: Server, phase: str) -> Aggregator:
        return Solving(self, server) if phase == MOMENTS else super().aggregator(server, phase)

    # Site half
    def upload(self, client: Client, message: Broadcast) -> State:
        return moments(client) if message.phase == MOMENTS else super().upload(client, message)


class Solving:
    """Averages the sites' moments, and puts the heads of the closed form into the server's model."""

    def __init__(self, method: OneRoundCCA, server: Server) -> None:
        self._method = method
        self._server = server
        self._mean = server.mean(moments_of(server.state))

    def add(self, update: Update) -> None:
        self._mean.add(update.state, self._method.weight(self._server, update))

    def commit(self) -> None:
        mean = self._mean.result()
        if mean:  # some site has records
            self._server.replace(heads(self._method, mean, self._server.state))


def head_of(modality: str, state: State) -> tuple[str, str]:
    """Names of the weight [D, W] and of the bias [D] of a linear head."""
    names = [name for name in state if name.startswith(f"{modality}_head.")]
    return next(n for n in names if n.endswith("weight")), next(n for n in names if n.endswith("bias"))


def moments_of(state: State) -> State:
    """Examples, in shape and dtype, of the moments that a site sends for the model of ``state``."""
    image, text = (state[head_of(modality, state)[0]].shape[1] for modality in ("image", "text"))
    shapes = {IMAGE_MEAN: (image,), TEXT_MEAN: (text,), IMAGE: (image, image), TEXT: (text, text), CROSS: (image, text)}
    return {name: torch.zeros(shape) for name, shape in shapes.items()}


@torch.no_grad()
def moments(client: Client) -> State:
    """Step 1, over all training records, summed in float64. Raises NoLossError for a site without images or reports."""
    if set(client.modalities) != {"image", "text"}:
        raise NoLossError(
            f"{client.name}: its records lack images or reports, and OneRoundCCA is learned from pairs; leave it out",
            public="this site's records lack images or reports, and the method is learned from pairs; leave it out",
        )
    features: list[tuple[Tensor, Tensor]] = []
    client.model.eval()
    with before_heads(client.model) as seen:
        for batch in client.data.batches("train", ROWS, drop_last=False):
            client.model(batch)
            features.append((seen["image"].double().cpu(), seen["text"].double().cpu()))
    if not features:
        return moments_of(client.state())
    image, text = (torch.cat(of_modality) for of_modality in zip(*features, strict=True))
    return moments_of_features(image, text)


def moments_of_features(image: Tensor, text: Tensor) -> State:
    """Step 1 for float64 features image [n, W] and text [n, V] of n > 0 pairs."""
    image_mean, text_mean = image.mean(dim=0), text.mean(dim=0)
    x, t = image - image_mean, text - text_mean  # [n, W], [n, V]
    n = len(x)
    sums = {IMAGE_MEAN: image_mean, TEXT_MEAN: text_mean, IMAGE: x.T @ x / n, TEXT: t.T @ t / n, CROSS: x.T @ t / n}
    return {name: tensor.float() for name, tensor in sums.items()}


@contextmanager
def before_heads(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Record the last inputs of both heads, by modality: pooled features [B, W] and [B, V]."""
    seen: dict[str, Tensor] = {}

    def noting(modality: str) -> Any:
        return lambda head, inputs: seen.__setitem__(modality, inputs[0])

    hooks = [getattr(model, f"{name}_head").register_forward_pre_hook(noting(name)) for name in ("image", "text")]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def heads(method: OneRoundCCA, mean: State, state: State) -> State:
    """Steps 3 to 5: weights and biases of both heads, by their names in ``state``."""
    m_x, m_t, s_xx, s_tt, s_xt = (mean[name].double() for name in (IMAGE_MEAN, TEXT_MEAN, IMAGE, TEXT, CROSS))
    (image_weight, image_bias), (text_weight, text_bias) = (head_of(name, state) for name in ("image", "text"))
    dim, width = state[image_weight].shape
    own = width + 1 if dim > width + 1 else 0  # coordinates of the tower's own space
    # Steps 3 and 4, the canonical variables; then step 5, each side divided by its root mean square length.
    with threads(1):  # another number of threads has other last bits
        root_x, root_t = inverse_root(s_xx, method.image_ridge), inverse_root(s_tt, method.text_ridge)
        u, rho, v = torch.linalg.svd(root_x @ s_xt @ root_t, full_matrices=False)  # step 3
        d = min(dim - own, len(rho))
        a, b = root_x @ u[:, :d] * rho[:d], root_t @ v[:d].T * rho[:d]  # step 4
        a, b = (of / root_mean_square(of.T @ s @ of) for of, s in ((a, s_xx), (b, s_tt)))  # step 5

    # The heads' first d rows are the canonical variables; the rest of the image head is the tower's own space.
    image, text = (torch.zeros(dim, len(s), dtype=torch.float64) for s in (s_xx, s_tt))
    image[:d], text[:d] = a.T, b.T
    offset = torch.zeros(dim, dtype=torch.float64)
    if own:
        image[-own:-1] = torch.eye(width, dtype=torch.float64) * method.tower / root_mean_square(s_xx)
        # Vectors get unit length. Beside so long a coordinate that hardly depends on the image, and changes no feature.
        offset[-1] = 3 * method.tower

    # The bias takes the mean away: A^T (x - m_x) = A^T x - A^T m_x.
    solved = {
        image_weight: image,
        image_bias: offset - image @ m_x,
        text_weight: text,
        text_bias: -text @ m_t,
    }
    return {name: tensor.to(state[name].dtype) for name, tensor in solved.items()}


def inverse_root(covariance: Tensor, ridge: float) -> Tensor:
    """(S + ridge trace(S) I)^(-1/2), of a symmetric S [W, W] whose negative eigenvalues are rounding."""
    values, vectors = torch.linalg.eigh(covariance)
    values = values.clamp(min=0)
    tiny = torch.finfo(torch.float32).tiny  # of records that are all equal
    return (vectors / (values + ridge * values.sum() + tiny).sqrt()) @ vectors.T


def root_mean_square(covariance: Tensor) -> float:
    """Root mean square length of centred vectors with this covariance; 1 where all of them are 0."""
    return float(covariance.trace().clamp(min=0).sqrt()) or 1.0
