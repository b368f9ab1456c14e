"""The experiments of OMEN, small: precision stays theirs, bytes are those counted."""

import dataclasses
import warnings

import jax
import numpy as np
import pytest

from experiments.omen import tables, transport, volumes
from experiments.omen.transport import Config
from hpcjax.core import ConfigError
from tests.train import tiny

SMALL = Config(energies=60, step=0.04, frequencies=2, limit=3)


def trained():
    """Three steps of gradient descent, in the precision of everybody."""
    model, points = tiny.linear(), tiny.Points()
    params, _ = model.init(jax.random.key(0))

    @jax.jit
    def step(params):
        def loss(params):
            logits, _ = model.apply(params, {}, points.inputs, train=True)
            picked = jax.nn.log_softmax(logits)[np.arange(96), points.labels]
            return -picked.mean()

        return jax.tree.map(lambda p, g: p - 0.5 * g, params, jax.grad(loss)(params))

    for _ in range(3):
        params = step(params)
    return params


def test_what_is_trained_after_it_is_bit_equal():
    before = trained()
    found = transport.run(Config(), None)
    assert found["current"].dtype == np.float64
    assert found["imbalance"] < 1e-8
    after = trained()
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert {leaf.dtype for leaf in jax.tree.leaves(after)} == {np.dtype("float32")}


@pytest.mark.slow
@pytest.mark.parametrize("device", ["ChainConfig", "RibbonConfig"])
def test_other_devices_have_currents(device):
    from hpcjax import solvers

    cfg = dataclasses.replace(SMALL, device=getattr(solvers, device)(slabs=2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # levels outside of the grid are as good
        found = transport.run(cfg, None)
    assert found["current"].sel(contact="left") > 0.05


@pytest.mark.slow
def test_orders_are_equal():
    from experiments.omen import scattering

    sizes = {"energies": 8, "frequencies": 2, "atoms": 4, "bonds": 2, "orbitals": 2}
    found = scattering.run(scattering.Config(**sizes, repetitions=2), None)
    assert found["distance"].max() < 1e-12
    assert found["gflop"].sel(order="sequential") > found["gflop"].sel(order="tiled")


@pytest.mark.parametrize(
    "cfg",
    [
        volumes.Config(te=2, ta=2, energies=8, frequencies=4, atoms=8),
        pytest.param(
            # Windows wider than a tile, and atoms that all tiles need.
            volumes.Config(te=8, ta=1, energies=16, atoms=4),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["2x2", "8x1"],
)
@pytest.mark.parametrize("scheme", volumes.SCHEMES)
def test_programs_send_what_is_counted(cfg, scheme):
    sent = volumes.count_sent(volumes.compile_scheme(cfg, scheme))
    assert sent == volumes.count_needed(cfg, scheme)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"frequencies": 110}, "fewer than energies"),
        ({"device": Config().device.__class__(momenta=(4, 3))}, "sub-grid"),
    ],
)
def test_configs_that_are_refused(options, match):
    with pytest.raises(ConfigError, match=match):
        Config(**options)


def test_a_loop_that_diverged_is_above_every_bound():
    found = transport.run(Config(), None)
    for figure in ("imbalance", "flatness"):
        broken = found.assign({figure: np.nan}).expand_dims(seed=[0])
        table = tables.CONSERVATION.reduce({"1/1": broken})
        assert table["worst"].sel(row="1/1") == np.inf
