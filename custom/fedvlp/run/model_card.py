"""The model card: README.md in the folder of a trained model, from a template; without a path or words of a record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedvlp import __version__
from fedvlp.core.metric_keys import RECORD_EPSILON, SITE_EPSILON
from fedvlp.core.names import name_of
from fedvlp.core.validate import counted
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.data.synthetic.latent import LatentCohort
from fedvlp.evaluation import metric_names as names
from fedvlp.models.dual_encoder import describe
from fedvlp.models.initial import SHIPPED, parse
from fedvlp.models.multimodal import MultimodalConfig
from fedvlp.run.config import fingerprint
from fedvlp.run.experiment import Experiment
from fedvlp.run.metrics import Record, areas_of_sites, largest_by_site, of_server, summary
from fedvlp.run.site_sources import SiteSources

TEMPLATE = """\
# {name}: {kind} trained with fedvlp

{image_tower} reads images of {size} x {size} pixels, {text_tower} reads up to {tokens} tokens; both end in unit vectors
of {dim} numbers. {parameters:,} parameters. Method: `{method}`, {rounds}, seed {seed}. Start: {start}.
Written by fedvlp {version}; fingerprint of the experiment: `{fingerprint}`.{weights}

## Use

```python
from fedvlp import load_model

model = load_model("FOLDER")  # this folder
{use}
```

Images must be prepared as `config.json` says under `preprocessing`; `load_model` does. One that is prepared
otherwise gets a wrong vector, without an error.

## Training records

{source}

{counts}

## Results

{results}

## Normalisation statistics

{statistics}

## Privacy

{privacy}

## Classes

{classes}

## Intended use

Research on {kinds}, by people who can judge what it says. This is no medical device: it was not
validated for diagnosis, triage, writing reports or any other decision about a patient. It knows images and reports like
those of its sites; measure it on your own records before you use it.

## Known limits

- It was trained and tested at the sites above alone: other scanners, wards, countries and languages were not tested.
- What is rare in the training records is learned badly, and a metric of few positives has a wide interval.
- Any image gets a vector, one of another region or view too, and nothing warns of it.
- A cosine or a logit is no probability. A saliency map says what the model looks at, and not whether it is right.
- It may know a site by its scanner or its way of reporting: see the source oracle, where it was measured.
- What has no metric here was not measured. `fedvlp report RUN --intervals` adds intervals, baselines and findings by
  site; `fedvlp evaluate RUN --what zero-shot` or `linear-probe`, then `fedvlp report RUN`, subgroups; and
  `fedvlp audit RUN` attacks on the training records.

## Review

To fill in and sign before the model leaves the consortium. The data card of every site belongs to it.

| | |
|---|---|
| responsible for the model; contact | ... |
| data cards: site, version, date | ... |
| ethics committee: reference, date; contract | ... |
| permitted use and users; valid until | ... |
| who is told of a failure, and who withdraws the model | ... |

| | name | date | signature |
|---|---|---|---|
| lead | | | |
| clinical reviewer | | | |
| data protection officer | | | |

## Licence

Of these weights: not stated. Those who trained them have to write it here, within the terms of the training records.
fedvlp itself is under Apache-2.0.

## Files

`config.json` describes architecture, tokenizer, preprocessing and prompts; `model.safetensors` holds the weights{more}.
`SHA256SUMS` holds their checksums, which `load_model` and `sha256sum -c SHA256SUMS` compare. This file has none: edit
it.
"""


ENCODER = """\
vectors = model.encode_image(["one.dcm", "other.png"])  # [2, {dim}]"""
CLASSIFIER = """\
images = model.preprocess(["one.dcm", "other.png"])
words, mask = model.tokenizer(["report of one", "report of the other"])
logits = model({{"image": images, "text": words, "text_mask": mask}}).logits  # [2, {findings}]; one is enough"""
"""What to do with a model, as code."""

INITIAL_WEIGHTS = "the weights are the initial ones: no site sent any, and each has the model that it trained alone"
"""Of a run whose sites train alone."""


def card(
    experiment: Experiment,
    model: Any,
    samples: Mapping[str, int],
    history: Sequence[Record],
    statistics: str,
    objective: bool,
    initial: bool = False,
) -> str:
    """The text for a trained ``model`` (a DualEncoder). ``samples``: training records by site, as the sites said.

    ``statistics``: whose its running statistics are. ``objective``: whether tensors of the objective lie beside it.
    ``initial``: whether its weights are those that the run started from.
    """
    described = model.described()["model"]
    labels, ends = _findings(experiment), summary(list(history), experiment.takes_steps)
    return TEMPLATE.format(
        name=experiment.name,
        kind="a classifier of images and reports" if labels else "an image-text model",
        kinds="classifiers of images and reports" if labels else "image-text models",
        weights=f" {_sentence(INITIAL_WEIGHTS)}" if initial else "",
        use=(CLASSIFIER if labels else ENCODER).format(dim=described["embedding_dim"], findings=len(labels)),
        image_tower=_cell(described["image_tower"]),
        text_tower=_cell(described["text_tower"]),
        size=described["image_size"],
        tokens=described["max_tokens"],
        dim=described["embedding_dim"],
        parameters=describe(model)["total"],
        method=name_of(type(experiment.method)),
        rounds=counted(experiment.rounds.rounds, "round"),
        seed=experiment.rounds.seed,
        start=_start(experiment),
        version=__version__,
        fingerprint=fingerprint(experiment),
        source=_source(experiment.data),
        counts=_counts(samples),
        results=_areas(history) if labels else _results(ends, experiment.method.evaluates()),
        statistics=_sentence(statistics or "the model has no batch normalisation"),
        privacy=_privacy(history),
        classes=f"It gives a logit for each of: {', '.join(labels)}." if labels else _classes(model.prompts),
        more=", `objective.safetensors` what was trained beside it" if objective else "",
    )


CLASSES, RESULTS_END = "## Classes", "## Normalisation statistics"
"""Headings before which something is added."""


def with_block(written: str, said: str, name: str, heading: str) -> str:
    """The card with what was measured after training, between marks of this ``name``: again, it takes its own place.

    Else it stands before a heading, or at the end of a card that was edited.
    """
    mark, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, marked, rest = written.partition(mark)
    if marked:
        return f"{before}{mark}\n{said}\n{end}{rest.partition(end)[2]}"
    block = f"{mark}\n{said}\n{end}\n"
    if heading in written:
        return written.replace(heading, f"{block}\n{heading}", 1)
    return f"{written.rstrip()}\n\n{block}"


def _sentence(said: str) -> str:
    return f"{said[:1].upper()}{said[1:]}."


def _findings(experiment: Experiment) -> tuple[str, ...]:
    """What a classifier tells; nothing for any other model."""
    return experiment.model.labels if isinstance(experiment.model, MultimodalConfig) else ()


def _cell(text: str) -> str:
    return f"`{text}`"


def _start(experiment: Experiment) -> str:
    """What training started from: weights that ship by their name, others by their checksum alone."""
    if experiment.model.pretrained:
        return "the published weights of both towers"
    init = parse(experiment.model.init)
    if not init.name:
        return "random weights"
    if init.name in SHIPPED:
        return f"`{init.name}`, encoders that ship with fedvlp"
    return f"weights with the SHA-256 {init.digest}" if init.digest else "weights of its owner's"


def _source(source: Any) -> str:
    if isinstance(source, SiteSources):
        kinds = ", ".join(f"{site} by `{name_of(type(inner))}`" for site, inner in source.sites)
        return f"Read at each site: {kinds}."
    if isinstance(source, SyntheticCohort | LatentCohort):
        return f"Drawn by a program (`{name_of(type(source))}`): no patient's image or report is among them."
    return f"Read by `{name_of(type(source))}`."


def _counts(samples: Mapping[str, int]) -> str:
    if not samples:
        return "How many each site had was not reported."
    rows = [f"| {site} | {count:,} |" for site, count in samples.items()]
    return "\n".join(["| site | training records |", "|---|---|", *rows, f"| all | {sum(samples.values()):,} |"])


def _results(figures: Mapping[str, Mapping[str, float]], evaluated: str) -> str:
    """Recall on the test split of the initial and the trained model, where it was measured.

    ``evaluated``: what the sites measured, where that is not this model. The server's own figures then come first.
    """
    blocks = []
    columns = _on_public_set(figures.get("trained", {}))
    if evaluated and columns:
        title = "Recall of these weights among all test records of the public set, mean of both directions, percent:"
        blocks.append("\n".join([title, "", *_recall_rows(figures, columns)]))
    for scope, among in ((names.IN_BATCH, "in batches of 32"), (names.WHOLE_SET, "among all of a site")):
        columns = _recalls(figures.get("trained", {}), scope)
        if columns:
            of = f"The next figures are not of these weights: each site measured {evaluated}.\n" if evaluated else ""
            title = f"{of}Recall on the sites' test records, {among}, mean of both directions, percent:"
            blocks.append("\n".join([title, "", *_recall_rows(figures, columns)]))
            break
    return "\n\n".join(blocks) or "No recall was measured on the test split in this run."


def _on_public_set(measured: Mapping[str, float]) -> dict[str, str]:
    """Column -> name of the server's figure on the public set, of those that were measured."""
    named = {f"R@{k}": of_server(names.recall("test", k, names.WHOLE_SET)) for k in (1, 5, 10)}
    return {column: key for column, key in named.items() if key in measured}


def _areas(history: Sequence[Record]) -> str:
    """Macro area under the ROC curve before and after training: the server's on the public set, else the sites'."""
    for whose, areas_of in (("on the public set", _areas_of_server), ("mean over the sites' records", areas_of_sites)):
        measured = [areas for record in history if (areas := areas_of(record))]
        if measured:
            ends = {"initial": measured[0], "trained": measured[-1]}
            title = f"Area under the ROC curve, {whose}, mean over findings (macro), 0 to 1; chance is 0.5:"
            rows = [
                f"| {model} | {' | '.join(f'{areas[split]:.3f}' if split in areas else '' for split in measured[-1])} |"
                for model, areas in ends.items()
            ]
            head = [f"| model | {' | '.join(measured[-1])} |", f"|{'---|' * (len(measured[-1]) + 1)}"]
            return "\n".join([title, "", *head, *rows])
    return "No area under the ROC curve was measured in this run."


def _areas_of_server(record: Record) -> dict[str, float]:
    """Split -> macro AUC of the server's model."""
    figures = record.get("server", {})
    return {split: figures[name] for split in ("test", "val") if (name := names.auc(split, names.MACRO)) in figures}


def _recalls(measured: Mapping[str, float], scope: str) -> dict[str, str]:
    """Column -> name of the figure, of those that were measured."""
    return {
        f"R@{k} {kind}": key
        for k in (1, 5)
        for kind, which in (("average", names.AVERAGE), ("worst site", names.WORST))
        if (key := names.over_sites(names.recall("test", k, scope), which)) in measured
    }


def _recall_rows(figures: Mapping[str, Mapping[str, float]], columns: Mapping[str, str]) -> list[str]:
    rows = [f"| model | {' | '.join(columns)} |", f"|{'---|' * (len(columns) + 1)}"]
    for model, of_model in figures.items():
        cells = [f"{of_model[key]:.1f}" if key in of_model else "" for key in columns.values()]
        rows.append(f"| {model} | {' | '.join(cells)} |")
    return rows


def _privacy(history: Sequence[Record]) -> str:
    of_sets, of_records = (largest_by_site(history, name) for name in (SITE_EPSILON, RECORD_EPSILON))
    if not of_sets and not of_records:
        return (
            "No site reported differential privacy: nothing bounds what these weights may tell of single records. "
            "Share them as you would share what was learned from the records themselves."
        )
    said = []
    if of_sets:
        said.append(
            f"Epsilon that sites reported: {_listed(of_sets)}, at the delta of each site's own policy. The unit is a "
            "site's whole data set, so it says how well one site's taking part is hidden. Other sites reported none."
        )
    if of_records:
        said.append(
            f"Epsilon of record-level training: {_listed(of_records)}, at the delta of the experiment. The unit is one "
            "record, an image-text pair: of a patient with several, each alone."
        )
    return " ".join(said)


def _listed(spent: Mapping[str, float]) -> str:
    return ", ".join(f"{site} {epsilon:.3g}" for site, epsilon in sorted(spent.items()))


def _classes(prompts: Mapping[str, Sequence[str]]) -> str:
    if not prompts:
        return "It has no classes of its own for zero-shot classification."
    count = max(map(len, prompts.values()))
    return (
        f"For zero-shot classification, with up to {count} sentences of each in `config.json`: "
        f"{', '.join(prompts)}. The figures are cosines, no probabilities."
    )
