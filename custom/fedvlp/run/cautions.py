"""What a person should know of a run: how far to believe its figures, what it shows of records to other sites.

Commands and the report repeat these sentences.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedvlp.data.cohort import PUBLIC, Cohort
from fedvlp.data.synthetic.cohort import SyntheticCohort
from fedvlp.run import presets
from fedvlp.run.experiment import Experiment
from fedvlp.run.site_sources import SiteSources
from fedvlp.training.config import Training

FILE = "cautions.json"
"""In a run's folder: a list of sentences."""


def cautions(experiment: Experiment, cohort: Cohort) -> list[str]:
    """Sentences for people, none where there is nothing to know. ``cohort``: the records with their sites."""
    disclosed = [f"{experiment.name}: {said}"] if (said := experiment.method.discloses()) else []
    return [*drawn_data(experiment), *disclosed, *_small_splits(experiment, train_sizes(cohort))]


def train_sizes(cohort: Cohort) -> dict[str, int]:
    """Site -> number of its training records, by the sites' names; the public set is one of them."""
    return {site: len(cohort.rows("train", site)) for site in sorted(set(cohort.sites or ()))}


def drawn_data(experiment: Experiment) -> list[str]:
    """The sentence for a paper's preset that is trained on drawn films; none for any other."""
    data = experiment.data
    sources = [source for _, source in data.sites] if isinstance(data, SiteSources) else [data]
    if experiment.name not in presets.PAPERS or not any(isinstance(source, SyntheticCohort) for source in sources):
        return []
    return [
        f"{experiment.name} has a paper's towers and schedule, but these are not the paper's data: the films and "
        "reports are the built-in cohort's, drawn by a program. Its figures are no reproduction and compare with "
        "nothing in the paper; give --data or --site"
    ]


def _small_splits(experiment: Experiment, sizes: Mapping[str, int]) -> list[str]:
    """Which sites have fewer training records than a batch: each of their steps takes all of them."""
    elsewhere = {PUBLIC, *experiment.partition.left_out_sites}
    private = {site: count for site, count in sizes.items() if site not in elsewhere}
    if experiment.method.pooled:
        private = {"all sites together": sum(private.values())}
    said = [_smaller(private, experiment.training)]
    if experiment.method.uses_public and PUBLIC in sizes:
        said.append(_smaller({"the public set": sizes[PUBLIC]}, experiment.server_training or experiment.training))
    return [sentence for sentence in said if sentence]


def _smaller(sizes: Mapping[str, int], training: Training) -> str:
    few = {name: count for name, count in sizes.items() if count < training.batch_size}
    if not few:
        return ""
    return (
        f"a batch of {training.batch_size} is larger than the training split of {_listed(few)}: a step there takes all "
        "records of the split, so contrastive losses have fewer negatives. Lower the batch size, or give more records"
    )


def _listed(counts: Mapping[str, int]) -> str:
    """ "north (12 records), south (30 records)"; of more than eight sites, the first eight and how many more."""
    shown = [f"{site} ({count} records)" for site, count in list(counts.items())[:8]]
    more = [f"{len(counts) - 8} more"] if len(counts) > 8 else []
    return ", ".join(shown + more)
