"""The estimate of a site's memory: pairs of records grow with the square of a batch, activations with their width."""

from __future__ import annotations

from dataclasses import replace

from fedvlp.run import presets
from fedvlp.run.dry_run import PAIRWISE, bytes_needed


def needed(precision: str = "float32", **training: int) -> int:
    experiment = presets.get("fedavg")
    changed = replace(experiment.training, precision=precision, **training)  # type: ignore[arg-type]
    return bytes_needed(replace(experiment, training=changed), "site-1")


def test_pairs_are_of_the_whole_batch_and_activations_of_a_part_of_it() -> None:
    """Batches of 1, 2 and 3 times 100 grow by a line and a square, whose second difference is 2 * 100^2 pairs."""
    of_pairs = PAIRWISE * 4 * 100**2
    one, two, three = (needed(batch_size=size) for size in (100, 200, 300))
    assert three - 2 * two + one == 2 * of_pairs
    assert needed(batch_size=200, micro_batch=100) == one + 3 * of_pairs


def test_activations_of_half_precision_take_half() -> None:
    """What is left without a record is the same."""
    whole, half = ([needed(precision, batch_size=size) for size in (100, 200)] for precision in ("float32", "bfloat16"))
    of_pairs = 3 * PAIRWISE * 4 * 100**2
    assert whole[1] - whole[0] - of_pairs == 2 * (half[1] - half[0] - of_pairs)
