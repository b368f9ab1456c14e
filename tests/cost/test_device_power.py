"""A device of two layers, by hand; work of a network, by its compiled program."""

import dataclasses

import jax
import numpy as np
import pytest

from configs.polythrottle._devices import ORIN, TX2
from experiments.polythrottle import workloads
from hpcjax import core, cost, models, perf
from hpcjax.core import ConfigError

DEVICE = cost.DevicePower(
    gpu_mhz=(500.0, 1000.0),
    mem_mhz=(1000.0, 2000.0),
    cpu_mhz=(1000.0, 2000.0),
    peak=1e12,
    bandwidth=1e11,
    memory_efficiency=0.5,
    half_batch=1.0,
    overlap=0.1,
    launch_s=1e-3,
    idle_w=2.0,
    gpu_w=10.0,
    mem_w=4.0,
    cpu_w=1.0,
    mem_static=0.25,
    v_least=0.5,
    v_most=1.0,
    v_knee=0.5,
)
WORK = cost.Work(
    flops=np.array([5e9, 1e9]),
    query_bytes=np.array([1e8, 5e8]),
    batch_bytes=np.array([1e8, 0.0]),
    kernels=np.array([1.0, 2.0]),
    cpu_cycles=4e6,
)


def test_time_and_energy_by_hand():
    """Compute 10 and 2 ms, move 4 and 10: 10.4 + 10.2, 3 of launches, 2 before."""
    spent = DEVICE.spend(WORK, {}, 1)
    seconds = 25.6e-3
    assert spent.seconds == pytest.approx(seconds)
    assert spent.gpu == pytest.approx(10 * 20.6e-3 / seconds)
    assert spent.mem == pytest.approx(4 * (14e-3 / seconds + 0.25) / 1.25)
    assert spent.cpu == pytest.approx(5e-3 / seconds)
    dynamic = (spent.gpu + spent.mem + spent.cpu) * seconds
    assert spent.dynamic == pytest.approx(dynamic)
    assert spent.joules == pytest.approx(2.0 * seconds + dynamic)


def test_clocks_and_batches_by_hand():
    """At half of all clocks: 20 and 4 ms, 8 and 20, 6 of launches, 4 before."""
    half = {"gpu_mhz": 500.0, "mem_mhz": 1000.0, "cpu_mhz": 1000.0}
    slow = DEVICE.spend(WORK, half, 1)
    assert slow.seconds == pytest.approx(51.2e-3)
    # The voltage is half, so that power is an eighth.
    assert slow.gpu == pytest.approx(10 / 8 * 41.2 / 51.2)
    # Four queries compute at 4/5 of the peak: 25 and 5 ms, and move 10 and 40.
    four = DEVICE.spend(WORK, {}, 4)
    assert four.seconds == pytest.approx(26e-3 + 40.5e-3 + 3e-3 + 8e-3)
    assert four.joules < DEVICE.spend(WORK, {}, 1).joules


@pytest.mark.parametrize(
    ("clocks", "batch", "message"),
    [
        ({"gpu_mhz": 700.0}, 1, r"gpu_mhz=700\.0 is not on the grid: .* 500 and 1000"),
        ({"gpu": 500.0}, 1, "knob must be one of"),
        ({}, 0, "batch must be an integer >= 1"),
    ],
)
def test_clocks_that_there_are_not(clocks, batch, message):
    with pytest.raises(ConfigError, match=message):
        DEVICE.spend(WORK, clocks, batch)


def test_a_grid_must_ascend():
    with pytest.raises(ConfigError, match="gpu_mhz must ascend"):
        dataclasses.replace(DEVICE, gpu_mhz=(2.0, 1.0))


@pytest.mark.parametrize("device", [TX2, ORIN])
def test_the_grid_of_the_shipped_devices(device):
    sizes = [len(grid) for grid in (device.gpu_mhz, device.mem_mhz, device.cpu_mhz)]
    assert sizes == [13, 7, 12]


@pytest.fixture(scope="module")
def small():
    model = models.resnet((16, 16, 3), 10, depth=8)
    return model, jax.ShapeDtypeStruct((16, 16, 3), "float32")


def test_operations_are_those_of_the_compiled_program(small):
    model, inputs = small
    work = perf.work_of(model, inputs)
    params, state = jax.eval_shape(model.init, jax.random.key(0))
    batch = jax.ShapeDtypeStruct((4, *inputs.shape), inputs.dtype)

    def forward(params, state, batch):
        return model.apply(params, state, batch, train=False)[0]

    compiled = jax.jit(forward).lower(params, state, batch).compile()
    # XLA leaves out what multiplies the convolutions' padding, much of small images.
    assert 4 * work.flops.sum() == pytest.approx(perf.flops(compiled), rel=0.2)
    held = 2 * sum(leaf.size for leaf in jax.tree.leaves((params, state)))
    assert work.batch_bytes.sum() == pytest.approx(held, rel=0.01)
    assert len(work.flops) == work.kernels.sum() == 8


def test_a_pass_that_computes_nothing_is_refused():
    model = core.Model(lambda key: ({}, {}), lambda p, s, x, **_: (x, s))
    with pytest.raises(ConfigError, match="operators that compute"):
        perf.work_of(model, jax.ShapeDtypeStruct((4,), "float32"))


def test_a_convolution_is_that_of_the_formula(small):
    """The first: 3x3, 3 to 16 channels of 16x16, with its norm and activation."""
    work = perf.work_of(*small)
    product = 2 * 16 * 16 * 16 * 27
    assert product <= work.flops[0] <= 1.1 * product
    assert work.query_bytes[0] == 2 * 16 * 16 * (3 + 16)


def test_an_efficientnet_has_the_published_operations():
    """0.39 and 4.2 billion multiplications, with squeeze and excitation."""
    for name, published in (("efficientnet_b0", 0.39e9), ("efficientnet_b4", 4.2e9)):
        flops = workloads.work_of(name).flops.sum()
        assert flops / 2 == pytest.approx(published, rel=0.06)
