"""Language models by name, with the tokenizer that goes with them."""

import dataclasses
import functools
import pathlib
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Int32

from hpcjax.core.errors import ConfigError, DataMissing

if TYPE_CHECKING:
    from hpcjax.data import Coder
    from hpcjax.data.corpora import Part
    from hpcjax.models.pretrained import Pretrained

RANDOM = "random"


class Bytes:
    """A tokenizer whose tokens are the 256 bytes."""

    eos = None

    def __len__(self) -> int:
        return 256

    def encode(self, text: str) -> np.ndarray:
        """Returns the bytes of a text as UTF-8, int32 [bytes]."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        """Returns the text; bytes that are no UTF-8 become U+FFFD."""
        return bytes(tokens.astype(np.uint8)).decode(errors="replace")


class Speaking(NamedTuple):
    """A language model, and how it spells.

    Attributes:
      pretrained: the model with its parameters.
      tokenizer: text to its tokens and back.
    """

    pretrained: "Pretrained"
    tokenizer: "Coder"


# A table's runs are of one model: it is read, and its programs are compiled, once.
@functools.lru_cache(maxsize=2)
def load_language_model(name: str, root: pathlib.Path) -> Speaking:
    """Loads a causal language model.

    Args:
      name: a data set of the catalog that holds one, such as "smollm2"; the path of a
        GGUF file, or of a folder in Hugging Face's layout with its `tokenizer.json`;
        or "random", a tiny model of bytes that nobody has trained.
      root: the folder of data sets.

    Raises:
      DataMissing: nothing is there; the message says what to do.
      DataFormatError: a file is damaged.
      ConfigError: no causal model, or a tokenizer with more tokens than it has.
    """
    from hpcjax import data, models
    from hpcjax.data import catalog
    from hpcjax.models import pretrained

    if name == RANDOM:
        return Speaking(_random(), Bytes())
    path = pathlib.Path(name)
    if name in catalog.CATALOG:
        paths = catalog.locate(name, root)
        path = next(iter(paths.values()))
    elif not path.exists():
        raise DataMissing(
            f"no language model {name!r}: it is no path, and of the data sets only "
            "smollm2 is one (`hpcjax data fetch smollm2`)"
        )
    loaded = pretrained.load(path)
    models.decoder_of(loaded.model)
    if path.is_dir():
        eos = loaded.metadata.get("eos_token_id")
        # Of several, which chat models have, the first.
        eos = next(iter(eos), None) if isinstance(eos, list) else eos
        tokenizer = data.load_tokenizer(path / "tokenizer.json", eos=eos)
    else:
        tokenizer = data.gguf_tokenizer(loaded.metadata)
    if len(tokenizer) > loaded.vocabulary:
        raise ConfigError(
            f"{name}: the tokenizer has {len(tokenizer)} tokens, the model only "
            f"{loaded.vocabulary}: they do not go together"
        )
    return Speaking(loaded, tokenizer)


@functools.lru_cache(maxsize=4)
def corpus_tokens(
    name: str, corpus: str, part: "Part", root: pathlib.Path
) -> Int32[np.ndarray, " tokens"]:
    """Returns the documents of a part of a corpus, line by line, as a model reads them.

    Args:
      name: of the model, see `load_language_model`.
      corpus: of `hpcjax.data`, such as "kjv" or "python-library".
      part: "train", "validation" or "test".
      root: the folder of data sets.
    """
    from hpcjax import data

    text = "\n".join(data.read_part(root, corpus, part))
    return load_language_model(name, root).tokenizer.encode(text)


def _random() -> "Pretrained":
    import jax

    from hpcjax.models.config import LLAMA, CausalLmConfig
    from hpcjax.models.pretrained import Pretrained

    tied = dataclasses.replace(LLAMA, tied_head=True)
    config = CausalLmConfig(
        depth=4, width=16, heads=4, kv_heads=2, mlp_width=32, options=tied
    )
    empty = Pretrained(params=None, config=config, context=512, vocabulary=256)
    params, _ = empty.model.init(jax.random.key(0))
    return dataclasses.replace(empty, params=params)
