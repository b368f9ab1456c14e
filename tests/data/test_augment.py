"""Augmentation: per example, against a loop over padded images."""

import numpy as np
import pytest

from hpcjax import data
from hpcjax.core.errors import ConfigError


def batch_of(count=9, side=(7, 6), channels=2):
    rng = np.random.default_rng(0)
    images = rng.normal(size=(count, *side, channels)).astype(np.float32)
    return {"x": images, "y": np.arange(count, dtype=np.int32)}


@pytest.mark.parametrize("pad", [0, 1, 3, 5])
@pytest.mark.parametrize("flip", [False, True])
def test_equals_padding_cropping_and_mirroring_one_by_one(pad, flip):
    batch = batch_of()
    got = data.crop_flip(pad, flip)(batch, data.example_rng(3, 100), None)
    draws = data.example_rng(3, 100).random((9, 4))
    border = ((pad, pad), (pad, pad), (0, 0))
    for image, out, draw in zip(batch["x"], got["x"], draws, strict=True):
        top, left = int(draw[0] * (2 * pad + 1)), int(draw[1] * (2 * pad + 1))
        crop = np.pad(image, border, mode="reflect")[top : top + 7, left : left + 6]
        expected = crop[:, ::-1] if flip and draw[2] < 0.5 else crop
        np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(got["y"], batch["y"])
    assert got["x"].dtype == np.float32


def test_the_draws_of_an_example_are_its_own():
    rows = data.example_rng(7, 5).random((6, 4))
    for place in range(6):
        alone = data.example_rng(7, 5 + place).random((1, 4))
        np.testing.assert_array_equal(rows[place : place + 1], alone)
    assert not np.array_equal(rows, data.example_rng(8, 5).random((6, 4)))
    assert len(np.unique(rows)) == rows.size


def test_all_shifts_and_both_sides_occur():
    image = np.arange(81, dtype=np.float32).reshape(1, 9, 9, 1)
    batch = {"x": np.repeat(image, 400, 0), "y": np.zeros(400, np.int32)}
    out = data.crop_flip(1)(batch, data.example_rng(0, 0), None)["x"]
    assert len({image.tobytes() for image in out}) == 3 * 3 * 2


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("augment", [data.crop_flip(2), data.mixup()])
def test_sharded_streams_see_the_same_pictures(count, augment):
    source = data.DigitsConfig(limit=50).load().train
    whole = data.batches(source, 8, 1, augment=augment)[11]["x"]
    parts = [
        data.batches(source, 8, 1, augment=augment, shard=(index, count))[11]["x"]
        for index in range(count)
    ]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    plain = data.batches(source, 8, 1)[11]["x"]
    assert not np.array_equal(whole, plain)


def test_an_example_is_changed_differently_in_each_epoch():
    source = data.DigitsConfig(limit=1).load().train
    stream = data.batches(source, 1, 1, augment=data.crop_flip(2))
    assert len({stream[epoch]["x"].tobytes() for epoch in range(20)}) > 5


def test_bad_pads_are_refused():
    with pytest.raises(ConfigError, match="pad must be an integer >= 0"):
        data.crop_flip(-1)
    with pytest.raises(ConfigError, match="below the side of the image"):
        data.crop_flip(6)(batch_of(), data.example_rng(0, 0), None)


def test_the_config_makes_the_same_augmentation():
    batch = batch_of()
    one = data.CropFlipConfig(pad=2).make()(batch, data.example_rng(0, 0), None)
    other = data.crop_flip(2)(batch, data.example_rng(0, 0), None)
    np.testing.assert_array_equal(one["x"], other["x"])


def test_masks_move_with_their_images():
    batch = batch_of()
    batch["y"] = batch["x"][..., 0]
    moved = data.crop_flip(2)(batch, data.example_rng(0, 0), None)
    np.testing.assert_array_equal(moved["y"], moved["x"][..., 0])
    assert not np.array_equal(moved["y"], batch["y"])


@pytest.mark.parametrize("alpha", [0.4, 1.0])
def test_mixup_mixes_with_examples_of_the_source_by_shares_of_the_beta(alpha):
    """Images that are one number tell the share: the source's are all 1."""
    source = data.DigitsConfig(limit=50).load().train
    count = 4000
    zeros = np.zeros((count, 8, 8, 1), np.float32)
    batch = {"x": zeros, "y": np.arange(count)}
    ones = Ones(source)
    mixed = data.mixup(alpha)(batch, data.example_rng(0, 0), ones)
    share = 1 - mixed["x"][:, 0, 0, 0]
    assert mixed["x"].dtype == np.float32
    np.testing.assert_array_equal(
        mixed["x"], np.broadcast_to(mixed["x"][:, :1, :1], zeros.shape)
    )
    np.testing.assert_array_equal(mixed["y"], batch["y"])
    # Mean and variance of Beta(α + 1, α).
    mean = (alpha + 1) / (2 * alpha + 1)
    variance = mean * (1 - mean) / (2 * alpha + 2)
    assert share.mean() == pytest.approx(mean, abs=4 * np.sqrt(variance / count))
    assert share.var() == pytest.approx(variance, rel=0.1)
    assert len(np.unique(ones.asked)) == len(source)


def test_its_loss_is_expected_to_be_the_one_of_the_paper():
    """λ ℓ(y) + (1 − λ) ℓ(y') with λ of Beta(α, α), over all pairs of some points."""
    rng, alpha = np.random.default_rng(0), 0.7
    x, y = rng.normal(size=6), rng.integers(0, 2, 6)

    def loss(x, y):
        return np.logaddexp(0, np.where(y == 1, -x, x))

    theirs, ours = [], []
    for i, j in np.ndindex(6, 6):
        one, other = rng.beta(alpha, alpha, 5000), rng.beta(alpha + 1, alpha, 5000)
        mixed = one * x[i] + (1 - one) * x[j]
        theirs.append(np.mean(one * loss(mixed, y[i]) + (1 - one) * loss(mixed, y[j])))
        ours.append(np.mean(loss(other * x[i] + (1 - other) * x[j], y[i])))
    assert np.mean(ours) == pytest.approx(np.mean(theirs), rel=5e-3)


class Ones:
    """A source whose images are all 1, and which remembers what it was asked for."""

    def __init__(self, source):
        self.source, self.asked = source, []

    def __len__(self):
        return len(self.source)

    def gather(self, indices):
        self.asked.extend(indices)
        batch = self.source.gather(indices)
        return {**batch, "x": np.ones_like(batch["x"])}


def test_what_cannot_be_mixed_is_refused():
    mix, rng = data.mixup(), data.example_rng(0, 0)
    with pytest.raises(ConfigError, match="pictures of floats"):
        mix({"x": np.zeros((2, 8, 8, 1), np.uint8)}, rng, Ones(None))
    with pytest.raises(ConfigError, match=r"source that has gather: .* of object"):
        mix({"x": np.zeros((2, 8, 8, 1), np.float32)}, rng, object())
