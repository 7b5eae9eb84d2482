"""`fedvlp pretrain`: towers for models to start from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedvlp.cli.overrides import AcceptAll, AcceptKinds, Plugins, Setting, accepted, configured, use_plugins
from fedvlp.cli.runs import Runs
from fedvlp.cli.stopping import goes_on_with

if TYPE_CHECKING:
    from fedvlp.run.pretrain import Comparison

app = typer.Typer()

TINY_POOL = "tiny-pool"
"""The preset of the encoders that ship with fedvlp."""


@app.command()
def pretrain(
    out: Annotated[Path, typer.Argument(help="Folder for the encoders: what model.init names.")],
    preset: Annotated[
        str | None, typer.Option(help=f"A preset that trains on all records together; default: {TINY_POOL}.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Public records: synthetic, table:PATH.csv or SOURCE:PATH.")] = None,
    settings: Setting = None,
    runs: Runs = Path("runs"),
    resume: Annotated[Path | None, typer.Option(help="Folder of a run to go on with.")] = None,
    accept_phi_risk: AcceptAll = False,
    accept_phi_kind: AcceptKinds = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare with the shipped weights of the preset's name.")
    ] = False,
    plugins: Plugins = None,
) -> None:
    """Trains both towers on public records and writes the encoders, for --set model.init=FOLDER."""
    from contextlib import nullcontext

    from fedvlp.cli.tables import progress_line
    from fedvlp.models.initial import refuse_other_folder
    from fedvlp.run.folder import RunFolder
    from fedvlp.run.pretrain import compare, note_command, noted_command, pretrainable, shipped, write_towers
    from fedvlp.run.simulate import simulate

    use_plugins(plugins)
    accept = accepted(accept_phi_risk, accept_phi_kind)
    refuse_other_folder(out)
    if resume is None:
        preset = preset or TINY_POOL
        expected = shipped(preset) if check else ""
        experiment = configured(preset, data, None, settings)
        pretrainable(experiment)
        folder = RunFolder.create(runs, experiment)
        note_command(folder, preset, data, settings or [])
    elif settings or data:
        raise ValueError("--resume goes on with the run's own configuration; leave --set and --data out")
    else:
        folder = RunFolder(resume)
        experiment = folder.experiment()
        if preset not in (None, experiment.name):
            raise ValueError(f"--resume is a run of {experiment.name}, not of {preset}; leave --preset out")
        preset = experiment.name
        expected = shipped(preset) if check else ""
        pretrainable(experiment)
    print(f"run {folder.path}")
    again = ["--accept-phi-risk"] * accept_phi_risk + ["--check"] * check
    again += [word for kind in accept_phi_kind or () for word in ("--accept-phi-kind", kind)]
    again += [word for plugin in plugins or () for word in ("--plugin", plugin)]
    goes_on_with("fedvlp", "pretrain", str(out), "--resume", str(folder.path), *again)
    with folder.removed_unless_begun() if resume is None else nullcontext():
        simulate(
            experiment,
            folder,
            accept_phi_risk=accept,
            report=lambda record: print(progress_line(record), flush=True),
        )
    wrote, made = write_towers(folder, out, noted_command(folder))
    recall = made["held_out"]
    print(
        f"held-out records of the pool: R@1 {recall.get('r1')}, R@5 {recall.get('r5')}, {recall['queries']} queries, "
        f"chance {recall['chance_r1']:.1f}; R@1 within sites {recall.get('r1_within_sites')}\nwrote {wrote}"
    )
    if check:
        comparison = compare(experiment, expected, out)
        print(_told(preset, comparison))
        if comparison.problem:
            raise ValueError(f"these are not the shipped {preset}: {comparison.problem}")


def _told(preset: str, comparison: Comparison) -> str:
    """How near the new encoders are to the shipped ones, in a line."""
    exact = "the same bytes" if comparison.same_bytes else "other bytes"
    where = "made on such a machine" if comparison.same_machine else "made on another machine or torch"
    cosines = ", ".join(f"{name} {value:.4f}" for name, value in comparison.cosine.items())
    return (
        f"shipped {preset} ({where}): {exact}; held-out R@1 {comparison.recall[0]} then, {comparison.recall[1]} "
        f"now (standard error {comparison.error:.1f}); cosine of the features of a record: {cosines}"
    )
