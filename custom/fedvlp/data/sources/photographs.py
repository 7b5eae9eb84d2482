"""What sources of photographs share: three channels on request."""

from __future__ import annotations

from dataclasses import dataclass

from fedvlp.data.sources.published import Published


@dataclass(frozen=True, kw_only=True)
class Photographs(Published):
    """Base class of collections of photographs."""

    colour: bool = False  # three channels (red, green, blue) in place of grey; the model's in_channels is then 3

    @property
    def _in_colour(self) -> bool:
        return self.colour
