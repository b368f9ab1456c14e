"""Hamiltonians of real crystals: Wannier90's `_hr.dat`."""

import os
import pathlib

import numpy as np

from hpcjax.core import checks
from hpcjax.core.errors import DataFormatError
from hpcjax.solvers.devices import Slabs, repeat


def read_hr(
    path: str | os.PathLike[str],
    *,
    slabs: int = 4,
    axis: int = 0,
    transverse: int = 1,
    momenta: int = 1,
) -> Slabs:
    """Reads a crystal's Hamiltonian, and makes slabs and leads of it.

    A slab has as many cells as the longest hopping along the axis. The direction that
    is neither is at momentum 0.

    Args:
      path: of the file.
      slabs: their number.
      axis: lattice vector of transport, 0 to 2.
      transverse: lattice vector whose momenta are sampled.
      momenta: their number.

    Raises:
      ConfigError: axes that are the same, or none; no slab or momentum.
      DataFormatError: a file of another form, or a Hamiltonian that is not Hermitian.
    """
    checks.require_count(1, slabs=slabs, momenta=momenta)
    given = {"axis": axis, "transverse": transverse}
    good = axis != transverse and {axis, transverse} <= {0, 1, 2}
    checks.require(good, "axes must differ, and be 0, 1 or 2", **given)
    cells, blocks = _parse(pathlib.Path(path))
    angle = 2 * np.pi * np.arange(momenta) / momenta
    phases = np.exp(1j * cells[:, transverse, None] * angle)
    reach = max(1, int(np.abs(cells[:, axis]).max()))
    n = blocks.shape[-1]
    hopping = np.zeros((2 * reach + 1, momenta, n, n), complex)
    terms = phases[..., None, None] * blocks[:, None]
    np.add.at(hopping, cells[:, axis] + reach, terms)
    apart = np.abs(hopping - hopping[::-1].conj().swapaxes(-1, -2)).max()
    if apart > 1e-4:  # files have six digits
        raise DataFormatError(
            f"{path} must be Hermitian: entries differ by {apart:.2g}"
        )
    hopping = (hopping + hopping[::-1].conj().swapaxes(-1, -2)) / 2
    first, second = np.indices((reach, reach))
    whole = np.concatenate([hopping, np.zeros_like(hopping)])  # what reaches too far

    def join(shift: int) -> np.ndarray:
        found = whole[second - first + shift + reach]  # [i, j, momenta, n, n]
        return np.einsum("ijkab->kiajb", found).reshape(momenta, reach * n, -1)

    return repeat(join(0), join(reach), slabs)


def _parse(path: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    """Returns cells [R, 3] and blocks [R, n, n], ⟨0 m|H|R n⟩ over degeneracies."""
    try:
        _, *lines = path.read_text().splitlines()
        n, count = int(lines[0]), int(lines[1])
        if n < 1 or count < 1:
            raise ValueError(f"{n} functions, {count} cells")
        first = 2 + -(-count // 15)
        degeneracies = np.array(" ".join(lines[2:first]).split(), int)
        rows = np.array([line.split() for line in lines[first:] if line.strip()], float)
        rows = rows.reshape(count, n * n, 7)
        left, right = rows[..., 3].astype(int) - 1, rows[..., 4].astype(int) - 1
        every = np.sort(n * left + right) == np.arange(n * n)
        if (rows[..., :3] != rows[:, :1, :3]).any() or not every.all():
            raise ValueError("a cell's functions must be in one piece, each pair once")
        blocks = np.zeros((count, n, n), complex)
        blocks[np.arange(count)[:, None], left, right] = (
            rows[..., 5] + 1j * rows[..., 6]
        )
    except (IndexError, ValueError) as error:
        raise DataFormatError(
            f"{path} must be Wannier90's _hr.dat, a comment, numbers of functions and "
            f"of cells, degeneracies, and 7 numbers a line: {error}"
        ) from error
    if len(degeneracies) != count or degeneracies.min() < 1:
        raise DataFormatError(
            f"{path} must have {count} degeneracies, all >= 1: got {degeneracies}"
        )
    return rows[:, 0, :3].astype(int), blocks / degeneracies[:, None, None]
