"""Few-shot linear probe (spec 10.2, after MGCA, https://arxiv.org/abs/2210.06044): a linear layer on frozen features.

Labels that exclude each other (every record has exactly one) are classes of a softmax; others are findings of a sigmoid
each. An uncertain label (-1) is neither trained on nor judged, nor is one that no record of its site has.
Differs: features are computed once, from centre crops; the released code augments the training images. The whole
validation split chooses the epoch, as in the papers: a probe at 1 % has seen more labels than that.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedvlp.core.seeds import seed as seed_of
from fedvlp.core.seeds import seeded
from fedvlp.data.cohort import Cohort
from fedvlp.evaluation.classification import refuse_nan
from fedvlp.evaluation.downstream import (
    Records,
    Subset,
    features,
    never_said,
    records,
    refuse_repeated,
    refuse_schedule,
    subsets,
    train_head,
)
from fedvlp.evaluation.intervals import Figure, Interval, area_of, bootstrap, delong, difference, holm, macro, mean_of
from fedvlp.evaluation.output import columns_of, write_table

# Expected calibration error (Guo et al., 2017, https://arxiv.org/abs/1706.04599): stated beside true probability.

BINS = 15
"""Of equal width on 0..1, as in the paper."""


def calibration_error(stated: Tensor, happened: Tensor, bins: int = BINS) -> float:
    """Mean over records of |mean stated probability - share that happened| in the record's bin, 0..1.

    Raises ValueError without a record.
    """
    groups = reliability(stated, happened, bins)
    return sum(count * abs(said - was) for count, said, was in groups) / len(stated)


def reliability(stated: Tensor, happened: Tensor, bins: int = BINS) -> list[tuple[int, float, float]]:
    """(records, mean stated probability, share that happened) of every bin with a record.

    ``stated`` [N] in 0..1, ``happened`` [N] in {1, 0}. Bin b holds (b - 1) / bins < p <= b / bins, the first 0 too.
    Raises ValueError without a record.
    """
    if not len(stated) or len(stated) != len(happened):
        raise ValueError(f"calibration: {len(stated)} probabilities and {len(happened)} outcomes; expected one each")
    inner = torch.linspace(0, 1, bins + 1, dtype=torch.float64)[1:-1]
    index = torch.bucketize(stated.double(), inner)  # [N]
    count, said, was = (
        torch.zeros(bins, dtype=torch.float64).index_add(0, index, values.double()).tolist()
        for values in (torch.ones(len(stated)), stated, happened)
    )
    return [(int(n), p / n, h / n) for n, p, h in zip(count, said, was, strict=True) if n]


log = logging.getLogger(__name__)

ADAMW, LBFGS = "adamw", "lbfgs"
BLANKS = {"absent": 0.0, "unknown": math.nan}
MODULE = 8  # number of the head's random stream (core/seeds.py)


@dataclass(frozen=True)
class LinearProbe:
    """The protocol. Raises ValueError for a value that is not allowed."""

    classes: tuple[str, ...] | str = ""  # labels to tell, or "a,b"; "": all that the data have
    fractions: tuple[float, ...] = (0.01, 0.1, 1.0)  # of the training records
    shots: tuple[int, ...] = ()  # also with so many records of each class
    seeds: tuple[int, ...] = (42, 43, 44, 45, 46)  # of the subset and the head; figures are means over them
    solver: str = ADAMW  # "adamw" (papers), or "lbfgs": L2-regularised logistic regression, solved exactly
    lr: float = 5e-4  # of AdamW
    weight_decay: float = 1e-6  # of AdamW
    batch_size: int = 48  # of AdamW
    epochs: int = 50  # of AdamW, at most
    patience: int = 10  # AdamW stops after so many epochs without a lower validation loss
    l2: float = 1.0  # of lbfgs: l2 / 2 |W|^2 beside the sum of the losses, on features of unit variance; 1 / C
    aligned: bool = False  # features after the alignment block
    blank: str = "absent"  # a label that is not mentioned is "absent", or "unknown"; never said at a site: "unknown"
    resamples: int = 1000  # of the test patients, for the intervals; 0: none

    def __post_init__(self) -> None:
        names = self.classes.split(",") if isinstance(self.classes, str) else self.classes
        object.__setattr__(self, "classes", tuple(name.strip() for name in names if name.strip()))
        refuse_repeated(self.classes, "linear probe")
        self.subsets()
        refuse_schedule(self, self.resamples, "linear probe")
        if self.solver not in (ADAMW, LBFGS):
            raise ValueError(f"linear probe: solver {self.solver!r}; expected {ADAMW} or {LBFGS}")
        if self.blank not in BLANKS:
            raise ValueError(f"linear probe: blank {self.blank!r}; expected one of {', '.join(BLANKS)}")
        if not self.seeds:
            raise ValueError("linear probe: no seeds; expected at least one")

    def subsets(self) -> tuple[Subset, ...]:
        """What the heads are trained on. Raises ValueError for shares or shots that cannot be."""
        return subsets(self.fractions, self.shots, "linear probe")


@dataclass(frozen=True, eq=False)
class Task:
    """What is classified: L classes, and the target of every row of a cohort."""

    names: tuple[str, ...]
    targets: Tensor  # [N, L] float64 in {1, 0, nan: neither trained on nor judged}
    exclusive: bool  # every labelled record has exactly one class

    @property
    def labelled(self) -> np.ndarray:
        """[N] bool: which rows have a target."""
        return (~self.targets.isnan()).any(dim=1).numpy()

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy (classes) or binary cross-entropy over known labels (findings) of [B, L], summed."""
        if self.exclusive:
            return F.cross_entropy(logits, targets.argmax(dim=1), reduction="sum")
        known = (~targets.isnan()).to(logits.dtype)
        return F.binary_cross_entropy_with_logits(logits, targets.nan_to_num().to(logits.dtype), known, reduction="sum")

    def count(self, targets: Tensor) -> int:
        """How many terms ``loss`` sums."""
        return len(targets) if self.exclusive else int((~targets.isnan()).sum())

    def probabilities(self, logits: Tensor) -> Tensor:
        """[N, L] in 0..1."""
        return logits.double().softmax(dim=1) if self.exclusive else logits.double().sigmoid()


def task_of(cohort: Cohort, settings: LinearProbe) -> Task:
    """The labels that the settings name, or all that the data have, without those that no record has.

    Raises ValueError for a name that the data have not or that no record has, and without a label.
    """
    names = tuple(settings.classes) or cohort.label_names
    strange = [name for name in names if name not in cohort.label_names]
    if strange or not names:
        known = ", ".join(cohort.label_names) or "none"
        raise ValueError(
            f"linear probe: labels {', '.join(strange) or 'none'} asked for; the data have {known}. Choose some of "
            "these with probe.classes, or name a table's columns with data.label_columns"
        )
    names = _given(cohort, names, bool(settings.classes))
    columns = [cohort.label_names.index(name) for name in names]
    labels = torch.from_numpy(cohort.labels[:, columns]).double()
    blank, never = labels.isnan(), torch.from_numpy(never_said(cohort)[:, columns])
    whole = ~blank.all(dim=1)  # rows of which anything is said
    one = (labels == 1).sum(dim=1) == 1
    rest = ((labels == 0) | (labels == 1)).all(dim=1)
    if len(names) > 1 and bool(whole.any()) and bool((one & rest)[whole].all()):
        return Task(names, labels, True)
    targets = torch.where(blank, BLANKS[settings.blank], labels)
    return Task(names, torch.where(never | (labels == -1), math.nan, targets), False)


def _given(cohort: Cohort, names: Sequence[str], asked: bool) -> tuple[str, ...]:
    """Those of the labels ``names`` that some record has, as 1, 0 or uncertain; the log names the others.

    A collection that does not know a finding has it blank in every record, and a head that says "absent" would be right
    throughout. Raises ValueError where none is left, and for such a label that was ``asked`` for.
    """
    columns = dict(zip(cohort.label_names, ~np.isnan(cohort.labels).all(axis=0), strict=True))
    never = [name for name in names if not columns[name]]
    if never and (asked or len(never) == len(names)):
        raise ValueError(f"linear probe: no record has a label {', '.join(never)}; choose others with probe.classes")
    if never:
        log.warning("linear probe: left out, since no record has such a label: %s", ", ".join(never))
    return tuple(name for name in names if columns[name])


@dataclass(frozen=True, eq=False)
class Sample:
    """Frozen features of some records with their targets."""

    features: Tensor  # [n, W] float32
    targets: Tensor  # [n, L]

    def take(self, positions: Tensor) -> Sample:
        """The features and targets of the records at ``positions`` [m]."""
        return Sample(self.features[positions], self.targets[positions])


def fit(task: Task, settings: LinearProbe, train: Sample, val: Sample, seed: int, steps: int | None) -> nn.Linear:
    """A head W -> L. ``steps``: of the optimiser at most; None: as many as the protocol takes."""
    if settings.solver == LBFGS:
        return _exact(task, settings, train, steps)
    return _adamw(task, settings, train, val, seed, steps)


def _adamw(task: Task, settings: LinearProbe, train: Sample, val: Sample, seed: int, steps: int | None) -> nn.Linear:
    """The papers' head: the epoch with the least validation loss, of those until it stops falling."""
    width, classes = train.features.shape[1], train.targets.shape[1]
    layer = seeded(seed, MODULE, lambda: nn.Linear(width, classes))

    def loss(rows: Tensor) -> Tensor:
        batch = train.take(rows)
        return task.loss(layer(batch.features), batch.targets) / max(1, task.count(batch.targets))

    @torch.no_grad()
    def held_out() -> float:
        return float(task.loss(layer(val.features), val.targets))

    generator = torch.Generator().manual_seed(seed_of(seed, "linear probe"))
    train_head(layer, settings, len(train.features), loss, held_out, generator, steps)
    return layer


def _exact(task: Task, settings: LinearProbe, train: Sample, steps: int | None) -> nn.Linear:
    """Logistic regression on features of mean 0 and variance 1, whose scale is then folded into the weights.

    Without randomness and validation; the intercept is not regularised. The optimum lies in the span of the records, so
    with fewer of them than features it is searched there: with n records, in n dimensions.
    """
    from scipy.optimize import minimize

    x = train.features.double()
    mean, deviation = x.mean(dim=0), x.std(dim=0, correction=0)
    scale = torch.where(deviation > 1e-12, deviation, 1.0)
    x = (x - mean) / scale
    span = None
    if len(x) < x.shape[1]:
        left, singular, span = torch.linalg.svd(x, full_matrices=False)  # [n, n], [n], [n, W]
        x = left * singular
    width, classes = x.shape[1], train.targets.shape[1]

    def objective(flat: np.ndarray) -> tuple[float, np.ndarray]:
        both = torch.from_numpy(flat).view(classes, width + 1).requires_grad_()  # weights, and the intercept last
        loss = task.loss(x @ both[:, :-1].T + both[:, -1], train.targets)
        loss = loss + settings.l2 / 2 * both[:, :-1].square().sum()
        loss.backward()
        assert both.grad is not None
        return float(loss.detach()), both.grad.numpy().ravel()

    start, limit = np.zeros(classes * (width + 1)), {"maxiter": 1000 if steps is None else steps, "gtol": 1e-6}
    optimum = minimize(objective, start, jac=True, method="L-BFGS-B", options=limit | {"ftol": 1e-12})
    solution = torch.from_numpy(optimum.x).view(classes, width + 1)
    weight = (solution[:, :-1] if span is None else solution[:, :-1] @ span) / scale
    layer = nn.Linear(weight.shape[1], classes)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(solution[:, -1] - weight @ mean)
    return layer


@dataclass(frozen=True)
class ProbeResult:
    """The heads of one subset size on the test records; figures are means over the seeds, of which ``*_std`` tell."""

    subset: str  # e.g. "1 %" or "5-shot"
    records: int  # that a head was trained on
    accuracy: Interval  # percent
    accuracy_std: float  # population standard deviation over the seeds
    auc: Interval | None  # macro AUC, 0..1, over classes that have both kinds of records; None where none has
    auc_std: float
    calibration: float  # expected error, 0..1: of the class that is named, or mean over findings
    majority: float  # percent, the accuracy of the answer that is most frequent in the training split


@dataclass(frozen=True)
class AtSite:
    """The same heads on the test records of one site."""

    subset: str
    site: str
    records: int
    accuracy: float  # percent
    auc: float  # nan where no class has both kinds of records


@dataclass(frozen=True)
class OfSubgroup:
    """The same heads on the test records of one subgroup of people, of whom the data set says it."""

    subset: str
    by: str  # e.g. "sex"
    subgroup: str  # e.g. "F"
    records: int
    patients: int
    accuracy: Interval  # percent, over resamples of these patients
    auc: Interval | None  # macro AUC, 0..1; None where no class has both kinds of records


@dataclass(frozen=True, eq=False)
class Probed:
    """All that a probe of one model found."""

    task: Task
    rows: Records
    patients: tuple[str, ...]  # of the test records
    probabilities: dict[str, Tensor]  # subset -> [seeds, N, L] on the test records
    results: list[ProbeResult] = field(default_factory=list)
    sites: list[AtSite] = field(default_factory=list)
    subgroups: list[OfSubgroup] = field(default_factory=list)

    @property
    def truth(self) -> Tensor:
        """Targets [N, L] of the test records."""
        return self.task.targets[self.rows.test]


def linear_probe(settings: LinearProbe, model: Any, cohort: Cohort, steps: int | None = None) -> Probed:
    """Trains heads on the frozen image tower of ``model``, a DualEncoder, and judges them on the test records.

    No tensor of the model changes. Raises ValueError for classes that the data have not, or a split without records.
    """
    task = task_of(cohort, settings)
    rows = records(cohort, task.labelled)
    train, val, test = (
        Sample(features(model, cohort, chosen, settings.aligned), task.targets[chosen])
        for chosen in (rows.train, rows.val, rows.test)
    )
    patients = tuple(cohort.patients[row] for row in rows.test)
    probed = Probed(task, rows, patients, {})
    majority = _majority(task, train.targets, test.targets)
    for subset in settings.subsets():
        answers, counts = [], []
        for seed in settings.seeds:
            chosen = train.take(subset.draw(train.targets == 1, seed))
            head = fit(task, settings, chosen, val, seed, steps)
            with torch.no_grad():
                answers.append(task.probabilities(head(test.features)))
            counts.append(len(chosen.features))
        probed.probabilities[str(subset)] = torch.stack(answers)
        probed.results.append(_judged(probed, str(subset), round(fmean(counts)), majority, settings.resamples))
        if cohort.sites is not None:
            probed.sites.extend(_by_site(probed, str(subset), [cohort.sites[row] for row in rows.test]))
        for name in cohort.subgroup_names:
            values = cohort.subgroup(name)[rows.test]
            probed.subgroups.extend(_by_subgroup(probed, str(subset), name, values, settings.resamples))
    return probed


def right(task: Task, probabilities: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """How many of each record's answers are right [N], and how many were asked [N]: 1, or its known findings.

    Raises ValueError for a probability that is nan.
    """
    refuse_nan(probabilities, "linear probe")
    if task.exclusive:
        hit = probabilities.argmax(dim=1) == truth.argmax(dim=1)
        return hit.double(), torch.ones(len(truth), dtype=torch.float64)
    known = ~truth.isnan()
    return (((probabilities >= 0.5) == (truth == 1)) & known).sum(dim=1).double(), known.sum(dim=1).double()


def accuracy_of(task: Task, probabilities: Tensor, truth: Tensor) -> Figure:
    """The share of right answers, in percent, of probabilities and truth [N, L]."""
    hits, asked = right(task, probabilities, truth)
    return mean_of(100 * hits / asked.clamp(min=1), asked)


def areas_of(probabilities: Tensor, truth: Tensor) -> list[Figure]:
    """The AUC of each class of probabilities and truth [N, L] that has both kinds of records."""
    return [
        area_of(scores, target)
        for scores, target in zip(probabilities.T, truth.T, strict=True)
        if bool((target == 1).any()) and bool((target == 0).any())
    ]


def _majority(task: Task, train: Tensor, truth: Tensor) -> float:
    """Accuracy in percent of the most frequent training answer, whatever the image."""
    rate = train.nanmean(dim=0).nan_to_num()
    constant = F.one_hot(rate.argmax(), len(rate)).double() if task.exclusive else rate
    return float(accuracy_of(task, constant.expand(len(truth), -1), truth)(torch.ones(1, len(truth)).double()))


def _calibration(task: Task, probabilities: Tensor, truth: Tensor) -> float:
    """Of the class that is named, or the mean over findings."""
    return fmean(calibration_error(*pair) for pair in _stated(task, probabilities, truth).values())


def _stated(task: Task, probabilities: Tensor, truth: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Finding -> (stated probability, what happened) where that is known; of classes, of the one that is named."""
    if task.exclusive:
        stated, named = probabilities.max(dim=1)
        return {"the class named": (stated, named == truth.argmax(dim=1))}
    known = ~truth.isnan()
    return {
        name: (probabilities[here, column], truth[here, column])
        for column, (name, here) in enumerate(zip(task.names, known.T, strict=True))
        if here.any()
    }


def _judged(probed: Probed, subset: str, count: int, majority: float, resamples: int) -> ProbeResult:
    """The figures of one subset size. A resample of the patients is the same for all seeds."""
    task, truth, by_seed = probed.task, probed.truth, probed.probabilities[subset]
    whole = torch.ones(1, len(truth), dtype=torch.float64)
    accuracies = [accuracy_of(task, one, truth) for one in by_seed]
    areas = [macro(figures) for one in by_seed if (figures := areas_of(one, truth))]
    return ProbeResult(
        subset,
        count,
        bootstrap(macro(accuracies), probed.patients, resamples),
        pstdev(float(figure(whole)) for figure in accuracies),
        bootstrap(macro(areas), probed.patients, resamples) if areas else None,
        pstdev(float(figure(whole)) for figure in areas) if areas else math.nan,
        fmean(_calibration(task, one, truth) for one in by_seed),
        majority,
    )


def _by_site(probed: Probed, subset: str, sites: Sequence[str]) -> list[AtSite]:
    """The figures of one subset size at each site, means over the seeds."""
    results = []
    for site in sorted(set(sites)):
        here = torch.tensor([one == site for one in sites])
        truth, by_seed = probed.truth[here], probed.probabilities[subset][:, here]
        whole = torch.ones(1, len(truth), dtype=torch.float64)
        accuracy = fmean(float(accuracy_of(probed.task, one, truth)(whole)) for one in by_seed)
        areas = [float(macro(figures)(whole)) for one in by_seed if (figures := areas_of(one, truth))]
        results.append(AtSite(subset, site, len(truth), accuracy, fmean(areas) if areas else math.nan))
    return results


def _by_subgroup(probed: Probed, subset: str, by: str, values: np.ndarray, resamples: int) -> list[OfSubgroup]:
    """The figures of one subset size for each subgroup of ``values`` [N], but for "", which is not known."""
    results = []
    for value in sorted(set(values.tolist()) - {""}):
        here = torch.from_numpy(values == value)
        patients = [patient for patient, among in zip(probed.patients, here.tolist(), strict=True) if among]
        truth, by_seed = probed.truth[here], probed.probabilities[subset][:, here]
        accuracy = macro([accuracy_of(probed.task, one, truth) for one in by_seed])
        areas = [macro(figures) for one in by_seed if (figures := areas_of(one, truth))]
        results.append(
            OfSubgroup(
                subset,
                by,
                value,
                len(truth),
                len(set(patients)),
                bootstrap(accuracy, patients, resamples),
                bootstrap(macro(areas), patients, resamples) if areas else None,
            )
        )
    return results


@dataclass(frozen=True)
class Difference:
    """One model's AUC for a class minus another's, on the same test records; scores are means over the seeds."""

    subset: str
    label: str
    other: str  # name of the other model
    one_auc: float
    other_auc: float
    interval: Interval  # of the difference, over resamples of the patients
    p: float  # DeLong's
    holm: float  # adjusted for all comparisons of the table


def compare(one: Probed, others: dict[str, Probed], resamples: int = 1000) -> list[Difference]:
    """DeLong's test of each class and subset size against each other model, with Holm's adjustment over all.

    Classes with fewer than 2 records of either kind are left out. Raises ValueError unless all were judged on the same
    records.
    """
    rows: list[Difference] = []
    for name, other in others.items():
        if not np.array_equal(one.rows.test, other.rows.test) or one.task.names != other.task.names:
            raise ValueError(f"linear probe: {name} was judged on other records; give both models the same data")
        for subset, by_seed in one.probabilities.items():
            mine, theirs = by_seed.mean(dim=0), other.probabilities[subset].mean(dim=0)  # [N, L]
            for column, label in enumerate(one.task.names):
                target = one.truth[:, column]
                known = ~target.isnan()
                if min((target == 1).sum(), (target == 0).sum()) < 2:
                    continue
                test = delong(mine[known, column], theirs[known, column], target[known])
                figure = difference(area_of(mine[:, column], target), area_of(theirs[:, column], target))
                apart = bootstrap(figure, one.patients, resamples)
                rows.append(Difference(subset, label, name, test.one, test.other, apart, test.p, math.nan))
    adjusted = holm([row.p for row in rows])
    return [Difference(**{**vars(row), "holm": value}) for row, value in zip(rows, adjusted, strict=True)]


def write_probe(probed: Probed, differences: Sequence[Difference], path: Path) -> list[Path]:
    """Writes ``<path>.csv``, ``-reliability.csv`` and, where there are such, sites, subgroups and comparisons."""
    tables = {
        "": _subset_lines(probed),
        "-reliability": _reliability_lines(probed),
        "-sites": [
            {
                "train_on": one.subset,
                "site": one.site,
                "test_records": one.records,
                "accuracy": one.accuracy,
                "macro_auc": one.auc,
            }
            for one in probed.sites
        ],
        "-subgroups": [
            {
                "train_on": one.subset,
                "by": one.by,
                "subgroup": one.subgroup,
                "test_records": one.records,
                "test_patients": one.patients,
                **columns_of(one.accuracy, "accuracy", "accuracy_"),
                **columns_of(one.auc, "macro_auc", "macro_auc_"),
            }
            for one in probed.subgroups
        ],
        "-against": [
            {
                "train_on": one.subset,
                "label": one.label,
                "against": one.other,
                "auc": one.one_auc,
                "auc_against": one.other_auc,
                **columns_of(one.interval, "difference", ""),
                "delong_p": one.p,
                "holm_p": one.holm,
            }
            for one in differences
        ],
    }
    return [write_table(path.with_name(f"{path.name}{end}"), lines) for end, lines in tables.items() if lines]


def _subset_lines(probed: Probed) -> list[dict[str, Any]]:
    """The figures of each subset size."""
    return [
        {
            "train_on": one.subset,
            "train_records": one.records,
            **columns_of(one.accuracy, "accuracy", "accuracy_"),
            "accuracy_std": one.accuracy_std,
            **columns_of(one.auc, "macro_auc", "macro_auc_"),
            "macro_auc_std": one.auc_std,
            "calibration_error": one.calibration,
            "majority_accuracy": one.majority,
            **probed.rows.counts(probed.patients),
        }
        for one in probed.results
    ]


def _reliability_lines(probed: Probed) -> list[dict[str, Any]]:
    """Stated and true probability of each bin, over the records under all seeds. No record has a line of its own."""
    lines = []
    for subset, by_seed in probed.probabilities.items():
        pairs = _stated(probed.task, by_seed.flatten(0, 1), probed.truth.repeat(len(by_seed), 1))
        for label, (stated, happened) in pairs.items():
            for count, said, was in reliability(stated, happened):
                line = {"records": count / len(by_seed), "stated": said, "happened": was}
                lines.append({"train_on": subset, "label": label, **line})
    return lines
