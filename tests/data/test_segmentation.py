"""Phantoms and slices of scans: what they hold, and who is held out."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from PIL import Image

from hpcjax import data
from hpcjax.core.errors import ConfigError, DataFormatError, DataMissing
from hpcjax.data import phantoms
from hpcjax.data.source import split
from tests.data import writers


def score(prediction, mask):
    """Dice of two sets of pixels."""
    return 2 * (prediction & mask).sum() / (prediction.sum() + mask.sum())


@pytest.mark.parametrize(("noise", "least", "most"), [(0.0, 1, 1), (20.0, 0.1, 0.9)])
def test_a_threshold_finds_the_lesions_where_there_is_no_noise(noise, least, most):
    for number in range(20):
        image, mask = phantoms.phantom(number, 8, 32, noise, seed=0)
        assert 0 < mask.mean() < 0.2
        assert least <= score(image > phantoms.BETWEEN, mask) <= most


def test_ellipsoids_have_their_volume():
    axis = np.linspace(-1, 1, 201)
    grid = np.meshgrid(axis, axis, axis, indexing="ij")
    half = np.array([0.8, 0.5, 0.3])
    inside = phantoms.ellipsoid(grid, np.array([0.1, -0.2, 0.3]), half)
    exact = 4 / 3 * np.pi * half.prod()
    assert inside.sum() * 0.01**3 == pytest.approx(exact, rel=0.01)
    assert inside[np.searchsorted(axis, 0.1), np.searchsorted(axis, 0.28), 130]
    assert not inside[np.searchsorted(axis, 0.1), np.searchsorted(axis, 0.32), 130]


def test_phantoms_are_split_by_patient_and_their_number_changes_none():
    read = data.PhantomsConfig(patients=8, slices=3, size=16).load()
    owners = {
        image.tobytes(): number
        for number in range(8)
        for image in phantoms.phantom(number, 3, 16, 20.0, seed=0)[0]
    }
    found = [
        {owners[image.tobytes()] for image in part.images}
        for part in (read.train, read.validation)
    ]
    assert found[0] | found[1] == set(range(8))
    assert not found[0] & found[1]
    assert len(found[1]) == 2
    other = data.PhantomsConfig(patients=8, slices=3, size=16, draw_seed=1).load()
    assert (other.train.images != read.train.images).any()


@hypothesis.given(st.integers(2, 40), st.floats(0.01, 0.99), st.integers(0, 9))
def test_a_split_is_a_partition_with_something_in_each_part(size, share, seed):
    train, held_out = split(size, share, seed)
    assert sorted([*train, *held_out]) == list(range(size))
    assert min(len(train), len(held_out)) >= 1
    assert abs(len(held_out) - share * size) <= 1


def load(root, **options):
    return data.MriSlicesConfig(**{"size": 24, "validation": 0.4} | options).load(root)


def test_slices_hold_what_was_written(tmp_path):
    writers.write_slices(tmp_path, 5)
    read = load(tmp_path, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    assert (len(read.train), len(read.validation)) == (12, 8)
    assert (read.inputs, read.outputs, read.objective.name) == (
        (24, 24, 3),
        2,
        "segmentation",
    )
    patients = []
    for part in (read.train, read.validation):
        batch = part.gather(np.arange(len(part)))
        patients.append({one.image.parent.name for one in part.slices})
        for row, (image, mask) in enumerate(part.slices):
            number, index = int(image.parent.name[-4:]), int(image.stem[-1])
            assert mask.name == f"{image.stem}_mask.tif"
            grey, inside = phantoms.phantom(number, 4, 24, 20.0, seed=0)
            np.testing.assert_array_equal(batch["y"][row], inside[index - 1])
            bytes_ = np.stack([grey[index - 1] // n for n in (1, 2, 3)], axis=-1)
            expected = (bytes_ / 255 - (0.1, 0.2, 0.3)) / (0.5, 0.6, 0.7)
            np.testing.assert_allclose(batch["x"][row], expected, atol=1e-5)
    assert not patients[0] & patients[1]
    assert [len(names) for names in patients] == [3, 2]


def test_resized_masks_have_two_values(tmp_path):
    writers.write_slices(tmp_path, 2)
    batch = load(tmp_path, size=10).train.gather(np.arange(4))
    assert batch["x"].shape == (4, 10, 10, 3)
    assert batch["y"].shape == (4, 10, 10)
    assert set(np.unique(batch["y"])) <= {0, 1}


@pytest.mark.faults(9)
@pytest.mark.filterwarnings("ignore:Truncated File Read")
def test_damaged_or_odd_files_are_refused_by_name(tmp_path):
    with pytest.raises(DataMissing, match="lgg"):
        load(tmp_path)
    writers.write_slices(tmp_path, 3)
    folder = tmp_path / "lgg"
    (folder / "data.csv").write_text("patients are folders, this is none")
    (folder / "TCGA_0000" / ".hidden").touch()
    read = load(tmp_path)
    path = read.train.slices[0].image
    content = path.read_bytes()
    for damaged in (content[:100], b"GIF89a" + content):
        path.write_bytes(damaged)
        with pytest.raises(
            DataFormatError, match=f"{path.name}: expected a whole TIFF"
        ):
            read.train.gather(np.array([0]))
    path.unlink()
    with pytest.raises(DataFormatError, match=f"only for .*{path.stem}_mask.tif"):
        load(tmp_path)
    path.write_bytes(content)
    mask = read.train.slices[1].mask
    mask.rename(tmp_path / "elsewhere.tif")
    with pytest.raises(DataFormatError, match=f"only for .*{mask.name}"):
        load(tmp_path)
    mask.symlink_to(tmp_path / "elsewhere.tif")
    assert len(load(tmp_path).train) == len(read.train)
    outside = tmp_path.parent / f"{tmp_path.name}.tif"
    (tmp_path / "elsewhere.tif").rename(outside)
    mask.unlink()
    mask.symlink_to(outside)
    with pytest.raises(ConfigError, match="leads out of"):
        load(tmp_path)
    mask.unlink()
    Image.new("L", (4, 4)).save(mask.with_suffix(".png"))
    with pytest.raises(DataFormatError, match=r"expected a name ending in \.tif"):
        load(tmp_path)


def test_one_patient_cannot_be_split(tmp_path):
    writers.write_slices(tmp_path, 1)
    with pytest.raises(DataFormatError, match="two patients or more, found 1"):
        load(tmp_path)
