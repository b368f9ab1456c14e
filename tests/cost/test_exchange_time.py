"""What averaging gradients costs: published check figures, limits, refusals."""

import dataclasses
import math

import numpy as np
import pytest

from experiments.gradcomp.networks import PUBLISHED as NETWORKS
from experiments.gradcomp.networks import shapes_of
from hpcjax import cost
from hpcjax.collectives import (
    GTopkConfig,
    MsTopKConfig,
    OkTopkConfig,
    PowerSgdConfig,
    RandomKConfig,
    SignConfig,
    TopKConfig,
    TopkDsaConfig,
    all_gather,
    all_reduce,
)
from hpcjax.core import ConfigError
from hpcjax.hostcomm import MessageCost

PUBLISHED = {
    # tensors, parameters, 1-D part, numbers of P and Q at rank 4, 8, 16, and what
    # compression comes to at rank 1, 4, 8, 16
    "resnet50": (
        *(161, 25_557_032, 54_120),
        (329_964, 659_928, 1_319_856),
        ("187.1", "66.5", "35.8", "18.6"),
    ),
    "resnet101": (
        *(314, 44_549_160, 106_344),
        (678_124, 1_356_248, 2_712_496),
        ("161.5", "56.8", "30.5", "15.8"),
    ),
    "bert_base": (
        *(199, 109_482_240, 122_112),
        (801_516, 1_601_492, 3_201_444),
        ("339.1", "118.5", "63.5", "32.9"),
    ),
}
NET = cost.System(processes=64, link=MessageCost.of_rate(1.25e9, 1e-5))


def exchanged(exchange, encode=None, **options):
    return cost.Exchanged(
        name="it", exchange=exchange, encode_decode_s=encode, **options
    )


def power_sgd(rank, encode=None):
    return exchanged(PowerSgdConfig(rank=rank), encode)


METHODS = (
    power_sgd(4, 0.045),
    exchanged(TopKConfig(density=0.01), 0.24),
    exchanged(MsTopKConfig(density=0.1), 0.1),
    exchanged(SignConfig(), 0.016),
    exchanged(RandomKConfig(density=0.01), 0.01),
    exchanged(OkTopkConfig(density=0.01), 0.05),
    exchanged(GTopkConfig(density=0.01), 0.05),
    exchanged(TopkDsaConfig(density=0.01), 0.05),
    cost.AllReducible(ratio=10.0, encode_decode_s=0.02),
)


def workload(model="resnet50", **changes):
    options = {"backward_s": 0.1, "slowdown": 1.05} | changes
    return cost.Workload(shapes=shapes_of(model), **options)


def net(*, bytes_per_s=1.25e9, alpha=1e-5, **changes):
    link = MessageCost.of_rate(bytes_per_s, alpha)
    return dataclasses.replace(NET, link=link, **changes)


def factor_sizes(rank, shapes):
    """Numbers of inputs' and outputs' factors: what one of two workers sends."""
    made = power_sgd(rank).plan(cost.Workload(shapes=shapes, backward_s=0.0), 2)
    return tuple(each.words for each in made.after)


@pytest.mark.quick("bert_base", "resnet101")
@pytest.mark.parametrize("model", NETWORKS)
def test_published_layer_shapes(model):
    tensors, count, vectors, factors, ratios = PUBLISHED[model]
    shapes = shapes_of(model)
    assert (len(shapes), sum(map(math.prod, shapes))) == (tensors, count)
    assert sum(math.prod(s) for s in shapes if len(s) == 1) == vectors
    powers = [power_sgd(rank) for rank in (1, 4, 8, 16)]
    sizes = [sum(factor_sizes(rank, shapes)) for rank in (1, 4, 8, 16)]
    assert tuple(sizes[1:]) == factors
    assert tuple(f"{count / (size + vectors):.1f}" for size in sizes) == ratios
    sent = [each.sent_bytes(shapes, 5) for each in (cost.Dense(), *powers)]
    found = [f"{sent[0] / each:.1f}" for each in sent[1:]]
    assert tuple(found) == ratios


def test_the_worked_example():
    work = workload()
    assert work.buckets == (25 * 2**20,) * 3 + (23_584_928,)
    assert f"{NET.seconds([all_reduce(25 * 2**18, 64)]):.5f}" == "0.04192"
    sizes = factor_sizes(4, work.shapes)
    assert tuple(4 * size for size in sizes) == (878_896, 440_960)
    sent = METHODS[1].sent_bytes(work.shapes, 2)
    assert sent == 8 * 255_570
    methods = [cost.Dense(), *METHODS[:2], METHODS[3], cost.Dense(value_bytes=2)]
    found = [f"{cost.predict(each, work, NET).total_s:.5f}" for each in methods]
    assert found == ["0.16353", "0.14834", "0.44431", "0.27764", "0.12420"]
    gains = [cost.speedup(each, work, NET) for each in methods]
    assert [f"{gain.value:.2f}" for gain in gains] == [
        *("1.00", "1.10", "0.37", "0.59", "1.32")
    ]
    assert {gain.baseline for gain in gains} == {"dense"}
    assert f"{cost.required_ratio(work, NET):.2f}" == "1.54"
    assert cost.scaling_gap(work, NET) == pytest.approx(0.06353, abs=5e-6)


def test_parts_add_up_and_the_forward_pass_is_in_all():
    work = workload(forward_s=0.05)
    for method in METHODS:
        made = cost.predict(method, work, NET)
        assert made.total_s == pytest.approx(sum(made))
        assert made[:3] == (0.05, 0.1, method.encode_decode_s)
        without = cost.predict(method, workload(), NET)
        assert made.total_s - without.total_s == pytest.approx(0.05)


def bytes_of_2_2(n, p, density, shapes, rank):
    """The table of volumes, written down a second time."""
    k = math.floor(density * n)
    matrices = [(s[-1], math.prod(s[:-1])) for s in shapes if len(s) > 1]
    factors = sum(min(rank, a, b) * (a + b) for a, b in matrices)
    vectors = sum(math.prod(s) for s in shapes if len(s) == 1)
    return {
        cost.Dense(): 8 * n * (p - 1) / p,
        power_sgd(rank): 8 * (factors + vectors) * (p - 1) / p,
        exchanged(TopKConfig(density=density)): 8 * k * (p - 1),
        exchanged(SignConfig()): n * (p - 1) / 8,
        exchanged(OkTopkConfig(density=density)): 24 * k * (p - 1) / p,
        exchanged(OkTopkConfig(density=density), place=0.0): 8 * k * (p - 1) / p,
        exchanged(GTopkConfig(density=density)): 16 * k * math.log2(p),
        exchanged(TopkDsaConfig(density=density)): 4 * (2 * k + n) * (p - 1) / p,
    }


@pytest.mark.acceptance("gradcomp-utility", 3)
@pytest.mark.parametrize("p", [1, 2, 8, 64])
def test_bytes_are_those_of_the_formulas(p):
    shapes = shapes_of("resnet50")
    for method, count in bytes_of_2_2(25_557_032, p, 0.02, shapes, 4).items():
        assert method.sent_bytes(shapes, p) == pytest.approx(count, rel=2e-6)


@pytest.mark.acceptance("gradcomp-utility", 3)
def test_what_is_gathered_loses_its_advantage():
    shapes = ((1000, 32 * 100),)

    def ratio(method, p):
        return method.sent_bytes(shapes, p) / cost.Dense().sent_bytes(shapes, p)

    sign = exchanged(SignConfig())
    assert ratio(sign, 63) < 1 == ratio(sign, 64) < ratio(sign, 65)
    for density, p in ((0.1, 10), (0.01, 100)):
        top = exchanged(TopKConfig(density=density))
        assert ratio(top, p - 1) < 1 == ratio(top, p) < ratio(top, p + 1)


@pytest.mark.acceptance("gradcomp-utility", 4)
@pytest.mark.parametrize("slowdown", [1.0, 1.05, 1.4])
def test_with_links_for_nothing_encoding_decides(slowdown):
    fast = net(bytes_per_s=math.inf, alpha=0.0)
    work = workload(slowdown=slowdown)
    saved = (slowdown - 1) * work.backward_s
    for method in METHODS:
        for encode in (0.0, 0.9 * saved, 1.1 * saved, 0.3):
            timed = dataclasses.replace(method, encode_decode_s=encode)
            slower = cost.speedup(timed, work, fast).value < 1 - 1e-12
            assert slower == (encode > saved)
    # With latency, the buckets' own one can lose.
    slow = net(bytes_per_s=math.inf, alpha=1e-3)
    free = cost.AllReducible(ratio=2.0, encode_decode_s=saved + 0.01)
    assert cost.speedup(free, work, slow).value > 1


@pytest.mark.acceptance("gradcomp-utility", 4)
@pytest.mark.parametrize("model", NETWORKS)
def test_with_slow_links_bytes_decide(model):
    slow, work = net(bytes_per_s=1e-3), workload(model)
    for rank, ratio in zip((1, 4, 8, 16), PUBLISHED[model][4], strict=True):
        gain = cost.speedup(power_sgd(rank, 9.0), work, slow)
        assert f"{gain.value:.1f}" == ratio
    for method in METHODS:
        sent = [m.sent_bytes(work.shapes, 64) for m in (cost.Dense(), method)]
        assert cost.speedup(method, work, slow).value == pytest.approx(
            sent[0] / sent[1], rel=1e-6
        )


@pytest.mark.acceptance("gradcomp-utility", 4)
@pytest.mark.parametrize("topology", ["ring", "tree"])
def test_alone_nothing_is_sent(topology):
    alone = net(processes=1, topology=topology, alpha=1.0)
    for method in (cost.Dense(), cost.Dense(value_bytes=2), *METHODS):
        made = cost.predict(method, workload(slowdown=1.3), alone)
        assert made.exposed_s == 0
        assert made.total_s == pytest.approx(0.1 + method.encode_decode_s)
    assert cost.required_ratio(workload(), alone) == 1


def test_what_is_empty_is_not_sent():
    vectors = cost.Workload(shapes=((100,), ()), backward_s=0.1)
    matrices = cost.Workload(shapes=((10, 10),), backward_s=0.1)
    power = power_sgd(1, 0.0)
    assert [len(part) for part in power.plan(vectors, 64)] == [0, 1]
    assert [len(part) for part in power.plan(matrices, 64)] == [2, 0]
    assert cost.predict(power, vectors, NET).exposed_s == 0


def test_rounds_of_rings_and_trees():
    def alphas(**changes):
        system = net(processes=8, bytes_per_s=math.inf, alpha=1.0, **changes)
        moved = (all_reduce(2, 8), all_gather(2, 8))
        return tuple(system.seconds([each]) for each in moved)

    assert alphas() == (7, 7)
    assert alphas(hops="counted") == (14, 7)
    assert alphas(topology="tree") == (3, 3)
    assert alphas(topology="tree", hops="counted") == (6, 3)


@pytest.mark.parametrize("topology", ["ring", "tree"])
def test_rounds_of_sparse_sums_are_their_own(topology):
    """The latencies of table 1 of Ok-Topk's paper, whatever the links make up."""
    waits = net(processes=8, bytes_per_s=math.inf, alpha=1.0, topology=topology)
    for config, rounds in (
        (TopkDsaConfig(), 8 + 2 * 3),
        (GTopkConfig(), 2 * 3),
        (OkTopkConfig(), 2 * 8 + 2 * 3),
    ):
        plan = exchanged(config).plan(workload(), 8)
        assert waits.seconds(plan.after) == rounds


def test_stacks_of_layers_are_many_matrices():
    """Twelve times 4 (64 + 64) numbers, once and a half by each of four workers."""
    shapes = {"blocks/kernel": (12, 64, 64), "head": (64,)}
    stacked = exchanged(PowerSgdConfig(rank=4, stacked=("^blocks/",)))
    assert stacked.sent_bytes(shapes, 4) == 4 * (9216 + 1.5 * 64)
    (early,) = stacked.plan(cost.Workload(shapes=shapes, backward_s=0.0), 4).beside
    assert early.words == 1.5 * 64
    with pytest.raises(ConfigError, match="stacked must match"):
        stacked.sent_bytes(tuple(shapes.values()), 4)


@pytest.mark.acceptance("gradcomp-utility", 7)
def test_the_baseline_sends_while_the_backward_pass_goes_on():
    work, power = workload(), METHODS[0]
    dense = cost.predict(cost.Dense(), work, NET).total_s
    naive = cost.predict(cost.Dense(overlapped=False), work, NET).total_s
    # By hand: three full buckets beside, the last one after; or everything after.
    assert naive == pytest.approx(0.1 + 63e-5 + 8 * work.size * 63 / 64 / 1.25e9)
    assert dense < naive
    gain = cost.speedup(power, work, NET, baseline="naive")
    assert gain.value == pytest.approx(naive / cost.predict(power, work, NET).total_s)
    assert gain.baseline == "naive dense (no buckets, no overlap)"
    assert cost.speedup(power, work, NET).baseline == "dense"
    # Buckets as large as all gradients would be the same thing under another name.
    one = workload(bucket_bytes=10**9)
    for asked in (cost.speedup, cost.crossover):
        with pytest.raises(ConfigError, match=r"one bucket.*baseline='naive'"):
            asked(power, one, NET)
        asked(power, one, NET, baseline="naive")


def test_where_a_method_begins_and_ceases_to_pay():
    work, power = workload(), METHODS[0]
    (edge,) = cost.crossover(power, work, NET, over="bandwidth")
    assert edge.pays == "below"
    at = cost.speedup(power, work, net(bytes_per_s=edge.value)).value
    assert at == pytest.approx(1)
    (edge,) = cost.crossover(power, work, NET, over="p")
    last = [
        cost.speedup(power, work, net(processes=int(edge.value) + i)) for i in (0, 1)
    ]
    assert edge.pays == "above"
    assert last[0].value <= 1 < last[1].value
    # Signs pay from where they are encoded in time to where too many are gathered.
    sign = METHODS[3]
    edges = cost.crossover(sign, work, net(bytes_per_s=1.25e8), over="p")
    assert [edge.pays for edge in edges][-1] == "below"
    assert cost.crossover(METHODS[1], work, NET, over="p") == ()


def test_compression_pays_less_with_larger_batches_and_more_on_faster_devices():
    power, work = METHODS[0], workload(batch=64)
    gains = [cost.speedup(power, work.with_batch(b), NET).value for b in (16, 32, 64)]
    # What is below gamma · T_comp is hidden in any case.
    assert gains == sorted(gains, reverse=True)
    below, above = cost.crossover(power, work, NET, over="batch")
    assert (below.pays, above.pays) == ("below", "above")
    same = cost.speedup(power, work.with_batch(below.value), NET)
    assert same.value == pytest.approx(1)
    # From here on the slower backward pass costs as much as encoding, and the sums of
    # factors as little as those of the last bucket.
    left = NET.seconds(power.plan(work, 64).after)
    saved = 0.05 * work.with_batch(above.value).backward_s
    assert saved + NET.seconds([all_reduce(23_584_928 / 4, 64)]) == pytest.approx(
        0.045 + left
    )
    edges = cost.crossover(power, work, NET, over="compute_speed")
    assert edges[-1].pays == "above"
    fast = dataclasses.replace(power, encode_decode_s=0.045 / edges[-1].value)
    same = cost.speedup(fast, work.with_speed(edges[-1].value), NET)
    assert same.value == pytest.approx(1)
    speeds = np.array([1.0, 2.0, 3.0, 4.0])
    quick = [cost.speedup(power, work.with_speed(float(f)), NET).value for f in speeds]
    assert quick == sorted(quick)


def test_the_ratio_that_hides_an_all_reduce():
    work = workload(batch=16)
    ratios = [cost.required_ratio(work.with_batch(b), NET) for b in (16, 32, 64)]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[-1] == 1
    hidden = cost.AllReducible(ratio=ratios[0], encode_decode_s=0.0)
    assert cost.predict(hidden, work, NET).exposed_s == pytest.approx(0.105)
    assert cost.required_ratio(work, net(alpha=0.105 / 63 * 1.01)) == math.inf
    # What takes exactly as long as the backward pass is hidden.
    latency = net(alpha=2.0, bytes_per_s=math.inf, processes=2)
    assert cost.required_ratio(workload(slowdown=1.0, backward_s=2.0), latency) == 1
    free = net(alpha=0.0, bytes_per_s=math.inf)
    assert cost.required_ratio(workload(backward_s=0.0), free) == 1


def test_more_seconds_to_encode_against_more_bytes():
    """A scheme twice as fast to encode, and a tenth as good, wins where links do."""
    work = workload(backward_s=0.02)
    strong = cost.AllReducible(ratio=50.0, encode_decode_s=0.04)
    quick = cost.AllReducible(ratio=5.0, encode_decode_s=0.02)
    gains = [
        [cost.speedup(m, work, net(bytes_per_s=b)).value for m in (strong, quick)]
        for b in (1.25e8, 1.25e10)
    ]
    assert gains[0][0] > gains[0][1]
    assert gains[1][0] < gains[1][1]


@pytest.mark.acceptance("gradcomp-utility", 9)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda: exchanged(OkTopkConfig(), place=2.0).sent_bytes(((4,),), 2),
            "place must be in",
        ),
        (lambda: NET.with_bandwidth(0.0), "bytes_per_s must be > 0"),
        (lambda: net(processes=0), "processes must be"),
        (lambda: workload(slowdown=0.9), "slowdown must be"),
        (lambda: workload(backward_s=-0.1), "backward_s must be"),
        (lambda: workload(bucket_bytes=0), "bucket_bytes must be"),
        (lambda: cost.Workload(shapes=(), backward_s=0.1), "there must be gradients"),
        (
            lambda: cost.predict(exchanged(SignConfig()), workload(), NET),
            "of it is not known.*`hpcjax run gradcomp/calibration`",
        ),
        (lambda: cost.AllReducible(ratio=0.5), "ratio must be"),
        (lambda: workload().with_speed(0.0), "factor must be finite and > 0"),
        (lambda: workload().with_batch(0), "batch must be finite and > 0"),
        (lambda: exchanged(SignConfig(), -1.0), "encode_decode_s must be"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        wrong()
