"""The table of synthetic patients: findings, anatomy, devices, sites and splits, all rows drawn at once.

No pixel and no word is made here; both are functions of this table. All randomness comes from Philox streams keyed by
(seed, stream), so every process that builds the same cohort has the same table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedvlp.data.cohort import SPLITS
from fedvlp.data.partition import PUBLISHED, dirichlet_partition

if TYPE_CHECKING:
    from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort

FINDINGS = PUBLISHED
EDEMA, EFFUSION, CONSOLIDATION, PNEUMOTHORAX, PNEUMONIA = range(5)
SIDES = ("right", "left", "bilateral")  # of the patient; the right lung is on the left of the image
ZONES = {  # by finding, index = Cases.zone
    EDEMA: ("perihilar", "lower", "diffuse"),
    EFFUSION: ("lower",),
    CONSOLIDATION: ("upper", "mid", "lower"),
    PNEUMOTHORAX: ("apical", "lateral", "basal"),
    PNEUMONIA: ("upper", "mid", "lower"),
}
SEVERITIES = ("mild", "moderate", "severe")
DEVICES = ("pacemaker", "endotracheal tube", "central line", "nasogastric tube", "sternal wires")
PACEMAKER, ETT, LINE, NGT, WIRES = range(5)
FOURTEEN = (
    *FINDINGS,
    "Cardiomegaly",
    "Hyperinflation",
    "Support Devices",
    "Pacemaker",
    "Sternal Wires",
    "Granuloma",
    "Aortic Calcification",
    "Elevated Left Diaphragm",
    "Bilateral Pneumothorax",
)
LABEL_SETS = {"five": FINDINGS, "fourteen": FOURTEEN}  # the last two of the fourteen are rare: 3 and 1.5 %
SAYABLE = (*FINDINGS, *DEVICES, "heart", "volume", "diaphragm", "aorta", "granuloma")  # what a report may leave out
STYLES = ("sections", "prose", "list", "impression", "terse")  # of reports; only the hard site is "terse"
RATES = (0.34, 0.40, 0.34, 0.26, 0.32)  # probability of each finding, in the studies that are not drawn uniformly
NEGATED = (
    0.45,
    0.70,
    0.45,
    0.75,
    0.35,
)  # probability that an absent finding is denied in the report instead of left out
UNCERTAIN = 0.06  # probability that a present finding is faint in the image, hedged in the report, and labelled -1
AT_LEAST_VAL = 32  # rows of val and of test at each site: one batch of in-batch retrieval


@dataclass(frozen=True)
class SiteStyle:
    """How one site takes its images and words its reports."""

    name: str
    contrast: float  # about 1
    brightness: float  # added grey, 0..1 scale
    curve: float  # tone curve I + curve * I (1 - I)
    noise: float  # detector noise, sigma on the 0..1 scale
    blur: float  # share of the 4-neighbour mean, 0..1
    zoom: float  # body units per half image: above 1 shows more body
    shift: tuple[float, float]  # body units
    collimation: float  # half width of the exposed field, 1 = the whole image
    marker: bool  # a side marker is burned into the corner
    ap: float  # share of AP (bedside) images
    report: str  # one of STYLES
    words: int  # index of the synonyms that the site prefers


@dataclass(frozen=True, eq=False)
class Cases:
    """One row per study, which has one image. Values of a patient are repeated in the patient's rows."""

    patient: np.ndarray  # [N] int, 0..P-1, ascending
    site: np.ndarray  # [N] int, 0 is site-1
    split: np.ndarray  # [N] str, of SPLITS
    present: np.ndarray  # [N, 5] bool, by FINDINGS
    labels: np.ndarray  # [N, 5] float32, as in a cohort
    side: np.ndarray  # [N, 5] int, index of SIDES
    zone: np.ndarray  # [N, 5] int, index of ZONES[finding]
    severity: np.ndarray  # [N, 5] int, index of SEVERITIES
    jitter: np.ndarray  # [N, 5, 2] float, of position and size, -1..1
    devices: np.ndarray  # [N, 5] bool, by DEVICES
    device_side: np.ndarray  # [N, 5] int, 0 right, 1 left (pacemaker and central line)
    heart: np.ndarray  # [N] int, 0 normal, 1 mildly enlarged, 2 markedly enlarged
    volume: np.ndarray  # [N] int, 0 low, 1 normal, 2 hyperinflated
    raised: np.ndarray  # [N] int, 0 none, 1 right, 2 left hemidiaphragm elevated
    granuloma: np.ndarray  # [N] int, 0 none, else 1 + 3 * side + zone of ("upper", "mid", "lower")
    aorta: np.ndarray  # [N] bool, prominent calcified aortic knob
    ap: np.ndarray  # [N] bool, an AP (bedside) image
    body: np.ndarray  # [N, 8] float, anatomy of the patient, -1..1
    pose: np.ndarray  # [N, 4] float, positioning of the image: zoom, x, y, rotation, standard normal
    words: np.ndarray  # [N, 24] float, 0..1, choices of wording
    omitted: np.ndarray  # [N, 15] bool, by SAYABLE: the report says nothing of it, whatever the image shows
    styles: tuple[SiteStyle, ...]  # by site

    def __len__(self) -> int:
        return len(self.patient)


def stream(seed: int, name: int, index: int = 0) -> np.random.Generator:
    """The generator of stream ``name``. Rows use 0, so (seed, row) alone decides a row's texture and noise."""
    return np.random.Generator(np.random.Philox(key=np.array([seed, (name << 48) + index], dtype=np.uint64)))


def draw_cases(spec: SyntheticCohort) -> Cases:
    """The table of a cohort. Raises ValueError as ``site_styles`` and ``dirichlet_partition`` do."""
    n = spec.size
    rng = stream(spec.seed, 1)
    patient = _patients(rng, n)
    findings = _findings(rng, n)
    extras = _extras(rng, patient)
    styles = site_styles(spec.sites, spec.seed, spec.hard_site, spec.shared_habits)
    least = max(min(4 * AT_LEAST_VAL, n // (4 * spec.sites)), 2 * spec.test_rows)
    site = dirichlet_partition(
        findings["labels"], patient, spec.sites, spec.beta, spec.seed, min_size=least, label_code=spec.label_code
    )
    ap = rng.random(n) < np.array([style.ap for style in styles])[site]
    sick = findings["present"].sum(axis=1) > 2
    return Cases(
        patient=patient,
        site=site,
        split=_splits(stream(spec.seed, 2), patient, site, spec.sites, spec.test_rows),
        ap=ap | (sick & (rng.random(n) < 0.3)) | extras["devices"][:, ETT],  # intubated patients are imaged in bed
        styles=styles,
        omitted=stream(spec.seed, 4).random((n, len(SAYABLE))) < spec.omitted,
        **findings,
        **extras,
    )


def _patients(rng: np.random.Generator, n: int) -> np.ndarray:
    """Patient [n] of each study: one study (75 %), two (20 %) or three (5 %), about 1.3 on average."""
    studies = rng.choice([1, 2, 3], size=n, p=[0.75, 0.20, 0.05])
    return np.repeat(np.arange(n), studies)[:n]


def _findings(rng: np.random.Generator, n: int) -> dict[str, np.ndarray]:
    """Presence, label and attributes [n, 5]. One study in five draws its combination uniformly: all 2^5 occur."""
    rates = np.where(rng.random((n, 1)) < 0.2, 0.5, np.array(RATES))
    present = rng.random((n, 5)) < rates
    overload = present[:, EDEMA] & (rng.random(n) < 0.35)  # fluid overload: effusions go with edema
    present[:, EFFUSION] |= overload
    labels = np.where(present, 1.0, np.nan)
    labels[~present & (rng.random((n, 5)) < np.array(NEGATED))] = 0.0
    uncertain = present & (rng.random((n, 5)) < UNCERTAIN)
    labels[uncertain] = -1.0
    both = np.array([0.84, 0.34, 0.18, 0.06, 0.24])  # how often both sides are affected
    side = np.where(rng.random((n, 5)) < both, 2, (rng.random((n, 5)) < 0.46).astype(np.int64))
    zones = np.array([len(ZONES[finding]) for finding in range(5)])
    zone = np.floor(rng.random((n, 5)) ** np.array([1, 1, 0.75, 1.5, 0.75]) * zones).astype(np.int64)
    severity = np.where(uncertain, 0, rng.choice(3, size=(n, 5), p=[0.36, 0.36, 0.28]))
    return {
        "present": present,
        "labels": labels.astype(np.float32),
        "side": side,
        "zone": zone,
        "severity": severity,
        "jitter": rng.uniform(-1, 1, (n, 5, 2)),
    }


def _extras(rng: np.random.Generator, patient: np.ndarray) -> dict[str, np.ndarray]:
    """Columns drawn per patient (anatomy, permanent devices) and per study (tubes, posture, wording)."""
    n, people = len(patient), int(patient.max()) + 1
    devices = rng.random((n, 5)) < np.array([0.0, 0.07, 0.12, 0.07, 0.0])
    for device, rate in ((PACEMAKER, 0.08), (WIRES, 0.07)):
        devices[:, device] = (rng.random(people) < rate)[patient]
    device_side = (rng.random((people, 5)) < np.array([0.85, 0, 0.25, 0, 0])).astype(np.int64)[patient]
    granuloma = np.where(rng.random(people) < 0.08, 1 + rng.integers(6, size=people), 0)
    return {
        "devices": devices,
        "device_side": device_side,
        "heart": rng.choice(3, size=people, p=[0.60, 0.24, 0.16])[patient],
        "volume": rng.choice(3, size=n, p=[0.2, 0.65, 0.15]),
        "raised": rng.choice(3, size=people, p=[0.91, 0.06, 0.03])[patient],
        "granuloma": granuloma[patient],
        "aorta": (rng.random(people) < 0.10)[patient],
        "body": rng.uniform(-1, 1, (people, 8))[patient],
        "pose": rng.standard_normal((n, 4)).clip(-2, 2),
        "words": rng.random((n, 24)),
    }


def more_labels(cases: Cases) -> np.ndarray:
    """Columns [N, 9] of ``FOURTEEN`` after the findings, 1 or 0: what the image shows, not what the report says.

    Both lungs' pneumothorax is as uncertain (-1) or blank (nan) as the pneumothorax itself.
    """
    one = cases.labels[:, PNEUMOTHORAX]
    both = np.where((one == 1) & (cases.side[:, PNEUMOTHORAX] != SIDES.index("bilateral")), 0.0, one)
    columns = (
        cases.heart > 0,
        cases.volume == 2,
        cases.devices[:, [ETT, LINE, NGT]].any(axis=1),
        cases.devices[:, PACEMAKER],
        cases.devices[:, WIRES],
        cases.granuloma > 0,
        cases.aorta,
        cases.raised == 2,
        both,
    )
    return np.stack(columns, axis=1).astype(np.float32)


def _splits(rng: np.random.Generator, patient: np.ndarray, site: np.ndarray, sites: int, test_rows: int) -> np.ndarray:
    """Split [N] by patient within each site: 15 % val, 15 % test (or ``test_rows``); 32 at least at sites of 128."""
    split = np.full(len(patient), SPLITS[0], dtype="<U5")
    for index in range(sites):
        rows = np.flatnonzero(site == index)
        quota = max(round(0.15 * len(rows)), min(AT_LEAST_VAL, len(rows) // 4))
        people, studies = np.unique(patient[rows], return_counts=True)
        order = rng.permutation(len(people))
        before = np.cumsum(studies[order]) - studies[order]  # rows ahead of this patient
        val = before < quota
        test = ~val & (before < studies[order][val].sum() + max(quota, test_rows))
        for name, chosen in ((SPLITS[1], val), (SPLITS[2], test)):
            split[rows[np.isin(patient[rows], people[order][chosen])]] = name
    return split


def site_styles(
    sites: int, seed: int, hard_site: str | None = None, shared_habits: bool = False
) -> tuple[SiteStyle, ...]:
    """How site-1..site-N take images and word reports; a site's habits do not depend on the number of sites.

    With ``shared_habits`` all sites but ``hard_site`` have those of site-1. Raises ValueError for a ``hard_site`` that
    is none of the sites.
    """
    names = [f"site-{index + 1}" for index in range(sites)]
    if hard_site is not None and hard_site not in names:
        raise ValueError(f"synthetic: hard_site is {hard_site!r}; expected one of {names[0]}..{names[-1]} or None")
    styles = []
    for number, name in enumerate(names):
        index = 0 if shared_habits else number
        u = stream(seed, 3, index).uniform(-1, 1, 12)
        hard = name == hard_site
        styles.append(
            SiteStyle(
                name=name,
                contrast=0.55 if hard else 1 + 0.16 * u[0],
                brightness=0.06 * u[1],
                curve=0.35 * u[2],
                noise=0.13 if hard else 0.045 + 0.018 * u[3],
                blur=0.6 if hard else max(0.0, 0.35 * u[4]),
                zoom=1.0 + 0.07 * u[5],
                shift=(0.04 * u[6], 0.05 * u[7]),
                collimation=0.97 if u[8] > 0.3 else 1.0,
                marker=bool(u[9] > -0.4),
                ap=0.9 if hard else 0.5 + 0.4 * u[10],
                report=STYLES[-1] if hard else STYLES[index % (len(STYLES) - 1)],
                words=index,
            )
        )
    return tuple(styles)
