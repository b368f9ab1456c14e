"""How many weights each layer keeps and when: hand cases, and sums in fractions."""

import tracemalloc
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hpcjax.core import ConfigError
from hpcjax.core.structures import NM, Block, Unstructured
from hpcjax.optim import sparsify
from hpcjax.optim.sparsify.distributions import Layer
from hpcjax.optim.sparsify.schedules import ramp

LENET = {
    "a": Layer(784 * 300, (784, 300)),
    "b": Layer(300 * 100, (300, 100)),
    "c": Layer(100 * 10, (100, 10)),
}
CONVS = {
    "stem": Layer(3 * 3 * 3 * 16, (3, 3, 3, 16)),
    "mid": Layer(3 * 3 * 16 * 32, (3, 3, 16, 32)),
    "point": Layer(32 * 64, (1, 1, 32, 64)),
    "head": Layer(640, (64, 10)),
}


def all_of(final):
    return final


@pytest.mark.acceptance("sparsity", 3)
def test_erk_on_the_hand_case_keeps_the_smallest_layer_dense():
    found = sparsify.ErdosRenyi(sparsity=0.9).counts(LENET, all_of)
    # 25,620 shared in the ratio 1084 : 400 is 18,714.4 and 6,905.7.
    assert found == {"a": 18_714, "b": 6_906, "c": 1_000}


@pytest.mark.acceptance("sparsity", 3)
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.999])
@pytest.mark.parametrize("kernel", [True, False])
def test_erk_has_the_exact_total_and_densities_in_proportion(sparsity, kernel):
    shares = sparsify.ErdosRenyi(sparsity=sparsity, kernel=kernel)
    found = shares.counts(CONVS, all_of)
    sizes = {name: layer.units for name, layer in CONVS.items()}
    exact = (1 - Fraction(str(sparsity))) * sum(sizes.values())
    assert sum(found.values()) == int(exact + Fraction(1, 2))
    scales = []
    for name, layer in CONVS.items():
        dims = layer.shape if kernel else layer.shape[-2:]
        raw = sum(dims) / np.prod(dims)
        if 1 < found[name] < sizes[name]:
            scales.append((found[name] / raw / sizes[name], 1 / raw / sizes[name]))
    for one, width in scales:
        for other, margin in scales:
            assert abs(one - other) <= width + margin


def test_erk_leaves_no_layer_empty_and_keeps_the_total():
    tiny = {name: Layer(4, (2, 2)) for name in "bcd"}
    layers = {"a": Layer(10**6, (1000, 1000)), **tiny}
    found = sparsify.ErdosRenyi(sparsity=0.9999).counts(layers, all_of)
    assert found == {"a": 97, "b": 1, "c": 1, "d": 1}


@pytest.mark.acceptance("sparsity", 2)
def test_counts_of_the_other_distributions():
    uniform = sparsify.Uniform(sparsity=0.9)
    assert uniform.counts(LENET, all_of) == {"a": 23_520, "b": 3_000, "c": 100}
    assert sparsify.Global(sparsity=0.9).counts(LENET, all_of) == 26_620
    # A quarter of a weight is left of all, and one of each layer.
    assert sparsify.Global(sparsity=0.999999).counts(LENET, all_of) == 3
    rules = sparsify.ByRules(rules=(("c", 0.5), (".*", 0.9)))
    assert rules.counts(LENET, all_of) == {"a": 23_520, "b": 3_000, "c": 500}
    with pytest.raises(ConfigError, match="rules that match no layer"):
        sparsify.ByRules(rules=(("d", 0.5), (".*", 0.9))).counts(LENET, all_of)


@pytest.mark.acceptance("sparsity", 3)
def test_sharing_out_a_large_network_takes_no_memory():
    layers = {f"block{i}": Layer(2048**2, (2048, 2048)) for i in range(96)}
    layers["embedding"] = Layer(50_257 * 2048, (50_257, 2048))
    tracemalloc.start()
    kept = sparsify.ErdosRenyi(sparsity=0.9).counts(layers, all_of)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    total = sum(layer.units for layer in layers.values())
    assert sum(kept.values()) == round(total / 10)


@pytest.mark.acceptance("sparsity", 5)
def test_schedules_at_their_first_middle_and_last_change():
    def of(schedule, number):
        return ramp(schedule, number)(Fraction(9, 10))

    times = {"begin": 30, "every": 10, "updates": 4}
    cubic = sparsify.Cubic(**times, initial=0.1)
    assert cubic.steps() == (30, 40, 50, 60, 70)
    assert of(cubic, 0) == Fraction(1, 10)
    assert of(cubic, 2) == Fraction(9, 10) - Fraction(8, 10) / 8
    assert of(cubic, 4) == Fraction(9, 10)
    linear = sparsify.Linear(**times)
    assert [of(linear, i) for i in (0, 2, 4)] == [0, Fraction(9, 20), Fraction(9, 10)]
    geometric = sparsify.Exponential(**times)
    left = [1 - of(geometric, i) for i in range(5)]
    np.testing.assert_allclose([float(x) for x in left], 0.1 ** (np.arange(5) / 4))
    assert left[4] == Fraction(1, 10)
    turns = sparsify.Alternating(begin=5, sparse=10, dense=3, rounds=2)
    assert turns.steps() == (5, 15, 18, 28, 31)
    assert [of(turns, i) for i in range(5)] == [Fraction(9, 10), 0] * 2 + [
        Fraction(9, 10)
    ]
    assert sparsify.OneShot(step=7).steps() == (7,)
    with pytest.raises(ConfigError, match="no such change: got number=5"):
        ramp(cubic, 5)


def plan_of(structure, distribution, schedule, include=(), exclude=()):
    params = {
        "conv": {"kernel": jnp.ones((3, 3, 4, 8)), "bias": jnp.ones(8)},
        "dense": {"kernel": jnp.ones((8, 4))},
    }
    return sparsify.make_plan(
        jax.eval_shape(lambda: params),
        structure=structure,
        distribution=distribution,
        schedule=schedule,
        include=include,
        exclude=exclude,
    )


def test_a_plan_holds_the_counts_of_every_change():
    half = sparsify.Linear(begin=3, every=2, updates=2)
    found = plan_of(Unstructured(), sparsify.Uniform(sparsity=0.5), half)
    assert found.steps.tolist() == [3, 5, 7]
    assert found.counts["conv/kernel"].tolist() == [288, 216, 144]
    assert found.counts["dense/kernel"].tolist() == [32, 24, 16]
    assert found.pruned["conv/bias"] is False
    blocks = plan_of(Block(), sparsify.Global(sparsity=0.5), half)
    assert blocks.counts.tolist() == [20, 15, 10]
    groups = plan_of(NM(n=1, m=4), None, half, exclude=("dense",))
    assert groups.counts["conv/kernel"].tolist() == [4, 3, 1]
    assert groups.pruned["dense/kernel"] is False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"include": ("nowhere",)}, "rules that match no parameter: .'nowhere'"),
        ({"exclude": ("(",)}, "must hold regular expressions"),
        ({"structure": NM()}, "NM keeps n of m everywhere"),
        ({"structure": NM(n=2, m=3), "distribution": None}, "conv/kernel: NM must"),
    ],
)
def test_plans_that_cannot_be_made_are_refused(options, message):
    given = {"structure": Unstructured(), "distribution": sparsify.Uniform()} | options
    with pytest.raises(ConfigError, match=message):
        plan_of(schedule=sparsify.OneShot(), **given)
