"""Pictures in tar archives, as WebDataset writes them: few large files of many."""

import dataclasses
import os
import pathlib
import tarfile
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from hpcjax.core import files
from hpcjax.core.config import FileName
from hpcjax.core.errors import DataFormatError
from hpcjax.data import catalog
from hpcjax.data.image_folder import SUFFIXES, Pictures, PicturesConfig
from hpcjax.data.source import Dataset, subset

_LABEL = ".cls"
_DIGITS, _MOST = 20, 2**24  # bytes of a label's file, and classes


class Member(NamedTuple):
    """Where a picture lies.

    Attributes:
      shard: the archive.
      name: of the member.
      offset: of its first byte in the archive.
      size: its bytes.
      label: number of its class.
    """

    shard: pathlib.Path
    name: str
    offset: int
    size: int
    label: int


class TarSource(Pictures):
    """Pictures that are read out of archives by their offsets."""

    def __init__(self, members: list[Member], **form: Any) -> None:
        super().__init__(np.array([m.label for m in members], np.int32), **form)
        self.members = members
        self.sizes: Int[np.ndarray, " n"] = np.array([m.size for m in members])

    def name_of(self, index: int) -> str:
        """Returns archive and member of a picture."""
        member = self.members[index]
        return f"{member.shard}: {member.name}"

    def read(self, index: int) -> bytes:
        """Returns a member.

        Raises:
          DataFormatError: the archive has become shorter, or cannot be read.
        """
        member = self.members[index]
        try:
            with member.shard.open("rb", buffering=0) as shard:
                content = os.pread(shard.fileno(), member.size, member.offset)
        except OSError as error:
            raise DataFormatError(f"{self.name_of(index)}: {error}") from error
        if len(content) < member.size:
            raise DataFormatError(
                f"{self.name_of(index)}: expected {member.size} bytes, found "
                f"{len(content)}"
            )
        return content


@dataclasses.dataclass(frozen=True, kw_only=True)
class TarImagesConfig(PicturesConfig):
    """Pictures in `<root>/<name>/{train,val}-*.tar`, as WebDataset has them.

    A picture `key.jpg`, `key.jpeg` or `key.png` has its class in `key.cls`, a number
    from 0 in ASCII. Other members are left out, and hidden ones.

    Attributes:
      name: the folder of the data set.
    """

    name: FileName = "tar-images"

    def load(self, root: pathlib.Path) -> Dataset:
        """Reads the headers of all archives; pictures when a batch needs them.

        Raises:
          ConfigError: a symbolic link out of `root`.
          DataMissing: no such folder, or no archives in it.
          DataFormatError: an archive that is cut, or holds no pictures with a class; or
            a class in `val` that `train` has not.
        """
        folder = files.inside(root, self.name)
        parts = {split: self._list(folder, split, root) for split in ("train", "val")}
        classes = 1 + max(member.label for member in parts["train"])
        for member in parts["val"]:
            if member.label >= classes:
                raise DataFormatError(
                    f"{member.shard}: {member.name}: expected a class below {classes}, "
                    f"the number of those in train, found {member.label}"
                )
        kept = subset(len(parts["train"]), self.limit)
        return self.dataset(
            TarSource([parts["train"][i] for i in kept], **self.form),
            TarSource(parts["val"], **self.form),
            classes,
        )

    def _list(
        self, folder: pathlib.Path, split: str, root: pathlib.Path
    ) -> list[Member]:
        shards = sorted(folder.glob(f"{split}-*.tar"))
        if not shards:
            missing = folder / f"{split}-*.tar"
            raise catalog.missing_error(catalog.entry("tar-images"), missing)
        for shard in shards:
            files.check_inside(root, shard)
        return [member for shard in shards for member in list_members(shard)]


def list_members(shard: pathlib.Path) -> list[Member]:
    """Returns the pictures of an archive that have a class, in its order.

    Raises:
      DataFormatError: no tar archive, one that is cut, a picture without a class, a
        class that is no number, or no picture at all.
    """
    size = shard.stat().st_size
    labels: dict[str, int] = {}
    pictures: dict[str, tarfile.TarInfo] = {}
    try:
        with tarfile.open(shard, "r:") as archive:
            for member in archive:
                key, suffix = os.path.splitext(member.name)
                suffix = suffix.lower()
                if suffix not in (_LABEL, *SUFFIXES) or _is_hidden(member.name):
                    continue
                _check_member(shard, member, size)
                if key in (labels if suffix == _LABEL else pictures):
                    raise DataFormatError(f"{shard}: {member.name}: a second of {key}")
                if suffix == _LABEL:
                    labels[key] = _read_label(archive, member, shard)
                else:
                    pictures[key] = member
            _check_end(shard, archive.offset)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DataFormatError(f"{shard}: expected a tar archive: {error}") from error
    for key, member in pictures.items():
        if key not in labels:
            raise DataFormatError(f"{shard}: {member.name}: expected {key}{_LABEL}")
    if not pictures:
        raise DataFormatError(f"{shard}: expected pictures, found none")
    return [
        Member(shard, member.name, member.offset_data, member.size, labels[key])
        for key, member in pictures.items()
    ]


def _is_hidden(name: str) -> bool:
    return pathlib.PurePosixPath(name).name.startswith(".")


def _check_member(shard: pathlib.Path, member: tarfile.TarInfo, size: int) -> None:
    """Raises DataFormatError for what is no file of its own, or is not all there."""
    if not member.isreg() or member.issparse():
        raise DataFormatError(
            f"{shard}: {member.name}: expected a file as it is, found a link, a sparse "
            "one or something else"
        )
    if member.offset_data + member.size > size:
        raise DataFormatError(
            f"{shard}: {member.name}: expected {member.size} bytes, found "
            f"{size - member.offset_data}"
        )


def _check_end(shard: pathlib.Path, offset: int) -> None:
    """Raises DataFormatError unless reading has ended where the archive does.

    `tarfile` takes a damaged header for the end, of which a block of zeros is the sign.
    """
    with shard.open("rb") as file:
        file.seek(offset)
        block = file.read(tarfile.RECORDSIZE)
        whole = len(block) >= tarfile.BLOCKSIZE
        while whole and block and not any(block):
            block = file.read(tarfile.RECORDSIZE)
        if block or not whole:
            raise DataFormatError(
                f"{shard}: byte {offset}: expected a member, or the end of the archive "
                "with nothing behind it"
            )


def _read_label(
    archive: tarfile.TarFile, member: tarfile.TarInfo, shard: pathlib.Path
) -> int:
    content = archive.extractfile(member)
    said = content.read(_DIGITS + 1) if content else b""
    text = said.decode("ascii", "replace").strip()
    if len(said) > _DIGITS or not text.isdecimal() or int(text) >= _MOST:
        raise DataFormatError(
            f"{shard}: {member.name}: expected the number of a class below {_MOST}, "
            f"found {text!r}"
        )
    return int(text)
