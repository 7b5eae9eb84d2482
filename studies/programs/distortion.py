"""What one more round at one site does to the pairs of every site: FedAvg and FedRGB, on a cohort of the ledger.

    python studies/programs/distortion.py [--cohort scanner-shift] [--seeds 0-4] [--jobs 2] [--quick]

The runs of `fedvlp claims fedrgb`, whose verdict is of their means; here by the site whose test records are measured,
averaged over the sites that train, itself among them, as in the paper's tables 6 and 11 (spec 10.7).
``plain`` training is FedAvg's, without guidance, as the paper's table has it for FedAvg; ``own`` is FedRGB's local
phase. Paired cosine x 100, mean over seeds; a loss is negative.
"""

from __future__ import annotations

from common import machine, say, table
from ledger_cells import finished, less, mean, parser_of

from fedvlp.data.synthetic.drawn_cohort import COHORTS
from studies.claims.cell_results import Table
from studies.claims.distortion import BEFORE, OWN, PLAIN, change, change_at, change_elsewhere
from studies.claims.ledger import SCENARIOS

METHODS = ("fedavg", "fedrgb")


def report(rows: Table, sites: list[str]) -> str:
    """The Markdown table, of the rows that have finished."""
    body = []
    for name in METHODS:
        for way in (PLAIN, OWN):
            if not rows.has(name, change(way)):
                continue
            figures = [*(change_at(site, way) for site in sites), change(way), change_elsewhere(way)]
            cells = [mean(rows, name, figure) for figure in figures]
            body.append([f"{name}, {way}", *cells, mean(rows, name, BEFORE)])
    apart = less(rows, "fedrgb", "fedavg", change(PLAIN))
    header = ["re-trained", *sites, "all sites", "other sites only", "before"]
    return table(header, body) + f"\n\nPlain training, all sites, fedrgb less fedavg: {apart or 'no seed has both'}"


def main() -> None:
    parser = parser_of(__doc__, "0-4")
    parser.add_argument("--cohort", default="label-skew", choices=["label-skew", "scanner-shift"])
    options = parser.parse_args()
    say({**machine(), **vars(options)})
    rows = finished(SCENARIOS[f"{options.cohort}-distortion"], options)
    count: int = COHORTS[options.cohort].sites  # type: ignore[attr-defined]
    sites = [f"site-{number}" for number in range(1, count + 1)]
    print(f"\n{options.cohort}, seeds {options.seeds}\n\n{report(rows, sites)}\n")
    say(machine())


if __name__ == "__main__":
    main()
