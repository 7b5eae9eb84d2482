"""The glue to NVIDIA FLARE: the only importer of nvflare. No algorithm lives here."""

from fedvlp.core import names

__getattr__, __dir__ = names.lazy(__name__)
