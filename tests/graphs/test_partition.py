"""Parts of a graph on eight devices against the whole on one, and numpy's counts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from sklearn.datasets import load_digits
from sklearn.neighbors import kneighbors_graph
from threadpoolctl import threadpool_limits

from hpcjax import graphs, perf
from hpcjax.collectives import gather_rows, plan_boundary
from hpcjax.core import ConfigError

PARTS, VERTICES, WIDTH = 8, 40, 4
SCHEMES = ("halo", "all_to_all", "allgather")
COLUMNS = "features"
METHODS = ("hash", "contiguous", "rcm", "label_propagation")
RNG = np.random.default_rng(0)


def draw_graph(vertices=VERTICES, edges=90, rng=RNG, self_loops=True):
    """A ring of neighbours and a few far edges, directed, with edges twice."""
    near = np.arange(vertices)
    ends = np.concatenate(
        [[near, (near + 1) % vertices], rng.integers(0, vertices, (2, edges))], 1
    )
    graph = graphs.make_graph(*ends, vertices)
    return graphs.add_self_loops(graph) if self_loops else graph


def remote_pairs(graph, owner):
    """Distinct (part, remote neighbour), by brute force."""
    ends = zip(graph.senders, graph.receivers, strict=True)
    return {(owner[v], u) for u, v in ends if owner[u] != owner[v]}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("method", METHODS)
def test_parts_have_all_edges_and_list_what_they_need(method, scheme):
    for number in range(6):
        graph = draw_graph(RNG.integers(9, 60), 20 * number)
        parts = int(RNG.integers(1, 9))
        found = graphs.partition(graph, parts, method, scheme, seed=number)
        real = found.edges >= 0
        assert sorted(found.edges[real]) == list(range(len(graph.senders)))
        ends = graph.senders[found.edges], graph.receivers[found.edges]
        part, _ = np.nonzero(real)
        for rows, wanted in zip((found.senders, found.receivers), ends, strict=True):
            named = found.vertices[part, rows[real]]
            np.testing.assert_array_equal(named, wanted[real])
        assert (np.diff(found.receivers) >= 0).all()
        # Edges of padding end at the row that is nobody's.
        assert (found.receivers[~real] == found.vertices.shape[1] - 1).all()
        assert (found.vertices[:, -1] == -1).all()
        assert (found.receivers >= found.boundary.arriving).all()
        wanted = remote_pairs(graph, found.owner)
        live = [sum(q == part for q, _ in wanted) for part in range(parts)]
        assert found.live.tolist() == live
        assert found.comm_words(3).live == 3 * len(wanted)
        cut = found.owner[graph.senders] != found.owner[graph.receivers]
        assert found.edge_cut == pytest.approx(cut.mean())
        assert found.sizes.sum() == graph.vertices
        assert found.sizes.min() >= 1
        assert (
            found.imbalance
            <= (1.1 if "label" in method else 1) + parts / graph.vertices
        )
        values = RNG.normal(size=(graph.vertices, 2))
        np.testing.assert_array_equal(found.join(found.take(values)), values)


def test_digits_neighbours_send_less_in_rounds_and_not_in_blocks():
    """Shares of an all-gather of 1797 rows to seven others each, k = 10."""
    x = load_digits().data / 16
    with threadpool_limits(1):  # which choose among those that are equally near
        near = kneighbors_graph(x, 10).tocoo()
    graph = graphs.symmetrize(graphs.make_graph(near.col, near.row, len(x)))
    shares = {}
    for method in ("hash", "rcm", "label_propagation"):
        for scheme in ("halo", "all_to_all"):
            words = graphs.partition(graph, PARTS, method, scheme).comm_words(1)
            used = words.operands if scheme == "halo" else words.sent
            shares[method, scheme] = used / (7 * len(x))
    assert shares["rcm", "halo"] <= 0.55
    assert shares["label_propagation", "halo"] <= 0.30
    assert shares["rcm", "all_to_all"] >= 0.99
    assert shares["hash", "halo"] >= 1


def test_rounds_use_each_side_once_and_are_as_long_as_their_longest_pair():
    for _ in range(50):
        parts = int(RNG.integers(2, 9))
        sizes = RNG.integers(1, 12, parts)
        pairs = [(s, t) for s in range(parts) for t in range(parts) if s != t]
        needs = {
            p: RNG.permutation(sizes[p[0]])[: RNG.integers(0, sizes[p[0]] + 1)]
            for p in pairs
            if RNG.random() < 0.6
        }
        plan, places = plan_boundary(needs, sizes)
        needs = {pair: rows for pair, rows in needs.items() if len(rows)}
        sent = [pair for each in plan.rounds for pair in each.pairs]
        assert sorted(sent) == sorted(needs) == sorted(places)
        start = 0
        for rows, pairs in plan.rounds:
            for side in zip(*pairs, strict=True):
                assert len({*side}) == len(side)
            assert rows.shape[1] == max(len(needs[pair]) for pair in pairs)
            for pair in pairs:
                at = places[pair]
                np.testing.assert_array_equal(rows[pair[0], at - start], needs[pair])
            start += rows.shape[1]
        assert start == plan.arriving


LAYERS = {
    "gcn": (graphs.gcn, True),
    "gat": (functools.partial(graphs.gat, combine="mean"), True),
    "gin": (graphs.gin, False),
}


def draw_params(name):
    def one():
        shapes = {
            "gcn": {"kernel": (WIDTH, WIDTH), "bias": (WIDTH,)},
            "gat": {
                "kernel": (WIDTH, 2, WIDTH),
                "receiver": (2, WIDTH),
                "sender": (2, WIDTH),
                "bias": (WIDTH,),
            },
            "gin": {
                "kernel_0": (WIDTH, WIDTH),
                "bias_0": (WIDTH,),
                "kernel_1": (WIDTH, WIDTH),
                "bias_1": (WIDTH,),
                "epsilon": (),
            },
        }[name]
        return {k: 0.5 * RNG.normal(size=s).astype("f4") for k, s in shapes.items()}

    return [one(), one()]


def apply_layers(params, graph, x, degrees, exchange, targets, leave=lambda h: h):
    """Two layers of each kind, with an exchange before each."""
    found = []
    for number, (name, (layer, _)) in enumerate(LAYERS.items()):
        h = x + number  # or three first exchanges of the same rows would be one
        for index, own in enumerate(params[name]):
            given = {"degrees": degrees[name]} if name == "gcn" else {}
            h = jnp.tanh(
                layer(
                    graph[name],
                    exchange[name](h, index),
                    own,
                    targets=targets[name],
                    **given,
                )
            )
        found.append(leave(h))
    return jnp.stack(found)


@functools.cache
def whole():
    """Graphs, parameters, inputs, and the loss with its slopes on one device."""
    loose = draw_graph(self_loops=False)
    graph = {
        name: graphs.add_self_loops(loose) if loops else loose
        for name, (_, loops) in LAYERS.items()
    }
    params = {name: draw_params(name) for name in LAYERS}
    x = RNG.normal(size=(VERTICES, WIDTH)).astype("f4")
    y = RNG.normal(size=(3, VERTICES, WIDTH)).astype("f4")
    mask = (RNG.random(VERTICES) < 0.5).astype("f4")

    def loss(params, x):
        same = dict.fromkeys(LAYERS, lambda h, _: h)
        out = apply_layers(
            params, graph, x, dict.fromkeys(LAYERS), same, dict.fromkeys(LAYERS)
        )
        return ((out - y) ** 2 * mask[:, None]).sum() / mask.sum()

    wanted = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(params, x)
    return graph, params, x, y, mask, wanted


def on_parts(owner, schemes, broken=None):
    """Loss and slopes of eight devices by scheme, and one program of all schemes."""
    graph, params, x, y, mask, _ = whole()
    cut = {
        scheme: {
            name: graphs.partition(
                each, PARTS, owner, "halo" if scheme == COLUMNS else scheme
            )
            for name, each in graph.items()
        }
        for scheme in schemes
    }
    if broken:
        cut = {
            s: {n: broken(each) for n, each in own.items()} for s, own in cut.items()
        }
    degree = np.bincount(graph["gcn"].receivers, minlength=VERTICES).astype("f4")
    data = {
        scheme: {
            "x": own["gcn"].take(x),
            "y": own["gcn"].take(y.swapaxes(0, 1)),
            "mask": own["gcn"].take(mask),
            "degree": own["gcn"].take(degree, halo=True),
        }
        for scheme, own in cut.items()
    }

    def on_device(params, data):
        data = jax.tree.map(lambda each: each[0], data)
        part = lax.axis_index("data")

        def exchange(each):
            return lambda h, _: gather_rows(h, each.boundary, "data")

        def by_row(params, x, own, data):
            return apply_layers(
                params,
                {name: each.graph(part) for name, each in own.items()},
                x,
                {"gcn": data["degree"]},
                {name: exchange(each) for name, each in own.items()},
                {name: each.rows for name, each in own.items()},
            )

        def by_column(params, x, own, data):
            def enter(h, index):
                if index:
                    return graphs.Columns(values=h, width=WIDTH, axis="data")
                return graphs.rows_to_columns(h[:-1], "data")

            def leave(h):
                return jnp.pad(graphs.columns_to_rows(enter(h, 1)), ((0, 1), (0, 0)))

            none = dict.fromkeys(own)
            graph = {name: each.graph_of_columns() for name, each in own.items()}
            same = dict.fromkeys(own, enter)
            return apply_layers(params, graph, x, none, same, none, leave)

        def loss(params, x, own, data, out):
            out = out(params, x, own, data)
            error = (out - data["y"].swapaxes(0, 1)) ** 2 * data["mask"][:, None]
            return error.sum() / mask.sum()

        params = jax.tree.map(lambda p: lax.pcast(p, "data", to="varying"), params)
        found = {}
        for scheme, own in cut.items():
            value, (slopes, of_x) = jax.value_and_grad(loss, argnums=(0, 1))(
                params,
                data[scheme]["x"],
                own,
                data[scheme],
                by_column if scheme == COLUMNS else by_row,
            )
            found[scheme] = value, slopes, of_x[None]
        return {
            scheme: (*lax.psum((value, slopes), "data"), of_x)
            for scheme, (value, slopes, of_x) in found.items()
        }

    cut_over = PartitionSpec("data")
    step = jax.shard_map(
        on_device,
        mesh=Mesh(np.array(jax.devices()[:PARTS]), "data"),
        in_specs=(PartitionSpec(), cut_over),
        out_specs=dict.fromkeys(cut, (PartitionSpec(), PartitionSpec(), cut_over)),
    )
    options = {"xla_backend_optimization_level": 0}
    compiled = jax.jit(step).lower(params, data).compile(options)
    found = {
        scheme: (value, (slopes, cut[scheme]["gcn"].join(of_x)))
        for scheme, (value, slopes, of_x) in compiled(params, data).items()
    }
    return found, compiled, cut


@pytest.mark.acceptance("gnn-parallelism", 3)
@pytest.mark.acceptance("gnn-parallelism", 4)
@pytest.mark.quick("rcm")
@pytest.mark.parametrize("method", ["hash", "rcm", "label_propagation"])
def test_losses_slopes_and_bytes_of_eight_parts(method):
    """Of gcn, gat and gin, and all schemes, in one program."""
    graph, *_, wanted = whole()
    owner = graphs.partition(graph["gcn"], PARTS, method).owner
    every, compiled, cut = on_parts(owner, (*SCHEMES, COLUMNS))
    for found in every.values():
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
        for own, right in pairs:
            np.testing.assert_allclose(own, right, rtol=1e-5, atol=1e-5)
    kinds = perf.bytes_by_kind(compiled)
    # Of each graph two exchanges, and back: with slopes of the inputs, both of them.
    words = {}
    for scheme in SCHEMES:
        rows = [each.comm_words(WIDTH).operands for each in cut[scheme].values()]
        words[scheme] = 2 * sum(rows) // PARTS
    lengths = [
        sum(rows.shape[1] for rows, _ in each.boundary.rounds)
        for each in cut["halo"].values()
    ]
    assert 4 * words["halo"] == 4 * WIDTH * 2 * sum(lengths)
    assert kinds["collective-permute"] == 2 * 4 * words["halo"]
    longest = [each.boundary.arriving // PARTS for each in cut["all_to_all"].values()]
    assert 4 * words["all_to_all"] == 2 * 4 * WIDTH * PARTS * sum(longest)
    # Columns of width 4 are filled up to 8. Of each graph rows become columns and
    # columns rows; of each layer one product, of two heads or two products.
    product = cut[COLUMNS]["gcn"].comm_words(WIDTH, columns=True).operands // PARTS
    assert product == PARTS * cut[COLUMNS]["gcn"].sizes.max() * 8
    turns, products = 3 * 2 * product // PARTS, 2 * (1 + 2 + 2) * product
    assert kinds["all-to-all"] == 2 * 4 * (words["all_to_all"] + turns)
    # The transpose of a gather adds up what all devices have: a reduce-scatter.
    assert kinds["all-gather"] == 4 * (words["allgather"] + products // PARTS)
    assert kinds["reduce-scatter"] == 4 * (PARTS * words["allgather"] + products)


def test_a_row_that_does_not_arrive_shows():
    """One boundary vertex is replaced by its sender's first row."""
    graph, *_, wanted = whole()

    def broken(each):
        rounds = list(each.boundary.rounds)
        rows = rounds[0].rows.copy()
        at = rounds[0].pairs[0][0]
        rows[at, 0] = (rows[at, 0] + 1) % each.sizes[at]
        rounds[0] = rounds[0]._replace(rows=rows)
        boundary = each.boundary._replace(rounds=tuple(rounds))
        return each.__class__(**{**vars(each), "boundary": boundary})

    owner = graphs.partition(graph["gcn"], PARTS, "rcm").owner
    found, *_ = on_parts(owner, ("halo",), broken)
    assert abs(found["halo"][0] - wanted[0]) > 1e-4 * wanted[0]


@pytest.mark.acceptance("gnn-parallelism", 5)
def test_parts_of_renamed_vertices_are_the_renamed_parts():
    graph = draw_graph()
    names = RNG.permutation(VERTICES)
    renamed = graphs.make_graph(names[graph.senders], names[graph.receivers], VERTICES)
    owner = RNG.permutation(VERTICES) % PARTS
    one = graphs.partition(graph, PARTS, owner)
    two = graphs.partition(renamed, PARTS, owner[np.argsort(names)])
    assert one.live.tolist() == two.live.tolist()
    assert one.comm_words(1) == two.comm_words(1)
    own = [{*names[row[row >= 0]]} for row in one.vertices]
    assert own == [{*row[row >= 0]} for row in two.vertices]


def test_auto_takes_what_sends_less():
    ring = draw_graph(edges=0)
    near = graphs.partition(ring, PARTS, "rcm", "auto")
    assert near.boundary.scheme == "halo"
    star = graphs.make_graph(np.arange(16) * 0, np.arange(16), 16)
    every = np.array(np.meshgrid(np.arange(16), np.arange(16))).reshape(2, -1)
    full = graphs.make_graph(*every, 16)
    owner = np.repeat(np.arange(8), [9, 1, 1, 1, 1, 1, 1, 1])
    both = [
        graphs.partition(full, 8, owner, each).comm_words(1).sent for each in SCHEMES
    ]
    chosen = graphs.partition(full, 8, owner, "auto")
    assert chosen.comm_words(1).sent == min(both[0], both[2])
    assert graphs.partition(star, 4, "contiguous", "auto").live.tolist() == [0, 1, 1, 1]
    assert graphs.partition(ring, 1, scheme="all_to_all").boundary.arriving == 0


def test_what_is_refused():
    graph = draw_graph()
    for parts in (0, -1, True * 1.5, VERTICES + 1):
        with pytest.raises(ConfigError, match="parts must be"):
            graphs.partition(graph, parts)
    with pytest.raises(ConfigError, match="method must be one of"):
        graphs.partition(graph, 2, "metis")
    with pytest.raises(ConfigError, match="scheme must be one of"):
        graphs.partition(graph, 2, scheme="ring")
    with pytest.raises(ConfigError, match="each of the 3 parts"):
        graphs.partition(graph, 3, np.arange(VERTICES) % 2)
    with pytest.raises(ConfigError, match="integers, one of 40 each"):
        graphs.partition(graph, 2, np.zeros(VERTICES - 1, int))
    two = graphs.partition(graph, 2)
    with pytest.raises(ConfigError, match="values must be of the 40 vertices"):
        two.take(np.zeros(3))
    with pytest.raises(ConfigError, match="parts and rows"):
        two.join(np.zeros((2, 3)))
    for needs in ({(0, 0): [0]}, {(0, 5): [0]}):
        with pytest.raises(ConfigError, match="pairs are of two of 2 parts"):
            plan_boundary({p: np.array(r) for p, r in needs.items()}, np.array([2, 2]))
    for rows in ([2], [-1], [0, 0]):
        with pytest.raises(ConfigError, match="rows must be among the 2 of part 0"):
            plan_boundary({(0, 1): np.array(rows)}, np.array([2, 2]))
    with pytest.raises(ConfigError, match="call it inside"):
        gather_rows(jnp.zeros((3, 1)), two.boundary, "data")
    for devices, rows, rule in ((4, 40, "device for each part"), (2, 1, "must have")):
        mapped = jax.shard_map(
            lambda x: gather_rows(x, two.boundary, "data"),
            mesh=Mesh(np.array(jax.devices()[:devices]), "data"),
            in_specs=PartitionSpec("data"),
            out_specs=PartitionSpec("data"),
        )
        with pytest.raises(ConfigError, match=rule):
            jax.eval_shape(mapped, jnp.zeros((devices * rows, 1)))
