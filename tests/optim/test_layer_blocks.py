import itertools
import logging

import jax
import jax.numpy as jnp
import pytest

from hpcjax import core, models, optim
from hpcjax.compress import SharingConfig
from hpcjax.core import ConfigError
from hpcjax.models import CausalLmConfig, MlpConfig, ResNetConfig
from hpcjax.optim import L0Config, StraightThroughConfig, VariationalDropoutConfig


def layers_of(model, inputs, dtype="float32"):
    x = jax.ShapeDtypeStruct((2, *inputs), dtype)
    return optim.layers_of_model(model, x)


@pytest.mark.parametrize("costs", [[3, 1, 4, 1, 5, 9, 2], [1] * 7, [0, 0, 5, 0, 0]])
@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_a_partition_is_the_most_equal_one(costs, k):
    def uneven(cuts):
        edges = [0, *cuts, len(costs)]
        return sum(sum(costs[a:b]) ** 2 for a, b in itertools.pairwise(edges))

    every = itertools.combinations(range(1, len(costs)), k - 1)
    cuts = optim.partition(costs, k)
    assert len(cuts) == k - 1
    assert uneven(cuts) == min(uneven(other) for other in every)


def test_layers_come_in_the_order_of_the_forward_pass():
    resnet = ResNetConfig(depth=8, width=2).make((8, 8, 1), 3)
    names = [layer.name for layer in layers_of(resnet, (8, 8, 1))]
    assert names[:3] == ["conv_in", "norm_in", "stage_0/block_0/conv1"]
    assert names[-2:] == ["stage_2/block_0/norm2", "head"]
    mlp = MlpConfig(widths=(5,) * 11).make((4,), 3)
    names = [layer.name for layer in layers_of(mlp, (4,))]
    assert names == [*(f"dense_{i}" for i in range(11)), "head"]  # 10 after 9


def test_a_scanned_stack_is_one_layer_and_an_unrolled_one_many():
    config = CausalLmConfig(depth=3, width=8, heads=2)
    scanned = layers_of(config.make((6,), 11), (6,), "int32")
    assert [layer.name for layer in scanned] == [
        *("embed", "position", "blocks", "final_norm")
    ]
    unrolled = layers_of(models.unrolled_causal_lm(config, 6, 11), (6,), "int32")
    assert sum(layer.name.startswith("block_2/") for layer in unrolled) == 8


def test_a_stack_costs_as_many_layers_where_a_network_is_cut():
    """Six and one layer against eight and one; as one layer each, the cut is at 1."""
    model = CausalLmConfig(depth=8, width=8, heads=2).make((6,), 11)
    costs, x = (6.0, 1.0, 1.0, 1.0), jax.ShapeDtypeStruct((2, 6), "int32")
    run = core.RunShape(model, {"x": x}, 1, 1, 2, core.RunSeed(0), lambda rows: costs)
    shares = {
        stacked: optim.PartialBackwardConfig(k=2, stacked=stacked).build(run).facts
        for stacked in ((), ("^blocks/",))
    }
    assert shares[()] == {"share": (9 + 3) / (2 * 9)}
    assert shares["^blocks/",] == {"share": (16 + 9) / (2 * 16)}


def test_a_call_of_another_program_is_looked_into():
    inner = jax.jit(lambda p, x: x @ p["b"] @ p["a"])
    shapes = {name: jnp.ones((2, 2)) for name in "abc"}
    found = optim.layers_of(inner, shapes, jnp.ones(2))
    assert [layer.name for layer in found] == ["c", "b", "a"]  # c is not used


def test_parameters_that_are_cast_at_first_are_used_later(caplog):
    def forward(params, x):
        half = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), params)
        turned = jnp.linalg.matrix_transpose(half["c"])  # a call of another program
        return ((x @ half["c"]) @ half["b"]) @ half["a"] @ turned

    shapes = {name: jnp.ones((2, 2)) for name in "abc"}
    found = optim.layers_of(forward, shapes, jnp.ones(2, "bfloat16"))
    assert [layer.name for layer in found] == ["c", "b", "a"]
    assert [layer.last - layer.first for layer in found] == [3, 0, 0]
    with caplog.at_level(logging.WARNING):
        optim.cut_layers(found, (1,))
    assert "['c']" in caplog.text


@pytest.mark.parametrize(
    "part",
    [
        SharingConfig(stacked=("^blocks/",)),
        L0Config(stacked=("^blocks/",)),
        StraightThroughConfig(stacked=("^blocks/",)),
        VariationalDropoutConfig(stacked=("^blocks/",)),
    ],
    ids=lambda part: type(part).__name__,
)
def test_weights_made_before_the_forward_pass_are_of_the_layers_that_use_them(part):
    """Stores, random gates and searched thresholds come before any layer."""
    model = CausalLmConfig(depth=2, width=8, heads=2).make((6,), 11)
    x = jnp.zeros((2, 6), "int32")
    names = {
        p: n for n, at in enumerate(optim.layers_of_model(model, x)) for p in at.paths
    }
    places = {}
    for number, layer in enumerate(optim.layers_of_model(part.apply_to(model), x)):
        places |= dict.fromkeys(layer.paths, number)
    assert {p: n for p, n in places.items() if p in names}.items() <= names.items()
    beside = {p: n for p, n in places.items() if p not in names and "blocks" in p}
    assert set(beside.values()) <= {names["blocks/mlp/up/kernel"]}


def test_a_tied_table_belongs_to_the_first_block_and_is_warned_about(caplog):
    config = CausalLmConfig(depth=1, width=8, heads=2)
    layers = layers_of(models.unrolled_causal_lm(config, 6, 11), (6,), "int32")
    with caplog.at_level(logging.WARNING):
        blocks = optim.cut_layers(layers, (2,))
    assert "embed" in caplog.text
    assert blocks.numbers()["embed/table"] == 1
    caplog.clear()
    optim.cut_layers(layers, ())
    assert not caplog.text


def test_what_cannot_be_cut_is_refused():
    layers = [optim.Layer(name, (name,), n, n) for n, name in enumerate("abc")]
    with pytest.raises(ConfigError, match=r"k must be at most the 2 blocks"):
        optim.partition([1.0, 1.0], 3)
    for cuts in [(2, 1), (1, 1), (0,), (3,)]:
        with pytest.raises(ConfigError, match="cuts must increase"):
            optim.cut_layers(layers, cuts)
    params = {"a": 0.0, "b": 1.0}
    with pytest.raises(ConfigError, match=r"in one block: got twice=\['a'\]"):
        optim.Blocks((("a",), ("a", "b"))).check(params)
    with pytest.raises(ConfigError, match=r"missing \['b'\], not in the model \['c'\]"):
        optim.Blocks((("a",), ("c",))).check(params)
