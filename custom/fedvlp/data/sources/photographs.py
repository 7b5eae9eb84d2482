"""What sources of photographs share: three channels on request, and one image for all rows that have the same file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedvlp.data.cache_format import Building
from fedvlp.data.images import films
from fedvlp.data.sources.published import Images, Listing, Published, refuse_absent


@dataclass(frozen=True, kw_only=True)
class Photographs(Published):
    """Base class of collections of photographs."""

    colour: bool = False  # three channels (red, green, blue) in place of grey; the model's in_channels is then 3

    @property
    def _in_colour(self) -> bool:
        return self.colour

    def _images(self, listing: Listing, ids: Sequence[str], most: int, building: Building) -> Images | None:
        """As of every collection. A file that several rows have is decoded and kept once."""
        if listing.files is None:
            return None
        refuse_absent(listing.source, dict.fromkeys(listing.files))
        files = list(dict.fromkeys(listing.files[:most]))
        number = {file: index for index, file in enumerate(files)}
        first: dict[int, str] = {}  # number of a file -> id of the first row that has it
        owner = np.array([number[file] for file in listing.files[:most]], dtype=np.int64)
        for name, index in zip(ids, owner.tolist(), strict=False):
            first.setdefault(index, name)
        given = (self.image_size, self.cache, building, self.burned_in, self.colour)
        images = films(listing.source, [first[index] for index in range(len(files))], files, *given)
        return images if len(files) == len(owner) else Repeated(images, owner)


@dataclass(frozen=True, eq=False)
class Repeated:
    """Reader of N rows of which row i has the image ``owner[i]`` of another reader."""

    images: Images
    owner: np.ndarray  # [N] int64

    @property
    def skipped(self) -> dict[int, str]:
        """Row -> reason, for the rows that have no readable image."""
        unread = self.images.skipped
        return {row: unread[index] for row, index in enumerate(self.owner.tolist()) if index in unread}

    @property
    def checksums(self) -> np.ndarray:
        """CRC-32 of each row's pixels, [N] uint32."""
        return self.images.checksums[self.owner]

    def __call__(self, rows: np.ndarray) -> np.ndarray:
        """uint8 [n, S, S] or [n, S, S, 3] of ``rows`` [n]."""
        return self.images(self.owner[np.asarray(rows, dtype=np.int64)])
