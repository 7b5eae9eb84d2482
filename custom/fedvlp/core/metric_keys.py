"""Names of the figures that a run notes in every phase, made and read with these functions only.

The names are in metrics.csv and in TensorBoard, so they must not change:

- ``loss/<term>``: mean of a term of the loss over a site's steps; at the server ``loss/<phase>/<term>``.
- ``probe/<name>``: what the method's ``probe`` measured of the received model.
- ``update_norm/<site>``: L2 norm of the change that a site sent.
- ``bytes_down``, ``bytes_up``: bytes of tensors to and from all sites; ``seconds``: of the phase.
- ``privacy/epsilon``: spent so far for a site's whole data set, by its policy (flare/privacy_filters.py);
  ``privacy/record_epsilon``: for one of its records, by record-level training (training/dp_sgd.py).
- ``processor_seconds``: processor time of a site's task in a phase that trains, without the evaluation in it; in runs
  on one machine alone (`fedvlp simulate`).
"""

from __future__ import annotations

BYTES_DOWN, BYTES_UP, SECONDS, PROCESSOR_SECONDS = "bytes_down", "bytes_up", "seconds", "processor_seconds"

SITE_EPSILON, RECORD_EPSILON = "privacy/epsilon", "privacy/record_epsilon"

TIMES = (SECONDS, PROCESSOR_SECONDS)
"""What two runs with the same bytes may differ in."""

MACRO_AUC_ON_VAL = "val/auc/macro"
"""The macro AUC on val, as evaluation/metric_names.py makes its name: by it a classifier's best round is chosen."""

_LOSS, _PROBE, _UPDATE_NORM = "loss/", "probe/", "update_norm/"


def loss(term: str) -> str:
    """Mean of a loss term."""
    return f"{_LOSS}{term}"


def loss_term(name: str) -> str | None:
    """The term of a name that ``loss`` made; None for any other name."""
    return name.removeprefix(_LOSS) if name.startswith(_LOSS) else None


def probe(name: str) -> str:
    """A figure of the method's ``probe``."""
    return f"{_PROBE}{name}"


def update_norm(site: str) -> str:
    """L2 norm of the change that a site sent."""
    return f"{_UPDATE_NORM}{site}"


def is_of_phase(name: str) -> bool:
    """Whether every phase of a round has its own value of this figure, so that a curve needs the phase's name."""
    return name.startswith((_LOSS, _UPDATE_NORM)) or name in (*TIMES, BYTES_DOWN, BYTES_UP)
