"""The settings that every command with an experiment accepts (preset, data, sites, --set), and plugins."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedvlp.cli import known
from fedvlp.cli.known import OPTION, overridden, split_site

if TYPE_CHECKING:
    from fedvlp.data.deid import Accepted
    from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
    from fedvlp.run.experiment import Experiment, Partition, Source
    from fedvlp.run.folder import RunFolder


Setting = Annotated[
    list[str] | None, typer.Option("--set", help="Override a setting, e.g. method.rho=0.1; may be repeated.")
]

Seed = Annotated[
    int | None, typer.Option(min=0, help="Of the run, and of data that are generated or split; default: the preset's.")
]

Start = Annotated[
    str | None,
    typer.Option(
        "--start",
        help="A model to start from: a name of `fedvlp towers import`, or a folder or file of open_clip, transformers, "
        "timm or torchxrayvision.",
    ),
]

DATA = "synthetic (default), label-skew, scanner-shift, table:PATH.csv, SOURCE:FOLDER[,SETTING=VALUE], run:RUN"
"""What ``--data`` of every command takes."""

Data = Annotated[str | None, typer.Option(help=DATA + ".")]
Sites = Annotated[int | None, typer.Option(help="Number of sites to simulate.")]
OwnSources = Annotated[
    list[str] | None,
    typer.Option("--site", help="NAME=SOURCE:FOLDER, a data set that is one site's; may be repeated."),
]
Cache = Annotated[Path | None, typer.Option(help="Folder for decoded images, to be decoded once.")]

Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin", help="A file (my_method.py) or module with methods, objectives, ... of your own; may be repeated."
    ),
]

AcceptAll = Annotated[
    bool, typer.Option("--accept-phi-risk", help="Continue although the scan finds identifiers in reports.")
]
AcceptKinds = Annotated[
    list[str] | None,
    typer.Option("--accept-phi-kind", help="The same for one kind of them, e.g. date; may be repeated."),
]


def accepted(everything: bool, kinds: list[str] | None) -> Accepted:
    """What the two options accept. Raises ValueError for an unknown kind, with a list of all."""
    if everything or not kinds:
        return everything or ()
    from fedvlp.data.deid import kinds_of

    return kinds_of(kinds)


def use_plugins(named: list[str] | None) -> None:
    """Imports what ``--plugin`` names. Raises PluginError."""
    if named:
        from fedvlp.run import plugins

        for name in named:
            plugins.use(name)


def given(context: typer.Context, read: Collection[str] = ()) -> dict[str, str]:
    """The options of a command that a person gave, without those that are ``read``: name -> as it is typed."""
    typed = {}
    for option in context.command.params:
        name = str(option.name)
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE" and name not in read:
            typed[name] = "/".join([*option.opts, *option.secondary_opts])
    return typed


def typed_again(accept_phi_risk: bool, accept_phi_kind: list[str] | None, plugins: list[str] | None) -> list[str]:
    """The words by which a resumed command accepts what this one does, with the same plugins."""
    words = ["--accept-phi-risk"] * accept_phi_risk
    words += [word for kind in accept_phi_kind or () for word in ("--accept-phi-kind", kind)]
    return words + [word for plugin in plugins or () for word in ("--plugin", plugin)]


def resumed(
    context: typer.Context, run: Path, preset: str | None, read: Collection[str], option: str
) -> tuple[RunFolder, Experiment]:
    """The run that ``--resume`` continues, and what it was started with.

    ``read``: the options that count there as well. ``option``: how the command calls its ``preset``. Raises ValueError
    for any other option, and for the preset of another run.
    """
    if unread := given(context, read):
        raise ValueError(f"--resume takes the run's own configuration; leave {', '.join(unread.values())} out")
    from fedvlp.run.folder import RunFolder

    folder = RunFolder(run)
    experiment = folder.experiment()
    if preset not in (None, experiment.name):
        raise ValueError(f"--resume is a run of {experiment.name}, not of {preset}; leave {option} out")
    return folder, experiment


def configured(
    preset: str | Experiment,
    data: str | None,
    sites: int | None,
    settings: list[str] | None,
    at: list[str] | None = None,
    cache: Path | None = None,
    like: Path | None = None,
    travels: bool = False,
    start: str | None = None,
    seed: int | None = None,
) -> Experiment:
    """A preset with the choices of the command line: ``data``, number of ``sites``, and ``settings`` "key=value".

    ``preset``: its name, or another run's experiment in its place.
    ``at``: a data set for each site, "NAME=SOURCE:FOLDER", in place of ``data``. ``cache``: folder for decoded images.
    ``like``: folder of a run on whose terms it is (``run.terms.like``). Weights to start from are named with their
    checksum.
    ``start``: a model to start from (``run.start.begin``). ``travels``: it is for other machines, so that paths in
    ``settings`` stay as they are; else they become absolute. ``seed``: as a sweep sets it; ``settings`` go before it.
    Raises ValueError for an unknown preset, data or setting.
    """
    if sites is not None and sites < 1:
        raise ValueError(f"--sites is {sites}; a run needs at least one site")
    if at and (data or sites):
        raise ValueError("--site gives every site its data set; leave --data and --sites out")
    if isinstance(preset, str) and like is None:
        known.refuse_experiment(preset, data, at, settings)
    from dataclasses import replace

    from fedvlp.data.sources.table import TableSource
    from fedvlp.run import presets, terms
    from fedvlp.run.fitting import absolute

    experiment = presets.get(preset) if isinstance(preset, str) else preset
    if like is not None:
        experiment = terms.like(experiment, experiment_in(like), like)
    if start is not None:
        from fedvlp.run.start import begin

        experiment = begin(experiment, start, travels)
    chosen, sites = _chosen_data(experiment, data, sites, at, cache)
    if chosen is not None:
        if experiment.name in presets.PAPERS:
            chosen = _by_the_papers(chosen)
        experiment = _on_data(experiment, chosen, settings or [])
    if data is not None and (of_run := known.run_of(data)) is not None:
        experiment = replace(experiment, partition=experiment_in(of_run).partition)
    if sites is not None:
        experiment = _with_sites(experiment, sites, chosen)
    if seed is not None:
        from fedvlp.run.sweep import seeded

        experiment = seeded(experiment, experiment.name, seed)
    experiment = overridden(experiment, settings)
    if sites is not None and isinstance(experiment.data, TableSource) and experiment.data.names_sites():
        raise ValueError(
            f"--sites {sites}: the table has a column {experiment.data.site_column!r}, which says whose each row is; "
            "leave --sites out, or deal the rows anew with --set data.site_column="
        )
    return (experiment if travels else absolute(experiment)).pinned()


def _chosen_data(
    experiment: Experiment, data: str | None, sites: int | None, at: list[str] | None, cache: Path | None
) -> tuple[Any, int | None]:
    """The data set of ``--data`` or ``--site``, None for the preset's own, and how many sites train on it, if it says.

    Raises ValueError for an unknown one, and for a number of sites where the data set deals its records itself.
    """
    from dataclasses import replace

    from fedvlp.data.cohort import PUBLIC
    from fedvlp.data.screening import DataSource
    from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
    from fedvlp.run.site_sources import SiteSources

    size = experiment.model.image_size
    margin = size if experiment.crops_centres else size * 9 // 8  # for random crops
    if at:
        named = tuple((name, stored(site_source(spec, margin), cache)) for name, spec in map(split_site, at))
        return SiteSources(named), len([name for name, _ in named if name != PUBLIC])
    source = source_of(data, margin)
    if source is None and data is not None:
        source = _own_cohort(experiment)
    chosen: Any = stored(source, cache)
    if isinstance(chosen, SyntheticCohort):
        return replace(chosen, image_size=getattr(experiment.data, "image_size", margin)), sites or chosen.sites
    if sites and DataSource.of(chosen).by_site():
        raise ValueError("--sites: this data set deals its records to sites itself; set pairs, images, texts after it")
    return chosen, sites


def _by_the_papers(data: Any) -> Any:
    """The data set with the papers' rule that a sentence of one word is dropped, where it has reports to clean."""
    from dataclasses import replace

    from fedvlp.data.report_text import PAPERS
    from fedvlp.data.sources.table import TableSource
    from fedvlp.run.site_sources import SiteSources

    if isinstance(data, TableSource):
        return replace(data, reports=PAPERS)
    if isinstance(data, SiteSources):
        return replace(data, sites=tuple((name, _by_the_papers(source)) for name, source in data.sites))
    return replace(data, min_sentence_words=2) if hasattr(data, "min_sentence_words") else data


def _own_cohort(experiment: Experiment) -> SyntheticCohort | None:
    """The synthetic cohort of the experiment's preset, which "synthetic" names; None where it has that already.

    It has others where it is another run's, or on another run's terms.
    """
    from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
    from fedvlp.run import presets

    try:
        own = presets.get(experiment.name).data
    except ValueError:  # it is named otherwise than any preset
        own = None
    if not isinstance(own, SyntheticCohort):
        own = SyntheticCohort()
    return None if own == experiment.data else own


def _on_data(experiment: Experiment, chosen: Any, settings: list[str]) -> Experiment:
    """The experiment on the data set ``chosen``, with all that it takes over from it."""
    from dataclasses import replace

    from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
    from fedvlp.run.fitting import fitted

    of_files = not isinstance(chosen, SyntheticCohort)
    of_data = [setting for setting in settings if of_files and setting.startswith("data.")]  # fitted to, too
    experiment = fitted(overridden(replace(experiment, data=chosen), of_data))
    return replace(experiment, partition=_of_own_records(chosen, experiment.partition))


def _with_sites(experiment: Experiment, sites: int, chosen: Any) -> Experiment:
    """The experiment with so many sites, in every setting that counts them."""
    from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort
    from fedvlp.run.config import override

    experiment = override(experiment, "partition.sites", str(sites))
    if chosen is None or isinstance(chosen, SyntheticCohort):
        experiment = override(experiment, "data.sites", str(sites))
    if hasattr(experiment.extra, "sites"):
        experiment = override(experiment, "extra.sites", str(sites))
    return experiment


def _of_own_records(data: Any, partition: Partition) -> Partition:
    """The preset's partition without the modalities that it drops, where the records are a person's own tables.

    It drops them to make sites unlike; own records are left as they are unless --set asks for it. Where the sites keep
    them, none become public either.
    """
    from dataclasses import replace

    from fedvlp.data.sources.table import TableSource
    from fedvlp.deploy.named_data import NamedData
    from fedvlp.run.fitting import undealt
    from fedvlp.run.site_sources import SiteSources

    if isinstance(data, NamedData):
        return undealt(partition)
    sources = [source for _, source in data.sites] if isinstance(data, SiteSources) else [data]
    own = any(isinstance(source, TableSource) for source in sources)
    return replace(partition, image_only=0, text_only=0) if own else partition


def seeds_of(text: str) -> range:
    """The seeds of ``--seeds`` "0-4" or "3". Raises ValueError for another form."""
    first, dash, last = text.partition("-")
    if not (first.isdigit() and (last.isdigit() or not dash) and int(first) <= int(last or first)):
        raise ValueError(f"--seeds is {text!r}; give FIRST-LAST, e.g. 0-4")
    return range(int(first), int(last or first) + 1)


def records_of(data: str, image_size: int) -> Source:
    """The data set of ``--data`` for a model that is there already. Raises ValueError for an unknown source."""
    from dataclasses import replace

    from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort

    chosen = source_of(data, image_size) or SyntheticCohort()
    return replace(chosen, image_size=image_size) if isinstance(chosen, SyntheticCohort) else chosen


def source_of(data: str | None, image_size: int) -> Source | None:
    """The data set of ``--data``, decoded to squares of so many pixels; None for the preset's own synthetic cohort.

    SOURCE:FOLDER reads a collection as it was published in that folder; SOURCE:FILE its table alone, without images;
    run:RUN the records of a run.
    Settings of the source may follow: mimic_cxr:FOLDER,suffix=dcm. Raises ValueError for an unknown source or setting,
    and one that lists what the folder lacks.
    """
    known.data_set(data or "synthetic")
    from fedvlp.data.sources import SOURCES
    from fedvlp.data.synthetic.drawn_cohort import COHORTS
    from fedvlp.deploy.named_data import NamedData
    from fedvlp.run.config import override

    kind, _, rest = (data or "synthetic").partition(":")
    location, *options = OPTION.split(rest)
    options = list(filter(None, options))
    if kind == "named" and rest:
        return overridden(NamedData(location, image_size), options)
    if kind == known.OF_RUN and rest:
        return overridden(_decoded_to(image_size, experiment_in(Path(location)).data), options)
    if rest:
        source: Any = known.choose_source(kind, SOURCES)
        path = Path(location).absolute()
        if path.is_dir() and not hasattr(source, "at"):
            raise ValueError(f"{kind} source: {location!r} is a folder; give its table, or the folder of a collection")
        if path.is_dir():
            chosen = source.at(path, image_size=image_size)
        elif _needed(source) - {"path"}:
            raise ValueError(
                f"{kind} source: {location!r} is no folder; give that of the collection as it was published"
            )
        else:
            chosen = source(path=str(path), image_size=image_size)
        for option in options:
            key, _, value = option.partition("=")
            chosen = override(chosen, key, value)
        published: Source = chosen
        return published
    return COHORTS.get(kind)


def _decoded_to(image_size: int, data: Any) -> Any:
    """The records of a run, their images decoded to squares of so many pixels, as another model sees them."""
    from dataclasses import replace

    from fedvlp.run.site_sources import SiteSources

    if isinstance(data, SiteSources):
        return replace(data, sites=tuple((name, _decoded_to(image_size, source)) for name, source in data.sites))
    return replace(data, image_size=image_size) if hasattr(data, "image_size") else data


def experiment_in(folder: Path) -> Experiment:
    """What a run was started with."""
    from fedvlp.run.folder import RunFolder

    return RunFolder(folder).experiment()


def _needed(kind: type) -> set[str]:
    """The settings of a source that have no default."""
    from dataclasses import MISSING, fields

    return {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}


def site_source(spec: str, image_size: int, option: str = "--site") -> Source:
    """The data set of one ``option``. Raises ValueError for one that deals records to sites itself, as the built-in."""
    from fedvlp.data.screening import DataSource
    from fedvlp.data.synthetic.drawn_cohort import SyntheticCohort

    source = None if spec.startswith("named:") else source_of(spec, image_size)
    if source is None or isinstance(source, SyntheticCohort) or DataSource.of(source).by_site():
        raise ValueError(f"{option} takes a data set of files, SOURCE:FOLDER or table:PATH.csv, not {spec!r}")
    return source


def stored(source: Any, cache: Path | None) -> Any:
    """The data set with ``cache`` as the folder for its decoded images. Raises ValueError where it decodes none."""
    from dataclasses import replace

    if cache is None:
        return source
    if not hasattr(source, "cache"):
        raise ValueError("--cache is for data sets of image files; the synthetic cohorts are drawn anew in each run")
    return replace(source, cache=str(cache.absolute()))


# What ``--config FILE`` says: a preset and settings as TOML, or the ``config.json`` of a run.


@dataclass(frozen=True)
class ConfigFile:
    """A file's content, or that of none; ``experiment`` is given by a run's alone, and is all of it."""

    preset: str | None = None
    data: str | None = None
    sites: int | None = None
    settings: tuple[str, ...] = ()  # "method.rho=0.5", as --set takes them
    experiment: Experiment | None = None

    def base(self, preset: str | None) -> str | Experiment:
        """What the settings are changes of: the preset of the command line, or else the file's.

        Raises ValueError without either, and for a preset beside a run's config.json, which has its own method.
        """
        if self.experiment is not None and preset is not None:
            raise ValueError(f"--config is a run's, which says what is trained; leave the preset {preset!r} out")
        base = self.experiment or preset or self.preset
        if base is None:
            raise ValueError("no preset; name one (`fedvlp presets` lists them), or give --config FILE with one")
        return base


WORDS = {"preset": str, "data": str, "sites": int}
"""What stands above a file's settings, as the options of these names take it."""


def read_config_file(path: Path) -> ConfigFile:
    """The content of a file that ends in .toml or .json. Raises ValueError that says what is wrong, and where."""
    kinds = {".toml": _of_toml, ".json": _of_run}
    if path.suffix not in kinds:
        raise ValueError(f"--config is {path.name!r}; expected a file that ends in .toml, or the config.json of a run")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise ValueError(f"--config {path.name}: {why}") from None
    try:
        return kinds[path.suffix](text)
    except ValueError as error:
        raise ValueError(f"--config {path.name}: {error}") from None


def _of_toml(text: str) -> ConfigFile:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    content = tomllib.loads(text)
    for name, kind in WORDS.items():
        if name in content and not isinstance(content[name], (kind, dict)):  # [data] is a section of settings
            raise ValueError(f"{name} is {content[name]!r}; expected a {kind.__name__}, as --{name} takes it")
    words = {name: content.pop(name) for name in WORDS if not isinstance(content.get(name), (dict, type(None)))}
    return ConfigFile(**words, settings=tuple(f"{key}={value}" for key, value in _settings(content)))


def _settings(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """("method.rho", "0.5") of every value of a table and its sections, in the file's order."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{above}{key}.")
        elif isinstance(value, str):
            yield above + key, value
        elif isinstance(value, (bool, int, float, list)):
            yield above + key, json.dumps(value)
        else:
            kind = type(value).__name__
            raise ValueError(f"{above}{key} is a {kind}; expected a number, text, true, false or a list")


def _of_run(text: str) -> ConfigFile:
    from fedvlp.run.config import from_config
    from fedvlp.run.experiment import Experiment

    experiment = from_config(json.loads(text))
    if not isinstance(experiment, Experiment):
        raise ValueError("no experiment; expected the config.json in the folder of a run")
    return ConfigFile(experiment=experiment)
