"""Spec faults, rows 7, 9, 22, 27, 30, 31 and 36 at a site: what it cannot do costs its own update and says why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import pytest
import torch
from support.toy import World, same_bytes, small

from fedvlp.core.server_state import Server
from fedvlp.core.types import Broadcast, Reply
from fedvlp.data.cohort import Cohort
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.federation.exchange import SequentialExchange
from fedvlp.federation.loop import Federation, Rounds
from fedvlp.methods import METHODS
from fedvlp.run import presets
from fedvlp.run.assembly import Assembly
from fedvlp.run.config import override
from fedvlp.run.experiment import Experiment


@dataclass(frozen=True)
class Lopsided:
    """The built-in cohort, in which site-3 has no record to train on."""

    def build(self) -> Cohort:
        cohort = SyntheticCohort(size=200, sites=3).build()
        assert cohort.sites is not None
        where = zip(cohort.sites, cohort.splits, strict=True)
        return cohort.with_sites(["site-1" if (s, p) == ("site-3", "train") else s for s, p in where])


def one_step(rounds: int) -> Experiment:
    chosen = replace(presets.get("fedavg"), data=Lopsided(), rounds=Rounds(rounds=rounds, evaluate_every=0))
    return override(chosen, "method.local_steps", "1")


def test_rows_7_and_9_a_site_with_zero_records_is_named_left_out_and_changes_nothing() -> None:
    """Bit for bit the model of the two others; after two rounds the site is not asked any more."""

    def run(silent: str) -> Server:
        assembly = Assembly(one_step(rounds=3))
        inner = SequentialExchange(assembly.site)

        def exchange(messages: Mapping[str, Broadcast]) -> Iterator[tuple[str, Reply]]:
            for site, reply in inner(messages):
                yield site, TimeoutError() if site == silent else reply

        server = assembly.server(("site-1", "site-2", "site-3"))
        Federation(assembly.experiment.method, server, assembly.experiment.rounds, exchange).run()
        return server

    seen = run("nobody")
    said = [record["dropped"]["site-3"] for record in seen.history]
    empty = "NoRecordsError: site data: training needs at least 2 records, this site has 0"
    assert said == [empty, empty, "left out after missed phases"]
    same_bytes(seen.state, run("site-3").state)


def test_a_site_that_the_data_do_not_know_is_told_so() -> None:
    with pytest.raises(ValueError, match="site-9' has no records in this experiment; there are: site-1, site-2"):
        Assembly(override(presets.get("fedavg"), "data.sites", "2")).site("site-9")


@pytest.mark.parametrize("error", [MemoryError(), torch.cuda.OutOfMemoryError("Tried to allocate 2.00 GiB")])
def test_row_36_no_memory_left_says_what_to_do(error: Exception) -> None:
    one = World(small(METHODS["fedavg"]), rounds=Rounds(rounds=1, evaluate_every=0))

    def out_of_memory() -> None:
        raise error

    one.data["b"].tick = out_of_memory
    dropped = one.run().history[0]["dropped"]
    assert list(dropped) == ["b"]
    assert "OutOfMemoryError: " in dropped["b"] or "MemoryError: " in dropped["b"]
    assert "lower training.batch_size" in dropped["b"]
    assert "2.00 GiB" not in dropped["b"]
