"""`fedvlp predict`, `search`, `embed`, `explain`, `explore`, `export`: a trained model in use."""

from __future__ import annotations

import shlex
import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedvlp.cli import known, panels
from fedvlp.cli.overrides import DATA, Cache, Plugins, records_of, stored, use_plugins
from fedvlp.core import validate

if TYPE_CHECKING:
    from fedvlp.models.dual_encoder import DualEncoder
    from fedvlp.models.findings import FindingHeads

Model = Annotated[Path, typer.Argument(help="Folder of a finished run, or of a model.", callback=known.model_in)]
Statistics = Annotated[
    str | None, typer.Option(help="Site whose batch normalisation is used, where each site keeps its own.")
]
DEVICES = ("cpu", "cuda", "auto")

Device = Annotated[str, typer.Option(help="cpu, cuda or auto.")]
Data = Annotated[str, typer.Option(help=DATA.replace(" (default)", ""))]
Split = Annotated[str | None, typer.Option(help="train, val or test; default: all records.")]

app = typer.Typer()


@app.command(rich_help_panel=panels.USE)
def predict(
    model: Model,
    films: Annotated[
        list[Path] | None, typer.Argument(metavar="images", help="PNG, JPEG, TIFF or DICOM, or folders of such.")
    ] = None,
    classes: Annotated[
        str | None, typer.Option(help="Names or phrases, with commas: edema,rib fracture; default: the model's own.")
    ] = None,
    probe: Annotated[
        str | None,
        typer.Option(
            help="A data set with labels, as --data of other commands takes it: a linear probe is fitted on them, kept "
            "beside the model, and used from then on."
        ),
    ] = None,
    sensitivity: Annotated[
        float, typer.Option(help="With --probe: of the threshold, on validation images; above 0, at most 1.")
    ] = 0.9,
    out: Annotated[
        Path | None, typer.Option(help="FILE.csv: image, finding, probability (or cosine) and whether above threshold.")
    ] = None,
    cache: Cache = None,
    statistics: Statistics = None,
    device: Device = "cpu",
    plugins: Plugins = None,
) -> None:
    """Classifies images by the heads beside the model, else by the sentences of each class (zero-shot).

    A file that cannot be read costs one line. Heads are there after --probe, and of a run that solved them.
    """
    from fedvlp.run import finding_probe

    use_plugins(plugins)
    if not films and probe is None:
        raise ValueError(f"predict: no image is given; name some, or a folder: fedvlp predict {model} FOLDER")
    refuse_out(out, ".csv")
    named = None if classes is None else class_names(classes)
    files = finding_probe.files_in(films) if films else []  # what is not there before a model is loaded
    trained = _loaded(model, statistics, device)
    if probe is not None:
        heads = finding_probe.fit_heads(trained, _records(trained, probe, cache), sensitivity)
        finding_probe.save_heads(heads, model)
        _show_heads(heads)
        print(f"wrote the heads beside the model; next: fedvlp predict {model} FOLDER --out predictions.csv")
    if files:
        _show_predictions(model, trained, files, named, out)


def _show_heads(heads: FindingHeads) -> None:
    """What each head reaches, and which are no better than chance."""
    from rich.console import Console

    from fedvlp.run.finding_probe import at_chance

    def cell(of: dict[str, float], name: str, digits: int = 2) -> str:
        return f"{of[name]:.{digits}f}" if name in of else "-"

    rows = []
    for name in heads.names:
        of = heads.figures.get(name, {})
        bounds = f" [{of['test_low']:.2f}, {of['test_high']:.2f}]" if "test_low" in of else ""
        figures = [cell(of, key) for key in ("calibration_error", "threshold", "sensitivity", "specificity")]
        rows.append((name, f"{cell(of, 'test_auc' if 'test_auc' in of else 'auc')}{bounds}", *figures))
    columns = ("finding", "AUC", "calib.", "threshold", "sens.", "spec.")
    Console(markup=False, highlight=False).print(panels.plain_table(heads.origin, columns, rows))
    print("AUC: of test images, with its 95 % interval over patients; the others: of validation images")
    if chance := at_chance(heads):
        print(f"CAUTION: no better than chance: {', '.join(map(printable, chance))}")


def _show_predictions(
    folder: Path, trained: DualEncoder, files: list[Path], named: list[str] | None, out: Path | None
) -> None:
    """Each image with what its findings have: a table, and a file where one is asked for."""
    import torch
    from rich.console import Console

    from fedvlp.core.validate import counted
    from fedvlp.evaluation.output import write_csv
    from fedvlp.models.use import sentences_of
    from fedvlp.run import finding_probe, zero_shot_areas

    heads = None if named else finding_probe.heads_in(folder)
    kind = "zero-shot" if heads is None else "probability"
    if heads is None:
        trained.require_comparable("zero_shot")
        sentences_of(named, trained.prompts)  # refuses a model without classes before any image is read
    refused: list[str] = []

    def refuse(file: Path, why: str) -> None:
        refused.append(why)
        if len(files) > 1:
            print(f"left out: {printable(file.name)}: {printable(why)}", file=sys.stderr)

    rows: list[tuple[Path, str, float, bool | None]] = []
    readable = finding_probe.read_each(trained, files, refuse)
    while some := list(islice(readable, finding_probe.BATCH)):
        prepared = torch.stack([image for _, image in some])
        if heads is None:
            scores = trained.zero_shot(prepared, named)
        else:
            stated = heads.probabilities(finding_probe.pooled(trained, prepared)).tolist()
            scores = [dict(zip(heads.names, of_image, strict=True)) for of_image in stated]
        thresholds = {name: of.get("threshold") for name, of in heads.figures.items()} if heads else {}
        for (file, _), of_image in zip(some, scores, strict=True):
            for name, value in of_image.items():
                least = thresholds.get(name)
                rows.append((file, name, value, None if least is None else value >= least))
    if not rows:
        raise ValueError(f"none of {counted(len(files), 'file')} is an image that can be read: {refused[0]}")
    if out is not None:
        head = ("image", "finding", "cosine" if heads is None else "probability", "above_threshold")
        lines = ((file, name, value, "" if above is None else int(above)) for file, name, value, above in rows)
        write_csv(out, [head, *lines])
        print(f"wrote {out}: {len(files) - len(refused):,} images")
    if out is None or len(files) <= MOST_SHOWN:
        shown, last = [], None
        for file, name, value, above in rows:
            number = f"{value:+.3f}" if heads is None else f"{value:.3f}"
            shown.append(("" if file == last else file.name, name, f"{number}{' *' * bool(above)}"))
            last = file
        columns = ("image", "class", "cosine") if heads is None else ("image", "finding", "probability")
        Console(markup=False, highlight=False).print(panels.plain_table(kind, columns, shown))
    _say_how_far(folder, heads, zero_shot_areas.at_chance(folder))


def _say_how_far(folder: Path, heads: FindingHeads | None, chance: bool) -> None:
    """What the figures are, and how far to believe them."""
    from fedvlp.run.finding_probe import at_chance

    if heads is None:
        print("no probabilities: within a class, an image with a higher cosine is more likely to show it")
        if chance:
            print("CAUTION: zero-shot of this model is no better than chance on its run's test images; fit heads: "
                  f"fedvlp predict {folder} --probe table:PATH.csv,label_columns=NAMES")  # fmt: skip
        return
    if any("threshold" in of for of in heads.figures.values()):
        print("*: above the threshold, which was chosen on validation images; research software, no medical device")
    if below := at_chance(heads):
        print(f"CAUTION: no better than chance on images not seen before: {', '.join(map(printable, below))}")


MOST_SHOWN = 40
"""Images that are shown on the terminal where a file has them all."""


def class_names(classes: str) -> list[str]:
    """The classes of ``--classes``. Raises ValueError for none, and for another mark between them."""
    for mark in ";|\t\n":
        if mark in classes:
            typed = ",".join(name.strip() for name in classes.split(mark))
            raise ValueError(f"--classes has {mark!r} between its names; put commas: --classes {shlex.quote(typed)}")
    named = [name.strip() for name in classes.split(",") if name.strip()]
    if not named:
        raise ValueError("--classes names no class; give some, with commas between them")
    return named


def refuse_out(out: Path | None, suffix: str) -> None:
    """Raises ValueError for a file to write of another kind, or in a folder that is not there."""
    if out is None:
        return
    if out.suffix != suffix:
        raise ValueError(f"--out is {out.name!r}; give a name that ends in {suffix}")
    if not out.absolute().parent.is_dir():
        raise ValueError(
            f"--out {out}: the folder {out.absolute().parent} is not there; make it first, or name another"
        )


@app.command(rich_help_panel=panels.USE)
def search(
    model: Model,
    data: Data,
    phrase: Annotated[str | None, typer.Argument(help='What to look for, e.g. "left basal effusion".')] = None,
    image: Annotated[Path | None, typer.Option(help="An image as the query, in place of a phrase.")] = None,
    top: Annotated[int, typer.Option(help="How many records to show.")] = 10,
    split: Split = None,
    show_reports: Annotated[
        bool, typer.Option("--show-reports", help="Prints the reports too: for the eyes of the records' owner alone.")
    ] = False,
    cache: Cache = None,
    statistics: Statistics = None,
    device: Device = "cpu",
    plugins: Plugins = None,
) -> None:
    """Shows the records of a data set whose images are nearest to a phrase, or to an image."""
    from rich.console import Console

    from fedvlp.cli.panels import plain_table
    from fedvlp.run.search import rows_of
    from fedvlp.run.search import search as nearest

    use_plugins(plugins)
    if (phrase is None) == (image is None) or phrase == "":
        raise ValueError('search takes one query; give a phrase ("left basal effusion") or --image FILE')
    if top < 1:
        raise ValueError(f"--top is {top}; give how many records to show, at least 1")
    trained = _loaded(model, statistics, device)
    query = trained.encode_image(image) if phrase is None else trained.encode_text(phrase)
    cohort = _records(trained, data, cache)
    matches = nearest(trained, cohort, query, split, top)
    rows = [
        (rank, f"{match.similarity:+.3f}", match.key, _site(cohort, match.row), cohort.splits[match.row])
        for rank, match in enumerate(matches, start=1)
    ]
    console = Console(markup=False, highlight=False)
    searched = int(cohort.has_image()[rows_of(cohort, split)].sum())
    title = f"nearest of {searched:,} records to the {'image' if image else 'phrase'}"
    console.print(plain_table(title, ("rank", "cosine", "record", "site", "split"), rows))
    for rank, match in enumerate(matches, start=1):
        if show_reports:
            print(f"{rank:>3}  {printable(cohort.reports[match.row]) or '(no report)'}")


@app.command(rich_help_panel=panels.USE)
def embed(
    model: Model,
    data: Data,
    out: Annotated[
        Path, typer.Option(help="FILE.npz or FILE.parquet: key, split, site, image [N, d] and text [N, d].")
    ],
    split: Split = None,
    cache: Cache = None,
    statistics: Statistics = None,
    device: Device = "cpu",
    plugins: Plugins = None,
) -> None:
    """Writes the embeddings of all images and reports of a data set, with the keys of their records."""
    from fedvlp.run.search import refuse_other_suffix, write_vectors

    use_plugins(plugins)
    refuse_other_suffix(out)
    trained = _loaded(model, statistics, device)
    counts = write_vectors(trained, _records(trained, data, cache), out, split)
    print(f"wrote {out}: {', '.join(f'{count:,} {what}' for what, count in counts.items())}")


@app.command(rich_help_panel=panels.USE)
def explain(
    model: Model,
    film: Annotated[Path, typer.Argument(metavar="image", help="PNG, JPEG, TIFF or DICOM.")],
    phrase: Annotated[str, typer.Argument(help='What it may show, e.g. "left basal effusion".')],
    out: Annotated[Path, typer.Option(help="FILE.png: the image, and the map on it.")],
    by: Annotated[
        str, typer.Option(help="occlusion: covers squares of the image; gradients: integrated gradients.")
    ] = "occlusion",
    mask: Annotated[
        Path | None, typer.Option(help="PNG of the image's lungs, or of anything: how much of the map lies within.")
    ] = None,
    square: Annotated[
        int | None, typer.Option(help="Side of the squares, pixels of the model's input; default: a sixth of it.")
    ] = None,
    statistics: Statistics = None,
    device: Device = "cpu",
    plugins: Plugins = None,
) -> None:
    """Saves a saliency map for an image and a phrase: how much each square adds to their cosine.

    It says what the model looks at, and not whether it is right.
    """
    from fedvlp.evaluation.attribution import attribution, draw, within
    from fedvlp.run.zero_shot_areas import at_chance

    use_plugins(plugins)
    refuse_out(out, ".png")
    if out.resolve() == film.resolve():
        raise ValueError("--out is the image itself, which the picture would replace; give another name")
    if not phrase.strip():
        raise ValueError('explain: the phrase is empty; give one, e.g. "left basal effusion"')
    trained = _loaded(model, statistics, device)
    inside = None if mask is None else _mask_of(trained, mask, film)  # a wrong file before the map, which takes a while
    result = attribution(trained, film, phrase, by, square)
    draw(result, out)
    if at_chance(model):
        print("CAUTION: zero-shot of this model is no better than chance on its run's test images, and so is this map")
    print(result.sentence)
    if inside is not None:
        print(within(result, inside))
    print(f"wrote {out}")


@app.command(rich_help_panel=panels.USE)
def explore(
    model: Model,
    data: Data,
    split: Split = None,
    address: Annotated[
        str,
        typer.Option("--host", help="Address to listen on. At any but this machine's own, others see the images too."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any free one.")] = 7860,
    cache: Cache = None,
    statistics: Statistics = None,
    device: Device = "cpu",
    plugins: Plugins = None,
) -> None:
    """Serves a web page to this machine: images for a phrase; findings, similar images and reports for an image."""
    from dataclasses import replace

    from fedvlp.data.screening import DataSource
    from fedvlp.report.explore import serve
    from fedvlp.report.explore.content import Explorer
    from fedvlp.report.explore.page import page
    from fedvlp.run.finding_probe import heads_in
    from fedvlp.run.search import decoded_size, rows_of
    from fedvlp.run.zero_shot_areas import at_chance

    use_plugins(plugins)
    serve.refuse_without_gradio()
    with serve.listening(address, port) as opened:
        trained = _loaded(model, statistics, device)
        source = stored(records_of(data, decoded_size(trained)), cache)
        cohort = source.build()
        count = len(rows_of(cohort, split))
        print(f"the vectors of {count:,} records are computed; then the page is there", flush=True)
        explorer = Explorer.of(trained, cohort, split, DataSource.of(source).written(), heads_in(model))
        explorer = replace(explorer, zero_shot_at_chance=at_chance(model))
        if not serve.is_loopback(opened):
            print(f"CAUTION: {serve.SEEN_BY_OTHERS}", file=sys.stderr)
        with serve.own_folder():
            served = page(explorer, names=serve.is_loopback(opened))
            print(f"{serve.address(opened)}  {count:,} records; Ctrl-C ends the page", flush=True)
            serve.serve(served, opened)


@app.command(rich_help_panel=panels.USE)
def export(
    model: Model,
    to: Annotated[
        str,
        typer.Option(help="timm (image tower), huggingface (text tower), onnx, open_clip or monai-bundle."),
    ],
    out: Annotated[Path, typer.Option(help="New folder.")],
    statistics: Statistics = None,
    plugins: Plugins = None,
) -> None:
    """Writes the model, or a tower, for another library, which loads it without fedvlp, and compares it there."""
    from fedvlp.models.export import EXPORTS
    from fedvlp.run.config import nearest

    use_plugins(plugins)
    if to not in EXPORTS:
        raise ValueError(f"--to is {to!r}{nearest(to, list(EXPORTS))}; there are: {', '.join(EXPORTS)}")
    print(f"wrote {out}, with the features that it has here: {EXPORTS[to](_loaded(model, statistics, 'cpu'), out)}")


def _mask_of(model: DualEncoder, file: Path, film: Path) -> Any:
    """Bool [S, S] of a mask's file, cropped as the model sees the image."""
    import torch

    from fedvlp.data.loader import eval_batch
    from fedvlp.data.masks import read_mask
    from fedvlp.run.search import decoded_size

    whole = 255 * torch.from_numpy(read_mask(file, decoded_size(model), film)).to(torch.uint8)
    return eval_batch(whole[None], model.config.image_size)[0, 0] > 0


def printable(text: str) -> str:
    """The text in one line, without characters that steer a terminal."""
    return " ".join(validate.printable(text).split())


def _loaded(folder: Path, statistics: str | None, device: str) -> DualEncoder:
    """The model on the device. Raises ValueError for a folder without one, and a device that is not there."""
    import torch

    from fedvlp.run.model_use import load_model

    if device not in DEVICES:
        raise ValueError(f"--device is {device!r}; choose {', '.join(DEVICES)}")
    there = torch.cuda.is_available()
    if device == "cuda" and not there:
        raise ValueError("--device is cuda, and torch finds no GPU on this machine; choose cpu or auto")
    return load_model(folder, statistics, "cuda" if device != "cpu" and there else "cpu")


def _records(model: DualEncoder, data: str, cache: Path | None) -> Any:
    """The records of ``--data``, their images decoded as the model's were."""
    from fedvlp.run.search import decoded_size

    return stored(records_of(data, decoded_size(model)), cache).build()


def _site(cohort: Any, row: int) -> str:
    return "" if cohort.sites is None else cohort.sites[row]
