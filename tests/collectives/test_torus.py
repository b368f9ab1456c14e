"""The all-reduce on a torus: numpy, bytes of every link, and its cycles."""

import collections
import itertools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from hpcjax import sharding
from hpcjax.collectives import MeshGroup, TorusConfig, ring_cycles
from hpcjax.collectives.hamiltonian_cycles import hamiltonian_cycles
from hpcjax.core.errors import ConfigError
from hpcjax.perf import hlo
from tests.collectives.exchanges import on_hosts, on_mesh, program

SHAPES = [(4, 2), (3, 3), (3, 2)]


def links_of(rows, cols):
    """How many links every two members have."""
    links = collections.Counter()
    for i, j in itertools.product(range(rows), range(cols)):
        for other in (i, (j + 1) % cols), ((i + 1) % rows, j):
            links[frozenset((i * cols + j, other[0] * cols + other[1]))] += 1
    return links


def steps_of(walk):
    return collections.Counter(
        map(frozenset, zip(walk, (*walk[1:], walk[0]), strict=True))
    )


@pytest.mark.acceptance("hammingmesh", 4)
@pytest.mark.parametrize(
    "shape",
    [
        *((3, 3), (8, 4), (4, 8), (6, 3), (5, 7), (12, 10), (32, 32)),
        *((2, 2), (4, 2), (2, 6)),
        *((24, 16), (32, 24), (3, 50), (17, 23)),
    ],
)
def test_two_cycles_have_every_link_once(shape):
    cycles = hamiltonian_cycles(*shape)
    for walk in cycles:
        assert sorted(walk) == list(range(shape[0] * shape[1]))
    assert steps_of(cycles[0]) + steps_of(cycles[1]) == links_of(*shape)


@pytest.mark.slow
@pytest.mark.acceptance("hammingmesh", 4)
def test_all_shapes_up_to_twelve_have_two_cycles():
    for shape in itertools.product(range(3, 13), repeat=2):
        test_two_cycles_have_every_link_once(shape)


@pytest.mark.acceptance("hammingmesh", 4)
@pytest.mark.parametrize("shape", [(3, 2), (2, 5), (1, 4)])
def test_where_there_are_no_two_cycles_there_is_one(shape):
    with pytest.raises(ConfigError, match=rf"no odd number times 2: got.*{shape[0]}"):
        hamiltonian_cycles(*shape)
    (walk,) = ring_cycles(*shape)
    assert sorted(walk) == list(range(shape[0] * shape[1]))
    assert not steps_of(walk) - links_of(*shape)


@pytest.mark.acceptance("hammingmesh", 5)
@pytest.mark.parametrize("algorithm", ["rings", "rows_columns"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_integers_are_added_up_exactly(shape, algorithm):
    config = TorusConfig(rows=shape[0], cols=shape[1], algorithm=algorithm)
    members = shape[0] * shape[1]
    draws = np.random.default_rng(0).integers(-1000, 1001, (1, members, 101))
    given = draws.astype(np.float32)
    (host,) = on_hosts(config, given)
    np.testing.assert_array_equal(host.mean, given[0].sum(0) / np.float32(members))
    sent = host.words - host.stats.sent_words
    # Counts and flags.
    assert sent.min() >= 0
    assert sent.max() <= 40


@pytest.mark.quick("rings-(3, 2)", "rows_columns-(4, 2)")
@pytest.mark.acceptance("hammingmesh", 5)
@pytest.mark.parametrize("shape", [(4, 2), (3, 2)], ids=str)
@pytest.mark.parametrize("algorithm", ["rings", "rows_columns"])
def test_links_of_a_device_carry_equal_parts(shape, algorithm):
    rows, cols = shape
    config = TorusConfig(rows=rows, cols=cols, algorithm=algorithm)
    members, n = rows * cols, 1001
    given = np.random.default_rng(1).normal(size=(1, members, n)).astype(np.float32)
    (step,) = on_mesh(config, given)
    bound = 2**-23 * np.abs(given[0]).sum(0)
    assert np.all(np.abs(step.mean - given[0].mean(0)) <= bound)
    sent, padded = sent_by_first(config, members, n), 4 * (n + -n % (4 * members))
    assert sum(sent.values()) == 2 * (members - 1) / members * padded
    if algorithm == "rings":
        # Of member 0: two links to its neighbour in the row, and one up and one down,
        # a quarter each; of a single cycle one across and one down, half each.
        share = {1: 2 / 4, cols: 1 / 4, members - 2: 1 / 4}
        share = {1: 1 / 2, cols: 1 / 2} if rows % 2 else share
    else:
        # Half of it goes along the rows first, and the other half's r-th part then.
        along = padded * (cols - 1) / cols * (1 + 1 / rows)
        down = padded * (rows - 1) / rows * (1 + 1 / cols)
        whole = along + down
        share = {
            1: along / whole,
            cols: down / whole / 2,
            members - 2: down / whole / 2,
        }
    assert sent == {to: sum(sent.values()) * part for to, part in share.items()}


@pytest.mark.parametrize("shape", [(5, 3), (1, 4), (2, 2)], ids=str)
def test_rounds_of_a_pass_are_the_steps_of_its_rings(shape):
    members = shape[0] * shape[1]
    config = TorusConfig(rows=shape[0], cols=shape[1], algorithm="rows_columns")
    exchange = config.make()
    (sent,) = exchange.transfers({"w": np.zeros(60)}, members, 1.0)
    for route in exchange.method.method.list_routes(members):
        assert sent.per_pass == sum(rings.size - 1 for rings in route)


def sent_by_first(config, members, n):
    """Bytes that a compiled program sends from device 0, by target."""
    state, jitted = program(config, members, n)
    zeros = np.zeros((members, n), np.float32)
    compiled, sent = jitted.lower(zeros, state).compile(), collections.Counter()
    for each in hlo.collectives(compiled):
        for source, target in each.groups if each.pairs else ():
            sent[target] += each.total * (source == 0)
    return {target: size for target, size in sent.items() if size}


def test_ranks_are_in_the_order_of_the_axes_that_are_given():
    mesh = sharding.make_mesh({"i": 2, "j": 3})
    given = np.arange(6.0, dtype=np.float32)
    pairs = [(rank, (rank + 1) % 6) for rank in range(6)]

    def step(x):
        group = MeshGroup(("j", "i"))
        return group.permute(x, pairs), group.rank[None]

    spec = P(("i", "j"))
    moved, ranks = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=spec, out_specs=spec)
    )(given)
    # Each has what the member of the rank before its own had.
    at = np.argsort(ranks)
    np.testing.assert_array_equal(moved[at], given[np.roll(at, 1)])


@pytest.mark.parametrize(
    ("given", "shape"),
    [({}, (3, 4)), ({"rows": 2}, (2, 6)), ({"cols": 2}, (6, 2)), ({"rows": 5}, (5, 2))],
)
def test_what_is_not_given_makes_up_the_members(given, shape):
    assert TorusConfig(**given).method().method.find_shape(12) == shape


def test_another_number_of_members_is_refused():
    state, step = program(TorusConfig(rows=2, cols=3), 4, 8)
    with pytest.raises(ConfigError, match="rows=2, cols=3, size=4"):
        jax.eval_shape(step, np.zeros((4, 8), np.float32), state)
