"""K-FAC shared by eight devices: the same numbers, less memory, the formula's bytes."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from hpcjax import core, models, perf, sharding, train
from hpcjax.core import ConfigError, per_device
from hpcjax.optim import kfac
from hpcjax.optim.kfac import _placement
from tests.optim.kfac import problems

FRACTIONS = (1 / 8, 1 / 4, 1 / 2, 1.0)
OPTIONS = {"factor_decay": 0.95, "factor_update_steps": 1, "inv_update_steps": 3}


def run(fraction, policy=None, dtype=jnp.float32, steps=20, cost="compute", **options):
    """Parameters and state after some steps on 8 devices, or on one for None."""
    model = problems.mlp(policy)
    chosen = kfac.plan(model)
    params, _ = model.init(jax.random.key(0))
    x, y = problems.batch(32, dtype)
    colocate = options.pop("colocate_factors", True)
    if fraction is None:
        tx, step = problems.alone(chosen, model, **OPTIONS, **options)
        state = tx.init(params)
    else:
        grid = kfac.Distribution(8, fraction, cost, colocate)
        _, state, step = problems.on_grid(
            grid, chosen, model, params, **OPTIONS, **options
        )
    for _ in range(steps):
        params, state = step(params, state, x, y)
    return params, state


def distance(left, right):
    squares = [
        (np.sum(np.square(a - b)), np.sum(np.square(b)))
        for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True)
    ]
    return np.sqrt(sum(s for s, _ in squares) / sum(t for _, t in squares))


@functools.cache
def one_device(**options):
    return run(None, **options)[0]


@pytest.mark.quick("0.25-options4")
@pytest.mark.acceptance("kaisa", 5)
@pytest.mark.parametrize(
    ("fraction", "options"),
    [
        *((fraction, {}) for fraction in FRACTIONS),
        (1 / 4, {"g_scale": "mean_loss"}),
        (1 / 2, {"method": "inverse", "symmetry_aware": True}),
        (1 / 2, {"prediv": False, "colocate_factors": False, "cost": "memory"}),
    ],
)
def test_every_fraction_gives_the_parameters_of_one_device(fraction, options):
    numeric = {
        k: v for k, v in options.items() if k not in ("colocate_factors", "cost")
    }
    expected = one_device(**numeric)
    # At 1/8 there are more columns than layers: some stay empty.
    assert len(problems.mlp().layers) < 8
    start, _ = problems.mlp().init(jax.random.key(0))
    assert distance(start, expected) > 0.05
    assert distance(run(fraction, **options)[0], expected) < 1e-5


@pytest.mark.slow
@pytest.mark.acceptance("kaisa", 5)
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_in_float64_they_are_equal_to_ten_digits(fraction):
    with jax.enable_x64(True):
        options = {"policy": problems.FLOAT64, "dtype": jnp.float64}
        expected = one_device(**options)
        assert jax.tree.leaves(expected)[0].dtype == jnp.float64
        assert distance(run(fraction, **options)[0], expected) < 1e-10


@pytest.mark.slow
def test_without_the_checker_of_varying_axes_it_is_the_same():
    model = problems.mlp()
    chosen, grid = kfac.plan(model), kfac.Distribution(8, 1 / 4)
    params, _ = model.init(jax.random.key(0))
    x, y = problems.batch(32)
    mesh, state, step = problems.on_grid(grid, chosen, model, params)
    transform = kfac.scale_by_kfac(chosen, learning_rate=0.05, distribution=grid)
    tx = problems.chain(transform, kfac.AXES)
    loose = problems.grid_step(chosen, model, tx, mesh, state, check_vma=False)
    for left, right in zip(
        jax.tree.leaves(step(params, state, x, y)),
        jax.tree.leaves(loose(params, state, x, y)),
        strict=True,
    ):
        np.testing.assert_array_equal(left, right)


@pytest.mark.quick("0.25")
@pytest.mark.acceptance("kaisa", 6)
@pytest.mark.parametrize("fraction", FRACTIONS)
def test_decompositions_take_the_padded_column_on_every_device(fraction):
    model = problems.mlp()
    chosen, grid = kfac.plan(model), kfac.Distribution(8, fraction)
    params, _ = model.init(jax.random.key(0))
    _, state, step = problems.on_grid(grid, chosen, model, params)
    _, state = step(params, state, *problems.batch(32))
    # By hand: matrices (7, 5), (6, 4), (5, 3) keep a² + g² + ag words each.
    words = {"dense_0": 109, "dense_1": 76, "head": 49}
    assignment = grid.assign(chosen)
    columns = [0] * grid.receivers
    for (path, _), column in assignment.group.items():
        columns[column] += words[path]
    buffer = state[1].decompositions.value["buffer"]
    per_device_bytes = [shard.data.nbytes for shard in buffer.addressable_shards]
    assert per_device_bytes == [4 * max(columns)] * 8
    assert kfac.memory_usage(state)["decompositions"] == 4 * max(columns)


@functools.cache
def resnet50():
    return kfac.plan(models.resnet((224, 224, 3), 1000, depth=50))


@pytest.mark.acceptance("kaisa", 6)
def test_resnet50_at_an_eighth_keeps_an_eighth():
    chosen = resnet50()
    assert len(chosen.blocks) == 54
    lengths = {}
    for cost in ("memory", "compute"):
        for fraction in (1 / 8, 1.0):
            grid = kfac.Distribution(8, fraction, cost)
            layout = kfac.make_layout(chosen, kfac.KfacOptions(), grid)
            lengths[cost, fraction] = layout.length
            if cost == "memory":
                assert layout.imbalance <= 1.10
        assert lengths[cost, 1 / 8] <= 0.15 * lengths[cost, 1.0]
    # Counted from the layers' shapes alone, for f = 1.
    whole = sum(b.a**2 + b.g**2 + b.a * b.g for b in chosen.blocks)
    assert lengths["memory", 1.0] == whole == pytest.approx(179.4e6, rel=1e-3)


@pytest.mark.acceptance("kaisa", 6)
def test_a_real_buffer_of_resnet50_is_an_eighth_on_each_device():
    """The state of ResNet-50 at f = 1/8, allocated on eight devices."""
    grid = kfac.Distribution(8, 1 / 8, "memory")
    mesh = sharding.make_mesh(grid.mesh_shape)
    placement = _placement.Shared(resnet50(), kfac.KfacOptions(), grid)

    def make():
        return per_device.expand(placement.init(jnp.float32), mesh)

    shardings = sharding.state_shardings(jax.eval_shape(make), mesh)
    buffer = jax.jit(make, out_shardings=shardings)().value["buffer"]
    sizes = {shard.data.nbytes for shard in buffer.addressable_shards}
    assert sizes == {4 * placement.layout.length}
    assert sizes.pop() <= 0.15 * 4 * 179.4e6


def compiled(fraction, **options):
    """The compiled step, and the plan and options it was made with."""
    model = problems.mlp()
    chosen, grid = kfac.plan(model), kfac.Distribution(8, fraction)
    params, _ = model.init(jax.random.key(0))
    _, state, step = problems.on_grid(
        grid,
        chosen,
        model,
        params,
        inv_update_steps=10,
        factor_update_steps=5,
        **options,
    )
    lowered = step.lower(params, state, *problems.batch(32))
    return lowered.compile(), chosen, kfac.KfacOptions(**options), grid


def permuted(found):
    return sum(c.pair_bytes for c in found if c.kind == "collective-permute")


def reduced(found):
    return sum(c.total for c in found if c.kind == "all-reduce")


@pytest.mark.quick("0.25-False")
@pytest.mark.acceptance("kaisa", 7)
@pytest.mark.parametrize(
    ("fraction", "symmetric"), [*((f, False) for f in FRACTIONS), (1 / 4, True)]
)
def test_bytes_of_the_program_are_the_formulas(fraction, symmetric):
    program, chosen, options, grid = compiled(fraction, symmetry_aware=symmetric)
    always, sometimes = perf.collectives_by_branch(program)
    volume = kfac.comm_volume(chosen, options, grid)
    weights = sum(block.a * block.g for block in chosen.blocks)
    assert weights == 7 * 5 + 6 * 4 + 5 * 3
    # Every step: the gradients' all-reduce and the results' broadcast. No scalars.
    assert reduced(always) == 4 * weights
    assert permuted(always) == 4 * volume["gradients"]
    assert volume["gradients"] == (8 - grid.workers) * weights
    # In branches: factors, and the flag that says whether all was finite.
    triangle = {False: lambda n: n * n, True: lambda n: n * (n + 1) // 2}[symmetric]
    factors = sum(triangle(b.a) + triangle(b.g) for b in chosen.blocks)
    assert volume["factors"] == factors
    assert reduced(sometimes) == 4 * factors + 4
    assert permuted(sometimes) == 4 * volume["decompositions"]
    kept = sum(b.a**2 + b.g**2 + b.a * b.g for b in chosen.blocks)
    assert volume["decompositions"] == (grid.workers - 1) * kept
    others = {c.kind for c in (*always, *sometimes)} - {
        "all-reduce",
        "collective-permute",
    }
    assert not others


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:decompositions are made of factors")
def test_a_grid_keeps_the_old_decompositions_where_new_ones_fail():
    model = problems.mlp()
    chosen, grid = kfac.plan(model), kfac.Distribution(8, 1 / 4)
    start, _ = model.init(jax.random.key(0))
    _, state, step = problems.on_grid(
        grid, chosen, model, start, factor_update_steps=10, inv_update_steps=1
    )
    params, state = step(start, state, *problems.batch(32))
    before = state[1]
    broken = jax.tree.map(lambda f: f, before.factors)
    broken["head"]["g"] = broken["head"]["g"] * jnp.nan
    state = (state[0], before._replace(factors=broken), *state[2:])
    params, after = step(params, state, *problems.batch(32))
    assert int(after[1].skipped) == 1
    chex.assert_trees_all_equal(after[1].decompositions, before.decompositions)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))


@pytest.mark.quick("None")
@pytest.mark.parametrize("dtype", ["float16", None])
def test_factors_are_exchanged_in_their_dtype(dtype):
    program, chosen, _, _ = compiled(1.0, factor_dtype=dtype)
    _, sometimes = perf.collectives_by_branch(program)
    numbers = sum(b.a**2 + b.g**2 for b in chosen.blocks)
    assert reduced(sometimes) == {"float16": 2, None: 4}[dtype] * numbers + 4


@pytest.mark.quick("None")
@pytest.mark.acceptance("kaisa", 11)
@pytest.mark.parametrize("fraction", [None, 1 / 4])
def test_each_factor_is_decomposed_once_per_interval(fraction, monkeypatch):
    calls = []
    plain = jnp.linalg.eigh

    def counted(matrix, **options):
        jax.debug.callback(lambda: calls.append(matrix.shape), ordered=False)
        return plain(matrix, **options)

    monkeypatch.setattr(jnp.linalg, "eigh", counted)
    for name in ("inv_update_steps", "factor_update_steps"):
        monkeypatch.setitem(OPTIONS, name, 10)
    run(fraction, steps=100)
    jax.effects_barrier()
    shapes = [(n, n) for n in (7, 5, 6, 4, 5, 3)]
    assert sorted(calls) == sorted(10 * shapes)


def test_the_grid_of_eight_devices_with_two_workers():
    grid = kfac.Distribution(8, 2 / 8)
    assert grid.columns == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert grid.rows == [[0, 1, 2, 3], [4, 5, 6, 7]]


@pytest.mark.acceptance("kaisa", 4)
@pytest.mark.parametrize(
    ("colocate", "loads"), [(True, (133, 128, 51, 54)), (False, (125, 91, 59, 91))]
)
def test_the_worked_assignment(colocate, loads):
    dims = {"l0": (3, 2), "l1": (4, 4), "l2": (5, 2), "l3": (2, 2), "l4": (3, 3)}
    work = {name: {"a": a**3.0, "g": g**3.0} for name, (a, g) in dims.items()}
    columns = kfac.Distribution(4, 1 / 2).columns
    found = core.assign_longest_first(work, columns, colocate=colocate)
    assert found.loads == loads
    if colocate:
        owner = {name: parts["a"] for name, parts in found.owner.items()}
        assert owner == {"l2": 0, "l1": 1, "l4": 3, "l0": 2, "l3": 2}
    else:
        assert found.owner["l1"] == {"g": 1, "a": 3}


@pytest.mark.acceptance("kaisa", 4)
@pytest.mark.parametrize(
    "fraction", [0.25, 2 / 3, -0.1, 1.1, float("nan"), float("inf")]
)
def test_impossible_fractions_are_refused_with_the_possible_ones(fraction):
    with pytest.raises(ConfigError, match="1/6, 1/3, 1/2, 1"):
        kfac.Distribution(6, fraction)


@pytest.mark.acceptance("kaisa", 4)
@pytest.mark.parametrize("fraction", [0.0, 0.1, 1 / 6])
def test_less_than_one_worker_is_one(fraction):
    assert kfac.Distribution(6, fraction).mesh_shape == {
        "grad_worker": 1,
        "grad_receiver": 6,
    }
    assert kfac.Distribution(8, 1 / 4).columns[1] == [1, 5]


@pytest.mark.quick("None")
@pytest.mark.acceptance("kaisa", 9)
@pytest.mark.parametrize("fraction", [None, 1 / 4])
def test_resuming_mid_interval_with_decompositions_is_exact(fraction, tmp_path):
    """From a checkpoint at step 7 past the next decomposition, the eleventh step's.

    And without the decompositions, which are then made of the saved factors.
    """
    model = problems.mlp()
    chosen = kfac.plan(model)
    params, _ = model.init(jax.random.key(0))
    x, y = problems.batch(32)
    options = {"inv_update_steps": 10}
    if fraction is None:
        tx, step = problems.alone(chosen, model, **options)
        state, place = tx.init(params), lambda state: state
    else:
        grid = kfac.Distribution(8, fraction)
        mesh, state, step = problems.on_grid(grid, chosen, model, params, **options)

        def place(state):
            return jax.device_put(state, sharding.state_shardings(state, mesh))

    for _ in range(7):
        params, state = step(params, state, x, y)
    straight = (params, place(state))
    with train.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(7, straight, {})
        checkpoints.wait()
        like = jax.tree.map(jnp.zeros_like, straight)
        again = checkpoints.restore(like).state
    stripped = [
        kfac.without_decompositions(s) if isinstance(s, kfac.KfacState) else s
        for s in jax.device_get(state)
    ]
    bare = (params, place(type(state)(stripped)))
    made = [decompositions(straight)]
    for _ in range(5):
        straight, again, bare = (step(*each, x, y) for each in (straight, again, bare))
        made.append(decompositions(straight))
        chex.assert_trees_all_equal(straight, again)
    assert [same(made[0], later) for later in made[1:]] == [True] * 3 + [False] * 2
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(bare))
    assert 0 < distance(bare[0], straight[0]) < 0.1


def decompositions(held):
    (found,) = (s for s in held[1] if isinstance(s, kfac.KfacState))
    return jax.device_get(found.decompositions)


def same(one, other):
    return all(jax.tree.leaves(jax.tree.map(np.array_equal, one, other)))


@pytest.mark.acceptance("kaisa", 9)
def test_without_decompositions_they_are_made_of_the_saved_factors():
    model, (x, y) = problems.mlp(), problems.batch(32)
    chosen = kfac.plan(model)
    params, _ = model.init(jax.random.key(0))
    tx, step = problems.alone(
        chosen, model, inv_update_steps=10, factor_update_steps=10
    )
    state = tx.init(params)
    for _ in range(7):
        params, state = step(params, state, x, y)
    stripped = (state[0], kfac.without_decompositions(state[1]), *state[2:])
    _, new = step(params, stripped, x, y)
    block = chosen.blocks[0]
    factors = {s: state[1].factors[block.path][s][0] for s in "ag"}
    expected = kfac.decompose(kfac.KfacOptions(), factors, 1e-3)
    found = new[1].decompositions["layers"]["dense_0/0"]
    matrix = jnp.ones((block.a, block.g))
    results = [
        kfac.precondition(kfac.KfacOptions(), items, matrix, 1e-3)
        for items in (found, expected)
    ]
    np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(2, 4), (4, 2), (1, 8)])
def test_the_mesh_must_be_that_of_the_distribution(shape):
    """Otherwise devices would take each other's layers for their own."""
    model = problems.mlp()
    chosen, grid = kfac.plan(model), kfac.Distribution(4, 1 / 2)
    tx = kfac.scale_by_kfac(chosen, distribution=grid)
    mesh = sharding.make_mesh(dict(zip(kfac.AXES, shape, strict=True)))
    params, _ = model.init(jax.random.key(0))
    state = tx.init(params)
    statistics = problems.identities(chosen)

    def body(params, state):
        return tx.update(params, state, taps=statistics, loss_terms=1)[0]

    mapped = jax.shard_map(
        body, mesh=mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False
    )
    with pytest.raises(ConfigError, match="mesh must be that of the distribution"):
        jax.eval_shape(mapped, params, state)


def test_layouts_are_told_apart():
    """Also where their buffers have one length: all of it on each device."""
    chosen = kfac.plan(problems.mlp())
    grids = [
        kfac.Distribution(devices, 1.0, cost)
        for devices in (1, 2, 4, 8)
        for cost in ("compute", "memory")
    ]
    layouts = [kfac.make_layout(chosen, kfac.KfacOptions(), grid) for grid in grids]
    assert len({layout.length for layout in layouts}) == 1
    orders = {str(layout) for layout in layouts}
    assert len({layout.fingerprint for layout in layouts}) == len(orders) >= 4
    assert all(0 < layout.fingerprint < 2**31 for layout in layouts)


def test_a_broadcast_reaches_groups_of_any_size_and_order():
    from hpcjax.collectives import broadcast

    mesh = sharding.data_mesh(8)
    groups = [[5, 0, 1], [2], [7, 6, 4]]

    def body(x):
        return broadcast(x, "data", groups)

    spec = P("data")
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)
    found = jax.jit(mapped)(jnp.arange(8.0))
    assert found.tolist() == [5, 5, 2, 3, 7, 5, 7, 7]
    for wrong, message in (
        ([[0, 1], [1]], "share devices"), ([[12]], "0 to 7"), ([[0, -1]], "0 to 7")
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(
                jax.shard_map(
                    functools.partial(broadcast, axes="data", groups=wrong),
                    mesh=mesh, in_specs=spec, out_specs=spec,
                ),
                jnp.arange(8.0),
            )  # fmt: skip


@pytest.mark.parametrize("forgotten", ["enter", "expand"])
def test_a_state_that_was_not_entered_is_told(forgotten):
    model, grid = problems.mlp(), kfac.Distribution(8, 1 / 4)
    chosen = kfac.plan(model)
    params, _ = model.init(jax.random.key(0))
    tx = kfac.scale_by_kfac(chosen, distribution=grid)
    state, mesh = tx.init(params), sharding.make_mesh(grid.mesh_shape)
    specs = per_device.specs(state)
    if forgotten == "enter":
        state = per_device.expand(state, mesh)
    else:
        specs = P()

    def run(state):
        entered = state if forgotten == "enter" else per_device.enter(state)
        statistics = jax.tree.map(lambda f: f, state.factors)
        return tx.update(params, entered, params, taps=statistics, loss_terms=8)[0]

    mapped = jax.shard_map(
        run, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=False
    )
    told = {
        "enter": r"K-FAC's state has a part of shape \(1, .*per_device.enter",
        "expand": r"decompositions/.* has no axis of devices: call per_device.expand",
    }
    with pytest.raises(ConfigError, match=told[forgotten]):
        jax.jit(mapped)(state)
