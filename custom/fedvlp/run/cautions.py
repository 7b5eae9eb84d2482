"""What a person should know of a run: how far to believe its figures, what it shows of records to other sites.

Commands and the report repeat these sentences.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from fedvlp.data.cohort import PUBLIC, Cohort
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.models.multimodal import MultimodalConfig
from fedvlp.run import presets
from fedvlp.run.experiment import Experiment
from fedvlp.run.site_sources import SiteSources
from fedvlp.training import dp_sgd
from fedvlp.training.settings import Training

FILE = "cautions.json"
"""In a run's folder: a list of sentences."""

ALL_SITES = "all sites together"
"""Who trains where the records are pooled."""


def cautions(experiment: Experiment, cohort: Cohort, untrained: Mapping[str, int] = MappingProxyType({})) -> list[str]:
    """Sentences for people, none where there is nothing to know. ``cohort``: the records with their sites.

    ``untrained``: how many training records of a site have no loss.
    """
    disclosed = [f"{experiment.name}: {said}"] if (said := experiment.method.discloses()) else []
    sizes = train_sizes(cohort)
    return [
        *drawn_data(experiment),
        *disclosed,
        *_epsilon(experiment, sizes),
        *_small_splits(experiment, sizes),
        *_unmeasured(experiment, sizes),
        *_unretrieved(experiment, cohort),
        *_half_pairs(untrained),
    ]


def train_sizes(cohort: Cohort) -> dict[str, int]:
    """Site -> number of its training records, by the sites' names; the public set is one of them."""
    return {site: len(cohort.rows("train", site)) for site in sorted(set(cohort.sites or ()))}


def drawn_data(experiment: Experiment) -> list[str]:
    """The sentence for a preset of real images that is trained on drawn ones; none for any other."""
    data = experiment.data
    sources = [source for _, source in data.sites] if isinstance(data, SiteSources) else [data]
    if not any(isinstance(source, SyntheticCohort) for source in sources):
        return []
    if experiment.name in presets.OF_REAL_FILMS:
        return [
            f"{experiment.name} is for real images and reports, but these are the synthetic cohort's, drawn by a "
            "program: towers that learned from photographs and everyday sentences see little in them; give --data"
        ]
    if experiment.name not in presets.PAPERS:
        return []
    return [
        f"{experiment.name} has a paper's towers and schedule, but these are not the paper's data: the images and "
        "reports are the synthetic cohort's, drawn by a program. Its figures are no reproduction and compare with "
        "nothing in the paper; give --data or --site"
    ]


def _epsilon(experiment: Experiment, sizes: Mapping[str, int]) -> list[str]:
    """What a run with record-level differential privacy costs by its end, and what that covers."""
    training, rounds = experiment.training, experiment.rounds.rounds
    if not training.dp_noise or not rounds:
        return []
    last = rounds - 1
    steps = dp_sgd.steps(experiment.method, last, len(experiment.method.phases(last)) - 1)
    private = _private(experiment, sizes)
    spent = {site: record_epsilon(training, count, steps) for site, count in private.items()}
    worst = max(spent, key=lambda site: spent[site])
    return [
        f"differential privacy of one record (an image-text pair): epsilon {spent[worst]:.3g} at delta "
        f"{training.dp_delta:g} after {steps} steps, the largest of the sites, that of {worst}. A patient with several "
        "records costs more. The number of records and figures of val and test are not covered"
    ]


def _private(experiment: Experiment, sizes: Mapping[str, int]) -> dict[str, int]:
    """Training records by who trains on them, without the public set and sites that take no part."""
    elsewhere = {PUBLIC, *experiment.partition.left_out_sites}
    private = {site: count for site, count in sizes.items() if site not in elsewhere}
    return {ALL_SITES: sum(private.values())} if experiment.method.pooled else private


def _small_splits(experiment: Experiment, sizes: Mapping[str, int]) -> list[str]:
    """Which sites have fewer training records than a batch: each of their steps takes all of them."""
    said = [_smaller(_private(experiment, sizes), experiment.training)]
    if experiment.method.uses_public and PUBLIC in sizes:
        said.append(_smaller({"the public set": sizes[PUBLIC]}, experiment.server_training or experiment.training))
    return [sentence for sentence in said if sentence]


def _unmeasured(experiment: Experiment, sizes: Mapping[str, int]) -> list[str]:
    """Which sites have too few training records for the loss by which a method weighs sites."""
    needed = experiment.method.probe_records()
    few = {name: count for name, count in _private(experiment, sizes).items() if count < needed}
    if not few:
        return []
    return [
        f"{experiment.name} weighs sites by their loss over batches of {needed} training records, and {_listed(few)} "
        "cannot fill one: hard or not, it keeps its weight. Lower method.dro_batch, or give more records"
    ]


def _unretrieved(experiment: Experiment, cohort: Cohort) -> list[str]:
    """Which sites with pairs to train on have too few held-out ones to be in the recall over sites, by split."""
    if isinstance(experiment.model, MultimodalConfig) or not experiment.rounds.evaluate_every:
        return []
    image, report = cohort.has_image(), cohort.has_report()
    said = []
    for split in ("val", "test"):
        few = {}
        for site in sorted(set(cohort.sites or ()) - {PUBLIC}):
            train, held_out = cohort.rows("train", site), cohort.rows(split, site)
            pairs = int((image & report)[held_out].sum())
            if pairs < 2 and (image & report)[train].any():
                few[site] = pairs
        if few:
            said.append(
                f"recall needs two pairs at least, so average and worst site on {split} are without {_listed(few)}. "
                "Give them more records"
            )
    return said


def _half_pairs(untrained: Mapping[str, int]) -> list[str]:
    """Which sites train on pairs alone, and leave out records with an image or a report alone."""
    if not untrained:
        return []
    return [
        "training is on pairs, and leaves out records with an image or a report alone: "
        f"{_listed(untrained)}. partition.retrieve lends reports to images; car-mfl and creamfl train on either half"
    ]


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


# What record-level training costs (training/dp_sgd.py), by Opacus's RDP accountant.


def record_epsilon(training: Training, records: int, steps: int, delta: float | None = None) -> float:
    """Epsilon of one record after ``steps`` steps at a site with so many training records: Poisson samples of them.

    ``delta``: that of the settings unless another is given. Raises RecordPrivacyError where Opacus is not installed.
    """
    try:
        from opacus.accountants import RDPAccountant
    except ImportError:
        raise dp_sgd.RecordPrivacyError("the accountant is missing here: pip install 'fedvlp[privacy]'") from None
    if not steps:
        return 0.0
    accountant = RDPAccountant()
    accountant.history = [(training.dp_noise, dp_sgd.rate(training, records), steps)]
    return float(accountant.get_epsilon(delta=training.dp_delta if delta is None else delta))
