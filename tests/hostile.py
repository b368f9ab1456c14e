"""What runs somebody's command where it is unpickled, in each form of pickles."""

import io
import os
import pathlib
import pickle
import zipfile

import numpy as np


class _Command:
    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch '{self.path}'",)


def files(sentinel: pathlib.Path) -> dict[str, bytes]:
    """Returns contents of files that make `sentinel` if they are unpickled.

    They are a plain pickle as in CIFAR's Python version, an array of objects, and a zip
    file in the form of PyTorch's weights.
    """
    command = _Command(sentinel)
    plain, array, weights = pickle.dumps(command), io.BytesIO(), io.BytesIO()
    np.save(array, np.array([command], object), allow_pickle=True)
    with zipfile.ZipFile(weights, "w") as archive:
        archive.writestr("archive/data.pkl", plain)
    return {"pickle": plain, "npy": array.getvalue(), "pt": weights.getvalue()}


def assert_hostile(content: bytes, sentinel: pathlib.Path) -> None:
    """Asserts that a plain pickle does make it, and removes it again."""
    pickle.loads(content)
    assert sentinel.exists()
    sentinel.unlink()
