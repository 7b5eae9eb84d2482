"""The measured tables and figures of the five papers, one entry for each row of spec 17.

Rows, columns and printed values of most are those of studies/tables (``_table``); the others (``Entry``) have rows or
columns of their own, and no printed values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fedvlp.data.cohort import PUBLIC
from fedvlp.data.labels import CHEXPERT
from fedvlp.data.synthetic.cases import FINDINGS
from fedvlp.run.config import choose
from studies.claims import ledger, selection
from studies.claims.ensembles import RSUM
from studies.claims.heads import head
from studies.protocols.distortion import MEAN
from studies.reproduce import measures as m
from studies.reproduce import printed
from studies.reproduce.experiments import alignment, missing_modalities, records, representations, unlike_sites
from studies.reproduce.measures import at_site, own
from studies.reproduce.table import DEMO, Column, Entry, Row, Size, Study

OWN_PATIENTS = "the counts are of MIMIC's patients"
BY_EYE = "a picture to be judged by eye: no figure is printed"


# FedDRA

RETR = (m.AVERAGE, m.AVERAGE5, m.WORST, m.WORST5)
HEAD_FIGURES = tuple(
    head(data, share) for data in (alignment.RSNA, alignment.COVID, alignment.SEGMENTED) for share in ("1 %", "10 %")
)
MAIN_FIGURES = (*HEAD_FIGURES, *RETR)
BY_SITE = (
    *(at_site(site) for site in records.SITES), m.AVERAGE, *(at_site(site, 5) for site in records.SITES), m.AVERAGE5,
)  # fmt: skip


SWAPPED = "Headings are as printed, and some are swapped there: ours is of what the numbers are."


def _table(
    key: str, title: str, study: Study, cells: Sequence[Any],
    figures: Sequence[Any], own: Sequence[Column] = (), ids: Sequence[str] = (), **more: Any,
) -> Entry:  # fmt: skip
    """A table with the paper's rows and columns (studies/tables), and ``own`` columns that it does not print.

    ``cells`` and ``figures`` are in the paper's order: a cell with what its row is about, a figure with its cell's end.
    """
    paper, _, number = key.partition(":")
    titles, headings = printed.labels(key)
    rows = tuple(Row(one, *((cell,) if isinstance(cell, str) else cell)) for one, cell in _pairs(titles, cells))
    columns = tuple(Column(one, *((of,) if isinstance(of, str) else of)) for one, of in _pairs(headings, figures))
    return Entry(paper, tuple(ids) or (number,), title, study, rows, (*columns, *own), table=key, **more)


def _pairs(labels: Sequence[str], named: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    return zip(labels, named, strict=True)


OWN_LOSSES = "FedEMA, FedU, FedX and FedMAE train their own loss beside ConVIRT's, whatever the block says."

ALONE_TOO = ("centralized", "fedavg", *(("local", own(f"site-{number}")) for number in range(1, 6)), "local")

RETRAINED = tuple(m.retrained(site) for site in (*records.SITES, MEAN))
RECALLS = (*(at_site(site) for site in records.SITES), *(at_site(site, 5) for site in records.SITES))
DISTORTED = tuple(m.distorted(site) for site in records.SITES)


def _turns(key: str) -> Entry:
    """FedAvg's model, and the local models whose mean it is, and those of one round more."""
    return _table(key, "server's and sites' models after a round of training", alignment.DISTORTION, (
        "fedavg", *(("fedavg-before", model) for model in RETRAINED), *(("fedavg", model) for model in RETRAINED),
    ), RECALLS, note="Turn 25 is the last round of the run, turn 26 one more at each site.")  # fmt: skip


def _shallow(key: str) -> Entry:
    return _table(key, "shallow layers of the server's model re-trained", alignment.SHALLOW, (
        "fedavg", "fedavg-twice", *(("fedavg", model) for model in RETRAINED[:-1]),
    ), BY_SITE, note="Com. 25 is the last round of the run, com. 50 of one that is twice as long.")  # fmt: skip


def _union(key: str) -> Entry:
    return _table(key, "shallow layers of local models re-trained on the union", alignment.SHALLOW, (
        "centralized", "fedavg", *(("local", model) for model in RETRAINED[:-1]),
        *(("local", own(site)) for site in records.SITES),
    ), BY_SITE, note="Block 1 is re-trained, block 2 as it was.")  # fmt: skip


def _distortion(key: str, cell: str) -> Entry:
    """The fall of the paired cosine by the site that was trained on."""
    return _table(key, f"distortion, {cell}", alignment.DISTORTION, tuple((cell, model) for model in RETRAINED),
                  DISTORTED, digits=4)  # fmt: skip


def _cosines(size: Size) -> tuple[Column, ...]:
    """One column a round."""
    return tuple(Column(f"round {number}", str(number)) for number in range(1 + alignment.ROUNDS[size.name]))


FEDDRA = (
    _table("feddra:2", "methods, three losses: heads and recall", alignment.HEADS, (
        "fedema", "fedmoon", "fedavg", "feddra", "fedx", "fedu", "fedavg-gloria", "feddra-gloria", "fedldawa-mgca",
        "fedavg-mgca", "feddra-mgca",
    ), MAIN_FIGURES, note=OWN_LOSSES),
    _table("feddra:3", "ablation", alignment.HEADS,
           ("feddra-one-stage", "feddra-no-constraint", "feddra-no-dro", "feddra"),
           (*HEAD_FIGURES[:4], *RETR), note=SWAPPED),
    _table("feddra:4", "retina: DR and edema at 10, 20, 100 %", alignment.RETINA,
           ("local", "fedavg", "fedmae", "fedx", "fedu", "feddra", "centralized"), tuple(
        head(name, share) for name in ("DR", "macular edema") for share in ("10 %", "20 %", "100 %")
    )),
    _table("feddra:5", "heterogeneity 1 and 5 (beta)", alignment.HEADS, (
        *(f"{name}{loss}{beta}" for beta in ("", "-beta-5") for name in ("fedavg", "feddra")
          for loss in ("", "-gloria")), "centralized", "centralized-gloria",
    ), HEAD_FIGURES),
    _table("feddra:6", "decentralized, FedAvg, centralized by loss", alignment.HEADS, tuple(
        name + loss for loss in ("", "-gloria", "-mgca") for name in ("local", "fedavg", "centralized")
    ), MAIN_FIGURES),
    _table("feddra:7", "2 and 5 sites", alignment.HEADS, ("feddra-2-sites", "feddra"), MAIN_FIGURES),
    _table("feddra:8", "rho", alignment.HEADS, ("feddra-rho-001", "feddra", "feddra-rho-1"), MAIN_FIGURES),
    _table("feddra:9", "mu", alignment.HEADS, ("feddra-mu-1", "feddra", "feddra-mu-10"),
           (*HEAD_FIGURES, m.AVERAGE, m.AVERAGE5, m.DISPARITY)),
    _table("feddra:10", "recall by site", alignment.RECALL, ALONE_TOO, BY_SITE),
    _turns("feddra:11"),
    _shallow("feddra:12"),
    _union("feddra:13"),
    Entry("feddra", ("f3a-c", "f3a", "f3b", "f3c"), "graphs of tables 10, 11, 13", shows=("10", "11", "13")),
    Entry("feddra", ("f4a-c", "f4a", "f4b", "f4c"), "graphs of tables 7, 8, 9", shows=("7", "8", "9")),
    Entry("feddra", ("f4d-f", "f4d", "f4e", "f4f"), "cosine of the pairs by round", alignment.RECALL, tuple(
        Row(f"{title}, {site}", cell, m.cosine_at(site))
        for title, cell in (("FedAvg", "fedavg"), ("FedDRA", "feddra")) for site in records.SITES
    ), _cosines(Size(DEMO)), columns_at=_cosines, digits=3,
          note="Of validation records, under the model that a round starts from. The paper draws curves alone."),
)  # fmt: skip

# FedRGB

ABLATION = ("fedrgb-average", "fedrgb-contrastive", "fedrgb")


def _counts(number: str, title: str, rows: Iterable[str], **more: Any) -> Entry:
    """A table of how records are dealt."""
    return _table(f"fedrgb:{number}", title, alignment.COUNTS, tuple(("cohort", f"{row} ") for row in rows),
                  tuple(f"at {site}" for site in records.SITES), digits=0, **more)  # fmt: skip


FEDRGB = (
    _table("fedrgb:2", "methods: heads and recall", alignment.HEADS,
           ("local", "fedx", "fedmae", "fedema", "fedavg", "fedrgb", "centralized"), MAIN_FIGURES, note=OWN_LOSSES),
    _table("fedrgb:3", "GLoRIA and MGCA", alignment.HEADS, tuple(
        name + loss for loss in ("-gloria", "-mgca") for name in ("local", "fedavg", "fedrgb", "centralized")
    ), MAIN_FIGURES),
    _table("fedrgb:4", "ablation", alignment.HEADS, ABLATION, (HEAD_FIGURES[0], HEAD_FIGURES[2], *RETR), note=SWAPPED),
    _table("fedrgb:5", "retrieval outside the training sites (EHRXQA)", alignment.ELSEWHERE,
           ("fedx", "fedmae", "fedema", "fedavg", "fedrgb"), (m.outside(1), m.outside(5), *RETR),
           note="Pairs of people whom a run was trained on are left out; the paper does not say whether it does so."),
    _distortion("fedrgb:6", "fedavg"),
    _counts("7", "records by site and combination of findings", map(alignment.combination, alignment.COMBINATIONS)),
    _counts("8", "records by site and finding", FINDINGS),
    _table("fedrgb:10", "rho", alignment.HEADS, ("fedrgb-rho-1e-7", "fedrgb-rho-1e-4", "fedrgb"), HEAD_FIGURES),
    _distortion("fedrgb:11", "fedrgb"),
    _table("fedrgb:12", "recall by site", alignment.RECALL, ALONE_TOO, BY_SITE),
    _turns("fedrgb:13"),
    _table("fedrgb:14", "number of rounds", alignment.HEADS, ("fedrgb-0", "fedrgb-15", "fedrgb-20", "fedrgb"),
           MAIN_FIGURES, note="In the demo 0, 1, 2 and 3 rounds; at the smallest size 0, 2, 3 and 1."),
    _table("fedrgb:15", "alpha", alignment.HEADS, ("fedrgb-alpha-2", "fedrgb-alpha-5", "fedrgb-alpha-10"),
           (*HEAD_FIGURES, m.DISPARITY, m.AVERAGE, m.WORST), note=SWAPPED),
    _table("fedrgb:16", "2 and 5 sites", alignment.HEADS, ("fedrgb-2-sites", "fedrgb"),
           MAIN_FIGURES, note=SWAPPED),
    _shallow("fedrgb:17"),
    _union("fedrgb:18"),
    _table("fedrgb:19", "ablation by site", alignment.RECALL, ABLATION, BY_SITE),
    Entry("fedrgb", ("f3",), "graph of tables 7 and 8", shows=("7", "8")),
    Entry("fedrgb", ("f4-f7", "f4", "f5", "f6", "f7"), "graphs of tables 12, 13, 17, 18",
          shows=("12", "13", "17", "18")),
    Entry("fedrgb", ("f8-f9", "f8", "f9"), "alpha, as a graph", shows=("15",)),
    Entry("fedrgb", ("f10",), "rho, as a graph", shows=("10",)),
    Entry("fedrgb", ("f11",), "rounds, as a graph", shows=("14",)),
)  # fmt: skip

# CreamFL

SUM = Column("R@1 sum", m.R1_SUM)
COCO = ("fedavg", "fediot", "fedmd", "fedet", "fedgems", "reamfl-avg", "reamfl-iot", "creamfl")
FOUR_SUMS = "The sum is of four recalls (1K and 5K candidates, both directions); in the demo of two (one set)."
CREAMFL = (
    _table("creamfl:1", "recall on COCO", representations.RECALL, COCO, (
        *(m.ranked(*rank) for rank in m.RANKS), m.R1_SUM, *(m.among_all(*rank) for rank in m.RANKS),
    ), note=FOUR_SUMS),
    _table("creamfl:2", "VQA accuracy", representations.ANSWERS, COCO, (m.VQA_OFFICIAL,), (
        Column("most common answer", m.VQA_CLASS), Column("majority answer", m.VQA_MAJORITY),
        Column("majority answer by question", m.VQA_BLIND),
    ), note="The paper says neither which metric nor which head it uses; its values stand beside the official metric. "
          "The last two columns need no image, so a method has to beat them. Encoders are frozen."),
    _table("creamfl:3", "ablation", representations.RECALL, (
        "reamfl-mean", "reamfl-avg", "reamfl-iot", "reamfl-gca", "reamfl-inter", "reamfl-intra", "creamfl",
    ), (m.R1_SUM,), (Column("sum of R@1, 5, 10", RSUM),), note=FOUR_SUMS),
    _table("creamfl:4", "a larger public set", representations.RECALL, tuple(
        f"{name}-large" for name in ("fedgems", "fedet", "reamfl-avg", "reamfl-iot", "creamfl")
    ), (m.R1_SUM,), note=FOUR_SUMS + " In the demo 40 % of the patients are public, and 25 % in table 1."),
    Entry("creamfl", ("f4",), "communication and recall", representations.RECALL, tuple(
        Row(title, cell) for title, cell in (
            *((f"{title}{of}", name + end) for title, name in (("FedAvg", "fedavg"), ("FedIoT", "fediot"))
              for of, end in (("", ""), (", ResNet-50", "-resnet50"), (", ResNet-34", "-resnet34"))),
            *((f"{title}{of}", name + end) for title, name in (("reamFL+IoT", "reamfl-iot"), ("CreamFL", "creamfl"))
              for of, end in (("", ""), (", few public", "-small"), (", many public", "-large"),
                              (", half as wide", "-half"), (", a quarter as wide", "-quarter"))),
        )
    ), (Column("MB a round", m.MEGABYTES), SUM),
          note="Public pairs: 25,000, 50,000, 100,000; in the demo 15, 25, 40 % of patients. Width: 512, 256, 128; in "
          "the demo 128, 64, 32. Its smaller models stand in for ResNet-50 and ResNet-34. The paper prints no value."),
)  # fmt: skip

# PMS-FM

LEAK = "The released code leaks the true site into the selection (docs/methods/released-code.md, 7.5): no target."
PMS = (
    "centralized", "fedavg", "fedprox", "fedmoon", "fedsm", "fedfed", "pms-fm", "fedavg-mgca", "pms-fm-mgca",
)  # fmt: skip
AT_CLIENTS = (*(m.deployed_at(number) for number in range(1, 5)), m.deployed("mean"))
OWN_AND_SELECTED = (selection.accuracy(selection.OWN), selection.accuracy("selected"))
TRIPLE = (selection.anew(selection.TRIPLE),)
PMS_FM = (
    _table("pms-fm:1", "zero-shot accuracy", unlike_sites.ZERO_SHOT, PMS, AT_CLIENTS, note=LEAK, digits=3,
           judged=OWN_AND_SELECTED),
    _table("pms-fm:2", "zero-shot on RSNA and COVID", unlike_sites.EXTERNAL, PMS,
           tuple(m.deployed(name) for name in ("RSNA", "COVID", "mean")), digits=3,
           note=LEAK + " A method without a selector is judged by its global model."),
    _table("pms-fm:3", "models of single sites", unlike_sites.ZERO_SHOT, (
        ("pms-fm", m.GLOBAL_MODEL), *(("pms-fm", m.client(number)) for number in range(1, 5)), "pms-fm",
    ), AT_CLIENTS, digits=3, judged=OWN_AND_SELECTED, note=LEAK + " The models of clients are the personalised ones."),
    _table("pms-fm:4", "embeddings and fusion at inference", unlike_sites.ZERO_SHOT, (
        "selector-enhanced-self", "selector-token-self", "selector-triple-attention", "selector-enhanced-mlp",
        "selector-token-mlp", "pms-fm",
    ), (m.deployed("mean"),), digits=3, judged=TRIPLE,
           note="E: zero-shot compares images with the enhanced embedding; T: the selector sees the token embedding."),
    _table("pms-fm:5", "embeddings of the selector", unlike_sites.ZERO_SHOT, (
        "selector-image", "selector-report-attention", "selector-report-mlp", "selector-triple-attention", "pms-fm",
    ), (m.NAMED, m.deployed("mean")), digits=3, judged=TRIPLE,
           note="I, P, W: embeddings of image, prompt and words. Rows 2 and 4 have the same marks; here 4 has all."),
)  # fmt: skip

# CAR-MFL

MIXED = tuple(
    Column(":".join(map(str, mix)), ledger.MACRO, missing_modalities.mixed(mix)) for mix in missing_modalities.MIXES
)
HETERO = Column("hetero 8:0:2", ledger.MACRO, "-hetero")


def _public_sizes(end: str) -> tuple[Column, ...]:
    """The public set of the base, then smaller ones."""
    return (
        Column("15 % public or 1,000 patients", ledger.MACRO, end),
        Column("8 % or 500", ledger.MACRO, f"{end}-public-8"), Column("4 % or 250", ledger.MACRO, f"{end}-public-4"),
    )  # fmt: skip


PUBLIC_PAIR = (Row("mFedAvgP", "mfedavg-p"), Row("CAR-MFL", "car-mfl"))
CAR_MFL = (
    _table("car-mfl:1", "macro AUC by mix of sites (image:text:both)", missing_modalities.MACRO_AUC_UNLIKE,
           ("mfedavg", "mfedavg-p", "creamfl", "car-mfl"),
           (*((ledger.MACRO, column.cell) for column in (*MIXED, HETERO)),),
           note="CreamFL's figures are of the server's classifier; a site passes over the public set once a round."),
    _table("car-mfl:2", "bounds at 8:0:2", missing_modalities.MACRO_AUC, ("",), tuple(
        (ledger.MACRO, cell) for cell in (ledger.POOLED, "lower", ledger.ALL_PAIRED, "mfedavg-p", "car-mfl")
    )),
    _table("car-mfl:3", "public samples by number of patients", missing_modalities.DEALT, ("cohort",),
           tuple(map(missing_modalities.public_of, missing_modalities.PUBLIC_SIZES)), no_demo=OWN_PATIENTS, digits=0),
    _table("car-mfl:4", "client sizes", missing_modalities.DEALT_UNLIKE,
           ("cohort", ("cohort", missing_modalities.UNLIKE)), tuple(map(records.dealt, missing_modalities.TEN)),
           no_demo=OWN_PATIENTS, digits=0, note="The released partitions number the sites from 1."),
    _table("car-mfl:5", "alpha, validation, 4:0:6", missing_modalities.MACRO_AUC, ("car-mfl",), tuple(
        (m.VAL_MACRO, end) for end in ("-alpha-10", "-alpha-5", "-alpha-4", "-4-0-6", "-alpha-2", "-alpha-0")
    )),
    Entry("car-mfl", ("f2",), "rare classes by mix", missing_modalities.MACRO_AUC, PUBLIC_PAIR, tuple(
        Column(f"{finding}, {column.title}", m.area(finding), column.cell)
        for finding in ("Fracture", "Lung Lesion") for column in MIXED
    ), no_demo="its five findings are all common; fourteen with rare ones are in `fedvlp claims car-mfl`",
       note="The paper draws bars; its text says that each is under 1.5 % of 43,802 records."),
    Entry("car-mfl", ("f3a",), "size of the public set", missing_modalities.MACRO_AUC, PUBLIC_PAIR,
          _public_sizes(""),
          note="The paper draws curves; its text says that CAR-MFL leads by 6 points with 250 patients."),
    Entry("car-mfl", ("f3b",), "share of the classifier's weight on the image", missing_modalities.MACRO_AUC,
          PUBLIC_PAIR, (Column("image's share", m.BIAS),), digits=3),
    Entry("car-mfl", ("f5",), "label distributions", missing_modalities.DEALT, tuple(
        Row(finding, "cohort", f"{finding} ") for finding in CHEXPERT
    ), tuple(Column(site, f"at {site}") for site in (*missing_modalities.TEN, PUBLIC)), digits=0,
          no_demo="it has no fourteen labels; `fedvlp reproduce fedrgb:8` counts its five",
          note="Training records in which a finding is present; the paper's counts are not in our sources."),
    Entry("car-mfl", ("f6",), "size of the public set, heterogeneous", missing_modalities.MACRO_AUC_UNLIKE, PUBLIC_PAIR,
          _public_sizes("-hetero")),
)  # fmt: skip

ENTRIES = (*FEDDRA, *FEDRGB, *CREAMFL, *PMS_FM, *CAR_MFL)
BY_KEY = {key: entry for entry in ENTRIES for key in entry.keys}
"""Every name of every entry."""

NOT_MEASURED = (
    ("feddra", "1, f1, f2", "structural"), ("feddra", "f5", BY_EYE), ("fedrgb", "1, f1, f2", "structural"),
    ("fedrgb", "9", "structural: `--dry-run` has the transfer; its seconds are of four A40, its FLOP of sums"),
    ("fedrgb", "f12", BY_EYE),
    ("creamfl", "f1, f2", "structural"), ("creamfl", "f3, f5, f6", BY_EYE), ("pms-fm", "f1 to f3", "structural"),
    ("car-mfl", "f1", "structural"), ("car-mfl", "f4, f7", BY_EYE),
)  # fmt: skip
"""(paper, tables and figures, why they are no measured rows)."""


def get(key: str) -> Entry:
    """The entry of that name, e.g. "feddra:2". Raises ValueError naming the nearest one."""
    entry: Entry = choose("table", key, "", BY_KEY)
    return entry


def shown(entry: Entry) -> list[Entry]:
    """The tables that are run for an entry: its own, or those that a figure draws."""
    return [get(f"{entry.paper}:{name}") for name in entry.shows] or [entry]
