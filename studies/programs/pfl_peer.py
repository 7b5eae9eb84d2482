"""The workload of ``orchestration.py`` in pfl, Apple's library for simulations: for a Python that has pfl[pytorch].

    python studies/programs/pfl_peer.py SIZE FOLDER

One process, users in turn. pfl's own are the cohort, the differences to the model, their weighted mean, and the step of
the server; what a user trains is the workload's.
"""

from __future__ import annotations

import json
import sys
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from workload import BATCH, LR, Size, built, save, visit


def run(size: Size, folder: Path) -> None:
    """Rounds of FedAvg; writes the final weights to ``folder``."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    class Averaging(FederatedAveraging):
        def train_one_user(self, initial_model_state: Any, model: Any, user_dataset: Any, central_context: Any) -> Any:
            number = central_context.current_central_iteration
            visit(size, user_dataset.user_id, number, model.pytorch_model.state_dict())
            return model.get_model_difference(initial_model_state), Metrics()

    class Unmeasured(PyTorchModel):
        def evaluate(self, *_: Any) -> Any:
            return Metrics()

    torch.set_num_threads(1)
    network, data = built(size)
    network.loss = network.metrics = None  # pfl asks for both, and neither is called
    users = FederatedDataset(
        lambda site: Dataset((torch.arange(data[site].num_train),), user_id=site), cycle(sorted(data)).__next__
    )
    model = Unmeasured(network, torch.optim.AdamW, torch.optim.SGD(network.parameters(), lr=1.0))
    Averaging().run(
        NNAlgorithmParams(
            central_num_iterations=size.rounds, evaluation_frequency=size.rounds, train_cohort_size=size.sites,
            val_cohort_size=0,
        ),
        SimulatedBackend(users, users, [WeightByDatapoints()]),
        model,
        NNTrainHyperParams(local_batch_size=BATCH, local_num_epochs=1, local_learning_rate=LR),
    )  # fmt: skip
    save(network.state_dict(), folder)


if __name__ == "__main__":
    run(Size(**json.loads(sys.argv[1])), Path(sys.argv[2]))
