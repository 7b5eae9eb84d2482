"""FedAvg (McMahan et al., 2017, https://arxiv.org/abs/1602.05629): sites train, the server averages their weights."""

from __future__ import annotations

from dataclasses import dataclass

from fedvlp.core.method import Method


@dataclass(frozen=True)
class FedAvg(Method):
    """The base class is the method: ``weighting="samples"`` is n_k/n (Alg. 1), ``"uniform"`` the 1/N of FedDRA."""
