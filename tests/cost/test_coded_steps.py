"""Steps of coded pipelines, beside the formulas, and what is refused."""

import pytest

from hpcjax import cost
from hpcjax.compress import Autoencoder, Identity, Quantizer, TopK
from hpcjax.core.errors import ConfigError

COSTS = cost.CodedCosts(flop=1e-12, byte=1e-8, number=1e-9, least=1e-4)
SHAPE = {"rows": 64, "time": 32, "layers": 8}
CODECS = [Identity(), Autoencoder(d=4), Quantizer(bits=4), TopK(k=9, grad="masked")]


@pytest.mark.parametrize("codec", CODECS)
def test_a_step_is_the_sum_that_the_definition_names(codec):
    """24 b s h² (1 + s / 6h) in 4 passes; β above c / β bytes, c below."""
    h, rows = 48, 64
    step = cost.compressed_step(h, codec, COSTS, stages=2, **SHAPE)
    assert step.compute == pytest.approx(
        1e-12 * 4 * (8 / 2) * 24 * rows * h * h * (1 + 32 / (6 * h))
    )
    full = 4 * rows * h
    up, down = {
        Identity: (full, full),
        Autoencoder: (4 * rows * 4, 4 * rows * 4),
        Quantizer: (rows * h / 2 + 2 * h, full),
        TopK: (8 * 9, 4 * 9),
    }[type(codec)]
    assert step.plain == pytest.approx(2 * 1e-8 * full)
    assert step.coded == pytest.approx(sum(max(1e-4, 1e-8 * n) for n in (up, down)))
    assert step.coding == pytest.approx(1e-9 * rows * h)
    without, coded = step.compute + step.plain, step.compute + step.coding + step.coded
    assert step.speedup == pytest.approx(without / coded)


def test_the_gain_vanishes_with_the_width_unless_stages_grow_too():
    def gain(width, stages):
        codec = Autoencoder(d=width // 16)
        step = cost.compressed_step(width, codec, COSTS, stages=stages, **SHAPE)
        return step.speedup - 1

    assert gain(4096, 2) < gain(1024, 2) / 3 < gain(256, 2) / 9
    assert gain(1024, 8) > gain(256, 2)
    assert gain(64, 1) == 0


def test_costs_and_counts_that_are_none_are_told():
    codec = Autoencoder(d=4)
    with pytest.raises(ConfigError, match="divide the layers: got layers=8, stages=3"):
        cost.compressed_step(64, codec, COSTS, stages=3, **SHAPE)
    with pytest.raises(ConfigError, match="width must be an integer >= 1"):
        cost.compressed_step(0, codec, COSTS, stages=2, **SHAPE)
    broken = COSTS._replace(byte=float("nan"))
    with pytest.raises(ConfigError, match="byte"):
        cost.compressed_step(64, codec, broken, stages=2, **SHAPE)
    with pytest.raises(ConfigError, match="chunks of the width: got width=63"):
        cost.compressed_step(63, Quantizer(bits=4), COSTS, stages=2, **SHAPE)
