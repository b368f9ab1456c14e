"""Plans of mixed sizes, their batches, and the resize."""

import collections
import dataclasses
import logging

import numpy as np
import pytest
from jaxtyping import TypeCheckError
from PIL import Image
from scipy import stats

from hpcjax import data, models
from hpcjax.core.errors import ConfigError
from hpcjax.data import mixed_sizes
from hpcjax.data._resize import resize_matrix
from hpcjax.runs import config, overrides
from hpcjax.runs.training import TrainingConfig

FILTERS = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}
RULES = {
    ("B+", 32): {16: (256, 1), 24: (114, 1), 32: (64, 1), 48: (28, 1)},
    ("D+", 32): {16: (64, 4), 24: (64, 2), 32: (64, 1), 48: (28, 1)},
    ("B+D+", 32): {16: (128, 2), 24: (85, 1), 32: (64, 1), 48: (43, 1)},
    ("B+", 224): {
        **{96: (348, 1), 128: (196, 1), 160: (125, 1), 192: (87, 1), 224: (64, 1)},
        **{256: (49, 1), 288: (39, 1), 320: (31, 1)},
    },
    ("D+", 224): {
        **{96: (64, 5), 128: (64, 3), 160: (64, 2), 192: (64, 1), 224: (64, 1)},
        **{256: (64, 1), 288: (64, 1), 320: (31, 1)},
    },
    ("B+D+", 224): {
        **{96: (149, 2), 128: (112, 2), 160: (90, 1), 192: (75, 1), 224: (64, 1)},
        **{256: (56, 1), 288: (50, 1), 320: (45, 1)},
    },
}


class Numbered:
    """Pictures of which each pixel is the picture's number."""

    def __init__(self, count, side=8):
        self.count, self.side = count, side

    def __len__(self):
        return self.count

    def gather(self, indices):
        x = np.asarray(indices, np.float32)[:, None, None, None]
        x = np.broadcast_to(x, (len(indices), self.side, self.side, 1))
        return {"x": x.copy(), "y": np.asarray(indices, np.int32)}


def sampler(count, *, augment=None, multiple=None, **config):
    whole = data.DigitsConfig().load()._replace(train=Numbered(count), augment=augment)
    made = data.MixedSizes(whole, data.MixedSizesConfig(**config))
    return made if multiple is None else made.aligned(multiple)


CIFAR = {"sizes": (32, 48, 24, 16), "probs": (0.3, 0.2, 0.3, 0.2), "base_size": 32}
SMALL = {"sizes": (4, 8), "probs": (0.29, 0.71), "base_size": 8}


@pytest.mark.acceptance("mixsize", 1)
@pytest.mark.parametrize(("mode", "base"), RULES)
def test_batches_and_copies_are_the_published_ones(mode, base):
    wanted = RULES[mode, base]
    found = {size: mixed_sizes.slot_shape(size, base, 64, mode) for size in wanted}
    assert found == wanted
    assert mixed_sizes.slot_shape(base, base, 64, "none", 3) == (64, 3)
    # Half to even, at 2.5, and one copy at 0.5, where nothing is switched yet.
    assert mixed_sizes.slot_shape(4, 4, 5, "B+", 1) == (5, 1)
    assert mixed_sizes.slot_shape(20, 10, 10, "B+") == (2, 1)
    assert mixed_sizes.slot_shape(20, 10, 64, "B+D+") == (32, 1)
    assert mixed_sizes.slot_shape(20, 10, 64, "D+", 2) == (64, 1)


@pytest.mark.acceptance("mixsize", 2)
@pytest.mark.parametrize("sampling", ["data", "step"])
def test_an_epoch_has_each_image_once_at_most(sampling):
    made = sampler(1000, sampling=sampling, **SMALL)
    plans = [made.plan(10, 3, epoch) for epoch in range(3)]
    for plan in plans:
        seen = np.concatenate([slot.indices for slot in plan])
        assert len({*seen.tolist()}) == len(seen) > 1000 - 40 - 10
        assert {(s.size, len(s.indices)) for s in plan} == {(4, 40), (8, 10)}
    orders = [np.concatenate([s.indices for s in plan]).tolist() for plan in plans]
    assert orders[0] != orders[1] != orders[2]
    again = [sampler(1000, sampling=sampling, **SMALL) for _ in range(4)]
    start = made.slots(10, 3, 0)
    for other in again:  # processes that know nothing of each other
        slot = other.slot(start + 5, 10, 3)
        assert slot.size == plans[1][5].size
        np.testing.assert_array_equal(slot.indices, plans[1][5].indices)
    if sampling == "data":  # 290, not 289, of 0.29 · 1000
        sizes = collections.Counter(slot.size for slot in plans[0])
        assert sizes == {4: 290 // 40, 8: 710 // 10}


@pytest.mark.acceptance("mixsize", 2)
def test_a_size_is_anywhere_in_an_epoch():
    made = sampler(128, sizes=(8, 4), probs=(0.5, 0.5), base_size=8)
    epochs, places = 2000, np.zeros(20)
    for epoch in range(epochs):
        plan = made.plan(4, 0, epoch)
        places += [slot.size == 4 for slot in plan]
    assert places.sum() == epochs * 64 // 16
    # An epoch's places differ, so that counts vary less than χ² supposes: by 16/19.
    statistic = ((places - epochs / 5) ** 2 / (epochs / 5)).sum()
    assert statistic * 20 / 16 < stats.chi2.ppf(0.999, 19)
    drawn = sampler(4000, sampling="step", sizes=(8, 4), probs=(0.2, 0.8), base_size=8)
    sizes = [s.size for epoch in range(20) for s in drawn.plan(4, 0, epoch)]
    count = np.array([sizes.count(8), sizes.count(4)])
    assert stats.chisquare(count, count.sum() * np.array([0.2, 0.8])).pvalue > 0.001


def test_shards_have_the_rows_of_the_whole_batch_and_draws_of_their_own():
    augment = data.crop_flip(pad=3)
    made = sampler(200, augment=augment, mode="D+", multiple=4, **SMALL)
    shapes = set()
    for number in range(12):
        whole = made.sample(number, 8, 1, (0, 1))
        parts = [made.sample(number, 8, 1, (i, 4)) for i in range(4)]
        for name, values in whole.items():
            joined = np.concatenate([part[name] for part in parts])
            np.testing.assert_array_equal(values, joined)
        assert len(whole["y"]) == made.rows(number, 8, 1)
        shapes.add(whole["x"].shape)
        copies = made.slot(number, 8, 1).copies
        first, last = whole["y"][::copies], whole["y"][copies - 1 :: copies]
        np.testing.assert_array_equal(first, last)
    assert shapes == {each["x"].shape for each in made.shapes(8)}
    assert shapes == {(32, 4, 4, 1), (8, 8, 8, 1)}


def test_copies_of_an_image_are_augmented_apart():
    ramp = dataclasses.replace(data.MixedSizesConfig(), mode="D+")
    whole = ramp.of.load()._replace(augment=data.crop_flip(pad=3))
    made = data.MixedSizes(whole, ramp)
    number = next(n for n in range(99) if made.slot(n, 8, 0).copies == 4)
    batch = made.sample(number, 8, 0, (0, 1))
    copies = batch["x"].reshape(8, 4, -1)
    assert (np.ptp(copies, axis=1).max(1) > 0).all()
    assert (batch["y"].reshape(8, 4) == batch["y"][::4, None]).all()
    plain = data.MixedSizes(whole._replace(augment=None), ramp)
    copies = plain.sample(number, 8, 0, (0, 1))["x"].reshape(8, 4, -1)
    assert np.ptp(copies, axis=1).max() == 0


@pytest.mark.acceptance("mixsize", 11)
def test_what_is_not_as_one_might_think_is_logged(caplog):
    caplog.set_level(logging.INFO, mixed_sizes.__name__)
    sampler(50_000, mode="D+", multiple=1, **CIFAR).plan(64, 0, 0)
    told = caplog.messages
    assert "batches of 48 px have 28 images: no copy is half a one" in told
    assert "48 px: an epoch leaves out 4 images" in told
    caplog.clear()
    made = sampler(50_000, multiple=8, **CIFAR)
    assert [len(batch["y"]) for batch in made.shapes(64)] == [64, 24, 112, 256]
    assert "batches of 24 px have 112 images, not 114, for 8 devices" in caplog.messages


@pytest.mark.acceptance("mixsize", 12)
@pytest.mark.parametrize("kind", FILTERS)
def test_images_are_resized_as_by_pillow(kind):
    rng = np.random.default_rng(0)
    square = [((32, 32), size) for size in (16, 24, 48)]
    for old, new in [*square, ((28, 21), 9), ((5, 7), 1)]:
        images = rng.integers(0, 256, (2, *old, 2)).astype(np.float32)
        found = data.resize(images, new, kind)
        for place in np.ndindex(2, 2):
            one = images[place[0], :, :, place[1]]
            theirs = Image.fromarray(one).resize((new, new), FILTERS[kind])
            ours = found[place[0], :, :, place[1]]
            np.testing.assert_allclose(ours, np.asarray(theirs), atol=2e-3, rtol=0)
            # Of bytes Pillow rounds and clips between the two sides.
            raw = Image.fromarray((64 + one / 2).astype(np.uint8))
            ours = data.resize(np.asarray(raw, np.float32)[None, ..., None], new, kind)
            theirs = np.asarray(raw.resize((new, new), FILTERS[kind]), np.float32)
            assert np.abs(ours.round()[0, ..., 0] - theirs).max() <= 1
    same = rng.random((1, 6, 6, 1)).astype(np.float32)
    assert (data.resize(same, 6, kind) == same).all()
    np.testing.assert_allclose(resize_matrix(32, 12, kind).sum(1), 1, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"probs": (0.5, 0.4)}, "probs must sum to 1"),
        ({"probs": (1.0,)}, "sizes must differ, and each have its share in probs"),
        ({"sizes": (4, 4)}, "sizes must differ"),
        ({"sizes": (), "probs": ()}, "sizes must differ"),
        ({"mode": "none"}, "mode=none has no size but base_size=8"),
        ({"of": data.PhantomsConfig()}, "of must be images with one label each"),
        ({"of": data.MixedSizesConfig()}, "of must be images with one label each"),
        ({"mode": "C+"}, "mode must be"),
        ({"base_size": 0}, "base_size must be"),
    ],
)
def test_what_cannot_be_is_refused_when_the_config_is_made(change, words):
    with pytest.raises(ConfigError, match=words):
        data.MixedSizesConfig(**change)


def test_a_size_without_a_batch_is_refused():
    made = sampler(100, sizes=(4, 8), probs=(0.3, 0.7), base_size=8)
    with pytest.raises(
        ConfigError, match="sizes=4 must have a batch of 32: got images=30"
    ):
        made.shapes(8)
    with pytest.raises(ConfigError, match="kind must be one of"):
        data.resize(np.zeros((1, 2, 2, 1), np.float32), 4, "nearest")
    with pytest.raises((ConfigError, TypeCheckError), match="images"):
        data.resize(np.ones((1, 2, 2, 1), np.uint8), 4)


def test_changes_do_not_ask_for_what_is_valid_on_the_way():
    """Sizes by default are too small for this model, and change after `dataset`."""
    base = TrainingConfig(model=models.ResNetConfig(depth=50))
    mixed = data.MixedSizesConfig(
        sizes=(32, 64, 96), probs=(0.5, 0.25, 0.25), base_size=32
    )
    wanted = dataclasses.replace(base, dataset=mixed)
    changes = config.changes(base, wanted)
    assert changes["dataset.sizes"] == "[32,64,96]"
    assert overrides.parse(base, changes) == wanted


def test_runs_refuse_small_images_and_foresight():
    base = TrainingConfig(model=models.ResNetConfig())
    with pytest.raises(ConfigError, match=r"dataset\.sizes must be at least 4 px"):
        overrides.parse(base, {"dataset": "mixed_sizes", "dataset.sizes": "[2,8]"})
    with pytest.raises(ConfigError, match="input=clairvoyant must know which examples"):
        overrides.parse(base, {"dataset": "mixed_sizes", "input": "clairvoyant"})
