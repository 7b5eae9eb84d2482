"""Finds image files by the names that a table has for them."""

from __future__ import annotations

import unicodedata
from itertools import chain
from pathlib import Path, PureWindowsPath

from fedvlp.data.report_text import is_missing

SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".dcm", ".dicom")
"""Those of image files that a name may lack."""

NO_NAME, OUTSIDE, MISSING = "no image name", "image outside the root", "missing image"
SEVERAL = "several images of this name, but for case or suffix"


class ImageNames:
    """The files below ``root`` by name, whatever the case and the form of accents, with or without a suffix.

    Windows takes any case, and a Mac writes "ö" as two characters: names of a table made there differ from the files'.
    """

    def __init__(self, root: Path, suffix: str = "") -> None:
        """``suffix``: "png" or ".png", of the files whose names lack one; "": any of ``SUFFIXES``."""
        self.root = root
        self._suffix = suffix and f".{suffix.lstrip('.')}"
        self._listings: dict[Path, dict[str, list[str]]] = {}

    def find(self, name: str) -> tuple[Path | None, str]:
        """The image file ``name``, or None and the reason. Both "/" and "\\" separate folders.

        A file of exactly this name is preferred; else it has to be the only one.
        """
        if is_missing(name):
            return None, NO_NAME
        relative = PureWindowsPath(name if name.lower().endswith(self._suffix.lower()) else name + self._suffix)
        if relative.anchor or ".." in relative.parts:
            return None, OUTSIDE
        try:
            file = self.root.joinpath(*relative.parts).resolve()
            exact = file.is_file() or not file.is_relative_to(self.root)
            files = [file] if exact else self._alike(relative.parts)
        except (OSError, ValueError, RuntimeError):  # name too long, null byte, loop of links
            files = []
        if len(files) != 1:
            return None, SEVERAL if files else MISSING
        return (files[0], "") if files[0].is_relative_to(self.root) else (None, OUTSIDE)

    def _alike(self, names: tuple[str, ...]) -> list[Path]:
        """The files whose path is ``names`` but for case, form of accents, and a suffix."""
        paths = [self.root]
        for name in names:
            paths = [path / known for path in paths for known in self._named(path, name)]
        return list({path.resolve(): None for path in paths if path.is_file()})

    def _named(self, folder: Path, name: str) -> list[str]:
        """What ``folder`` holds by this name; if nothing, by that of an image, as of films that were converted."""
        listing, path = self._listing(folder), Path(name)
        bare = path.stem if path.suffix.lower() in SUFFIXES else name
        return listing.get(_folded(name)) or [
            known for known in listing.get(_folded(bare), ()) if Path(known).suffix.lower() in SUFFIXES
        ]

    def _listing(self, folder: Path) -> dict[str, list[str]]:
        """What ``folder`` holds: folded name, of images also without suffix -> names. It is read once."""
        if folder not in self._listings:
            names: dict[str, list[str]] = {}
            for path in folder.iterdir() if folder.is_dir() else ():
                bare = [path.stem] if path.suffix.lower() in SUFFIXES else []
                for known in chain([path.name], bare):
                    names.setdefault(_folded(known), []).append(path.name)
            self._listings[folder] = names
        return self._listings[folder]


def _folded(name: str) -> str:
    """``name`` in one case, with each accent and its letter as one character."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
