"""Losses: modules (VLOutput, batch) -> named scalar terms, to be summed; terms of absent modalities are left out."""

from fedvlp.objectives.bce import BCEConfig
from fedvlp.objectives.convirt import ConVIRTConfig
from fedvlp.objectives.creamfl_tasks import CreamFLTaskConfig
from fedvlp.objectives.gloria import GLoRIAConfig
from fedvlp.objectives.medclip import MedCLIPConfig
from fedvlp.objectives.mgca import MGCAConfig

OBJECTIVES = {
    "convirt": ConVIRTConfig,
    "gloria": GLoRIAConfig,
    "mgca": MGCAConfig,
    "medclip": MedCLIPConfig,
    "creamfl": CreamFLTaskConfig,
    "bce": BCEConfig,
}
"""Configuration classes by name, as in ``--set objective=mgca``."""

__all__ = [
    "OBJECTIVES",
    "BCEConfig",
    "ConVIRTConfig",
    "CreamFLTaskConfig",
    "GLoRIAConfig",
    "MGCAConfig",
    "MedCLIPConfig",
]
