"""Work of convolutional networks from shapes."""

import pytest

from hpcjax import cost
from hpcjax.core import ConfigError


@pytest.mark.acceptance("hybrid3dcnn", 5)
def test_cosmoflow_has_the_papers_operations_and_bytes():
    # Side after the convolution, channels in and out, side after the pool, by hand.
    listed = [
        (128, 4, 16, 64),
        (64, 16, 32, 32),
        (32, 32, 64, 16),
        (8, 64, 128, 4),
        (4, 128, 256, 2),
        (2, 256, 256, None),
        (2, 256, 256, None),
    ]
    layers = []
    for side, inputs, outputs, pooled in listed:
        layers.append(cost.WindowLayer((side,) * 3 + (outputs,), (3, 3, 3), inputs))
        if pooled:
            layers.append(cost.WindowLayer((pooled,) * 3 + (outputs,), (3, 3, 3)))
    work = cost.conv_work(layers, (128, 128, 128, 4))
    assert work.step / 1e9 == pytest.approx(55.547, rel=1e-3)
    assert work.memory / 2**30 == pytest.approx(0.8236, rel=1e-3)
    assert work.step == 3 * work.forward


def test_a_size_below_one_is_refused():
    with pytest.raises(ConfigError, match="sizes must be at least 1"):
        cost.conv_work([cost.WindowLayer((4, 0), (3,), 1)], (4, 1))
