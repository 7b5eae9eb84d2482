"""Names of the figures that an evaluation reports, made and read with these functions only.

The names are in metrics.csv, in TensorBoard and in summaries, so they must not change:

- ``<split>/<direction>/r<k>``: Recall@k in percent, in batches; ``<split>/all/...`` over the whole set,
  ``<split>/fold/...`` mean over folds. The direction is ``i2t``, ``t2i`` or ``mean`` (of both).
- ``<split>/similarity``: mean cosine of the pairs, -1..1.
- ``<split>/auc/<finding>``, ``<split>/auc/macro``, ``<split>/auc/rare``: area under the ROC curve, 0..1;
  ``<split>/auc/macro without image`` or ``text``: the same model with that feature zeroed.
- ``classifier/image``: share of the classifier's absolute weight on the image, 0..1.
- ``<name>/average``, ``<name>/worst``, ``<name>/disparity_population_std``: a figure over sites.
"""

from __future__ import annotations

import math
import re

IN_BATCH, WHOLE_SET, FOLDS = "", "all/", "fold/"
"""Scopes of a recall: among the records of a batch, of a split, or of a fold of a split."""

I2T, T2I, BOTH = "i2t", "t2i", "mean"
"""Directions of a recall: image to text, text to image, and the mean of both."""

AVERAGE, WORST, DISPARITY = "average", "worst", "disparity_population_std"
"""Figures over sites: unweighted mean, minimum, population standard deviation."""

MACRO, RARE = "macro", "rare"
"""Means of the AUCs: over all findings, and over the rare ones."""

IMAGE_WEIGHT = "classifier/image"
"""The modality bias of a classifier: 0.5 is none."""

_RECALL = re.compile(r"/r\d+$")
_AUC, _SIMILARITY, _WITHOUT = "/auc/", "/similarity", " without "


def recall_at(k: int, direction: str = BOTH) -> str:
    """Recall@k of one direction, without split and scope, e.g. ``mean/r1``."""
    return f"{direction}/r{k}"


def recall(split: str, k: int, scope: str = IN_BATCH, direction: str = BOTH) -> str:
    """Recall@k on a split, e.g. ``val/mean/r1`` or ``test/all/i2t/r5``."""
    return on_split(split, scope, recall_at(k, direction))


def on_split(split: str, scope: str, name: str) -> str:
    """A name that ``recall_at`` made, on a split and in a scope."""
    return f"{split}/{scope}{name}"


def split_of(name: str) -> str:
    """The split of a name that ``on_split`` made."""
    return name.partition("/")[0]


def is_recall(name: str) -> bool:
    """Whether a figure is a recall: in percent, higher is better."""
    return _RECALL.search(name) is not None


def is_impossible(name: str, value: float) -> bool:
    """Whether no evaluation can give this figure: a recall outside of 0..100, an AUC outside of 0..1."""
    most = 100.0 if is_recall(name) else 1.0 if parse_auc(name) else math.inf
    return math.isfinite(most) and not 0.0 <= value <= most


def similarity(split: str) -> str:
    """Mean cosine of the pairs of a split."""
    return f"{split}{_SIMILARITY}"


def auc(split: str, finding: str) -> str:
    """Area under the ROC curve on a split, of a finding or of ``MACRO`` or ``RARE``."""
    return f"{split}{_AUC}{finding}"


def without(mean: str, modality: str) -> str:
    """``MACRO`` or ``RARE`` of the same model where the feature of a modality is zero."""
    return f"{mean}{_WITHOUT}{modality}"


def is_mean(finding: str) -> bool:
    """Whether the "finding" of an AUC is a mean over findings, of the whole model or of one without a modality."""
    return finding.partition(_WITHOUT)[0] in (MACRO, RARE)


def parse_auc(name: str) -> tuple[str, str] | None:
    """(split, finding) of the name of an AUC; None for any other name. A prefix such as ``server/`` stays."""
    split, separator, finding = name.partition(_AUC)
    return (split, finding) if separator else None


def evaluation_of(name: str) -> str:
    """Which evaluation reports the figure of a split: ``retrieval``, ``classification``, or ``other``."""
    if parse_auc(name):
        return "classification"
    return "retrieval" if is_recall(name) or name.endswith(_SIMILARITY) else "other"


def over_sites(name: str, figure: str) -> str:
    """``AVERAGE``, ``WORST`` or ``DISPARITY`` over sites of the figure ``name``."""
    return f"{name}/{figure}"
