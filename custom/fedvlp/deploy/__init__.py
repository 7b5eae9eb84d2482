"""What a site needs before it joins: its own settings, prepared data, and checks of the machine and the kit."""

from fedvlp.core import names

__getattr__, __dir__ = names.lazy(__name__)
