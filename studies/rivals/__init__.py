"""Methods that the papers' tables alone compare with, as a plugin of a clone: their classes, and a preset for each.

FedFed shows distilled records to other sites: no hospital has it.
"""

from __future__ import annotations

from dataclasses import replace

from fedvlp.core.method import Method
from fedvlp.methods import FedAvg
from fedvlp.run import presets
from fedvlp.run.experiment import Experiment, Objective
from studies.rivals.byol import BYOLConfig
from studies.rivals.fedema import FedEMA
from studies.rivals.fedet import FedET
from studies.rivals.fedfed import FedFed
from studies.rivals.fedgems import FedGEMS
from studies.rivals.fediot import FedIoT
from studies.rivals.fedldawa import FedLDAWA
from studies.rivals.fedmd import FedMD
from studies.rivals.fedu import FedU
from studies.rivals.fedx import FedX
from studies.rivals.mae import MAEConfig
from studies.rivals.nt_xent import NTXentConfig
from studies.rivals.vae import DistillerConfig

METHODS: dict[str, type[Method]] = {
    "fedmd": FedMD,
    "fedet": FedET,
    "fedgems": FedGEMS,
    "fediot": FedIoT,
    "fedfed": FedFed,
    "fedema": FedEMA,
    "fedu": FedU,
    "fedx": FedX,
    "fedldawa": FedLDAWA,
}

OBJECTIVES = {"nt-xent": NTXentConfig, "byol": BYOLConfig, "mae": MAEConfig}


def _like(preset: str, name: str, method: Method) -> Experiment:
    """A preset of fedvlp with another method."""
    return replace(presets.get(preset), name=name, method=method)


def _self_supervised(name: str, method: Method, objective: Objective) -> Experiment:
    """The demo of a baseline that learns from images alone, beside which images are matched with reports (spec 9)."""
    return replace(_like("fedavg", name, method), objective=objective)


PRESETS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        _like("fedavg", "fedldawa", FedLDAWA(local_steps=50)),
        _self_supervised("fedu", FedU(local_steps=50), BYOLConfig()),
        _self_supervised("fedema", FedEMA(local_steps=50), BYOLConfig()),
        _self_supervised("fedx", FedX(local_steps=50), NTXentConfig(temperature=0.1, predictor=True)),
        _self_supervised("fedmae", FedAvg(local_steps=50), MAEConfig(width=64, blocks=2, heads=4)),
        _like("creamfl", "fedmd", FedMD(**presets.STEPS)),
        _like("creamfl", "fedet", FedET(**presets.STEPS)),
        _like("creamfl", "fedgems", FedGEMS(**presets.STEPS)),
        replace(_like("creamfl", "fediot", FedIoT(local_steps=50)), site_models=()),
        replace(
            _like("pms-fm", "fedfed", FedFed(local_steps=30, distil_phases=3, distil_steps=20, share=True)),
            extra=DistillerConfig(),
        ),
    )
}

GROUPS: dict[str, dict[str, str]] = {
    "of the papers' tables alone, in a clone": {
        "fedldawa": "FedLDAWA (Rehman et al., 2023): weighs each tensor by its angle to the received model",
        "fedu": "FedU (Zhuang et al., 2021): BYOL whose predictor stays at sites that diverge",
        "fedema": "FedEMA (Zhuang et al., 2022): BYOL; sites merge the global model into their own",
        "fedx": "FedX (Han et al., 2022): SimCLR with distillation from the global model",
        "fedmae": "FedAvg with masked autoencoding",
        "fedfed": "FedFed (Yang et al., 2023): sites share distilled records; read what leaves a site first",
        "fedmd": "FedMD (Li & Wang, 2019): sites learn the consensus, then their own records again",
        "fedet": "FedET (Cho et al., 2022): confident sites weigh more in what the server distils",
        "fedgems": "FedGEMS (Cheng et al., 2021): the server distils from confident sites alone",
        "fediot": "FedIoT, Mm-FedAvg (Zhao et al., 2022): towers averaged by modality",
    },
}
