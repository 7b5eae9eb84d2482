"""What record-level training costs (training/dp_sgd.py), by Opacus's RDP accountant."""

from __future__ import annotations

from fedvlp.training import dp_sgd
from fedvlp.training.config import Training


def record_epsilon(training: Training, records: int, steps: int, delta: float | None = None) -> float:
    """Epsilon of one record after ``steps`` steps at a site with so many training records: Poisson samples of them.

    ``delta``: that of the settings unless another is given. Raises RecordPrivacyError where Opacus is not installed.
    """
    try:
        from opacus.accountants import RDPAccountant
    except ImportError:
        raise dp_sgd.RecordPrivacyError("the accountant is missing here: pip install 'fedvlp[privacy]'") from None
    if not steps:
        return 0.0
    accountant = RDPAccountant()
    accountant.history = [(training.dp_noise, dp_sgd.rate(training, records), steps)]
    return float(accountant.get_epsilon(delta=training.dp_delta if delta is None else delta))
