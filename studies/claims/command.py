"""`fedvlp claims`: what the papers claim, run on the built-in cohorts over paired seeds, with a verdict each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedvlp.cli import panels
from fedvlp.cli.overrides import AcceptAll, AcceptKinds, accepted, seeds_of
from fedvlp.cli.stopping import goes_on_as_typed

app = typer.Typer()


@app.command(rich_help_panel=panels.JUDGE)
def claims(
    papers: Annotated[
        list[str] | None, typer.Argument(help="feddra, fedrgb, creamfl, car-mfl, pms-fm; none: all.")
    ] = None,
    scenario: Annotated[list[str] | None, typer.Option(help="Only this one; may be repeated. Default: all.")] = None,
    seeds: Annotated[str, typer.Option(help="FIRST-LAST; 100 to 104 are for choosing settings.")] = "0-4",
    jobs: Annotated[int, typer.Option(help="Runs at a time; 0: judges what has finished, and runs nothing.")] = 2,
    runs: Annotated[Path, typer.Option("--runs", help="Where the runs are kept; stopped, it goes on there.")] = Path(
        "runs/claims"
    ),
    results: Annotated[
        Path, typer.Option(help="Files of finished cells, read and added to: what is there is not run again.")
    ] = Path("studies/results"),
    device: Annotated[str, typer.Option(help="What the runs train on: cpu, cuda, or auto.")] = "cpu",
    accept_phi_risk: AcceptAll = False,
    accept_phi_kind: AcceptKinds = None,
    listed: Annotated[bool, typer.Option("--list", help="Only says which claims and scenarios there are.")] = False,
) -> None:
    """Runs the scenarios of the papers' claims and says of each whether it holds, fails, or is undecided."""
    from rich.console import Console

    from fedvlp.cli.panels import plain_table
    from fedvlp.cli.tables import upright
    from fedvlp.core.checkpoint import save_text
    from fedvlp.run.config import choose
    from studies.claims.cell_results import measured, origin
    from studies.claims.ledger import CLAIMS, PAPERS, SCENARIOS
    from studies.claims.page import CORRECTED, HELD, as_page, claim_rows, corrected, figure_rows, judge
    from studies.claims.scenario import cells_of, methods_of

    asked = [choose("paper", name, "", dict.fromkeys(PAPERS, name)) for name in papers or PAPERS]
    names = scenario or list(SCENARIOS)
    chosen = [choose("scenario", name, "", SCENARIOS) for name in names]
    chosen = [one for one in chosen if methods_of(one, asked)]
    console = Console(markup=False)
    if listed:
        rows = [(one.name, claim.paper, claim.text) for one in chosen for claim in one.claims if claim.paper in asked]
        console.print(plain_table("claims", ("scenario", "paper", "claim"), rows, right=False))
        return
    goes_on_as_typed()
    wanted, accept = seeds_of(seeds), accepted(accept_phi_risk, accept_phi_kind)

    def said(method: str, seed: int, what: str) -> None:
        console.print(f"{method}, seed {seed}: {what}", highlight=False)

    every = []
    for one in chosen:
        console.print(f"scenario {one.name}", highlight=False)
        table = measured(one, cells_of(one, methods_of(one, asked), wanted, device), runs, results, jobs, said, accept)
        judged = judge(one, table, asked)
        every.append(judged)
        for condition, held in judged.preconditions:
            console.print(f"{HELD[held]}: {condition.text}", highlight=False)
        heading, *figures = upright([("method", *one.shown), *figure_rows(judged)])
        console.print(plain_table(one.name, heading, figures))
        console.print(origin(table), highlight=False)
    every = corrected(every, CLAIMS)
    for judged in every:
        console.print(plain_table(f"claims, {judged.scenario.name}", CORRECTED, claim_rows(judged), right=False))
    runs.mkdir(parents=True, exist_ok=True)
    save_text(runs / "claims.html", as_page(every))
    print(f"wrote {runs / 'claims.html'}")
