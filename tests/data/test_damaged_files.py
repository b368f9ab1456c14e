"""Files of every format, cut, changed or hostile: an error that names the file.

Formats differ in what they can notice. Where there is no checksum, a changed bit of a
picture's value is another picture; and texts that are cut between two lines are whole
texts. Everything else that would make fewer examples, or other shapes, is an error. The
end of a plain text of one's own says nothing, so that only what is no text is noticed.
"""

import random

import numpy as np
import pytest

from hpcjax.core.errors import DataFormatError
from tests import hostile
from tests.data import writers
from tests.data.registry import REGISTRY

# name in the registry: what writes its files
SETS = {
    "mnist": lambda root: writers.write_mnist(root, 20),
    "fashion-mnist": lambda root: writers.write_mnist(root, 20, "fashion-mnist", ".gz"),
    "cifar10": lambda root: writers.write_cifar10(root, 20),
    "image-folder": lambda root: writers.write_image_folder(root, 12),
    "tar-images": lambda root: writers.write_tar_images(root, 12),
    "kjv": lambda root: writers.write_kjv(root, 40),
    "kernel-docs": writers.write_kernel_docs,
    "wordnet": writers.write_wordnet,
    "wikitext-2": writers.write_parted,
    "ptb": writers.write_parted,
    "c4": writers.write_parted,
    "lgg": writers.write_slices,
}
TEXTS = {
    "text": lambda root: writers.write_text(root, 20),
    "text-masked": writers.write_documents,
}


def read_all(name, root):
    """Every example of a data set."""
    read = REGISTRY[name]().load(root)
    return [part.gather(np.arange(len(part))) for part in (read.train, read.validation)]


def shapes(parts):
    return [{key: array.shape for key, array in part.items()} for part in parts]


def same(parts, others):
    return shapes(parts) == shapes(others) and all(
        (part[key] == other[key]).all()
        for part, other in zip(parts, others, strict=True)
        for key in part
    )


def chosen_files(name, root):
    """The first and last file that the data set reads."""
    files = sorted(path for path in root.rglob("*") if path.is_file())
    if name in ("wikitext-2", "ptb", "c4"):  # one writer for them; test parts not read
        files = [path for path in files if path.parent.name == name]
        files = [path for path in files if "test" not in path.name]
    return [files[0], files[-1]]


def outcome(name, root, path, content):
    """What is read where a file has another content; None if an error names it."""
    whole, said = path.read_bytes(), ""
    path.write_bytes(content)
    try:
        return read_all(name, root)
    except DataFormatError as error:
        said = str(error)
    finally:
        path.write_bytes(whole)
    assert path.name in said
    return None


@pytest.mark.faults(9)
@pytest.mark.parametrize("name", SETS)
def test_a_cut_file_is_never_a_shorter_epoch(name, tmp_path):
    SETS[name](tmp_path)
    whole = read_all(name, tmp_path)
    for path in chosen_files(name, tmp_path):
        content = path.read_bytes()
        for size in (0, 1, len(content) // 2 - 3):
            assert outcome(name, tmp_path, path, content[:size]) is None, (path, size)
        for less in (1, 17):  # maybe only the mark behind all values of a picture
            made = outcome(name, tmp_path, path, content[:-less])
            assert made is None or same(made, whole), (path, less)


@pytest.mark.acceptance("mixsize", 8)
@pytest.mark.parametrize("name", ["mnist", "cifar10", "tar-images"])
def test_a_cut_file_says_how_many_bytes_it_lacks(name, tmp_path):
    SETS[name](tmp_path)
    path = max(chosen_files(name, tmp_path), key=lambda path: path.stat().st_size)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 - 3])
    with pytest.raises(DataFormatError, match=r"expected \d+\s+bytes.*found"):
        read_all(name, tmp_path)


@pytest.mark.faults(9)
@pytest.mark.parametrize("name", SETS)
def test_a_changed_bit_is_told_or_changes_a_value(name, tmp_path):
    SETS[name](tmp_path)
    whole, draws = shapes(read_all(name, tmp_path)), random.Random(0)
    for path in chosen_files(name, tmp_path):
        content = path.read_bytes()
        for _ in range(6):
            damaged = bytearray(content)
            damaged[draws.randrange(len(content))] ^= 1 << draws.randrange(8)
            made = outcome(name, tmp_path, path, bytes(damaged))
            assert made is None or shapes(made) == whole


@pytest.mark.faults(21)
@pytest.mark.parametrize("name", SETS | TEXTS)
def test_hostile_files_are_refused_and_run_nothing(name, tmp_path):
    (root := tmp_path / "root").mkdir()
    (SETS | TEXTS)[name](root)
    contents = hostile.files(tmp_path / "run")
    hostile.assert_hostile(contents["pickle"], tmp_path / "run")
    for path in chosen_files(name, root):
        for content in contents.values():
            assert outcome(name, root, path, content) is None, path
    assert not (tmp_path / "run").exists()
