"""Every data set at a small size, for suites that check them all."""

from collections.abc import Callable, Mapping

from hpcjax.data import config
from hpcjax.data.config import DataConfig


def _tokens(corpus: str) -> DataConfig:
    return config.TokenTextConfig(corpora=(corpus,), context=100, vocabulary=300)


REGISTRY: Mapping[str, Callable[[], DataConfig]] = {
    "digits": lambda: config.DigitsConfig(limit=50),
    "mnist": lambda: config.MnistConfig(limit=50),
    "mnist-32": lambda: config.MnistConfig(limit=50, pad=2),
    "fashion-mnist": lambda: config.FashionMnistConfig(limit=50),
    "cifar10": lambda: config.Cifar10Config(limit=50),
    "image-folder": lambda: config.ImageFolderConfig(size=12, resize=14, limit=30),
    "python-reference": lambda: config.CharTextConfig(context=9973),
    "kjv": lambda: config.CharTextConfig(corpus="kjv", context=500),
    "kjv-masked": lambda: config.MaskedTextConfig(
        corpus="kjv", context=300, vocabulary=60, copies=2, validation=0.3
    ),
    "text-masked": lambda: config.MaskedTextConfig(
        corpus="documents.txt", context=48, vocabulary=60, copies=1, validation=0.3
    ),
    "python-library": lambda: config.TokenTextConfig(
        corpora=("python-library",), context=3001, vocabulary=300, limit=15
    ),
    "kernel-docs": lambda: _tokens("kernel-docs"),
    "wordnet": lambda: _tokens("wordnet"),
    "wikitext-2": lambda: _tokens("wikitext-2"),
    "ptb": lambda: _tokens("ptb"),
    "c4": lambda: _tokens("c4"),
    "phantoms": lambda: config.PhantomsConfig(patients=6, slices=4, size=16),
    "lgg": lambda: config.MriSlicesConfig(size=12, validation=0.3),
    "text": lambda: config.CharTextConfig(corpus="sample.txt", context=500),
}
