"""The glue to NVIDIA FLARE: the only importer of nvflare. No algorithm lives here."""
