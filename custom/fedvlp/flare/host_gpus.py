"""The GPUs that a site offers to jobs: those of its machine, without a setting. A machine may have none."""

from __future__ import annotations

import logging

from nvflare.app_common.resource_managers import gpu_resource_manager as flare
from nvflare.app_common.resource_managers.gpu_resource_manager import GPUResourceManager

log = logging.getLogger(__name__)


class HostGPUs(GPUResourceManager):
    """FLARE's manager of GPUs, which asks the machine for what ``local/resources.json`` does not say.

    FLARE's own must be told a number, and a site that has fewer GPUs than that does not start.

    Args:
        num_of_gpus: GPUs that jobs may have, from the first one on; 0 = none, left out = all that FLARE may see
            (``nvidia-smi``, and ``CUDA_VISIBLE_DEVICES`` where it is set).
        mem_per_gpu_in_GiB: memory of each of them; left out = that of the smallest one.
        expiration_period: seconds that a reservation lasts whose job does not begin.
    """

    def __init__(
        self,
        num_of_gpus: int | None = None,
        mem_per_gpu_in_GiB: float | None = None,
        expiration_period: float = 300,
    ) -> None:
        sizes = _memory_by_gpu() if num_of_gpus is None or (num_of_gpus and mem_per_gpu_in_GiB is None) else []
        number = len(sizes) if num_of_gpus is None else num_of_gpus
        memory = min(sizes[:number], default=0.0) if mem_per_gpu_in_GiB is None else mem_per_gpu_in_GiB
        super().__init__(number, memory, expiration_period=expiration_period)


def _memory_by_gpu() -> list[float]:
    """GiB of each GPU that FLARE may see; none where ``nvidia-smi`` is missing or finds no device."""
    try:
        present = flare.get_host_gpu_ids()
        total = dict(zip(present, flare.get_host_gpu_memory_total(), strict=True)) if present else {}
    except Exception as error:  # FLARE raises a bare one where nvidia-smi fails, e.g. without a driver
        log.warning("nvidia-smi failed (%s): this site offers no GPU to jobs", type(error).__name__)
        return []
    return [total[gpu] / 1024 for gpu in flare._get_managed_host_gpu_ids(present)]
