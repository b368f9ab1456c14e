"""Examples as bytes: what is decoded of records is what the source gathers."""

import io
import tarfile

import numpy as np
import pytest
from PIL import Image

from hpcjax import data
from hpcjax.core import trees
from hpcjax.core.errors import ConfigError, DataFormatError, DataMissing
from tests.data import writers
from tests.data.registry import REGISTRY


@pytest.mark.parametrize("name", REGISTRY)
def test_records_of_every_data_set_become_what_it_gathers(name, tiny_root):
    source = REGISTRY[name]().load(tiny_root).train
    if isinstance(source, data.Sampler):
        with pytest.raises(ConfigError, match="input=read_ahead"):
            data.as_records(source)
        return
    records = data.as_records(source)
    indices = np.array([3, 0, 3, 1]) % len(source)
    read = [records.read(int(i)) for i in indices]
    assert [len(each) for each in read] == records.sizes[indices].tolist()
    got, expected = records.decode(read, indices), source.gather(indices)
    assert trees.paths(got) == trees.paths(expected)
    for path, leaf in trees.flatten(expected).items():
        other = trees.flatten(got)[path]
        assert other.dtype == leaf.dtype
        np.testing.assert_array_equal(other, leaf)


def test_pictures_are_records_themselves(tiny_root):
    for name in ("image-folder", "tar-images"):
        source = REGISTRY[name]().load(tiny_root).train
        assert data.as_records(source) is source
        content = Image.open(io.BytesIO(source.read(0)))
        assert min(content.size) == 24


def test_tar_images_equal_the_pictures_that_were_written(tiny_root):
    read = data.TarImagesConfig(size=24, resize=24).load(tiny_root)
    images, labels = writers.pictures(64, (24, 32, 3), 4, 0)
    # Members lie in the order of the archives; those of even pairs are PNG, exact.
    order = [*range(0, 64, 2), *range(1, 64, 2)]
    np.testing.assert_array_equal(read.train.labels, labels[order])
    exact = [place for place, number in enumerate(order) if number // 2 % 2 == 0]
    batch = read.train.gather(np.array(exact))
    mean, std = np.array(read.train.mean), np.array(read.train.std)
    pixels = np.rint(255 * (batch["x"] * std + mean))
    centre = images[np.array(order)[exact]][:, :, 4:28]
    np.testing.assert_array_equal(pixels, centre)
    assert read.outputs == 4


@pytest.fixture
def shard(tmp_path):
    writers.write_tar_images(tmp_path, 12)
    return tmp_path / "tar-images" / "train-001.tar"


def test_an_archive_that_was_cut_since_is_noticed(tmp_path, shard):
    read = data.TarImagesConfig(size=8, resize=8).load(tmp_path).train
    place = next(i for i, member in enumerate(read.members) if member.shard == shard)
    shard.write_bytes(shard.read_bytes()[: read.members[place].offset + 10])
    with pytest.raises(DataFormatError, match=r"train-001\.tar: 0001\.png: expected"):
        read.gather(np.array([place]))
    shard.unlink()
    with pytest.raises(DataFormatError, match=r"train-001\.tar: 0001\.png"):
        read.gather(np.array([place]))


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"a.png": b"x"}, r"a\.png: expected a\.cls"),
        (
            {"a.png": b"x", "a.cls": b"cat"},
            "below 16777216, found 'cat'",
        ),
        (
            {"a.png": b"x", "a.cls": b"-1"},
            "below 16777216, found '-1'",
        ),
        ({"a.png": b"x", "a.cls": b"0" * 20 + b"5"}, "number of a class"),
        ({"a.png": b"x", "a.jpg": b"x", "a.cls": b"1"}, r"a\.jpg: a second of a"),
        ({"a.png": b"x", "a.CLS": b"1", "a.cls": b"2"}, r"a\.cls: a second of a"),
        ({"._a.png": b"x"}, "expected pictures, found none"),
        ({"a.txt": b"x"}, "expected pictures, found none"),
    ],
)
def test_archives_that_are_no_data_set_are_refused(tmp_path, shard, members, message):
    with tarfile.open(shard, "w") as archive:
        for name, content in members.items():
            writers.add_member(archive, name, content)
    with pytest.raises(DataFormatError, match=message):
        data.TarImagesConfig(size=8, resize=8).load(tmp_path)


def test_links_and_what_is_behind_the_end_are_told(tmp_path, shard):
    load = data.TarImagesConfig(size=8, resize=8).load
    content = shard.read_bytes()
    shard.write_bytes(2 * content)
    with pytest.raises(DataFormatError, match="end of the archive with nothing behind"):
        load(tmp_path)
    shard.write_bytes(content)
    with tarfile.open(shard, "a") as archive:
        link = tarfile.TarInfo("z.png")
        link.type, link.linkname = tarfile.LNKTYPE, "0001.png"
        archive.addfile(link)
    with pytest.raises(DataFormatError, match=r"z\.png: expected a file as it is"):
        load(tmp_path)


def test_classes_that_are_not_in_train_and_links_out_are_refused(tmp_path, shard):
    load = data.TarImagesConfig(size=8, resize=8).load
    with tarfile.open(shard.with_name("val-000.tar"), "w") as archive:
        writers.add_member(archive, "a.png", b"x")
        writers.add_member(archive, "a.cls", b"7")
    with pytest.raises(DataFormatError, match="expected a class below 4"):
        load(tmp_path)
    outside = tmp_path.parent / f"{tmp_path.name}.tar"
    shard.rename(outside)
    shard.symlink_to(outside)
    with pytest.raises(ConfigError, match="leads out of"):
        load(tmp_path)
    for path in shard.parent.glob("train-*"):
        path.unlink()
    with pytest.raises(DataMissing, match="tar-images"):
        load(tmp_path)
