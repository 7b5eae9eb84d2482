"""Retrieval over the held-out records of all sites together, where a site alone has too few to say much.

    python studies/programs/pooled.py RUN

Prints recall of the run's initial and trained model over the whole val (or test) split of all sites, and in batches of
32 in fixed order; ``dedup`` counts another image of the same study or report as right.
"""

from __future__ import annotations

from pathlib import Path

import torch
from common import command_line, table

from fedvlp.evaluation.metric_names import recall_at
from fedvlp.evaluation.retrieval import embed, in_batch_retrieval, retrieval
from fedvlp.models.dual_encoder import DualEncoder
from fedvlp.models.initial import load_initial
from fedvlp.run.assembly import Assembly
from fedvlp.run.folder import RunFolder


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("run", type=Path, help="folder of a finished run")
    folder = RunFolder(parser.parse_args().run)
    experiment = folder.experiment()
    torch.set_num_threads(experiment.training.threads)
    assembly = Assembly(experiment)
    data = assembly.data(None)
    split = "test" if data.sizes.get("test") else "val"
    groups = data.study_groups(split)
    initial = assembly.modules()[0]
    load_initial(initial, experiment.model.init)
    rows = []
    for name, model in (
        ("initial", initial),
        ("trained", DualEncoder.from_pretrained(folder.path / "model")),
    ):
        image, text = embed(model, data.batches(split, 32, drop_last=False))
        whole, batch = retrieval(image, text), in_batch_retrieval(image, text)
        dedup = in_batch_retrieval(image, text, groups=groups)
        first, fifth = recall_at(1), recall_at(5)
        figures = [whole[first], whole[fifth], batch[first], batch[fifth], dedup[first]]
        rows.append([name, len(image), *(f"{figure:.1f}" for figure in figures)])
    header = ["model", "pairs", "R@1 whole", "R@5 whole", "R@1 of 32", "R@5 of 32", "R@1 of 32, dedup"]
    print(table(header, rows))


if __name__ == "__main__":
    main()
