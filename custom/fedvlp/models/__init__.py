"""Image and text towers, the dual encoder, and what methods train beside it."""

from fedvlp.core import names

__getattr__, __dir__ = names.lazy(__name__)
