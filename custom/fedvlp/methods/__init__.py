"""One file per federated method, and the registry that names them."""

from fedvlp.core.method import Method
from fedvlp.methods.car_mfl import CARMFL
from fedvlp.methods.centralized import Centralized
from fedvlp.methods.clip_adapter import AdapterConfig as AdapterConfig
from fedvlp.methods.clip_adapter import CLIPAdapter
from fedvlp.methods.creamfl import CreamFL
from fedvlp.methods.fedavg import FedAvg
from fedvlp.methods.feddra import FedDRA
from fedvlp.methods.fedmoon import FedMOON
from fedvlp.methods.fednova import FedNova
from fedvlp.methods.fedprox import FedProx
from fedvlp.methods.fedrgb import FedRGB
from fedvlp.methods.fedsm import FedSM
from fedvlp.methods.local import Local
from fedvlp.methods.mfedavg import MFedAvg
from fedvlp.methods.one_round_cca import OneRoundCCA
from fedvlp.methods.pms_fm import PMSFM
from fedvlp.methods.prompt_learning import ContextConfig as ContextConfig
from fedvlp.methods.prompt_learning import PromptLearning
from fedvlp.methods.scaffold import SCAFFOLD

METHODS: dict[str, type[Method]] = {
    "fedavg": FedAvg,
    "fedprox": FedProx,
    "local": Local,
    "centralized": Centralized,
    "feddra": FedDRA,
    "fedrgb": FedRGB,
    "mfedavg": MFedAvg,
    "car-mfl": CARMFL,
    "creamfl": CreamFL,
    "pms-fm": PMSFM,
    "fedsm": FedSM,
    "scaffold": SCAFFOLD,
    "fednova": FedNova,
    "fedmoon": FedMOON,
    "one-round-cca": OneRoundCCA,
    "prompt-learning": PromptLearning,
    "clip-adapter": CLIPAdapter,
}
