"""What happened in a run, in a few sentences made of its own figures: gained, left behind, still rising."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedvlp.core.types import EVALUATE
from fedvlp.core.validate import counted
from fedvlp.evaluation import metric_names as names
from fedvlp.evaluation.intervals import Interval
from fedvlp.report.figures import Points
from fedvlp.report.run import SCOPES, Run
from fedvlp.run.beside import CHANCE, verdict
from fedvlp.run.compare import BATCH, INITIAL
from fedvlp.run.metrics import Record, areas_of_sites, by_site, of_server, overall, summary
from fedvlp.run.recalls import FROM_AVERAGE, GAIN, SITE, TOGETHER, TRAINED, Recall

MARGIN = 0.05
"""Share of the whole rise on val: a change of the last quarter of the rounds that is smaller is none."""

BRACKETS = "in brackets the 95 % interval over test patients"
FEWEST = 4  # evaluations by which to say how val goes on


@dataclass(frozen=True)
class Chosen:
    """The recall that the sentences are about: at 1, of a split in a scope."""

    split: str
    scope: str

    @property
    def name(self) -> str:
        """Name of a site's figure."""
        return names.recall(self.split, 1, self.scope)

    def over_sites(self, figure: str) -> str:
        """Name of the figure over sites."""
        return names.over_sites(self.name, figure)


def sentences(run: Run) -> list[str]:
    """What happened, the most important first."""
    lines = _classifier(run)
    if not run.measured and not lines:
        never = run.setting("rounds.evaluate_every") == 0
        return [f"No evaluation{': rounds.evaluate_every is 0' if never else ' so far'}."]
    chosen = chosen_of(run)
    if chosen is not None:
        recalls = [row for row in run.recalls if chosen.split == "test" and (row.k, row.scope) == (1, chosen.scope)]
        if run.evaluated and run.sends:  # they are of the server's model, and what the sites sent is not
            recalls = []
        behind, others = _left_behind(run, chosen, recalls)
        lines = [*behind, *_gained(run, chosen, recalls), *_whose(run), *others, *_course(run, chosen.scope), *lines]
    said = verdict(run.beside)
    return [said, *lines] if said else [*lines, *_beside_oracle(run.recalls)]


def chosen_of(run: Run) -> Chosen | None:
    """Test before val, in batches before the whole set: the first that the first and last evaluation have."""
    if not run.measured:
        return None
    (_, first), (_, last) = run.measured[0], run.measured[-1]
    for scope in SCOPES:
        for split in ("test", "val"):
            chosen = Chosen(split, scope)
            if chosen.over_sites(names.AVERAGE) in first.keys() & last.keys():
                return chosen
    return None


def _gained(run: Run, chosen: Chosen, recalls: Sequence[Recall]) -> list[str]:
    """Where the average over sites started and where it is, with chance."""
    (start, first), (end, last) = run.measured[0], run.measured[-1]
    average = chosen.over_sites(names.AVERAGE)
    count = len({site for site, metrics in by_site(end).items() if chosen.name in metrics})
    measured = f"{chosen.split}, {SCOPES[chosen.scope]}{_chance(chosen, recalls)}"
    over = f"on average over {count} sites" if count > 1 else f"at {_ranked(end, chosen)[0][1]}"
    of_model = {row.figure: row.recall for row in recalls if row.over == names.AVERAGE}
    rounds = counted(end["round"], "round")
    if run.closed_form and end["round"]:
        shown = of_model[TRAINED].unsigned() if TRAINED in of_model else f"{last[average]:.1f}"
        return [f"R@1 is {shown} {over} after {rounds} without a training step ({measured})."]
    if start is end:
        return [f"Before training, R@1 is {last[average]:.1f} {over} ({measured})."]
    before, after = first[average], last[average]
    if GAIN not in of_model:
        verb = "rose" if after > before else "fell" if after < before else "stayed as it was,"
        return [f"R@1 {verb} from {before:.1f} to {after:.1f} {over} after {rounds} ({measured})."]
    gain = of_model[GAIN]
    verb = {1: "rose", -1: "fell", 0: "does not differ significantly from the initial model's:"}[gain.side]
    if gain.side > 0 and any(row.other == CHANCE and row.side <= 0 for row in run.beside):
        verb = "is no more than chance although it went"  # as the verdict says; the initial model was below chance
    ends = f"from {of_model[INITIAL].unsigned()} to {of_model[TRAINED].unsigned()}"
    return [f"R@1 {verb} {ends} {over} after {rounds}, by {gain} ({measured}; {BRACKETS})."]


def _whose(run: Run) -> list[str]:
    """Which model the figures are of, where that is not the server's."""
    return [f"Each site measured {run.evaluated}, and not the server's."] if run.evaluated else []


def _chance(chosen: Chosen, recalls: Sequence[Recall]) -> str:
    """Chance, as the end of a list; nothing for a whole set whose size is not on record."""
    if chosen.scope == names.IN_BATCH:
        return f"; chance {100 / BATCH:.1f}"
    known = [row.chance for row in recalls if (row.figure, row.over) == (TRAINED, names.AVERAGE)]
    return f"; chance {known[0]:.1f}" if known else ""


def _left_behind(run: Run, chosen: Chosen, recalls: Sequence[Recall]) -> tuple[list[str], list[str]]:
    """Which sites lie below the average by more than other patients would explain; else what is known of the sites."""
    end, last = run.measured[-1]
    ranked = _ranked(end, chosen)
    if len(ranked) < 2:
        return [], []
    average = last[chosen.over_sites(names.AVERAGE)]
    if ranked[0][0] == ranked[-1][0]:
        return [], [f"All sites have the same R@1, {average:.1f}."]
    distances = {row.site: row.recall for row in recalls if (row.figure, row.over) == (FROM_AVERAGE, SITE)}
    if all(math.isnan(distance.low) for distance in distances.values()):  # none was measured, or of one patient alone
        lowest = f"{ranked[0][1]} is the lowest: R@1 {ranked[0][0]:.1f} against {average:.1f} on average."
        return [], [f"{lowest} Without intervals nobody can say whether that is significant."]
    behind = [(value, site) for value, site in ranked if site in distances and distances[site].side < 0]
    if not behind:
        value, site = ranked[0]
        shown = f"the lowest, {site}, has {value:.1f} against {average:.1f} on average"
        return [], [f"No site is left behind: {shown}{_difference(distances.get(site))}."]
    return [
        f"{site} is left behind: R@1 {value:.1f} against {average:.1f} on average{_difference(distances[site])}."
        for value, site in behind
    ], []


def _ranked(record: Record, chosen: Chosen) -> list[tuple[float, str]]:
    """(figure, site) of the sites that have it, the lowest first."""
    return sorted((metrics[chosen.name], site) for site, metrics in by_site(record).items() if chosen.name in metrics)


def _difference(distance: Interval | None) -> str:
    return "" if distance is None else f", a difference of {distance}"


def _course(run: Run, scope: str) -> list[str]:
    """Whether the average on val still rises, by its last quarter."""
    name = names.over_sites(names.recall("val", 1, scope), names.AVERAGE)
    points: Points = {}
    for record, _ in run.measured:
        figures = overall(record)
        if name in figures:
            points[record["round"]] = figures[name]
    if len(points) < FEWEST:
        return []
    rounds = sorted(points)
    first, last = rounds[0], rounds[-1]
    best = max(rounds, key=lambda round: points[round])
    rise = points[best] - points[first]
    if rise <= 0:
        return [f"On val no round is above the start, {points[first]:.1f}."]
    if points[best] - points[last] > MARGIN * rise:
        ends = f"{points[best]:.1f}; now it is {points[last]:.1f}"
        return [f"On val the average was highest after {counted(best, 'round')}: {ends}."]
    quarter = max(round for round in rounds[:-1] if round <= first + 0.75 * (last - first))
    change = points[last] - points[quarter]
    if change > MARGIN * rise:
        return [f"On val the average still rises, by {change:.1f} since round {quarter}: more rounds may help."]
    return [f"On val the average no longer rises: {change:+.1f} since round {quarter}."]


def _beside_oracle(recalls: Sequence[Recall]) -> list[str]:
    """Whether the studies of all sites are distinguished by more than their sites."""
    for row in recalls:
        if (row.figure, row.over, row.k) == (TRAINED, TOGETHER, 1):
            shown = f"{row.recall.unsigned()} against {row.oracle:.1f}"
            if math.isnan(row.recall.low):
                return []
            if row.recall.low > row.oracle:
                return [f"Among the studies of all sites R@1 is above what knowing the site alone would give: {shown}."]
            return [f"Among the studies of all sites R@1 shows no more than knowing the site would: {shown}."]
    return []


def _classifier(run: Run) -> list[str]:
    """Where the macro AUC started and where it is: the server's on the public set, or else that of the sites."""
    figures = summary(run.history)
    for split in ("test", "val"):
        name = of_server(names.auc(split, names.MACRO))
        ends = [of_model[name] for of_model in figures.values() if name in of_model]
        if said := _areas(f"server's macro AUC on the public set ({split}; chance 0.5)", ends, "trained" in figures):
            return [said]
    measured = [(record, areas) for record in run.history if (areas := areas_of_sites(record))]
    for split in ("test", "val"):
        trained = bool(measured) and (measured[-1][0]["round"] > 0 or measured[-1][0]["phase"] == EVALUATE)
        of_models = [measured[0], measured[-1]] if trained else measured[:1]
        ends = [areas[split] for _, areas in of_models if split in areas]
        if said := _areas(f"sites' mean macro AUC ({split}; chance 0.5)", ends, trained):
            return [said] if run.measured else [said, *_whose(run)]
    return []


def _areas(whose: str, ends: Sequence[float], trained: bool) -> str:
    """A sentence on an AUC of the initial model and, where there is one, of the ``trained``; "" where one lacks."""
    if ends and not trained:
        return f"Before training, the {whose} is {ends[0]:.3f}."
    if len(ends) < 2:
        return ""
    before, after = ends
    verb = "rose" if after > before else "fell" if after < before else "stayed as it was,"
    return f"The {whose} {verb} from {before:.3f} to {after:.3f}."
