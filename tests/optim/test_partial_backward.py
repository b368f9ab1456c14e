import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from hpcjax import hostcomm, layers, models, optim, perf, sharding
from hpcjax.collectives import HostGroup, MeshGroup, spread, subset, subset_sum
from hpcjax.core import ConfigError, trees
from hpcjax.core.varying import vary
from hpcjax.models import CausalLmConfig, MlpConfig, ResNetConfig
from hpcjax.optim import _contributor_bytes
from hpcjax.optim.partial_backward import stop_below
from tests.hostcomm.threads import in_threads

WORKERS = 4


def chain(layers, width=16):
    """A chain of `layers` products and its blocks of equally many layers."""
    params = {f"w{i:02}": jnp.ones((width, width)) for i in range(layers)}

    def loss(params, x):
        for kernel in params.values():
            x = jnp.tanh(x @ kernel)
        return x.sum()

    return params, loss


def even_blocks(params, k):
    paths = list(trees.flatten(params))
    size = len(paths) // k
    return optim.Blocks(
        tuple(tuple(paths[i * size : (i + 1) * size]) for i in range(k))
    )


MODELS = {
    "mlp": (lambda: MlpConfig(widths=(9, 8, 7)).make((6,), 5), (6,), 5, False),
    "cnn": (lambda: ResNetConfig(depth=8, width=4).make((8, 8, 1), 5), (8, 8, 1), 5, 0),
    "transformer": (
        lambda: models.unrolled_causal_lm(
            CausalLmConfig(depth=2, width=8, heads=2), 6, 11
        ),
        (6,),
        11,
        True,
    ),
}


class Problem:
    """A model, a batch for four workers, and the loss of one worker's part."""

    def __init__(self, name):
        make, inputs, outputs, language = MODELS[name]
        self.model = make()
        self.params, self.state = self.model.init(jax.random.key(0))
        rng = np.random.default_rng(0)
        shape = (4 * WORKERS, *inputs)
        if language:
            self.x = rng.integers(0, outputs, shape).astype(np.int32)
            self.y = rng.integers(0, outputs, shape).astype(np.int32)
        else:
            self.x = rng.normal(size=shape).astype(np.float32)
            self.y = rng.integers(0, outputs, shape[:1]).astype(np.int32)
        self.layers = optim.layers_of_model(self.model, self.x[:4])

    def loss(self, params, x, y):
        logits, _ = self.model.apply(params, self.state, x, train=True)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), y[..., None], -1)
        return -chosen.mean()

    def blocks(self, k):
        return optim.cut_layers(
            self.layers, optim.partition([1.0] * len(self.layers), k)
        )

    @functools.cached_property
    def full(self):
        """The whole gradient of every worker's part, float64."""
        parts = zip(np.split(self.x, WORKERS), np.split(self.y, WORKERS), strict=True)
        grad = jax.jit(jax.grad(self.loss))
        return [
            {p: np.asarray(g, np.float64) for p, g in trees.flatten(grads).items()}
            for grads in (grad(self.params, x, y) for x, y in parts)
        ]


problem = functools.cache(Problem)


def step_of(problem, backward):
    """Returns the jitted `(params, x, y, step) -> averaged gradients`."""
    link = optim.contributor_mean(backward, "data")

    def body(params, x, y, step):
        params = vary(params, "data")
        branches = [
            lambda *a, role=role: vary(
                optim.partial_value_and_grad(problem.loss, backward.blocks, role)(*a),
                "data",
            )
            for role in range(1, backward.k + 1)
        ]
        role = backward.role(jax.lax.axis_index("data"), step)
        _, grads = jax.lax.switch(role - 1, branches, params, x, y)
        return link.update(grads, link.init(params), step=step)[0]

    specs = (P(), P("data"), P("data"), P())
    mesh = sharding.data_mesh(WORKERS)
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P()))


def contributors(k, number, step):
    """Written down from the specification: role(w, t) = ((w + t) mod k) + 1."""
    return [w for w in range(WORKERS) if (w + step) % k + 1 >= k - number + 1]


@pytest.mark.quick("mlp-2-contributors", "mlp-4-zeros")
@pytest.mark.acceptance("spb-jigsaw", 1)
@pytest.mark.parametrize("mode", ["zeros", "contributors"])
@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_every_block_is_averaged_over_exactly_its_contributors(name, k, mode):
    given = problem(name)
    backward = optim.PartialBackward(blocks=given.blocks(k), mode=mode)
    step = step_of(given, backward)
    number = backward.blocks.numbers()
    for turn in range(k):
        found = trees.flatten(step(given.params, given.x, given.y, jnp.int32(turn)))
        for path, leaf in found.items():
            those = contributors(k, number[path], turn)
            assert len(those) == WORKERS // k * number[path]
            parts = np.stack([given.full[worker][path] for worker in those])
            # Of what is averaged: float32 rounds that, and where contributors cancel
            # their mean is smaller than any of them.
            scale = np.abs(parts).max()
            np.testing.assert_allclose(
                leaf, parts.mean(0), rtol=0, atol=2e-6 * scale + 1e-12
            )


def test_fixed_roles_and_dense_steps_choose_the_contributors():
    given = problem("mlp")
    blocks = given.blocks(4)
    for mode in ("zeros", "contributors"):
        backward = optim.PartialBackward(
            blocks=blocks, mode=mode, rotation="fixed", dense_steps=2
        )
        step = step_of(given, backward)
        for turn in (1, 2, 3):
            found = trees.flatten(step(given.params, given.x, given.y, turn))
            for path, number in blocks.numbers().items():
                those = range(4) if turn < 2 else contributors(4, number, 0)
                wanted = np.mean([given.full[w][path] for w in those], axis=0)
                np.testing.assert_allclose(found[path], wanted, atol=1e-6)


@pytest.mark.acceptance("spb-jigsaw", 6)
def test_a_worker_has_the_next_role_in_the_next_step():
    assert [optim.roles(3, 3, step) for step in (0, 1, 2)] == [
        (1, 2, 3),
        (2, 3, 1),
        (3, 1, 2),
    ]


@pytest.mark.acceptance("spb-jigsaw", 6)
@pytest.mark.parametrize(("workers", "k"), [(4, 4), (4, 2), (8, 4), (3, 1)])
def test_over_a_cycle_every_worker_has_each_role_and_every_block_each_shard(workers, k):
    turns = [optim.roles(workers, k, step) for step in range(k)]
    for worker in range(workers):
        assert sorted(turn[worker] for turn in turns) == list(range(1, k + 1))
    for number in range(1, k + 1):
        fed = [sum(turn[w] >= k - number + 1 for turn in turns) for w in range(workers)]
        assert fed == [number] * workers
    fixed = {optim.roles(workers, k, step, "fixed") for step in range(k)}
    assert len(fixed) == 1
    backward = optim.PartialBackward(
        blocks=optim.Blocks(tuple((str(j),) for j in range(k)))
    )
    for step, worker in itertools.product(range(k), range(workers)):
        assert backward.role(worker, step) == turns[step][worker]
        assert (
            int(backward.role(jnp.int32(worker), jnp.int32(step)))
            == (turns[step][worker])
        )


def compiled_role(loss, blocks, role, params, x):
    made = jax.jit(optim.partial_value_and_grad(loss, blocks, role))
    return made.lower(params, x).compile()


@pytest.mark.acceptance("spb-jigsaw", 3)
@pytest.mark.parametrize("q", [1, 4])
def test_a_role_has_the_products_of_its_blocks_and_no_others(q):
    k = 4
    params, loss = chain(k * q, width=64)
    blocks, x = even_blocks(params, k), jnp.ones((32, 64))
    forward = jax.jit(loss).lower(params, x).compile()
    assert perf.count_ops(forward, "dot") == k * q
    flops = {}
    for role in range(1, k + 1):
        compiled = compiled_role(loss, blocks, role, params, x)
        # Weights' gradients of its layers, inputs' of all of them but the lowest.
        assert perf.count_ops(compiled, "dot") == k * q + 2 * role * q - 1
        flops[role] = perf.flops(compiled) - perf.flops(forward)
    for role, own in flops.items():
        exact = (2 * role * q - 1) / (2 * k * q - 1)
        assert own / flops[k] == pytest.approx(exact, rel=0.02)


@pytest.mark.acceptance("spb-jigsaw", 3)
def test_deep_blocks_cost_their_share():
    params, loss = chain(40, width=32)
    blocks, x = even_blocks(params, 4), jnp.ones((8, 32))
    forward = perf.flops(jax.jit(loss).lower(params, x).compile())
    full = perf.flops(compiled_role(loss, blocks, 4, params, x)) - forward
    for role in (1, 2, 3):
        own = perf.flops(compiled_role(loss, blocks, role, params, x)) - forward
        assert own / full == pytest.approx(role / 4, rel=0.05)


@pytest.mark.acceptance("spb-jigsaw", 3)
def test_a_network_with_shortcuts_forms_no_gradients_below_its_cut():
    given = problem("cnn")
    cuts = [n for n, layer in enumerate(given.layers) if layer.name.endswith("conv1")]
    blocks = optim.cut_layers(given.layers, cuts[1:])
    shapes = given.x[:4], given.y[:4]
    kernels = [
        sum("conv" in path for path in paths if path.endswith("kernel"))
        for paths in blocks.paths
    ]

    def convolutions(role):
        made = optim.partial_value_and_grad(given.loss, blocks, role)
        return str(jax.make_jaxpr(made)(given.params, *shapes)).count(
            "conv_general_dilated["
        )

    for role in (1, 2, 3):
        # The first one's input gets no gradient.
        assert convolutions(role) == sum(kernels) + 2 * sum(kernels[-role:]) - 1


def equal_cnn(blocks=8, channels=8, size=16):
    rng = np.random.default_rng(0)
    shape = (3, 3, channels, channels)
    params = {
        f"block_{i}": {name: jnp.asarray(rng.normal(size=shape), "float32") / 9}
        for i in range(blocks)
        for name in ("kernel",)
    }
    same = functools.partial(
        layers.conv, strides=(1, 1), padding="SAME", dilation=(1, 1), compute="float32"
    )

    def loss(params, x):
        for block in params.values():
            x = x + jax.nn.silu(same(x, block["kernel"], None))
        return jnp.mean(x**2)

    return params, loss, jnp.ones((64, size, size, channels))


@pytest.mark.acceptance("spb-jigsaw", 4)
def test_a_short_role_keeps_less_memory():
    params, loss, x = equal_cnn()
    blocks = even_blocks(params, 8)
    temporary = [
        compiled_role(loss, blocks, role, params, x)
        .memory_analysis()
        .temp_size_in_bytes
        for role in (1, 2, 4, 8)
    ]
    assert temporary == sorted(temporary)
    assert temporary[0] <= 0.6 * temporary[-1]


def tree_of(sizes, fill):
    return {f"b{j}": fill(n) for j, n in enumerate(sizes)}


def host_bytes(sizes, roles, mode):
    """Runs the average in threads; returns results and payload bytes sent, by rank."""
    k = len(sizes)
    blocks = optim.Blocks(tuple((f"b{j}",) for j in range(k)))

    def program(transport):
        rank = transport.rank
        grads = {
            f"b{j}": np.full(n, rank + 1 if roles[rank] >= k - j else 0, np.float32)
            for j, n in enumerate(sizes)
        }
        made = optim.average_contributions(
            HostGroup(transport), grads, blocks=blocks, roles=roles, mode=mode
        )
        return made, transport.counters().total_sent().payload

    return in_threads(program, hostcomm.connected(len(roles)))


@pytest.mark.acceptance("spb-jigsaw", 5)
def test_contributors_move_three_quarters_of_what_zeros_do():
    sizes = [60_000] * 4  # float32: long enough for rings
    sent = {}
    for mode in ("zeros", "contributors"):
        for turn in range(4):
            roles = optim.roles(4, 4, turn)
            results = host_bytes(sizes, roles, mode)
            for grads, _ in results:
                for number in range(1, 5):
                    mean = np.mean([w + 1 for w in contributors(4, number, turn)])
                    np.testing.assert_allclose(grads[f"b{number - 1}"], mean, rtol=1e-6)
            sent[mode, turn] = [payload for _, payload in results]
            said = optim.contributor_bytes([4 * n for n in sizes], roles, mode)
            np.testing.assert_allclose(sent[mode, turn], said.total)
    for turn in range(4):
        ours, zeros = sum(sent["contributors", turn]), sum(sent["zeros", turn])
        assert ours <= 0.78 * zeros
        assert ours == pytest.approx(0.75 * zeros)
        assert max(sent["contributors", turn]) < max(sent["zeros", turn])


@pytest.mark.parametrize(("workers", "k"), [(4, 2), (6, 3)])
def test_replicas_of_a_role_share_the_giving(workers, k):
    roles, sizes = optim.roles(workers, k, 1), [36_000] * k
    results = host_bytes(sizes, roles, "contributors")
    said = optim.contributor_bytes([4 * n for n in sizes], roles)
    for (_, sent), told in zip(results, said.total, strict=True):
        assert sent == pytest.approx(told, rel=1e-3)


def test_what_a_compiled_program_moves_is_what_is_said():
    sizes = [60, 24, 36, 48]  # parts of a ring without padding
    blocks = optim.Blocks(tuple((f"b{j}",) for j in range(4)))
    for mode in ("zeros", "contributors"):
        backward = optim.PartialBackward(blocks=blocks, mode=mode, rotation="fixed")
        link = optim.contributor_mean(backward, "data")

        def body(grads, link=link):
            return link.update(grads, link.init(grads), step=0)[0]

        mapped = jax.shard_map(
            body, mesh=sharding.data_mesh(4), in_specs=P("data"), out_specs=P()
        )
        grads = tree_of(sizes, lambda n: jnp.ones(4 * n))
        compiled = jax.jit(mapped).lower(grads).compile()
        if mode == "zeros":
            assert perf.collective_bytes(compiled) == 4 * sum(sizes)
            assert perf.bytes_by_kind(compiled).keys() == {"all-reduce"}
            continue
        permutes = [
            c for c in perf.collectives(compiled) if c.kind == "collective-permute"
        ]
        below = [4 * n for n in sizes[:3]] + [0]
        said = optim.contributor_bytes(below, optim.roles(4, 4, 0))
        assert sum(c.pair_bytes for c in permutes) == sum(said.total)
        assert perf.collective_bytes(compiled, "all-reduce") == 4 * sizes[3]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_a_sum_over_some_devices_and_its_spread(count):
    members = [5, 2, 7, 0, 1, 3, 6, 4][:count]
    rest = sorted(set(range(8)) - set(members))
    rows = np.arange(8 * 7, dtype=np.float32).reshape(8, 7)  # 7: needs padding

    def body(x):
        group = MeshGroup("data")
        total = subset_sum(group, x[0], members)
        return spread(group, total, [[members[0], *rest]])[None]

    mapped = jax.shard_map(
        body, mesh=sharding.data_mesh(8), in_specs=P("data"), out_specs=P("data")
    )
    np.testing.assert_array_equal(
        jax.jit(mapped)(rows), np.broadcast_to(rows[members].sum(0), (8, 7))
    )


@pytest.mark.parametrize("size", range(1, 9))
def test_how_often_a_place_of_a_tree_sends(size):
    sends = [
        source for pairs in subset._list_rounds([range(size)]) for source, _ in pairs
    ]
    told = [_contributor_bytes._children(place, size) for place in range(size)]
    assert told == [sends.count(place) for place in range(size)]


def test_half_precision_is_summed_in_float32():
    blocks = optim.Blocks((("a",), ("b",)))
    backward = optim.PartialBackward(blocks=blocks, workers=2, mode="zeros")
    link = optim.contributor_mean(backward)
    grads = {"a": jnp.ones(3, "bfloat16"), "b": jnp.full(3, 3.0, "bfloat16")}
    mean, _ = link.update(grads, link.init(grads), step=0)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(mean)} == {"bfloat16"}
    assert mean["a"].tolist() == [1.0] * 3  # one contributor
    assert mean["b"].tolist() == [1.5] * 3  # two


def test_a_block_can_have_a_learning_rate_of_its_own():
    blocks = optim.Blocks((("a",), ("b",)))
    link = optim.scale_blocks(blocks, (0.5, 2.0))
    updates = {"a": jnp.ones(1), "b": jnp.ones(1)}
    scaled, _ = link.update(updates, link.init(updates))
    assert (scaled["a"].item(), scaled["b"].item()) == (0.5, 2.0)
    with pytest.raises(ConfigError, match="scales must be 2"):
        optim.scale_blocks(blocks, (1.0,))


def test_what_cannot_be_shared_out_is_refused():
    with pytest.raises(ConfigError, match=r"multiple of k: got workers=3, k=2"):
        optim.roles(3, 2, 0)
    blocks = optim.Blocks((("a",), ("b",)))
    with pytest.raises(ConfigError, match="role must be 1 to 2"):
        stop_below({"a": 1.0, "b": 1.0}, blocks, 3)
    with pytest.raises(ConfigError, match="mode='zeros' only"):
        optim.PartialBackward(blocks=blocks, workers=2)
    for paths in ((), (("a",), ())):
        with pytest.raises(ConfigError, match="every block must hold a parameter"):
            optim.PartialBackward(blocks=optim.Blocks(paths))
    for roles in ((1, 1), (0, 2), (1, 3)):
        with pytest.raises(ConfigError, match="roles must be 1 to 2, one of them 2"):
            optim.contributor_bytes([1, 1], roles)
    link = optim.contributor_mean(optim.PartialBackward(blocks=blocks))
    grads = {"a": jnp.ones(1), "b": jnp.ones(1)}
    with pytest.raises(ConfigError, match="multiple of k"):
        link.update(grads, link.init(grads), step=0)
    alone = MeshGroup(None)
    with pytest.raises(ConfigError, match="roles must be of 1 workers"):
        optim.average_contributions(
            alone, grads, blocks=blocks, roles=(1, 2), mode="contributors"
        )
