"""Cohorts: sources of images and reports, how they are read, partitioned over sites and batched."""

from fedvlp.core import names

__getattr__, __dir__ = names.lazy(__name__)
