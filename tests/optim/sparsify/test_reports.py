"""Reports of storage against encoders that write the bits; other reports by hand."""

import numpy as np
import pytest

from hpcjax.core import ConfigError
from hpcjax.optim import sparsify

BITS = 8


def field(number, width):
    """A number in so many bits, the highest first."""
    assert 0 <= number < 2**width
    return [(number >> place) & 1 for place in reversed(range(width))]


def read(bits, at, width):
    return int("0" + "".join(map(str, bits[at : at + width])), 2), at + width


def width_of(count):
    width = 0
    while 2**width < count:
        width += 1
    return width


def encode(values, form, gap=None):
    """Writes the non-zero values of a matrix of bytes."""
    flat, places = values.ravel(), np.flatnonzero(values)
    columns = values.shape[1]
    bits = []
    if form == "bitmap":
        bits += [int(value != 0) for value in flat]
        for place in places:
            bits += field(flat[place], BITS)
    elif form == "coo":
        for place in places:
            bits += field(place, width_of(flat.size)) + field(flat[place], BITS)
    elif form == "csr":
        ends = np.concatenate([[0], np.cumsum((values != 0).sum(1))])
        for end in ends:
            bits += field(int(end), width_of(len(places) + 1))
        for place in places:
            column = int(place % columns)
            bits += field(column, width_of(columns)) + field(flat[place], BITS)
    else:
        last = -1
        for place in places:
            while place - last - 1 >= 2**gap:  # a zero that is stored
                bits += field(2**gap - 1, gap) + field(0, BITS)
                last += 2**gap
            bits += field(int(place - last - 1), gap) + field(flat[place], BITS)
            last = place
    return bits


def decode_gaps(bits, gap, shape):
    flat, at, place = np.zeros(np.prod(shape), int), 0, -1
    while at < len(bits):
        skip, at = read(bits, at, gap)
        value, at = read(bits, at, BITS)
        place += skip + 1
        flat[place] = value
    return flat.reshape(shape)


@pytest.mark.acceptance("sparsity", 11)
@pytest.mark.parametrize("density", [0.0, 0.01, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("shape", [(16, 16), (7, 33)])
def test_reports_are_the_bits_of_encoders(shape, density):
    rng = np.random.default_rng(int(100 * density))
    mask = rng.random(shape) < density
    values = np.where(mask, rng.integers(1, 256, shape), 0)
    found = sparsify.storage_report({"w": mask}, BITS)["w"]
    for form in ("bitmap", "coo", "csr"):
        assert found.bits[form] == len(encode(values, form)), form
    gaps = {gap: encode(values, "delta", gap) for gap in range(1, 17)}
    assert found.bits["delta"] == min(map(len, gaps.values()))
    for gap, bits in gaps.items():
        np.testing.assert_array_equal(decode_gaps(bits, gap, shape), values)
    assert found.bits["dense"] == BITS * values.size
    assert found.bits[found.best] == min(found.bits.values())


@pytest.mark.acceptance("sparsity", 11)
def test_below_the_crossover_a_form_takes_less_than_dense_storage():
    size = 1024
    for form in ("bitmap", "coo"):
        crossover = sparsify.storage_report({"w": np.ones(size, bool)}, 16)["w"]
        edge = crossover.crossover[form] * size
        for count in (int(np.floor(edge)) - 1, int(np.ceil(edge)) + 1):
            mask = np.arange(size) < count
            bits = sparsify.storage_report({"w": mask}, 16)["w"].bits
            assert (bits[form] < bits["dense"]) == (count < edge)


def test_densities_and_operations():
    masks = {"a": np.eye(4, dtype=bool), "b": None}
    params = {"a": np.ones((4, 4)), "b": np.ones(3)}
    found = sparsify.density_report(params, masks)
    assert (found.kept, found.size, found.layers) == (7, 19, {"a": (4, 16)})
    assert sparsify.forward_flops({"a": 100.0, "c": 10.0}, masks) == 35.0
    with pytest.raises(ConfigError, match=r"needs its operations: got none=\['a'\]"):
        sparsify.forward_flops({"c": 10.0}, masks)
    assert sparsify.training_flops(35.0, 110.0) == 105.0
    # Nine sparse steps and one whose gradient is dense.
    assert sparsify.training_flops(35.0, 110.0, 9) == (9 * 105 + 2 * 35 + 110) / 10
    with pytest.raises(ConfigError, match="every must be an integer >= 1"):
        sparsify.training_flops(35.0, 110.0, -1)


def test_accuracy_for_what_is_kept():
    assert sparsify.efficiency(0.75, 30) == 0.025
    np.testing.assert_allclose(sparsify.efficiency(0.9, 20, hard=True), 0.5)
    with pytest.raises(ConfigError, match=r"accuracy must be in \[0, 1\]"):
        sparsify.efficiency(1.0, 20, hard=True)
    curve = {5.0: 0.99, 10.0: 0.985, 20.0: 0.97, 50.0: 0.6}
    assert [sparsify.slack(curve, 0.985, e) for e in (0.0, 0.02, 0.5)] == [10, 20, 50]
    assert sparsify.slack(curve, 1.0) == 1.0
