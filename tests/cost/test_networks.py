"""Networks: prices to the dollar, and traffic against formulas and listed paths."""

import collections
import dataclasses
import itertools

import numpy as np
import pytest
from scipy import sparse
from scipy.sparse import csgraph

from hpcjax import cost
from hpcjax.collectives import TorusConfig, Transfer, all_gather, all_reduce
from hpcjax.core.errors import ConfigError
from hpcjax.cost import Dragonfly, FatTree, HxMesh, Torus
from hpcjax.hostcomm import MessageCost

DOLLARS = {
    "fat_tree": 25_303_040,
    "fat_tree_50": 17_644_320,
    "fat_tree_75": 13_235_376,
    "hyperx": 10_823_680,
    "hx2mesh": 5_411_840,
    "hx4mesh": 2_705_920,
    "torus": 2_469_888,
    "fat_tree_16k": 679_903_232,
    "fat_tree_50_16k": 419_152_224,
    "fat_tree_75_16k": 270_880_608,
    "hyperx_16k": 448_233_472,
    "hx2mesh_16k": 224_116_736,
    "hx4mesh_16k": 43_294_720,
    "torus_16k": 39_518_208,
}


def square(board, boards):
    return HxMesh(a=board, b=board, x=boards, y=boards)


@pytest.mark.acceptance("hammingmesh", 1)
def test_prices_are_the_papers():
    found = {name: cost.NETWORKS[name].bill().dollars() for name in DOLLARS}
    assert found == DOLLARS
    dragonfly = cost.NETWORKS["dragonfly_16k"].bill().dollars()
    assert round(dragonfly / 1e6, 1) == 429.2
    # Rows and columns with different numbers of ports; rows that need two levels.
    assert HxMesh(a=2, b=4, x=8, y=16).bill().dollars() == 4_397_824
    assert HxMesh(a=2, b=2, x=8, y=64).bill().dollars() == 19_419_136


@pytest.mark.acceptance("hammingmesh", 1)
@pytest.mark.parametrize(
    "network",
    [
        *(cost.NETWORKS[name] for name in DOLLARS if "16k" not in name),
        *(HxMesh(a=2, b=4, x=8, y=16), HxMesh(a=2, b=2, x=8, y=64)),
        *(HxMesh(a=1, b=3, x=3, y=40), Torus(rows=5, cols=3), Torus(rows=1, cols=6)),
        FatTree(endpoints=3000, down=40, up=20, levels=3),
        Dragonfly(routers=4, endpoints=3, links=2, groups=6),
    ],
    ids=repr,
)
def test_a_bill_is_what_the_graph_has(network):
    assert network.count_bill() == network.bill()


@pytest.mark.acceptance("hammingmesh", 2)
@pytest.mark.parametrize("board", range(1, 6))
def test_diameter_and_bisection_of_square_boards(board):
    small, large = square(board, 4), square(board, 48)
    inside = 2 * ((board - 1) // 2)
    assert cost.diameter(small) == 2 * (inside + 2)
    assert small.bisection() == 1 / (2 * board)
    if board < 4:
        # Lines of 96 ports have two levels.
        assert cost.diameter(large) == 2 * (inside + 4)


@pytest.mark.acceptance("hammingmesh", 2)
def test_other_diameters():
    found = [
        cost.diameter(each)
        for each in (
            *(FatTree(endpoints=64), Torus(rows=5, cols=8), Torus(rows=1, cols=7)),
            FatTree(endpoints=4096, down=32, up=32, levels=3),
            Dragonfly(routers=4, endpoints=2, links=2, groups=9),
        )
    ]
    assert found == [4, 6, 3, 6, 5]


def test_a_diameter_is_the_longest_of_all_shortest_paths():
    for network in (HxMesh(a=2, b=3, x=17, y=2), HxMesh(a=1, b=3, x=3, y=40)):
        graph, n = network.graph(), network.accelerators
        links = (graph.count, (graph.start, graph.end))
        links = sparse.csr_array(links, shape=(graph.nodes,) * 2)
        options = {"directed": False, "unweighted": True, "indices": range(n)}
        assert cost.diameter(network) == csgraph.dijkstra(links, **options)[:, :n].max()


def cut_by_flow(network):
    """The least cut of all halves, by maximum flows, over half of all links."""
    graph, n = network.graph(), network.accelerators
    source, sink = graph.nodes, graph.nodes + 1
    least = np.inf
    sizes = {n // 2 - 1, (n + 1) // 2 - 1}  # of the half with member 0, but for it
    halves = (itertools.combinations(range(1, n), size) for size in sizes)
    for half in itertools.chain(*halves):
        mine = [member in (0, *half) for member in range(n)]
        ends = [(source, m) if own else (m, sink) for m, own in enumerate(mine)]
        start = [*graph.start, *graph.end, *(a for a, _ in ends)]
        end = [*graph.end, *graph.start, *(b for _, b in ends)]
        size = [*graph.count, *graph.count, *[1000] * n]
        capacity = sparse.csr_array(
            (np.int32(size), (start, end)), shape=(graph.nodes + 2,) * 2
        )
        least = min(least, csgraph.maximum_flow(capacity, source, sink).flow_value)
    return least / (graph.injection * (n // 2))


@pytest.mark.acceptance("hammingmesh", 2)
@pytest.mark.parametrize(
    "network",
    [
        *(HxMesh(a=1, b=2, x=2, y=2), HxMesh(a=1, b=1, x=2, y=4)),
        *(Torus(rows=2, cols=4), Torus(rows=1, cols=8), Torus(rows=3, cols=2)),
        *(FatTree(endpoints=8, down=4, up=2), FatTree(endpoints=4, down=4, up=1)),
        *(FatTree(endpoints=9, down=3, up=1), FatTree(endpoints=6, down=2, up=3)),
        Dragonfly(routers=2, endpoints=1, links=2, groups=4),
        Dragonfly(routers=2, endpoints=2, links=1, groups=2),
    ],
    ids=repr,
)
def test_bisections_are_least_cuts(network):
    if network == Torus(rows=3, cols=2):
        with pytest.raises(ConfigError, match="longer side is even: got rows=3"):
            network.bisection()
    else:
        assert network.bisection() == pytest.approx(cut_by_flow(network))


@pytest.mark.parametrize(
    "network",
    [Torus(rows=1, cols=1), HxMesh(a=1, b=1, x=1, y=1), FatTree(endpoints=1, down=1)],
    ids=repr,
)
def test_one_accelerator_sends_nothing(network):
    assert cost.alltoall_share(network) == cost.ring_share(network) == 1
    system = cost.System(processes=1, link=LINK, network=network)
    assert system.seconds([all_reduce(100, 1)]) == 0


def line_bound(network):
    """The load of the ports of a line, if they are loaded alike."""
    n, boards = network.accelerators, network.x
    return (n - 1) * boards / (n * (boards - 1)) / (2 * network.a)


@pytest.mark.acceptance("hammingmesh", 3)
@pytest.mark.parametrize(
    ("network", "share"),
    [
        (FatTree(), 1.0),
        (FatTree(up=16), 0.5 * 1023 / (1024 - 32)),
        (FatTree(up=8), 0.25 * 1023 / (1024 - 32)),
        (square(1, 32), line_bound(square(1, 32))),
        (square(2, 16), line_bound(square(2, 16))),
        (square(2, 64), line_bound(square(2, 64))),
        (Torus(), 2 / 32 * 1023 / 1024),
        (Torus(rows=16, cols=16), 2 / 16 * 255 / 256),
    ],
    ids=repr,
)
def test_shares_to_all_are_the_closed_forms(network, share):
    assert cost.alltoall_share(network) == pytest.approx(share, rel=1e-6)


@pytest.mark.acceptance("hammingmesh", 3)
@pytest.mark.acceptance("hammingmesh", 9)
def test_shares_of_boards_whose_links_are_not_loaded_alike():
    assert 100 * cost.alltoall_share(square(4, 8)) == pytest.approx(10.223, abs=1e-3)
    assert 100 * cost.alltoall_share(square(2, 64)) == pytest.approx(25.395, abs=1e-3)
    assert 100 * cost.alltoall_share(square(4, 32)) == pytest.approx(9.043, abs=1e-3)


@pytest.mark.acceptance("hammingmesh", 3)
@pytest.mark.parametrize("network", [square(2, 4), square(1, 5), Torus(rows=6, cols=4)])
def test_one_board_loads_as_all_do(network):
    graph = network.graph()
    every = dataclasses.replace(
        graph,
        sources=np.arange(graph.accelerators),
        orbit=np.arange(len(graph.start)),
    )
    whole = type("Whole", (), {"graph": lambda self: every})()
    found = cost.alltoall_share.__wrapped__(whole)
    assert found == pytest.approx(cost.alltoall_share(network), rel=1e-12)


def share_by_listing(network, pairs):
    """One over the fullest link, with every shortest path listed one by one."""
    graph, links = network.graph(), collections.Counter()
    for start, end, count in zip(graph.start, graph.end, graph.count, strict=True):
        links[start, end] += count
        links[end, start] += count
    neighbours = collections.defaultdict(set)
    for start, end in links:
        neighbours[start].add(end)
    loads = collections.Counter()
    for (source, target), wanted in pairs.items():
        paths = [[source]]
        while not any(path[-1] == target for path in paths):
            paths = [[*p, n] for p in paths for n in neighbours[p[-1]] if n not in p]
        paths = [path for path in paths if path[-1] == target]
        weight = [np.prod([links[e] for e in itertools.pairwise(p)]) for p in paths]
        for path, own in zip(paths, weight, strict=True):
            for step in itertools.pairwise(path):
                loads[step] += wanted * own / sum(weight)
    return 1 / max(load / links[step] for step, load in loads.items())


@pytest.mark.acceptance("hammingmesh", 3)
@pytest.mark.parametrize(
    "network",
    [
        *(HxMesh(a=2, b=2, x=2, y=2), HxMesh(a=1, b=2, x=3, y=2)),
        *(Torus(rows=3, cols=4), Torus(rows=3, cols=2), Torus(rows=5, cols=1)),
        Dragonfly(routers=2, endpoints=2, links=2, groups=4),
    ],
    ids=repr,
)
def test_shares_equal_those_of_listed_paths(network):
    n, ports = network.accelerators, network.graph().injection
    pairs = itertools.permutations(range(n), 2)
    whole = dict.fromkeys(pairs, ports / (n - 1))
    found = cost.alltoall_share(network)
    assert found == pytest.approx(share_by_listing(network, whole), rel=1e-9)
    rings, cycles = collections.Counter(), network.cycles()
    for walk in cycles:
        for one, other in zip(walk, (*walk[1:], walk[0]), strict=True):
            rings[one, other] += ports / (2 * len(cycles))
            rings[other, one] += ports / (2 * len(cycles))
    found = cost.ring_share(network)
    assert found == pytest.approx(share_by_listing(network, rings), rel=1e-9)


def test_one_cycle_of_a_torus_leaves_half_of_the_links_idle():
    assert cost.ring_share(Torus(rows=3, cols=2)) == 0.5
    assert cost.ring_share(Torus(rows=4, cols=2)) == 1


LINK = MessageCost(alpha=1e-6, beta=1e-9)


def test_a_network_prices_rounds_and_bytes():
    torus = Torus(rows=4, cols=4)
    alone = cost.System(processes=16, link=LINK, hops="counted")
    system = dataclasses.replace(alone, network=torus)
    ring, to_all = all_reduce(1e6, 16), Transfer(1e6, messages=15)
    assert system.seconds([ring]) == alone.seconds([ring])
    share = cost.alltoall_share(torus)
    expected = 4 * 15e-6 + 4e6 / share * 1e-9
    assert system.seconds([to_all]) == pytest.approx(expected)
    mesh = dataclasses.replace(alone, network=square(2, 2))
    # Neighbours on two boards are two links apart.
    longer = 15e-6 + alone.seconds([all_gather(1e5, 16)])
    assert mesh.seconds([all_gather(1e5, 16)]) == pytest.approx(longer)


def test_rows_and_columns_take_fewer_rounds():
    system = cost.System(
        processes=16, link=LINK, hops="counted", network=Torus(rows=4, cols=4)
    )
    tree = {"w": np.zeros(1600)}
    rings, columns = (
        TorusConfig(rows=4, cols=4, algorithm=name).make().transfers(tree, 16, 1.0)
        for name in ("rings", "rows_columns")
    )
    assert [system.rounds(*each) for each in (rings, columns)] == [30, 12]
    fitted = dataclasses.replace(system, hops="fitted")
    assert [fitted.rounds(*each) for each in (rings, columns)] == [15, 6]
    assert system.share(*columns) == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HxMesh(x=0), "x.*0"),
        (lambda: FatTree(down=40, up=32), "64 ports: got down=40, up=32"),
        (lambda: FatTree(endpoints=5000), "at most 2048 endpoints: got endpoints=5000"),
        (lambda: Dragonfly(endpoints=18), "64 ports.*endpoints=18"),
        (lambda: Dragonfly(groups=600), "to every other.*groups=600"),
        (
            lambda: cost.System(processes=17, link=LINK, network=Torus(rows=4, cols=4)),
            "16 accelerators: got processes=17",
        ),
        (
            lambda: cost.System(
                processes=4, link=LINK, network=Torus(), topology="tree"
            ),
            "topology='ring': got topology='tree'",
        ),
    ],
)
def test_networks_that_cannot_be_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
