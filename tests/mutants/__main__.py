"""``make mutants``: judges the mutants of all modules, or of those named, and prints the score and the survivors."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mutants import MODULES, ROOT, file_of
from mutants.bench import Job, Verdict, judge, warm, watch
from mutants.records import Baseline, Verdicts, accepted, baseline_of, keep_baseline, known_baseline, proposal
from mutants.selection import Case, chosen, files_for, own_files
from mutants.sources import Mutant, mutants_of
from mutants.stage import differences, staged


@dataclass
class Tally:
    """The verdicts on one module."""

    module: str
    killed: int = 0
    equivalent: list[Mutant] = field(default_factory=list)
    survivors: list[Mutant] = field(default_factory=list)

    @property
    def score(self) -> float:
        """Percent of the mutants that matter."""
        return 100 * self.killed / max(1, self.killed + len(self.survivors))

    def __str__(self) -> str:
        counts = f"{self.killed:5d} killed, {len(self.survivors):3d} survive, {len(self.equivalent):3d} equivalent"
        return f"{self.module:28s} {counts}, score {self.score:5.1f} %"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options().parse_args(arguments)
    if options.list:
        for module in options.module or MODULES:
            _print_tests(module)
        return 0
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[variable] = "1"  # read when torch and numpy are imported, which is now
    warm(["pytest", "hypothesis", "numpy", "torch", "safetensors.torch"])
    tallies = []
    for module in options.module or MODULES:
        if options.fresh:
            Verdicts(module).path.unlink(missing_ok=True)
        tallies.append(_tally(module, options.workers, options.all))
        print(tallies[-1], flush=True)
    _report(tallies, options.propose)
    return 0


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--module", action="append", help="e.g. federation/codec; may be given several times")
    parser.add_argument("--workers", type=int, default=1, help="mutants judged at a time")
    parser.add_argument("--list", action="store_true", help="only print which tests judge which module")
    parser.add_argument("--all", action="store_true", help="judge the accepted mutants too: is none of them killed?")
    parser.add_argument("--fresh", action="store_true", help="forget the verdicts of earlier runs")
    parser.add_argument("--propose", action="store_true", help="print the survivors as entries of accepted.toml")
    return parser


def _print_tests(module: str) -> None:
    print(f"{module}: {len(mutants_of(module))} mutants")
    for path in files_for(module):
        print(f"    {path.relative_to(ROOT)}{' (its own)' if path in own_files(module) else ''}")


def _tally(module: str, workers: int, everything: bool) -> Tally:
    """Judges what is not known yet of a module's mutants, the accepted ones only where ``everything`` is wanted."""
    mutants, verdicts, reasons = mutants_of(module), Verdicts(module), accepted()
    excused = {mutant.name for mutant in mutants if mutant.key in reasons and not everything}
    unknown = [one for one in mutants if verdicts.killer(one) is None and one.name not in excused]
    if unknown:
        began, baseline = time.monotonic(), _baseline(module)
        for done, (job, verdict) in enumerate(_judged(module, unknown, baseline, verdicts, workers), 1):
            verdicts.add(job.label, verdict.killer)
            if done % 20 == 0:
                print(f"    {module}: {done} of {len(unknown)}, {time.monotonic() - began:.0f} s", flush=True)
    tally = Tally(module)
    for mutant in mutants:
        if mutant.name not in excused and verdicts.killer(mutant):
            tally.killed += 1
        elif mutant.key in reasons:
            tally.equivalent.append(mutant)
        else:
            tally.survivors.append(mutant)
    return tally


def _baseline(module: str) -> Baseline:
    files = files_for(module)
    found = known_baseline(module, files)
    if found is None:
        began = time.monotonic()
        found = watch(module, files)
        keep_baseline(module, files, found)
        print(f"    {module}: {len(found['tests'])} tests of {len(files)} files, {time.monotonic() - began:.0f} s")
    baseline = baseline_of(found)
    for name in baseline.broken:
        print(f"    {module}: {name} fails without any mutation and judges nothing", flush=True)
    warm(baseline.modules)
    return baseline


def _judged(
    module: str, mutants: Sequence[Mutant], baseline: Baseline, verdicts: Verdicts, workers: int
) -> Iterator[tuple[Job, Verdict]]:
    """The verdicts of the fast way, and then those of the thorough one where the fast one may be wrong.

    That is so for a survivor whose lines also run while tests are collected: values made then were not the mutant's.
    """
    jobs = list(_jobs(module, mutants, baseline, verdicts))
    quick = [job for job in jobs if differences(module, job.source or "")]
    left = [job for job in jobs if job not in quick]
    for job, verdict in staged(module, quick, baseline.tests, workers):
        if verdict.killed or (not verdict.killer and baseline.collected.isdisjoint(job.label.reach)):
            yield job, verdict
        else:
            left.append(job)
    yield from judge(left, workers)


def _jobs(module: str, mutants: Sequence[Mutant], baseline: Baseline, verdicts: Verdicts) -> Iterator[Job]:
    own = {str(path.relative_to(ROOT)) for path in own_files(module)}
    for mutant in mutants:
        tests = chosen(baseline.tests, mutant.reach, own)
        if tests:
            yield Job(module, _first(verdicts.suspect(mutant), tests), mutant.source(), mutant)
        else:
            verdicts.add(mutant, "")  # no test executes it


def _first(name: str, tests: list[Case]) -> list[Case]:
    """The tests with the one of this name before all others."""
    return sorted(tests, key=lambda test: test.name != name)


def _report(tallies: Sequence[Tally], propose: bool) -> None:
    survivors = [mutant for tally in tallies for mutant in tally.survivors]
    print(f"\n{len(survivors)} survivors" if survivors else "\nno survivor")
    for mutant in survivors:
        if propose:
            print(proposal(mutant))
        else:
            place = f"{file_of(mutant.module).relative_to(ROOT)}:{mutant.line}"
            print(f"{place}  {mutant.operator} {mutant.occurrence}\n  - {mutant.before}\n  + {mutant.after}")
    if len(tallies) > 1:
        total = Tally("all")
        for tally in tallies:
            total.killed += tally.killed
            total.equivalent += tally.equivalent
            total.survivors += tally.survivors
        print(f"\n{total}")
    stale = _stale(tallies)
    if stale:
        print("\naccepted.toml has entries that no surviving mutant has any more; remove them:")
        print("\n".join(f"  {module}: {after}" for module, _, after in stale))


def _stale(tallies: Sequence[Tally]) -> list[tuple[str, str, str]]:
    modules = {tally.module for tally in tallies}
    used = {mutant.key for tally in tallies for mutant in tally.equivalent}
    return [key for key in accepted() if key[0] in modules and key not in used]


if __name__ == "__main__":
    ending = main()
    sys.stdout.flush()
    os._exit(ending)  # what the tests had imported need not be taken down
