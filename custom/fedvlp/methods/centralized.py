"""Centralized, "Global" in FedDRA and FedRGB: one model on the pooled records, the upper bound. Simulation only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedvlp.core.method import Method


@dataclass(frozen=True)
class Centralized(Method):
    """FedAvg over a single site that holds everybody's training records (spec 9: the same number of steps)."""

    pooled: ClassVar[bool] = True
