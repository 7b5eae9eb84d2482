"""A data set that a job names and every site keeps for itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedvlp.core.site_error import SiteError
from fedvlp.core.validate import require, require_name
from fedvlp.data.cohort import Cohort


class SiteConfigError(SiteError, ValueError):
    """The site's file is missing or wrong, or lacks what a job asks for. Names no path, since the server reads it."""


@dataclass(frozen=True)
class NamedData:
    """A data set that every site keeps and configures for itself; job and server know its name alone.

    ``public`` is the name of a public set that server and sites have beside it, for methods that need one.
    """

    cleans_reports: ClassVar[bool] = True  # as the sources of files do that sites have

    name: str
    image_size: int = 72  # side of the decoded square, pixels: the model's, so the job decides
    public: str = ""  # of a data set that every site, and the server, lists as public in its own file; "": none

    def __post_init__(self) -> None:
        require_name("the name of a data set", self.name)
        require(self.image_size > 0, f"image_size is {self.image_size}; it must be positive")
        if self.public:
            require_name("the name of a public set", self.public)

    def build(self) -> Cohort:
        raise SiteConfigError(f"data set {self.name!r} is kept by the sites; export a job that names them, with --at")
