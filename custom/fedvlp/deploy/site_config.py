"""A site's own ``local/fedvlp.json``: which data sets it offers to jobs, under which names, and where they are.

A job names a data set (``NamedData("pretrain")``) and never a path; the site says what "pretrain" is. The
synthetic cohort is offered everywhere as "synthetic".
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path, PurePath, PureWindowsPath
from typing import Any

from fedvlp.core.checkpoint import save_json
from fedvlp.core.seeds import seed
from fedvlp.core.validate import require, require_name
from fedvlp.data.cohort import PUBLIC, Cohort
from fedvlp.data.deid import kinds_of
from fedvlp.data.screening import Screened, screen_all
from fedvlp.data.sources import SOURCES, FileSource
from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
from fedvlp.deploy.envelope import Envelope
from fedvlp.deploy.named_data import NamedData, SiteConfigError
from fedvlp.models import initial
from fedvlp.models.dual_encoder import ModelConfig
from fedvlp.models.tiny import BUILT_IN
from fedvlp.run.config import choose, fields_of, from_config, nearest, refuse_misfit
from fedvlp.run.experiment import Experiment, Source
from fedvlp.run.site_sources import SiteSources

FILE = "fedvlp.json"
SYNTHETIC = "synthetic"
REHEARSAL_STUDIES = 400  # of the synthetic cohort at each site

MODELS = "models"
"""Folder of the kit for towers of the site's own, each a folder that a job calls by its name."""

TOWER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}(/[A-Za-z0-9][A-Za-z0-9_.-]{0,127})?")
"""A name as timm and transformers have them, of an owner perhaps; no address, and no path that leads up."""


@dataclass(frozen=True)
class OwnData:
    """A source all of whose records belong to one site, whatever its table says of sites."""

    source: Source
    site: str

    def build(self) -> Cohort:
        return self.screen().build()

    def screen(self) -> Screened:
        """The PHI scan of the reports, before any image is decoded."""
        return screen_all([self.source], self._owned)

    def _owned(self, cohorts: Sequence[Cohort]) -> Cohort:
        return cohorts[0].with_sites([self.site] * len(cohorts[0]))


@dataclass(frozen=True)
class SiteConfig:
    """The file, checked: every path in it lies under ``root`` (a cache: under the kit)."""

    root: str = "data"  # folder of all data sets; absolute, or relative to the kit
    version: str = ""  # of fedvlp, as the consortium agreed; fedvlp doctor compares
    # train on reports in which the scan (data/deid.py) found identifiers: all kinds of them, or those that are named
    accept_phi_risk: bool | tuple[str, ...] = False
    data: dict[str, FileSource] = field(default_factory=dict)
    public: tuple[str, ...] = ()  # names in ``data`` of what anybody may have: a job may take them as its public set
    envelope: Envelope = field(default_factory=Envelope)  # what jobs may do here (deploy/envelope.py)
    processes: int = 0  # that train together in a job exported with --child, e.g. one per GPU; 0 = as the job says

    def __post_init__(self) -> None:
        if not isinstance(self.accept_phi_risk, bool):
            object.__setattr__(self, "accept_phi_risk", kinds_of(self.accept_phi_risk))
        require(self.processes >= 0, f"processes is {self.processes}; 0 = as the job says")

    @staticmethod
    def load(local: Path) -> SiteConfig:
        """Reads ``local/fedvlp.json`` of the kit. Raises SiteConfigError for an unknown key, type, source or path."""
        try:
            return _checked(json.loads((local / FILE).read_text(encoding="utf-8")), local.resolve().parent)
        except FileNotFoundError:
            raise SiteConfigError(
                f"this machine has no local/{FILE}; a site takes the one of its kit's archive and edits it, a server "
                "writes one for a public set alone (guide/LEAD.md)",
                public="this site has no local/fedvlp.json",
            ) from None
        except json.JSONDecodeError as error:
            raise SiteConfigError(
                f"local/{FILE} is not JSON: line {error.lineno}, {error.msg}",
                public="local/fedvlp.json is not JSON: line {lineno}",
                lineno=error.lineno,
            ) from None
        except ValueError as error:
            raise SiteConfigError(f"local/{FILE}: {error}", public="local/fedvlp.json has a mistake in it") from None


def accepts_phi_risk(local: Path) -> bool | tuple[str, ...]:
    """Whether the site's engineer has said so, or of which kinds; a site without the file has not."""
    return (local / FILE).exists() and SiteConfig.load(local).accept_phi_risk


def caches_at(local: Path) -> set[Path]:
    """The folders of decoded images that the site's data sets have."""
    offered = SiteConfig.load(local).data.values() if (local / FILE).exists() else ()
    return {Path(source.cache) for source in offered if source.cache}


def is_provisioned(kit: Path) -> bool:
    """Whether this is a site of a consortium, and no simulation on somebody's own machine."""
    return (kit / "startup" / "fed_client.json").exists()


def is_server(kit: Path) -> bool:
    """Whether this is the server of a consortium."""
    return (kit / "startup" / "fed_server.json").exists()


def envelope_at(kit: Path) -> Envelope | None:
    """The limits of a provisioned site; its defaults where it has no file of its own; None on anybody's own machine.

    Raises SiteConfigError where the file cannot be read: then no job runs.
    """
    if not is_provisioned(kit):
        return None
    return SiteConfig.load(kit / "local").envelope if (kit / "local" / FILE).exists() else Envelope()


def accept(local: Path, mark: str) -> None:
    """Adds the fingerprint of an experiment to those that may run here. Raises SiteConfigError."""
    SiteConfig.load(local)  # nothing is added to a file with a mistake in it
    content = json.loads((local / FILE).read_text(encoding="utf-8"))
    accepted = content.setdefault("envelope", {}).setdefault("accepted", [])
    if mark not in accepted:
        accepted.append(mark)
    save_json(local / FILE, content)


def processes_at(local: Path) -> int:
    """How many processes the site wants to train with; 0 = as the job says, also where its file cannot be read."""
    try:
        return SiteConfig.load(local).processes
    except SiteConfigError:  # the task says what is wrong with it
        return 0


def at_site(experiment: Experiment, site: str, local: Path) -> Experiment:
    """``experiment`` with the data set it names replaced by what ``site`` has under that name.

    ``local`` is the site's folder of settings. A provisioned site refuses a job that brings a source with paths.
    """
    kit = local.parent
    if is_provisioned(kit):
        experiment = with_own_towers(experiment, kit)
    wanted = experiment.data
    if isinstance(wanted, NamedData):
        own = own_source(wanted, site, local)
        if not wanted.public:
            return replace(experiment, data=OwnData(own, site))
        # the public set first: so every site has its labels in the server's order
        return replace(experiment, data=SiteSources(((PUBLIC, public_source(wanted, local)), (site, own))))
    if not isinstance(wanted, SyntheticCohort) and is_provisioned(kit):
        raise SiteConfigError(
            f"the job brings {type(wanted).__name__}; a site opens only what its own local/{FILE} names",
            public="the job brings a source of its own; a site opens only what its own local/fedvlp.json names",
        )
    return experiment


def at_server(experiment: Experiment, local: Path) -> Experiment:
    """``experiment`` with the public set it names as the server has it, where the server is one that trains on it.

    ``local`` is the server's folder of settings. Raises SiteConfigError where it offers no such set, and at the server
    of a consortium for a job that brings a source with paths.
    """
    wanted = experiment.data
    if not experiment.method.uses_public:
        return experiment
    if not isinstance(wanted, NamedData):
        if not isinstance(wanted, SyntheticCohort) and is_server(local.parent):
            raise SiteConfigError(f"the job brings {type(wanted).__name__}; name a public set of local/{FILE} instead")
        return experiment
    return replace(experiment, data=SiteSources(((PUBLIC, public_source(wanted, local)),)))


def with_own_towers(experiment: Experiment, kit: Path) -> Experiment:
    """``experiment`` with each tower that is a folder of ``kit``/models in place of its name, at a provisioned machine.

    A job names a tower as timm or transformers do and never a path: it would tell what lies on this machine's disk.
    So it does with the weights to start from, and says their checksum.
    """
    models = tuple((site, _own_towers(model, kit)) for site, model in experiment.site_models)
    return replace(experiment, model=_own_towers(experiment.model, kit), site_models=models)


def _own_towers(model: ModelConfig, kit: Path) -> ModelConfig:
    towers: dict[str, Any] = {}
    for field_name in ("image_tower", "text_tower"):
        name = getattr(model, field_name)
        if name in BUILT_IN:
            continue
        tower = initial.parse(name)
        if not TOWER.fullmatch(tower.name):
            raise SiteConfigError(
                f"{field_name} is no name of a model; a job names towers and gives no path",
                public="a tower is no name of a model; a job names towers and gives no path",
            )
        folder = _own_folder(field_name, tower.name, kit)
        if folder:
            towers[field_name] = str(tower._replace(name=folder))
    init = initial.parse(model.init)
    if init.name and init.name not in initial.SHIPPED:
        if not TOWER.fullmatch(init.name):
            raise SiteConfigError("model.init is no name of weights; a job names them and gives no path")
        if not init.digest:
            raise SiteConfigError(
                f"model.init {init.name!r} lacks the checksum of the weights; export the job again, with NAME@SHA256"
            )
        folder = _own_folder("model.init", init.name, kit)
        if folder:
            towers["init"] = str(init._replace(name=folder))
    return replace(model, **towers) if towers else model


def _own_folder(what: str, name: str, kit: Path) -> str:
    """The folder of ``kit``/models with this name; "" where there is none. Raises SiteConfigError for another path."""
    if (kit / MODELS / name).is_dir():
        return str(_inside(kit / MODELS, name))
    if Path(name).exists():
        raise SiteConfigError(
            f"{what} {name!r} is no folder of this site's {MODELS}/ and no name of a model",
            public="a tower is no folder of this site's models/ and no name of a model",
        )
    return ""


def own_source(wanted: NamedData, site: str, local: Path) -> Source:
    """What ``site`` has under the name of a data set. Raises SiteConfigError where it offers none of that name."""
    if wanted.name == SYNTHETIC:  # a rehearsal: every site draws patients of its own
        return SyntheticCohort(1, REHEARSAL_STUDIES, wanted.image_size, seed=seed(SYNTHETIC, site) >> 32)
    offered = SiteConfig.load(local).data
    if wanted.name not in offered:
        raise SiteConfigError(
            f"site {site} offers no data set {wanted.name!r}{nearest(wanted.name, list(offered))}; "
            f"its engineer adds one to local/{FILE}",
            public="this site offers no data set of that name; its engineer adds one to local/fedvlp.json",
        )
    return replace(offered[wanted.name], image_size=wanted.image_size)


def public_source(wanted: NamedData, local: Path) -> Source:
    """What this machine has under the name of a public set.

    Raises SiteConfigError where it has none of that name, or does not list it as public: of a public set a job may
    send something about every single record.
    """
    if wanted.public == SYNTHETIC:  # a rehearsal: the same patients at every site, and at no site
        return SyntheticCohort(1, REHEARSAL_STUDIES, wanted.image_size, seed=seed(SYNTHETIC, PUBLIC) >> 32)
    config = SiteConfig.load(local)
    if wanted.public not in config.public:
        raise SiteConfigError(
            f"this machine offers no public set {wanted.public!r}{nearest(wanted.public, list(config.public))}; if "
            f'anybody may have it, add the data set to local/{FILE} and its name to "public" there'
        )
    return replace(config.data[wanted.public], image_size=wanted.image_size)


def _checked(content: Any, kit: Path) -> SiteConfig:
    """The file's content as settings. Raises ValueError."""
    require(isinstance(content, dict), "expected an object {...}")
    for key, value in content.items():
        _refuse_unknown(key, fields_of(SiteConfig), "setting")
        content[key] = tuple(value) if isinstance(value, list) else value
        refuse_misfit(SiteConfig, key, content[key])
    envelope = _envelope(content.get("envelope", {}))
    entries = content.get("data", {})
    require(isinstance(entries, dict), '"data" maps names to data sets')
    for name in entries:
        require_name("the name of a data set", name)
    require(SYNTHETIC not in entries, f"{SYNTHETIC!r} is the synthetic cohort; give the data set another name")
    root = (kit / content.get("root", "data")).resolve()
    sources = {name: _source(entry, root, kit) for name, entry in entries.items()}
    for name in content.get("public", ()):
        require(name in sources, f'"public" names {name!r}, which is no data set of this file')
    return SiteConfig(**{**content, "envelope": envelope, "data": sources})


def _envelope(entry: Any) -> Envelope:
    """The site's limits as the file has them; what it leaves out is at its default."""
    require(isinstance(entry, dict), '"envelope" is an object with limits')
    return Envelope(**_limits(entry, Envelope))


def _limits(entry: dict[str, Any], kind: type) -> dict[str, Any]:
    """The entry as arguments of ``kind``. Raises ValueError for an unknown key or a value of another type."""
    limits: dict[str, Any] = {}
    for key, value in entry.items():
        _refuse_unknown(key, fields_of(kind), "limit")
        limits[key] = tuple(value) if isinstance(value, list) else value
        refuse_misfit(kind, key, limits[key])
    return limits


def _source(entry: Any, root: Path, kit: Path) -> FileSource:
    """One data set of the file as a source, its paths resolved."""
    if not isinstance(entry, dict) or not isinstance(entry.get("source"), str):
        raise ValueError('a data set is an object with "source", "root" and the fields of the source')
    kind: Any = choose("source", entry["source"], "SOURCES", SOURCES)
    args = {key: value for key, value in entry.items() if key != "source"}
    if "image_size" in args:
        raise ValueError("image_size is the job's to say; remove it")
    for key in args:
        _refuse_unknown(key, fields_of(kind), "setting")
        refuse_misfit(kind, key, tuple(args[key]) if isinstance(args[key], list) else args[key])
    require(bool(args.get("path")), 'a data set needs "path", the table under its root')
    args["root"] = str(_inside(root, args.get("root") or "."))
    below = [f.name for f in fields(kind) if f.metadata.get("below_root")]
    args |= {key: str(_inside(Path(args["root"]), args[key])) for key in below if args.get(key)}
    if args.get("cache"):
        args["cache"] = str(_inside(kit, args["cache"]))
    source: FileSource = from_config({"path": f"{kind.__module__}.{kind.__qualname__}", "args": args})
    return source


def _refuse_unknown(name: str, known: list[str], what: str) -> None:
    if name not in known:
        raise ValueError(f"unknown {what} {name!r}{nearest(name, known)}; there are: {', '.join(known)}")


def _inside(root: Path, name: str) -> Path:
    """``root/name``. ValueError, naming no path, where that leads out of ``root``, through a link as well."""
    path = (root / name).resolve()
    if PurePath(name).is_absolute() or PureWindowsPath(name).anchor or not path.is_relative_to(root.resolve()):
        raise ValueError(
            "a path leads out of the root it belongs under; give one relative to it, without '..' or links"
        )
    return path
