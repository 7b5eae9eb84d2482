"""What is minimised: each a module (VLOutput, batch) -> named loss terms; an absent modality's terms are left out."""

from fedvlp.objectives.bce import BCEConfig
from fedvlp.objectives.convirt import ConVIRTConfig
from fedvlp.objectives.creamfl import CreamFLTaskConfig
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
"""Objectives by name, as in ``--set objective=mgca``."""
