"""`fedvlp pretrain`: towers for models to start from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedvlp.cli.overrides import AcceptAll, AcceptKinds, Plugins, Setting, accepted, configured, use_plugins
from fedvlp.cli.runs import Runs

if TYPE_CHECKING:
    from fedvlp.run.pretrain import Comparison

app = typer.Typer()


@app.command()
def pretrain(
    out: Annotated[Path, typer.Argument(help="Folder for the encoders: what model.init names.")],
    preset: Annotated[str, typer.Option(help="A preset that trains on all records together.")] = "tiny-pool",
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
    from fedvlp.run.folder import RunFolder
    from fedvlp.run.pretrain import compare, pretrainable, shipped, write_towers
    from fedvlp.run.simulate import simulate

    use_plugins(plugins)
    accept = accepted(accept_phi_risk, accept_phi_kind)
    expected = shipped(preset) if check else ""
    if resume is None:
        experiment = configured(preset, data, None, settings)
        pretrainable(experiment)
        folder = RunFolder.create(runs, experiment)
    elif settings or data:
        raise ValueError("--resume goes on with the run's own configuration; leave --set and --data out")
    else:
        folder = RunFolder(resume)
        experiment = folder.experiment()
        pretrainable(experiment)
    print(f"run {folder.path}")
    with folder.removed_unless_begun() if resume is None else nullcontext():
        simulate(
            experiment,
            folder,
            accept_phi_risk=accept,
            report=lambda record: print(progress_line(record), flush=True),
        )
    source = (data or "").partition(":")[0]  # not the path: the folder may be handed on
    given = [f" --data {source}:..."] * bool(source) + [f" --set {setting}" for setting in settings or []]
    wrote, made = write_towers(folder, out, f"fedvlp pretrain OUT --preset {experiment.name}{''.join(given)}")
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
