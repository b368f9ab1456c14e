"""Tiny data sets in the real formats, for tests on machines without the real files."""

import gzip
import io
import json
import pathlib
import tarfile

import numpy as np
import xarray as xr
from PIL import Image

from hpcjax.data import catalog, phantoms, rain


def pictures(
    count: int, shape: tuple[int, int, int], classes: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Noise plus one fixed pattern per class; labels go round, so that all occur."""
    labels = np.arange(count, dtype=np.uint8) % classes
    patterns = np.random.default_rng(0).integers(0, 160, (classes, *shape))
    noise = np.random.default_rng(seed).integers(0, 96, (count, *shape))
    return (patterns[labels] + noise).astype(np.uint8), labels


def write_idx(path: pathlib.Path, values: np.ndarray) -> None:
    """Writes unsigned bytes; gzipped when the name says so."""
    header = bytes((0, 0, 8, values.ndim)) + np.array(values.shape, ">u4").tobytes()
    content = header + values.astype(np.uint8).tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_mnist(
    root: pathlib.Path, examples: int = 64, name: str = "mnist", suffix: str = ""
) -> None:
    """Writes the four IDX files of `mnist` or `fashion-mnist`."""
    for seed, (part, count) in enumerate((("train", examples), ("t10k", examples))):
        images, labels = pictures(count, (28, 28, 1), 10, seed)
        write_idx(root / name / f"{part}-images-idx3-ubyte{suffix}", images[..., 0])
        write_idx(root / name / f"{part}-labels-idx1-ubyte{suffix}", labels)


def write_cifar10(root: pathlib.Path, examples: int = 64) -> None:
    """Writes the six binary files with `examples / 5` records each."""
    records = max(10, -(-examples // 5))
    folder = root / "cifar10"
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate((*catalog.CIFAR10_TRAIN, catalog.CIFAR10_TEST)):
        images, labels = pictures(records, (32, 32, 3), 10, seed)
        planes = images.transpose(0, 3, 1, 2).reshape(records, -1)
        (folder / name).write_bytes(
            np.concatenate([labels[:, None], planes], axis=1).tobytes()
        )


def write_image_folder(
    root: pathlib.Path, examples: int = 64, name: str = "image-folder"
) -> None:
    """Writes JPEG and PNG pictures of several sizes in four classes."""
    classes = ("ant", "bee", "cat", "dog")
    for seed, split in enumerate(("train", "val")):
        images, labels = pictures(examples, (24, 32, 3), len(classes), seed)
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            folder = root / name / split / classes[label]
            folder.mkdir(parents=True, exist_ok=True)
            upright = image.transpose(1, 0, 2) if number % 3 == 0 else image
            ending = ("png", "JPEG", "jpg")[number % 3]
            Image.fromarray(upright).save(folder / f"{number:04d}.{ending}")


def write_tar_images(root: pathlib.Path, examples: int = 64) -> None:
    """Writes two archives of each part: JPEG and PNG pictures, and their classes."""
    folder = root / "tar-images"
    folder.mkdir(parents=True, exist_ok=True)
    for seed, split in enumerate(("train", "val")):
        images, labels = pictures(examples, (24, 32, 3), 4, seed)
        for shard in range(2):
            with tarfile.open(folder / f"{split}-{shard:03d}.tar", "w") as archive:
                for number in range(shard, examples, 2):
                    ending = ("png", "jpg")[number // 2 % 2]
                    content = io.BytesIO()
                    form = {"png": "PNG", "jpg": "JPEG"}[ending]
                    Image.fromarray(images[number]).save(content, form)
                    add_member(archive, f"{number:04d}.{ending}", content.getvalue())
                    add_member(archive, f"{number:04d}.cls", b"%d" % labels[number])
                    add_member(archive, f"{number:04d}.json", b"{}")


def add_member(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    """Adds a file to an archive."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


WORDS = "the cat sees a dog and then some bird flies over it"


def sentences(characters: int, seed: int = 0) -> str:
    """Returns words drawn from a small list, with some order in them."""
    rng = np.random.default_rng(seed)
    words = np.array(WORDS.split(" "))
    return " ".join(words[rng.integers(0, len(words), characters)])[:characters]


def write_kjv(root: pathlib.Path, examples: int = 64) -> None:
    """Writes one verse of 400 characters per example, ending where the book ends."""
    folder = root / "kjv"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "kjv.jsonl").open("w") as file:
        for number in range(examples):
            last = number == examples - 1
            chapter, verse = divmod(number, 2)
            citation = f"Genesis {chapter + 1}:{verse + 1}"
            citation = "Revelation 22:21" if last else citation
            text = sentences(400, number)
            file.write(json.dumps({"citation": citation, "text": text}) + "\n")


def write_text(
    root: pathlib.Path, examples: int = 64, name: str = "sample.txt"
) -> None:
    """Writes a text file with a few characters outside ASCII."""
    folder = root / "text"
    folder.mkdir(parents=True, exist_ok=True)
    text = "Größe — naïve \U0001d6fc\n" + sentences(400 * examples)
    (folder / name).write_text(text, encoding="utf-8")


def write_documents(
    root: pathlib.Path, examples: int = 64, name: str = "documents.txt"
) -> None:
    """Writes a sentence per line and a blank line between documents of six."""
    folder = root / "text"
    folder.mkdir(parents=True, exist_ok=True)
    lines = [sentences(60, number) for number in range(2 * examples)]
    documents = ["\n".join(lines[at : at + 6]) for at in range(0, len(lines), 6)]
    (folder / name).write_text("\n\n".join(documents) + "\n", encoding="utf-8")


def write_kernel_docs(root: pathlib.Path, examples: int = 64) -> None:
    """Writes a JSON line per document, as they are fetched."""
    folder = root / "kernel-docs"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "documents.jsonl").open("w", encoding="utf-8") as file:
        for number in range(examples):
            name = f"admin-guide/{number:03d}.rst"
            text = f"Größe {number}\n=====\n{sentences(300, number)}\n"
            file.write(json.dumps({"name": name, "text": text}) + "\n")


WORDNET_HEAD = "  1 This software and database is being provided to you  \n"


def write_wordnet(root: pathlib.Path, examples: int = 100) -> None:
    """Writes the four data files in the form of wndb(5)."""
    folder = root / "wordnet"
    folder.mkdir(parents=True, exist_ok=True)
    for kind, speech in zip("nvar", ("noun", "verb", "adj", "adv"), strict=True):
        lines = [WORDNET_HEAD]
        for number in range(examples):
            words = f"02 {speech}_{number} 0 other{number}(p) 1"
            gloss = f'{sentences(40, number)}; "{sentences(30, number)}"'
            place = f"{100 * number:08d} {3 + number % 2:02d} {kind}"
            pointer = "002 @ 00000000 n 0000 ! 00000100 v 0102"
            lines.append(f"{place} {words} {pointer} | {gloss}  \n")
        (folder / f"data.{speech}").write_text("".join(lines))


def write_parted(root: pathlib.Path, examples: int = 64) -> None:
    """Writes WikiText-2, the Penn Treebank and C4 in their published forms."""
    for folder in ("wikitext-2", "ptb", "c4"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for seed, part in enumerate(("train", "valid", "test")):
        lines = [sentences(100, 1000 * seed + number) for number in range(examples)]
        articles = "".join(f" \n = {line[:9]} = \n \n {line} \n" for line in lines)
        (root / "wikitext-2" / f"wiki.{part}.raw").write_text(articles)
        sentence_lines = "".join(f" {line} \n" for line in lines)
        (root / "ptb" / f"ptb.{part}.txt").write_text(sentence_lines)
    for part, files in (("train", 2), ("validation", 1)):
        for number in range(files):
            path = root / "c4" / f"c4-{part}.{number:05d}-of-{files:05d}.json.gz"
            with gzip.open(path, "wt", encoding="utf-8") as file:
                for line in range(examples):
                    text = sentences(200, 100 * number + line)
                    record = {"text": text, "timestamp": "", "url": f"u/{line}"}
                    file.write(json.dumps(record) + "\n")


def write_slices(root: pathlib.Path, patients: int = 5, name: str = "lgg") -> None:
    """Writes colour slices of phantoms and masks of 0 and 255, a folder per patient."""
    for number in range(patients):
        folder = root / name / f"TCGA_{number:04d}"
        folder.mkdir(parents=True, exist_ok=True)
        images, masks = phantoms.phantom(number, 4, 24, 20.0, seed=0)
        for index, (image, mask) in enumerate(zip(images, masks, strict=True), 1):
            path = folder / f"{folder.name}_{index}.tif"
            colours = np.stack([image, image // 2, image // 3], axis=-1)
            Image.fromarray(colours).save(path)
            Image.fromarray(255 * mask.astype(np.uint8)).save(
                path.with_name(f"{path.stem}_mask.tif")
            )


def forecasts(dates: int = 16, seed: int = 0) -> tuple[xr.Dataset, xr.Dataset]:
    """Members and truth as cfgrib names them, but for two days, on 6 by 8 points."""
    rng = np.random.default_rng(seed)
    days = np.datetime64("2001-01-01", "ns") + np.arange(dates + 3).astype(
        "timedelta64[D]"
    )
    coords = {
        "isobaricInhPa": ("isobaricInhPa", [500.0, 850.0], {"units": "hPa"}),
        "latitude": np.linspace(75, -75, 6),
        "longitude": np.arange(0.0, 360, 45),
    }
    step = np.array([0, 72], "timedelta64[h]").astype("timedelta64[ns]")
    flags = {"flag_values": [0, 1, 2], "flag_meanings": "train validation test"}
    part = np.minimum(np.arange(dates) // (dates // 2), 2)
    part[-2:] = 2
    own = {
        "number": np.arange(1, 11),
        "time": days[:dates],
        "step": step,
        "part": ("time", part.astype("int8"), flags),
    }
    dims = ("time", "isobaricInhPa", "latitude", "longitude")
    levels = {"z": (50_000.0, "m**2 s**-2"), "t": (260.0, "K"), "t2m": (285.0, "K")}
    forecast, truth = (
        xr.Dataset(coords=own | coords),
        xr.Dataset(coords={"time": days} | coords),
    )
    for name, (level, units) in levels.items():
        axes = tuple(dim for dim in dims if name != "t2m" or dim != "isobaricInhPa")
        shape = [len(days), 2, 6, 8] if name != "t2m" else [len(days), 6, 8]
        true = level + 5 * rng.normal(size=shape)
        wrong = rng.normal(size=(10, dates, 2, *shape[1:]))
        members = true[np.arange(dates)[:, None] + [0, 3]] + 1 + wrong
        attrs = {"units": units}
        truth[name] = (axes, true.astype("float32"), attrs)
        named = ("number", "time", "step", *axes[1:])
        forecast[name] = (named, members.astype("float32"), attrs)
    return forecast, truth


def write_forecasts(root: pathlib.Path) -> None:
    """Writes zarr stores of ENS-10's form, and netCDF files of one's own."""
    forecast, truth = forecasts()
    for name in ("ens10-light", "ens10-tiny"):
        for group, fields in (("forecast", forecast), ("truth", truth)):
            store = root / name / "ens10.zarr"
            fields.to_zarr(store, group=group, consolidated=False)
    folder = root / "weather-file"
    folder.mkdir(parents=True)
    forecast.isel(step=[1]).to_netcdf(folder / "forecast.nc", engine="h5netcdf")
    truth.to_netcdf(folder / "truth.nc", engine="h5netcdf")


def write_rain(root: pathlib.Path) -> None:
    """Writes a table of days in every year, as `hpcjax data fetch rain-ibk` does."""
    rng = np.random.default_rng(0)
    lines = [",".join(rain.COLUMNS)]
    for year in range(2000, 2014):
        for day in (1, 5, 9):
            values = rng.gamma(1.0, 4.0, 12).round(2).astype(str)
            lines.append(f"{year}-01-0{day}," + ",".join(values))
    (root / "rain-ibk").mkdir(parents=True)
    (root / "rain-ibk/rain.csv").write_text("\n".join(lines) + "\n")


def criteo_lines(examples: int = 64, seed: int = 0) -> list[str]:
    """Returns lines of Criteo's form, some fields of which are empty."""
    rng = np.random.default_rng(seed)
    lines = []
    for _ in range(examples):
        numbers = [str(n) if n > -3 else "" for n in rng.integers(-4, 50, 13)]
        names = [f"{n:08x}" if n else "" for n in rng.integers(0, 9, 26) * 123_456_789]
        lines.append("\t".join([str(rng.integers(2)), *numbers, *names]))
    return lines


def write_criteo(root: pathlib.Path, examples: int = 64) -> None:
    """Writes clicks, gzipped."""
    (root / "criteo").mkdir(parents=True)
    content = "\n".join(criteo_lines(examples)) + "\n"
    (root / "criteo/train.txt.gz").write_bytes(gzip.compress(content.encode()))


def write_links(root: pathlib.Path) -> None:
    """Writes knowledge graphs, of 14 entities or 2,200, the training part gzipped."""
    rng = np.random.default_rng(0)
    for name in ("wn18rr", "nations", "kinships", "umls"):
        (root / name).mkdir(parents=True, exist_ok=True)
        count, links = (2200, 2500) if name == "wn18rr" else (14, 300)
        drawn = rng.integers([count, 5, count], size=(links, 3))
        drawn = np.unique(drawn, axis=0)
        lines = [f"n{head}\tr{kind}\tn{tail}\n" for head, kind, tail in drawn]
        rng.shuffle(lines)
        train = gzip.compress("".join(lines[50:]).encode())
        (root / name / "train.txt.gz").write_bytes(train)
        (root / name / "valid.txt").write_text("".join(lines[:20]))
        (root / name / "test.txt").write_text("".join(lines[20:50]))


def write_all(root: pathlib.Path, examples: int = 64) -> None:
    """Makes every data set of the catalogue present below `root`, in tiny form."""
    write_mnist(root, examples)
    write_mnist(root, examples, "fashion-mnist", ".gz")
    write_cifar10(root, examples)
    write_image_folder(root, examples)
    write_tar_images(root, examples)
    write_kjv(root, examples)
    write_text(root, examples)
    write_documents(root, examples)
    write_kernel_docs(root, examples)
    write_wordnet(root)
    write_parted(root, examples)
    write_slices(root)
    write_forecasts(root)
    write_rain(root)
    write_criteo(root, examples)
    write_links(root)
