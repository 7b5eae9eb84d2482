"""OneRoundCCA (ridge CCA: Hotelling, 1936; Vinod, 1976): solves for linear heads from one round of second moments.

Canonical correlation analysis (CCA) needs only the mean and covariance of the records' features. The pooled mean and
covariance are weighted means of the sites' own. So one exchange without an optimiser step gives the heads that the
pooled records would give, each site's mean removed.

The combination is ours. Nearest to it, for classifiers: one-shot federated ridge regression (Alsulaimawi, 2026,
https://arxiv.org/abs/2601.08216) and GH-OFL, heads from class-conditional Gaussian moments (Turazza et al., ICLR 2026,
https://arxiv.org/abs/2602.01186).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from fedvlp.core.types import CHANGE, IMAGE_TOKENS, Batch, Broadcast, Expected, State, Update, group
from fedvlp.core.validate import require

MOMENTS = "moments"
"""The phase of round 0. Later rounds have FedAvg's, which begins with the heads of the closed form."""

IMAGE_MEAN, TEXT_MEAN, IMAGE, TEXT, CROSS = (
    f"{CHANGE}{name}" for name in ("image_mean", "text_mean", "image_image", "text_text", "image_text")
)
"""Tensors of an update: means m_x [W], m_t [V]; covariances S_xx [W, W], S_tt [V, V], S_xt [W, V] about them."""

PARTS = f"{CHANGE}parts"
"""With them: which share of a site's training records are pairs, and which share has an image [2]."""

KNOWN, LABEL_MEAN, IMAGE_LABELS = (f"{CHANGE}{name}" for name in ("labels_known", "label_mean", "image_labels"))
"""With ``findings``, also: which of them the site knows [L], their means m_y [L], and the covariances S_xy [W, L]."""

WEIGHT, BIAS = "findings.weight", "findings.bias"
"""The ridge heads for ``findings`` in the server's memory: [L, W] and [L], float32, as models/findings.py has them."""

ROWS = 64  # records that go through the towers at a time


@dataclass(frozen=True)
class OneRoundCCA(Method):
    """x: what the image tower makes of an image, [W]; t: the text tower of its report, [V]; heads are linear, to [D].

    1. Site i sends m_x, m_t and the covariances S_xx, S_tt, S_xt about its own means (``upload``). Where a record has
       several reports (``partition.retrieve``), each counts as one of k equal parts of it.
    2. Server: means over sites, weighted by their pairs. Differences between sites' means are in no covariance, so that
       what scanners and wording of a whole site have in common aligns nothing; ``site_means`` puts them in.
       ``standardised`` divides every feature by its deviation first.
    3. (S_xx + r_x I)^(-1/2) S_xt (S_tt + r_t I)^(-1/2) = U diag(rho) V^T, singular values rho_1 >= rho_2 >= ...
    4. A = (S_xx + r_x I)^(-1/2) U_d diag(rho), B = (S_tt + r_t I)^(-1/2) V_d diag(rho): d canonical variables.
    5. Heads: A^T (x - m_x) and B^T (t - m_t), each divided by its root mean square length.

    Where ``embedding_dim`` is above the image tower's width W, the image head keeps the tower's own space beside the
    d = embedding_dim - W - 1 canonical variables: the W centred features, and one coordinate that is the same for all
    images. Reports have zeros there, so they match images by canonical variables alone, while a classifier on images
    sees all that the tower knows.

    With ``findings`` the same round gives a linear classifier. Site i also sends m_y and S_xy of the labels y in {0, 1}
    (1/2 where uncertain, 0 where a report does not mention the finding). The server pools the sites that know finding
    l, differences of their means included, and solves (S_xx + r_f tr(S_xx) I) w_l = S_xy,l: what ridge regression with
    an intercept gives on their pooled features. The head is then w_l scaled to the log-odds that two Gaussian classes
    of these moments have (linear discriminant analysis), so that its sigmoid is a probability.

    Rounds after the first are FedAvg's, ``local_steps`` from the closed form on; a single round, or 0 steps, is the
    closed form alone.
    """

    image_ridge: float = 1e-3  # r_x / trace(S_xx), > 0: the larger, the fewer directions of images count
    text_ridge: float = 1e-3  # r_t / trace(S_tt), > 0
    tower: float = 2.0  # root mean square length of the tower's features beside the canonical variables' 1, > 0
    standardised: bool = False  # ridges are for features of variance 1: r_x = 0.02 is a ridge of 30 for W = 1,280
    site_means: bool = False  # whether what a whole site has in common counts for the alignment
    findings: tuple[str, ...] | str = ()  # labels that get a linear classifier, or "a,b"; (): none
    finding_ridge: float = 0.02  # r_f / trace(S_xx), > 0

    def __post_init__(self) -> None:
        super().__post_init__()
        names = self.findings.split(",") if isinstance(self.findings, str) else self.findings
        object.__setattr__(self, "findings", tuple(name.strip() for name in names if name.strip()))
        require(len(set(self.findings)) == len(self.findings), "findings: a label is named twice; name each once")
        for name in ("image_ridge", "text_ridge", "tower", "finding_ridge"):
            require(getattr(self, name) > 0, f"{name} is {getattr(self, name)}; it must be above 0")

    def refuse_settings(self, experiment: Any) -> None:
        hidden = getattr(experiment.model, "head_hidden", None)
        require(hidden is None, f"model.head_hidden is {hidden}: OneRoundCCA solves for linear heads; set it to null")
        aligned = self.findings and getattr(experiment.model, "alignment", False)
        require(not aligned, "method.findings: its heads read the image tower itself; set model.alignment to false")
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
            f"reports{', and of these with its findings' if self.findings else ''}; with fewer records than features "
            "these nearly determine each record's features, and no noise covers them but a site's own, which leaves "
            "nothing of them to learn from"
        )

    # Server half
    def expects(self, server: Server, site: str) -> Expected:
        expected = super().expects(server, site)
        return Expected(moments_of(server.state, len(self.findings))) if server.phase == MOMENTS else expected

    def aggregator(self, server: Server, phase: str) -> Aggregator:
        return Solving(self, server) if phase == MOMENTS else super().aggregator(server, phase)

    # Site half
    def upload(self, client: Client, message: Broadcast) -> State:
        return moments(client, self.findings) if message.phase == MOMENTS else super().upload(client, message)


class Solving:
    """Averages the sites' moments, and puts the heads of the closed form into the server's model."""

    def __init__(self, method: OneRoundCCA, server: Server) -> None:
        self._method = method
        self._server = server
        self._mean = server.mean(moments_of(server.state))
        self._labelled: dict[tuple[bool, ...], Pooled] = {}  # by which findings the sites know

    def add(self, update: Update) -> None:
        records, sent = self._method.weight(self._server, update), update.state
        of_pairs, of_images = (records * min(1.0, max(0.0, share)) for share in sent[PARTS].tolist())
        pairs = {name: sent[name] for name in moments_of(self._server.state)}
        self._mean.add(about_zero(pairs) if self._method.site_means else pairs, of_pairs)
        if self._method.findings and of_images:
            known = tuple((sent[KNOWN] > 0).tolist())
            self._labelled.setdefault(known, Pooled()).add(sent, of_images)

    def commit(self) -> None:
        mean = self._mean.result()
        if mean:  # some site has records
            mean = about_means(mean) if self._method.site_means else mean
            self._server.replace(heads(self._method, mean, self._server.state))
        if self._labelled:
            weight, bias = finding_heads(self._labelled, self._method.finding_ridge)
            self._server.memory |= {WEIGHT: weight.float(), BIAS: bias.float()}


SQUARES = ((IMAGE, IMAGE_MEAN, IMAGE_MEAN), (TEXT, TEXT_MEAN, TEXT_MEAN), (CROSS, IMAGE_MEAN, TEXT_MEAN))
"""Which means each covariance is about."""


def about_zero(moments: State) -> State:
    """The same moments with second moments in the place of covariances: S + m m^T, which sites may be pooled by."""
    raw = {name: moments[name] + torch.outer(moments[one], moments[other]) for name, one, other in SQUARES}
    return moments | raw


def about_means(moments: State) -> State:
    """Covariances again, about the means that the moments have by now."""
    own = {name: moments[name] - torch.outer(moments[one], moments[other]) for name, one, other in SQUARES}
    return moments | own


class Pooled:
    """Sums of images and labels over sites that know the same findings, in float64, as if their records were one."""

    def __init__(self) -> None:
        self.weight = 0.0
        self._sums: State = {}

    def add(self, sent: State, weight: float) -> None:
        """Adds a site's moments. A covariance becomes a second moment: those may be summed over sites."""
        x, y = sent[IMAGE_MEAN].double(), sent[LABEL_MEAN].double()
        whole = {
            IMAGE_MEAN: x,
            LABEL_MEAN: y,
            IMAGE: sent[IMAGE].double() + torch.outer(x, x),
            IMAGE_LABELS: sent[IMAGE_LABELS].double() + torch.outer(x, y),
        }
        self.weight += weight
        self._sums = {name: self._sums.get(name, 0.0) + weight * tensor for name, tensor in whole.items()}

    def __add__(self, other: Pooled) -> Pooled:
        both = Pooled()
        both.weight = self.weight + other.weight
        both._sums = {name: tensor + other._sums[name] for name, tensor in self._sums.items()}
        return both

    def moments(self) -> State:
        """Means, and covariances about them, over all that was added."""
        mean = {name: tensor / self.weight for name, tensor in self._sums.items()}
        x, y = mean[IMAGE_MEAN], mean[LABEL_MEAN]
        mean[IMAGE] = mean[IMAGE] - torch.outer(x, x)
        mean[IMAGE_LABELS] = mean[IMAGE_LABELS] - torch.outer(x, y)
        return mean


def finding_heads(labelled: dict[tuple[bool, ...], Pooled], ridge: float) -> tuple[Tensor, Tensor]:
    """Weight [L, W] and bias [L], float64, of every finding, from the sites that know it; 0 where none does.

    ``labelled``: sums of the sites by which of the L findings they know.
    """
    count = len(next(iter(labelled)))
    width = len(next(iter(labelled.values())).moments()[IMAGE_MEAN])
    weight, bias = torch.zeros(count, width, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    groups: dict[tuple[int, ...], list[int]] = {}  # which of the sums know a finding -> the findings
    for finding in range(count):
        groups.setdefault(tuple(i for i, known in enumerate(labelled) if known[finding]), []).append(finding)
    for members, findings in groups.items():
        if members:
            sums = list(labelled.values())
            pooled = sum((sums[i] for i in members[1:]), sums[members[0]]).moments()
            weight[findings], bias[findings] = ridge_heads(pooled, findings, ridge)
    return weight, bias


def ridge_heads(pooled: State, findings: list[int], ridge: float) -> tuple[Tensor, Tensor]:
    """Log-odds weight [F, W] and bias [F] of F findings from pooled moments, by ridge regression.

    w = (S_xx + r I)^(-1) S_xy, the score w^T x. Between the classes of a finding with share p the score's means differ
    by d = w^T S_xy / (p (1 - p)); within a class its variance is v = w^T S_xx w - p (1 - p) d^2. Two Gaussian classes
    with these have log-odds (d / v) (w^T x - c) + ln(p / (1 - p)), c midway between their means.
    """
    s, x = pooled[IMAGE], pooled[IMAGE_MEAN]
    cross, p = pooled[IMAGE_LABELS][:, findings], pooled[LABEL_MEAN][findings]  # [W, F], [F]
    tiny = torch.finfo(torch.float32).tiny
    with threads(1):
        w = torch.linalg.solve(s + (ridge * s.trace() + tiny) * torch.eye(len(s), dtype=s.dtype), cross)
    both = p * (1 - p)  # 0 where all of the records are of one kind: its head is 0 then
    apart = torch.where(both > 0, (w * cross).sum(0) / both.clamp(min=tiny), 0.0)
    between = both * apart.square()
    within = torch.maximum((w * (s @ w)).sum(0) - between, 1e-3 * between)  # 0 where a head fits its records perfectly
    scale = torch.where(between > 0, apart / within.clamp(min=tiny), 0.0)
    middle = w.T @ x + (0.5 - p) * apart  # the mean score lies p of the way from the one class to the other
    prior = torch.special.logit(p.clamp(1e-6, 1 - 1e-6))
    return (w * scale).T, prior - scale * middle


def head_of(modality: str, state: State) -> tuple[str, str]:
    """Names of the weight [D, W] and of the bias [D] of a linear head."""
    names = [name for name in state if name.startswith(f"{modality}_head.")]
    return next(n for n in names if n.endswith("weight")), next(n for n in names if n.endswith("bias"))


def moments_of(state: State, findings: int = 0) -> State:
    """Examples, in shape and dtype, of the moments that a site sends for the model of ``state`` and L findings."""
    image, text = (state[head_of(modality, state)[0]].shape[1] for modality in ("image", "text"))
    shapes = {IMAGE_MEAN: (image,), TEXT_MEAN: (text,), IMAGE: (image, image), TEXT: (text, text), CROSS: (image, text)}
    shapes[PARTS] = (2,)
    labels = {KNOWN: (findings,), LABEL_MEAN: (findings,), IMAGE_LABELS: (image, findings)} if findings else {}
    return {name: torch.zeros(shape) for name, shape in (shapes | labels).items()}


@torch.no_grad()
def moments(client: Client, findings: Sequence[str] = ()) -> State:
    """Step 1, over all training records that are pairs, and over all images for the findings, summed in float64.

    Raises NoLossError for a site without a pair, unless it has images and ``findings`` are asked for.
    """
    wanted = {"image"} if findings else {"image", "text"}
    if not wanted <= set(client.modalities):
        raise NoLossError(
            f"{client.name}: its records lack images or reports, and OneRoundCCA is learned from pairs; leave it out",
            public="this site's records lack images or reports, and the method is learned from pairs; leave it out",
        )
    sums = moments_of(client.state(), len(findings))
    read = read_features(client, findings)
    if len(read.owner):
        sums |= moments_of_features(read.image[read.paired], read.text, read.owner)
    if findings and len(read.image):
        sums |= moments_of_labels(read.image, read.labels)
    count = max(1, client.data.num_train)
    sums[PARTS] = torch.tensor([len(read.paired) / count, len(read.image) / count])
    return {name: tensor.float() for name, tensor in sums.items()}


@dataclass(frozen=True, eq=False)
class Features:
    """What the towers make of a site's n images and m reports of those that are pairs, float64."""

    image: Tensor  # [n, W]
    labels: Tensor  # [n, L]
    paired: Tensor  # [p] int64: which of the images are of pairs
    text: Tensor  # [m, V]
    owner: Tensor  # [m] int64: which of the p pairs a report belongs to


def read_features(client: Client, findings: Sequence[str]) -> Features:
    """All training records of a site once through the towers; reports without an image are of no use here."""
    client.model.eval()
    width, text_width = (client.state()[head_of(name, client.state())[0]].shape[1] for name in ("image", "text"))
    images, texts = [torch.empty(0, width).double()], [torch.empty(0, text_width).double()]
    labels, paired, rows = [torch.empty(0, len(findings)).double()], [], []
    count = 0
    with before_heads(client.model) as seen:
        for batch in client.data.batches("train", ROWS, drop_last=False):
            if not batch.keys() & {"image", IMAGE_TOKENS}:
                continue
            client.model(batch)
            images.append(seen["image"].double().cpu())
            labels.append(labels_of(client, batch, findings))
            if "text" in batch:
                texts.append(seen["text"].double().cpu())
                paired.append(torch.arange(count, count + len(batch["row"])))
                rows.append(batch["row"].cpu())
            count += len(batch["row"])
        position = torch.full((client.data.num_train,), -1)  # of a record among the pairs
        none = torch.empty(0, dtype=torch.int64)
        of_pairs = torch.cat([none, *rows])
        position[of_pairs] = owner = torch.arange(len(of_pairs))
        if (several := client.data.report_batches(ROWS)) is not None:  # all reports of a record, in the place of one
            texts, owners = texts[:1], [none]
            for batch in several:
                client.model(batch)
                whose = position[batch["row"].cpu()]
                texts.append(seen["text"].double().cpu()[whose >= 0])
                owners.append(whose[whose >= 0])
            owner = torch.cat(owners)
    return Features(torch.cat(images), torch.cat(labels), torch.cat([none, *paired]), torch.cat(texts), owner)


def labels_of(client: Client, batch: Batch, findings: Sequence[str]) -> Tensor:
    """[B, L] of a batch's records: the labels of the findings, nan where the site's data have none by that name."""
    names = list(client.data.label_names) if findings else []
    columns = [names.index(name) if name in names else -1 for name in findings]
    whole = torch.full((len(batch["row"]), len(findings)), torch.nan, dtype=torch.float64)
    for index, column in enumerate(columns):
        if column >= 0:
            whole[:, index] = batch["labels"][:, column].double().cpu()
    return whole


def moments_of_labels(image: Tensor, labels: Tensor) -> State:
    """Step 1 for the findings: image [n, W] float64, labels [n, L] in {1, 0, -1 uncertain, nan not mentioned}."""
    known = ~labels.isnan().all(dim=0)  # a finding that no record of the site has was asked for nobody
    truth = torch.where(labels == -1, 0.5, labels.nan_to_num()).double()
    mean = truth.mean(dim=0)
    x, y = image - image.mean(dim=0), truth - mean
    return {KNOWN: known.double(), LABEL_MEAN: mean, IMAGE_LABELS: x.T @ y / len(x)}


def moments_of_features(image: Tensor, text: Tensor, owner: Tensor | None = None) -> State:
    """Step 1 for float64 features image [n, W] and text [m, V] of n > 0 records, float64.

    ``owner`` [m]: the record of each text, at least one of each; None: they are as many, in one order. A record's
    texts share its weight.
    """
    n = len(image)
    owner = torch.arange(n) if owner is None else owner
    share = (1.0 / torch.bincount(owner, minlength=n)[owner]).to(text)  # [m], 1 / k of a record with k texts
    image_mean, text_mean = image.mean(dim=0), share @ text / n
    x, t = image - image_mean, text - text_mean  # [n, W], [m, V]
    of_record = torch.zeros(n, text.shape[1], dtype=text.dtype).index_add(0, owner, share[:, None] * t)  # [n, V]
    return {
        IMAGE_MEAN: image_mean,
        TEXT_MEAN: text_mean,
        IMAGE: x.T @ x / n,
        TEXT: t.T @ (share[:, None] * t) / n,
        CROSS: x.T @ of_record / n,
    }


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
    with threads(1):  # another number of threads has other last bits
        x, t = (scaled(covariance, method.standardised) for covariance in (s_xx, s_tt))
        roots = (
            inverse_root(spectrum(x.covariance), method.image_ridge),
            inverse_root(spectrum(t.covariance), method.text_ridge),
        )
        a, b = canonical(roots[0], s_xt / torch.outer(x.deviation, t.deviation), roots[1], dim - own)
        a, b = a / x.deviation[:, None], b / t.deviation[:, None]
        a, b = (of / root_mean_square(of.T @ s @ of) for of, s in ((a, s_xx), (b, s_tt)))  # step 5

    # The heads' first d rows are the canonical variables; the rest of the image head is the tower's own space.
    image, text = (torch.zeros(dim, len(s), dtype=torch.float64) for s in (s_xx, s_tt))
    image[: a.shape[1]], text[: b.shape[1]] = a.T, b.T
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


@dataclass(frozen=True, eq=False)
class Scaled:
    """A covariance [W, W] of features that were divided by ``deviation`` [W]."""

    covariance: Tensor
    deviation: Tensor


def scaled(covariance: Tensor, standardised: bool) -> Scaled:
    """The covariance of features of variance 1, or as it is. A feature that never varies stays as it is."""
    variance = covariance.diagonal()
    deviation = torch.where(variance > 0, variance.clamp(min=0).sqrt(), 1.0) if standardised else variance.new_ones(())
    deviation = deviation.expand(len(covariance))
    return Scaled(covariance / torch.outer(deviation, deviation), deviation)


def canonical(root_x: Tensor, s_xt: Tensor, root_t: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Steps 3 and 4: A [W, d] and B [V, d], of at most ``most`` canonical variables."""
    u, rho, v = torch.linalg.svd(root_x @ s_xt @ root_t, full_matrices=False)  # step 3
    d = min(most, len(rho))
    return root_x @ u[:, :d] * rho[:d], root_t @ v[:d].T * rho[:d]  # step 4


def spectrum(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues [W], negative ones being rounding, and eigenvectors [W, W] of a symmetric matrix."""
    values, vectors = torch.linalg.eigh(covariance)
    return values.clamp(min=0), vectors


def inverse_root(spectrum: tuple[Tensor, Tensor], ridge: float) -> Tensor:
    """(S + ridge trace(S) I)^(-1/2) of the S that has this ``spectrum``."""
    values, vectors = spectrum
    tiny = torch.finfo(torch.float32).tiny  # of records that are all equal
    return (vectors / (values + ridge * values.sum() + tiny).sqrt()) @ vectors.T


def root_mean_square(covariance: Tensor) -> float:
    """Root mean square length of centred vectors with this covariance; 1 where all of them are 0."""
    return float(covariance.trace().clamp(min=0).sqrt()) or 1.0
