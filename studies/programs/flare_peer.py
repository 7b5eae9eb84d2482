"""The workload of ``orchestration.py`` by FLARE's own recipe.

    python studies/programs/flare_peer.py SIZE FOLDER     # writes FOLDER/job/fedavg, a job for `nvflare simulator`

In the job the same file is the training script of a site.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def write(size: str, folder: Path) -> None:
    """The job, exported."""
    import workload
    from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe

    chosen = workload.Size(**json.loads(size))
    recipe = FedAvgRecipe(
        name="fedavg",
        model=workload.built(chosen)[0],
        min_clients=chosen.sites,
        num_rounds=chosen.rounds,
        train_script=str(Path(__file__).resolve()),
        train_args=f"{json.dumps(vars(chosen), separators=(',', ':'))} {HERE}",
    )
    recipe.export(str(folder / "job"))


def train(size: str, here: str) -> None:
    """A site."""
    sys.path.insert(0, here)
    import nvflare.client as flare
    import torch
    import workload

    torch.set_num_threads(1)
    chosen = workload.Size(**json.loads(size))
    flare.init()
    site = flare.get_site_name()
    while flare.is_running():
        received: Any = flare.receive()
        state = {name: torch.as_tensor(value) for name, value in received.params.items()}
        tensors = workload.visit(chosen, site, int(received.current_round), state)
        records = workload.built(chosen)[1][site].num_train
        params = {name: tensor.clone() for name, tensor in tensors.items()}  # arrays of numpy would be left out
        flare.send(flare.FLModel(params=params, meta={"NUM_STEPS_CURRENT_ROUND": records}))


if __name__ == "__main__":
    if Path(sys.argv[2]).resolve() == HERE:
        train(sys.argv[1], sys.argv[2])
    else:
        write(sys.argv[1], Path(sys.argv[2]))
