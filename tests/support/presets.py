"""An experiment as small as the synthetic cohort and the tiny towers allow."""

from __future__ import annotations

from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.federation.loop import Rounds
from fedvlp.methods import FedAvg
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.run.experiment import Experiment
from fedvlp.training.settings import Training

MODEL = ModelConfig(embedding_dim=16, image_size=32, max_tokens=16, vocabulary=256, head_hidden=16, head_norm="layer",
                    text_layers=1)  # fmt: skip
SMALL = Experiment("small", FedAvg(local_steps=1), MODEL, data=SyntheticCohort(sites=3, size=60, image_size=36),
                   training=Training(batch_size=4), rounds=Rounds(rounds=1, evaluate_every=0))  # fmt: skip
