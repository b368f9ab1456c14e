"""The electrons' self-energy on a mesh: tiles of energies and atoms, or round by round.

Axes are "te" and "ta". Outside, Green's functions are spread over energies and phonons
over frequencies, each over all devices, as solving for them leaves them.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from hpcjax.collectives import broadcast
from hpcjax.core import checks
from hpcjax.core.varying import vary
from hpcjax.solvers.scattering import left_factor, right_factor, sum_emitted_absorbed

Scheme = Literal["tiles", "rounds"]
AXES = ("te", "ta")


class Tiles(NamedTuple):
    """Atoms of each tile.

    Attributes:
      atoms: a tile's own, then those that its bonds end at besides; filled up with the
        last one.
      neighbours: of its own atoms, as places in its row of `atoms`.
    """

    atoms: Int[np.ndarray, "tiles held"]
    neighbours: Int[np.ndarray, "tiles own bonds"]


def plan_tiles(neighbours: Int[np.ndarray, "atoms bonds"], tiles: int) -> Tiles:
    """Cuts atoms into tiles of as many each, in their order.

    Where tiles do not divide the atoms, the last one stands for those that are missing.

    Raises:
      ConfigError: more tiles than atoms, or none.

    Examples:
      >>> plan_tiles(np.array([[3, 1], [0, 2], [1, 3], [2, 0]]), 2).atoms.tolist()
      [[0, 1, 2, 3], [2, 3, 0, 1]]
    """
    atoms = len(neighbours)
    rule = "TA must be at least 1 and at most the atoms"
    checks.require(1 <= tiles <= atoms, rule, TA=tiles, Na=atoms)
    own = np.arange(atoms + -atoms % tiles).clip(max=atoms - 1).reshape(tiles, -1)
    ends = np.asarray(neighbours)[own]
    rows = [
        [*mine, *np.setdiff1d(theirs, mine)]
        for mine, theirs in zip(own, ends, strict=True)
    ]
    most = max(map(len, rows))
    held = np.array([row + row[-1:] * (most - len(row)) for row in rows])
    found = [
        [[row.index(b) for b in a] for a in end]
        for row, end in zip(rows, ends, strict=True)
    ]
    return Tiles(held, np.array(found))


def spread_self_energy(
    mesh: Mesh, neighbours: Int[np.ndarray, "atoms bonds"], *, scheme: Scheme = "tiles"
) -> Callable[..., Array]:
    """Returns `electron_self_energy` on a mesh; sums are those of one device.

    "tiles", the communication-avoiding scheme: one all-to-all along "ta" gives a tile
    the atoms that it needs, at its energies; neighbours along "te" send it as many
    energies as there are frequencies from either side; phonons come once. "rounds", the
    original one: for each momentum and frequency the phonons are broadcast, and each
    device gets Green's functions at all of its energies, shifted up and down. Energies,
    frequencies and atoms that devices do not divide are filled up with zeros.

    Args:
      mesh: with axes "te" and "ta".
      neighbours: b of bonds, known here.
      scheme: what is sent.

    Returns:
      A function of `greens`, `bonds`, `gradients` and `step`, to be jitted, like
      `electron_self_energy`.

    Raises:
      ConfigError: another mesh, or more tiles than atoms.
    """
    checks.require_choice("scheme", scheme, get_args(Scheme))
    names = tuple(mesh.axis_names)
    checks.require(names == AXES, f"the mesh must have axes {AXES}", axes=names)
    te, ta = mesh.shape["te"], mesh.shape["ta"]
    tiles, atoms = plan_tiles(neighbours, ta), len(neighbours)
    missing = tiles.neighbours[..., 0].size - atoms if scheme == "tiles" else 0
    if scheme == "tiles":
        body = functools.partial(_in_tiles, tiles=tiles, te=te)
    else:
        body = functools.partial(
            _in_rounds, neighbours=jnp.asarray(neighbours), devices=te * ta
        )
    spread = P(None, None, AXES)
    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(spread, spread, P(), P()), out_specs=spread
    )

    def apply(greens: Any, bonds: Any, gradients: Any, step: Any) -> Array:
        energies, frequencies = greens.shape[2], bonds.shape[2]
        greens = _fill(greens, 2, -energies % (te * ta))
        bonds = _fill(_fill(bonds, 2, -frequencies % (te * ta)), 3, missing)
        found = mapped(greens, bonds, _fill(gradients, 0, missing), jnp.asarray(step))
        return found[:, :, :energies, :atoms]

    return apply


def _fill(x: Any, axis: int, missing: int) -> Array:
    """Returns an array with so many zeros behind it."""
    return jnp.pad(x, [(0, missing * (d == axis)) for d in range(x.ndim)])


def _in_tiles(
    greens: Array, bonds: Array, gradients: Array, step: Array, *, tiles: Tiles, te: int
) -> Array:
    number, own = jax.lax.axis_index("ta"), tiles.neighbours.shape[1]
    exchange = functools.partial(jax.lax.all_to_all, axis_name="ta", tiled=True)
    taken = exchange(greens[:, :, :, tiles.atoms.ravel()], split_axis=3, concat_axis=2)
    phonons = exchange(bonds, split_axis=3, concat_axis=2)
    phonons = jax.lax.all_gather(phonons, "te", axis=2, tiled=True)
    sigma = sum_emitted_absorbed(
        _widen(taken, phonons.shape[2], te),
        phonons,
        jax.lax.dynamic_slice_in_dim(gradients, number * own, own),
        jnp.asarray(tiles.neighbours)[number],
        step,
        "tiled",
    )
    return exchange(sigma, split_axis=2, concat_axis=3)


def _widen(x: Array, rows: int, te: int) -> Array:
    """Returns a tile with so many energies before and behind it, from those beside."""
    own = x.shape[2]
    before, behind = [], []
    for hop in range(1, -(-rows // own) + 1):
        taken = min(own, rows - (hop - 1) * own)
        before.insert(0, _move(x[:, :, own - taken :], "te", te, hop))
        behind.append(_move(x[:, :, :taken], "te", te, -hop))
    return jnp.concatenate([*before, x, *behind], 2)


def _move(x: Array, axes: Any, devices: int, hop: int) -> Array:
    """Returns what the device so many places before this one has, zeros if none."""
    pairs = [(i, i + hop) for i in range(devices) if 0 <= i + hop < devices]
    if not hop:
        return x
    return jax.lax.ppermute(x, axes, pairs) if pairs else jnp.zeros_like(x)


def _in_rounds(
    greens: Array,
    bonds: Array,
    gradients: Array,
    step: Array,
    *,
    neighbours: Array,
    devices: int,
) -> Array:
    momenta, (qs, held) = greens.shape[1], bonds.shape[1:3]

    def add(sigma: Array, q: Array) -> tuple[Array, None]:
        far = q * (momenta // qs)
        for w in range(devices * held):
            first, own = divmod(w, held)
            group = [first, *(i for i in range(devices) if i != first)]
            phonons = broadcast(bonds[:, q, own], AXES, [group])
            turned = phonons[::-1].swapaxes(-1, -2)
            for sign, given in ((1, phonons), (-1, turned)):
                taken = greens[:, (jnp.arange(momenta) - sign * far) % momenta]
                shifted = _shift(taken, sign * (w + 1), devices)
                left = left_factor(shifted, gradients, neighbours)
                right = right_factor(given, gradients)
                sigma += jnp.einsum("skeabiop,sabipr->skeaor", left, right)
        return sigma, None

    start = vary(jnp.zeros_like(greens), AXES)
    sigma, _ = jax.lax.scan(add, start, jnp.arange(qs))
    return 1j * step / (2 * jnp.pi * qs) * sigma


def _shift(x: Array, by: int, devices: int) -> Array:
    """Returns x(E − by), zeros from beyond the grid."""
    own = x.shape[2]
    hop, rest = divmod(by, own)
    near = _move(x[:, :, : own - rest], AXES, devices, hop)
    if not rest:
        return near
    return jnp.concatenate(
        [_move(x[:, :, own - rest :], AXES, devices, hop + 1), near], 2
    )
