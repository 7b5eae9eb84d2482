"""Losses: modules (VLOutput, batch) -> named scalar terms, to be summed; terms of absent modalities are left out."""

from fedvlp.objectives.bce import BCEConfig
from fedvlp.objectives.byol import BYOLConfig
from fedvlp.objectives.convirt import ConVIRTConfig
from fedvlp.objectives.creamfl_tasks import CreamFLTaskConfig
from fedvlp.objectives.gloria import GLoRIAConfig
from fedvlp.objectives.mae import MAEConfig
from fedvlp.objectives.medclip import MedCLIPConfig
from fedvlp.objectives.mgca import MGCAConfig
from fedvlp.objectives.nt_xent import NTXentConfig

OBJECTIVES = {
    "convirt": ConVIRTConfig,
    "gloria": GLoRIAConfig,
    "mgca": MGCAConfig,
    "medclip": MedCLIPConfig,
    "creamfl": CreamFLTaskConfig,
    "bce": BCEConfig,
    "nt-xent": NTXentConfig,
    "byol": BYOLConfig,
    "mae": MAEConfig,
}
"""Configuration classes by name, as in ``--set objective=mgca``."""

__all__ = [
    "OBJECTIVES",
    "BCEConfig",
    "BYOLConfig",
    "ConVIRTConfig",
    "CreamFLTaskConfig",
    "GLoRIAConfig",
    "MAEConfig",
    "MGCAConfig",
    "MedCLIPConfig",
    "NTXentConfig",
]
