"""Federated medical vision-language pre-training on NVIDIA FLARE."""

__version__ = "0.1.0"
