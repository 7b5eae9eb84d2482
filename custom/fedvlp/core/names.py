"""Public names: what job files, run configurations and hospital policies may name, and where each is defined.

A public name is part of the file format: it stays when its module moves, and tests/core/test_names.py fails when one
disappears.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

PUBLIC = {
    "fedvlp.Cohort": "fedvlp.data.cohort.Cohort",
    "fedvlp.Experiment": "fedvlp.run.experiment.Experiment",
    "fedvlp.Method": "fedvlp.core.method.Method",
    "fedvlp.Partition": "fedvlp.run.experiment.Partition",
    "fedvlp.PatientSites": "fedvlp.run.site_sources.PatientSites",
    "fedvlp.Rounds": "fedvlp.federation.loop.Rounds",
    "fedvlp.RunFolder": "fedvlp.run.folder.RunFolder",
    "fedvlp.SiteSources": "fedvlp.run.site_sources.SiteSources",
    "fedvlp.Training": "fedvlp.training.settings.Training",
    "fedvlp.Wire": "fedvlp.federation.codec.Wire",
    "fedvlp.data.COVIDRadiographySource": "fedvlp.data.sources.tabular.COVIDRadiographySource",
    "fedvlp.data.COVIDxSource": "fedvlp.data.sources.tabular.COVIDxSource",
    "fedvlp.data.CandidPTXSource": "fedvlp.data.sources.tabular.CandidPTXSource",
    "fedvlp.data.CheXpertSource": "fedvlp.data.sources.tabular.CheXpertSource",
    "fedvlp.data.CheXpertPlusSource": "fedvlp.data.sources.tabular.CheXpertPlusSource",
    "fedvlp.data.LatentCohort": "fedvlp.data.synthetic.latent.LatentCohort",
    "fedvlp.data.MIMICSource": "fedvlp.data.sources.mimic_cxr.MIMICSource",
    "fedvlp.data.NIHSource": "fedvlp.data.sources.tabular.NIHSource",
    "fedvlp.data.OpenISource": "fedvlp.data.sources.openi.OpenISource",
    "fedvlp.data.PadChestSource": "fedvlp.data.sources.tabular.PadChestSource",
    "fedvlp.data.RSNASource": "fedvlp.data.sources.tabular.RSNASource",
    "fedvlp.data.SIIMSource": "fedvlp.data.sources.tabular.SIIMSource",
    "fedvlp.data.SyntheticCohort": "fedvlp.data.synthetic.drawn_cohort.SyntheticCohort",
    "fedvlp.data.TableSource": "fedvlp.data.sources.table.TableSource",
    "fedvlp.data.VinDrSource": "fedvlp.data.sources.tabular.VinDrSource",
    "fedvlp.deploy.NamedData": "fedvlp.deploy.named_data.NamedData",
    "fedvlp.deploy.OwnData": "fedvlp.deploy.site_config.OwnData",
    "fedvlp.flare.AllowMetrics": "fedvlp.flare.privacy_filters.AllowMetrics",
    "fedvlp.flare.ChildExecutor": "fedvlp.flare.executor.ChildExecutor",
    "fedvlp.flare.ClipAndNoise": "fedvlp.flare.privacy_filters.ClipAndNoise",
    "fedvlp.flare.DecodeTask": "fedvlp.flare.wire_filters.DecodeTask",
    "fedvlp.flare.Decrypt": "fedvlp.flare.encryption.Decrypt",
    "fedvlp.flare.EncodeResult": "fedvlp.flare.wire_filters.EncodeResult",
    "fedvlp.flare.Encrypt": "fedvlp.flare.encryption.Encrypt",
    "fedvlp.flare.EncryptedController": "fedvlp.flare.encryption.EncryptedController",
    "fedvlp.flare.ExcludeVariables": "fedvlp.flare.privacy_filters.ExcludeVariables",
    "fedvlp.flare.FedVLPRecipe": "fedvlp.flare.recipe.FedVLPRecipe",
    "fedvlp.flare.FederatedController": "fedvlp.flare.controller.FederatedController",
    "fedvlp.flare.GuardedKits": "fedvlp.flare.kits.GuardedKits",
    "fedvlp.flare.HostGPUs": "fedvlp.flare.host_gpus.HostGPUs",
    "fedvlp.flare.JobCheck": "fedvlp.flare.job_check.JobCheck",
    "fedvlp.flare.Perimeter": "fedvlp.flare.perimeter.Perimeter",
    "fedvlp.flare.PrivateKits": "fedvlp.flare.kits.PrivateKits",
    "fedvlp.flare.RememberReceived": "fedvlp.flare.privacy_filters.RememberReceived",
    "fedvlp.flare.RequestedCertificates": "fedvlp.flare.kits.RequestedCertificates",
    "fedvlp.flare.ResultsInJob": "fedvlp.flare.results.ResultsInJob",
    "fedvlp.flare.AuditOutgoing": "fedvlp.flare.privacy_filters.AuditOutgoing",
    "fedvlp.flare.SendAsReceived": "fedvlp.flare.privacy_filters.SendAsReceived",
    "fedvlp.flare.SignedSoftware": "fedvlp.flare.kits.SignedSoftware",
    "fedvlp.flare.SiteCurves": "fedvlp.flare.curves.SiteCurves",
    "fedvlp.flare.SiteJobLauncher": "fedvlp.flare.job_user.SiteJobLauncher",
    "fedvlp.flare.SiteExecutor": "fedvlp.flare.site_executor.SiteExecutor",
    "fedvlp.flare.StatsD": "fedvlp.flare.statsd.StatsD",
    "fedvlp.flare.TensorBoardReceiver": "fedvlp.flare.tracking.TensorBoardReceiver",
    "fedvlp.flare.WireEnd": "fedvlp.flare.wire_filters.WireEnd",
    "fedvlp.load_model": "fedvlp.run.model_use.load_model",
    "fedvlp.methods.AdapterConfig": "fedvlp.methods.clip_adapter.AdapterConfig",
    "fedvlp.methods.CARMFL": "fedvlp.methods.car_mfl.CARMFL",
    "fedvlp.methods.CLIPAdapter": "fedvlp.methods.clip_adapter.CLIPAdapter",
    "fedvlp.methods.Centralized": "fedvlp.methods.centralized.Centralized",
    "fedvlp.methods.ContextConfig": "fedvlp.methods.prompt_learning.ContextConfig",
    "fedvlp.methods.CreamFL": "fedvlp.methods.creamfl.CreamFL",
    "fedvlp.methods.FedAvg": "fedvlp.methods.fedavg.FedAvg",
    "fedvlp.methods.OneRoundCCA": "fedvlp.methods.one_round_cca.OneRoundCCA",
    "fedvlp.methods.FedDRA": "fedvlp.methods.feddra.FedDRA",
    "fedvlp.methods.FedMOON": "fedvlp.methods.fedmoon.FedMOON",
    "fedvlp.methods.FedNova": "fedvlp.methods.fednova.FedNova",
    "fedvlp.methods.FedProx": "fedvlp.methods.fedprox.FedProx",
    "fedvlp.methods.FedRGB": "fedvlp.methods.fedrgb.FedRGB",
    "fedvlp.methods.FedSM": "fedvlp.methods.fedsm.FedSM",
    "fedvlp.methods.Local": "fedvlp.methods.local.Local",
    "fedvlp.methods.MFedAvg": "fedvlp.methods.mfedavg.MFedAvg",
    "fedvlp.methods.PMSFM": "fedvlp.methods.pms_fm.PMSFM",
    "fedvlp.methods.PromptLearning": "fedvlp.methods.prompt_learning.PromptLearning",
    "fedvlp.methods.SCAFFOLD": "fedvlp.methods.scaffold.SCAFFOLD",
    "fedvlp.models.DualEncoder": "fedvlp.models.dual_encoder.DualEncoder",
    "fedvlp.models.ModelConfig": "fedvlp.models.dual_encoder.ModelConfig",
    "fedvlp.models.MultimodalClassifier": "fedvlp.models.multimodal.MultimodalClassifier",
    "fedvlp.models.MultimodalConfig": "fedvlp.models.multimodal.MultimodalConfig",
    "fedvlp.models.SelectorConfig": "fedvlp.models.selector.SelectorConfig",
    "fedvlp.objectives.BCEConfig": "fedvlp.objectives.bce.BCEConfig",
    "fedvlp.objectives.ConVIRTConfig": "fedvlp.objectives.convirt.ConVIRTConfig",
    "fedvlp.objectives.CreamFLTaskConfig": "fedvlp.objectives.creamfl_tasks.CreamFLTaskConfig",
    "fedvlp.objectives.GLoRIAConfig": "fedvlp.objectives.gloria.GLoRIAConfig",
    "fedvlp.objectives.MGCAConfig": "fedvlp.objectives.mgca.MGCAConfig",
    "fedvlp.objectives.MedCLIPConfig": "fedvlp.objectives.medclip.MedCLIPConfig",
    "fedvlp.presets": "fedvlp.run.presets",
    "fedvlp.simulate": "fedvlp.run.simulate.simulate",
}
"""Public name: where it is defined."""


@cache
def _public_names() -> dict[str, str]:
    return {path: name for name, path in PUBLIC.items()}


def name_of(kind: type) -> str:
    """The public name of a class, or its module and name where it has none (a plugin's class)."""
    path = f"{kind.__module__}.{kind.__qualname__}"
    return _public_names().get(path, path)


def load(name: str) -> Any:
    """What a public name stands for. Raises KeyError for a name that is none."""
    path = PUBLIC[name]
    module, _, attribute = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except AttributeError:  # a module of a package, such as presets
        return importlib.import_module(path)


def lazy(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package (PEP 562): a public name is imported when it is first asked for."""

    def __getattr__(name: str) -> Any:  # noqa: N807
        try:
            return load(f"{package}.{name}")
        except KeyError:
            raise AttributeError(f"module {package!r} has no attribute {name!r}") from None

    def __dir__() -> list[str]:  # noqa: N807
        return sorted({*vars(sys.modules[package]), *exported(package)})

    return __getattr__, __dir__


def exported(package: str) -> list[str]:
    """The public names of a package, without it."""
    return [name.rpartition(".")[2] for name in PUBLIC if name.rpartition(".")[0] == package]
