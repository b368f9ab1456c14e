"""Trees of pictures against Pillow, and against damaged or hostile ones."""

import math
import shutil

import numpy as np
import pytest
from PIL import Image

from hpcjax import data
from hpcjax.core.errors import ConfigError, DataFormatError, DataMissing
from hpcjax.data import image_folder
from tests.data import writers

# Pillow rounds to bytes after each direction, and takes the cheaper one first.
ROUNDED_TWICE = 2


def resized_then_cropped(path, resize, size):
    with Image.open(path) as picture:
        image = picture.convert("RGB")
    scale = resize / min(image.size)
    width, height = (max(resize, round(side * scale)) for side in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    image = image.resize((width, height), Image.Resampling.BILINEAR)
    return np.asarray(image)[top : top + size, left : left + size].astype(int)


def test_image_folder_equals_pillow(tiny_root):
    read = data.ImageFolderConfig(size=10, resize=12).load(tiny_root)
    assert read.outputs == 4
    folder = tiny_root / "image-folder" / "train"
    paths = sorted(path for name in folder.iterdir() for path in name.iterdir())
    assert len(read.train) == len(paths) == 64
    number = 5
    batch = read.train.gather(np.array([number]))
    pixels = batch["x"][0] * [0.229, 0.224, 0.225] + [0.485, 0.456, 0.406]
    expected = resized_then_cropped(paths[number], 12, 10)
    np.testing.assert_allclose(255 * pixels, expected, atol=ROUNDED_TWICE + 1e-3)
    classes = sorted(path.name for path in folder.iterdir())
    assert classes[batch["y"][0]] == paths[number].parent.name


@pytest.mark.parametrize("resize", [9, 12, 40])
@pytest.mark.parametrize("shape", [(24, 32), (33, 10), (9, 9), (200, 150), (1, 50)])
def test_cropping_first_changes_nothing(tmp_path, shape, resize):
    noise = np.random.default_rng(0).integers(0, 256, (*shape, 3)).astype(np.uint8)
    path = tmp_path / "a.png"
    Image.fromarray(noise).save(path)
    got = image_folder.read_image(path, resize, 9).astype(int)
    expected = resized_then_cropped(path, resize, 9)
    assert np.abs(got - expected).max() <= ROUNDED_TWICE


@pytest.mark.parametrize("shape", [(2, 4000), (4000, 2)])
def test_a_thin_picture_becomes_no_huge_one(tmp_path, monkeypatch, shape):
    path = tmp_path / "a.png"
    Image.fromarray(np.zeros((*shape, 3), np.uint8)).save(path)
    resize, made = Image.Image.resize, []

    def recorded(image, size, *args, **kwargs):
        made.append(math.prod(size))
        return resize(image, size, *args, **kwargs)

    monkeypatch.setattr(Image.Image, "resize", recorded)
    assert image_folder.read_image(path, 256, 224).shape == (224, 224, 3)
    assert made == [224**2]


def test_tall_and_wide_pictures_are_never_smaller_than_the_crop(tmp_path):
    for number, shape in enumerate(((3, 500), (500, 3), (1, 1), (7, 8))):
        path = tmp_path / f"{number}.png"
        Image.fromarray(np.zeros((*shape, 3), np.uint8)).save(path)
        assert image_folder.read_image(path, 9, 9).shape == (9, 9, 3)


@pytest.fixture
def folder(tmp_path):
    writers.write_image_folder(tmp_path, 12)
    return tmp_path / "image-folder"


def test_a_cut_or_false_picture_is_noticed_when_read(tmp_path, folder):
    read = data.ImageFolderConfig(size=8, resize=8).load(tmp_path)
    jpeg = next((folder / "train").rglob("*.jpg"))
    content = jpeg.read_bytes()
    place = read.train.paths.index(jpeg)
    for damage in (content[: len(content) // 2], b"GIF89a", b""):
        jpeg.write_bytes(damage)
        with pytest.raises(DataFormatError, match=jpeg.name):
            read.train.gather(np.array([place]))
    jpeg.unlink()
    stream = data.batches(read.train, len(read.train), 0)
    with stream.iterate() as iterator, pytest.raises(DataFormatError, match=jpeg.name):
        next(iterator)


def test_folders_that_do_not_fit_are_refused(tmp_path, folder):
    load = data.ImageFolderConfig(size=8, resize=8).load
    (folder / "train" / ".hidden").mkdir()
    (folder / "train" / "ant" / ".DS_Store").touch()
    load(tmp_path)
    odd = folder / "train" / "ant" / "notes.csv"
    odd.touch()
    with pytest.raises(DataFormatError, match="expected a name ending in"):
        load(tmp_path)
    odd.unlink()
    (folder / "train" / "emu").mkdir()
    with pytest.raises(DataFormatError, match="emu: expected pictures, found none"):
        load(tmp_path)
    shutil.rmtree(folder / "train" / "emu")
    shutil.rmtree(folder / "val" / "ant")
    with pytest.raises(DataFormatError, match=r"not in both: \['ant'\]"):
        load(tmp_path)
    for name in ("bee", "cat", "dog"):
        shutil.rmtree(folder / "val" / name)
    with pytest.raises(DataFormatError, match="one folder per class, found none"):
        load(tmp_path)
    (folder / "val").rmdir()
    with pytest.raises(DataMissing, match="image-folder"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["train", "train/ant", "train/ant/0000.png"])
def test_links_may_lead_about_the_root_but_not_out_of_it(tmp_path, name):
    root = tmp_path / "root"
    writers.write_image_folder(root, 12)
    path = root / "image-folder" / name
    load = data.ImageFolderConfig(size=8, resize=8).load
    path.rename(root / "inside")
    path.symlink_to(root / "inside")
    assert len(load(root).train) == 12
    (root / "inside").rename(tmp_path / "outside")
    path.unlink()
    path.symlink_to(tmp_path / "outside")
    with pytest.raises(ConfigError, match=f"{name} leads out of"):
        load(root)


def test_a_link_in_a_circle_is_no_picture(tmp_path, folder):
    path = folder / "train" / "ant" / "a.png"
    path.symlink_to(path)
    read = data.ImageFolderConfig(size=8, resize=8).load(tmp_path)
    with pytest.raises(DataFormatError, match=r"a\.png: expected a whole JPEG or PNG"):
        read.train.gather(np.array([read.train.paths.index(path)]))
