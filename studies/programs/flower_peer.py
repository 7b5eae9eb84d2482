"""The workload of ``orchestration.py`` in Flower's simulation: as its quick start has it, for a Python that has flwr.

    FLWR_TELEMETRY_ENABLED=0 python studies/programs/flower_peer.py SIZE FOLDER

Two clients at a time, with a core each. What a client's process has built stays in it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from workload import Size, built, save, visit


def run(size: Size, folder: Path) -> None:
    """Rounds of FedAvg; writes the final weights to ``folder``."""
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client, server = ClientApp(), ServerApp()

    @client.train()
    def train(message: Any, context: Any) -> Any:
        torch.set_num_threads(1)
        content = message.content
        _, data = built(size)
        site = sorted(data)[int(context.node_config["partition-id"])]
        number = int(content["config"]["server-round"]) - 1
        state = visit(size, site, number, content["arrays"].to_torch_state_dict())
        metrics = MetricRecord({"num-examples": data[site].num_train})
        return Message(content=RecordDict({"arrays": ArrayRecord(state), "metrics": metrics}), reply_to=message)

    @server.main()
    def main(grid: Any, context: Any) -> None:
        model, _ = built(size)
        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=size.sites, min_available_nodes=size.sites)
        result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=size.rounds)
        save(result.arrays.to_torch_state_dict(), folder)

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 2}}
    run_simulation(server, client, num_supernodes=size.sites, backend_config=resources)


if __name__ == "__main__":
    run(Size(**json.loads(sys.argv[1])), Path(sys.argv[2]))
