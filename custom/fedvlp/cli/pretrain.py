"""`fedvlp pretrain`: towers for models to start from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedvlp.cli import known
from fedvlp.cli.overrides import AcceptAll, AcceptKinds, Plugins, Setting, accepted, configured, given, use_plugins
from fedvlp.cli.runs import Runs
from fedvlp.cli.stopping import goes_on_with

if TYPE_CHECKING:
    from fedvlp.run.pretrain import Comparison

app = typer.Typer()

TINY_POOL = "tiny-pool"
"""The preset of the encoders that ship with fedvlp."""


WITH_RESUME = {"out", "preset", "resume", "accept_phi_risk", "accept_phi_kind", "check", "plugins"}
"""The options that are read where a run goes on."""


@app.command()
def pretrain(
    context: typer.Context,
    out: Annotated[Path, typer.Argument(help="Folder for the encoders: what model.init names.")],
    preset: Annotated[
        str | None, typer.Option(help=f"A preset that trains on all records together; default: {TINY_POOL}.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Public records: synthetic, table:PATH.csv or SOURCE:PATH.")] = None,
    settings: Setting = None,
    runs: Runs = Path("runs"),
    resume: Annotated[
        Path | None, typer.Option(help="Folder of a run to go on with.", callback=known.run_if_given)
    ] = None,
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
    from fedvlp.run.pretrain import checkable, compare, note_command, noted_command, pretrainable, write_towers
    from fedvlp.run.simulate import simulate

    refuse_other_folder(out)
    if resume is None:
        preset = preset or TINY_POOL
        experiment = configured(preset, data, None, settings)
        expected = checkable(experiment) if check else ""
        pretrainable(experiment)
        folder = RunFolder.create(runs, experiment)
        note_command(folder, preset, data, settings or [])
    elif unread := given(context, WITH_RESUME):
        raise ValueError(f"--resume goes on with the run's own configuration; leave {', '.join(unread.values())} out")
    else:
        folder = RunFolder(resume)
        experiment = folder.experiment()
        if preset not in (None, experiment.name):
            raise ValueError(f"--resume is a run of {experiment.name}, not of {preset}; leave --preset out")
        preset = experiment.name
        expected = checkable(experiment) if check else ""
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
    print(f"held-out records of the pool: {_recall(made['held_out'])}\nwrote {wrote}")
    if check:
        comparison = compare(experiment, expected, out)
        print(_told(preset, comparison))
        if comparison.problem:
            raise ValueError(f"these are not the shipped {preset}: {comparison.problem}")


def _recall(held_out: Mapping[str, float]) -> str:
    """What was measured on the records that were held out."""
    if not held_out["queries"]:
        return f"fewer than {held_out['candidates']} with films and reports, so no recall is measured"
    return (
        f"R@1 {held_out['r1']}, R@5 {held_out['r5']}, {held_out['queries']} queries, chance "
        f"{held_out['chance_r1']:.1f}; R@1 within sites {held_out.get('r1_within_sites', 'not measured')}"
    )


def _told(preset: str, comparison: Comparison) -> str:
    """How near the new encoders are to the shipped ones, in a line."""
    exact = "the same bytes" if comparison.same_bytes else "other bytes"
    where = "made on such a machine" if comparison.same_machine else "made on another machine or torch"
    cosines = ", ".join(f"{name} {value:.4f}" for name, value in comparison.cosine.items())
    return (
        f"shipped {preset} ({where}): {exact}; held-out R@1 {comparison.recall[0]} then, {comparison.recall[1]} "
        f"now (standard error {comparison.error:.1f}); cosine of the features of a record: {cosines}"
    )
