"""Cohorts: sources of images and reports, how they are read, dealt to sites and batched."""

from fedvlp.core import names

__getattr__, __dir__ = names.lazy(__name__)
