"""Shampoo's roots shared out over devices: one device's numbers, less work for each."""

import chex
import jax
import pytest
from jax.sharding import PartitionSpec as P

from hpcjax import core, optim, perf, sharding
from hpcjax.optim import matrix_roots

DEVICES = 4
OPTIONS = {"roots_every": 2, "block_size": 8}
SHAPES = {"a": (12, 5), "b": (7, 6), "c": (3, 3, 2, 4), "d": (9,)}


def gradients(number):
    keys = jax.random.split(jax.random.key(number), len(SHAPES))
    return {
        name: jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)
    }


def shared(root, check_vma):
    mesh = sharding.data_mesh(DEVICES)
    tx = optim.scale_by_shampoo(root=root, axis_name="data", **OPTIONS)
    return tx, jax.jit(
        jax.shard_map(
            tx.update,
            mesh=mesh,
            in_specs=(P(), P()),
            out_specs=(P(), P()),
            check_vma=check_vma,
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize(("root", "check_vma"), [("eigh", True), ("newton", False)])
def test_four_devices_give_the_updates_of_one(root, check_vma):
    alone = optim.scale_by_shampoo(root=root, **OPTIONS)
    tx, step = shared(root, check_vma)
    params = gradients(0)
    one, four = alone.init(params), tx.init(params)
    single = jax.jit(alone.update)
    for number in range(4):
        expected, one = single(gradients(number), one)
        found, four = step(gradients(number), four)
        chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(four, one, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_each_root_is_computed_once(monkeypatch):
    calls = []
    plain = matrix_roots.inverse_root_eigh

    def counted(matrix, *arguments):
        jax.debug.callback(lambda _: calls.append(matrix.shape), matrix[0, 0])
        return plain(matrix, *arguments)

    monkeypatch.setattr(matrix_roots, "inverse_root_eigh", counted)
    tx, step = shared("eigh", check_vma=True)
    _, state = step(gradients(0), tx.init(gradients(0)))
    jax.effects_barrier()
    # Blocks of at most 8: a is 8 + 4 rows by 5, b 7 by 6, c 18 by 4 is 8 + 8 + 2 by 4.
    sizes = [8, 5, 4, 5, 7, 6, 8, 4, 8, 4, 2, 4]
    assert sorted(calls) == sorted((n, n) for n in sizes)
    step(gradients(1), state)
    jax.effects_barrier()
    assert len(calls) == len(sizes)


def test_only_roots_are_sent_and_only_when_they_are_due():
    tx, step = shared("eigh", check_vma=True)
    params = gradients(0)
    compiled = step.lower(params, tx.init(params)).compile()
    always, sometimes = perf.collectives_by_branch(compiled)
    assert not always
    sizes = [8, 5, 4, 5, 7, 6, 8, 4, 8, 4, 2, 4]
    # Each root, and three scalars beside it: residual, iterations, failures.
    words = sum(n * n + 3 for n in sizes)
    assert sum(c.pair_bytes for c in sometimes) == (DEVICES - 1) * 4 * words


def test_work_goes_to_the_least_loaded_device():
    sides = (8, 8, 7, 6, 5, 5, 4)
    costs = {place: {"": float(n**3)} for place, n in enumerate(sides)}
    found = core.assign_longest_first(costs, [[0], [1]])
    assert max(found.loads) <= 4 / 3 * sum(found.loads) / 2
