"""Loads language models by name, together with their tokenizers.

This is not in the room `models`, which may not import the tokenizers of `data`.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from hpcjax.core import files
from hpcjax.core.errors import ConfigError, DataFormatError, DataMissing
from hpcjax.inference.chat import write_chat

if TYPE_CHECKING:
    from hpcjax.data import Coder
    from hpcjax.data.corpora import Part
    from hpcjax.models.pretrained import Pretrained

RANDOM = "random"


class Bytes:
    """A tokenizer whose tokens are the 256 byte values."""

    eos = None

    def __len__(self) -> int:
        return 256

    def encode(self, text: str) -> np.ndarray:
        """Returns the bytes of a text as UTF-8, int32 [bytes]."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        """Returns the text; bytes that are not valid UTF-8 become U+FFFD."""
        return bytes(tokens.astype(np.uint8)).decode(errors="replace")


class TextModel(NamedTuple):
    """A language model with its tokenizer.

    Attributes:
      pretrained: the model with its parameters.
      tokenizer: encodes texts and decodes tokens.
      chat_template: how questions are written, see `write_chat`; None if the model is
        not one that answers.
      ends: the tokens that end a text, a message or a turn.
    """

    pretrained: "Pretrained"
    tokenizer: "Coder"
    chat_template: str | None = None
    ends: tuple[int, ...] = ()

    def ask(self, question: str) -> str:
        """Returns a question in the form that the model answers.

        Raises:
          ConfigError: it has no chat template.
        """
        if self.chat_template is None:
            raise ConfigError(
                "the model has no chat template: it continues texts, and answers no "
                "questions; take chat=false"
            )
        coder = self.tokenizer
        special = {
            f"{name}_token": coder.decode(np.array([code]))
            for name in ("bos", "eos")
            if (code := getattr(coder, name, None)) is not None
        }
        messages = [{"role": "user", "content": question}]
        return write_chat(self.chat_template, messages, special=special)


# All runs of a table use one model: its file is read once, and as all get the same
# object, its programs are compiled once.
@functools.lru_cache(maxsize=2)
def load_language_model(name: str, root: pathlib.Path) -> TextModel:
    """Loads a causal language model.

    Args:
      name: a data set of the catalog that holds a model, such as "smollm2"; the path of
        a GGUF file, or of a folder in Hugging Face's layout with its `tokenizer.json`;
        or "random", a tiny untrained model of bytes.
      root: the folder of data sets.

    Raises:
      DataMissing: no such model; the message says what to do.
      DataFormatError: a file is damaged.
      ConfigError: not a causal model, or a tokenizer with more tokens than the model.
    """
    from hpcjax import data, models
    from hpcjax.data import catalog
    from hpcjax.models import pretrained

    if name == RANDOM:
        return TextModel(_make_random_model(), Bytes())
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
        own = path / "generation_config.json"
        told = files.read_object(own) if own.exists() else {}
        ends = _read_ends([x.get("eos_token_id") for x in (loaded.metadata, told)])
        eos = next(iter(ends), None)
        tokenizer = data.load_tokenizer(path / "tokenizer.json", eos=eos)
        chat = _read_chat_template(path)
    else:
        keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
        ends = _read_ends([loaded.metadata.get(key) for key in keys])
        tokenizer = data.gguf_tokenizer(loaded.metadata)
        chat = loaded.metadata.get("tokenizer.chat_template")
    if len(tokenizer) > loaded.vocabulary:
        raise ConfigError(
            f"{name}: the tokenizer has {len(tokenizer)} tokens, the model only "
            f"{loaded.vocabulary}: they do not go together"
        )
    return TextModel(loaded, tokenizer, chat, ends)


def _read_ends(given: Iterable[Any]) -> tuple[int, ...]:
    """Returns each of some tokens once; each given is one, a list of them, or None."""
    lists = [each if isinstance(each, list) else [each] for each in given]
    found = [one for each in lists for one in each if one is not None]
    if wrong := [one for one in found if type(one) is not int]:
        raise DataFormatError(f"end tokens must be integers: found {wrong[0]!r:.40}")
    return tuple(dict.fromkeys(found))


def _read_chat_template(folder: pathlib.Path) -> str | None:
    """Reads the template of a folder in Hugging Face's layout, if there is one."""
    own, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if own.exists():
        return own.read_text()
    if not config.exists():
        return None
    try:
        found = json.loads(config.read_text()).get("chat_template")
    except (ValueError, AttributeError) as error:
        raise DataFormatError(f"{config}: expected a JSON object: {error}") from error
    if isinstance(found, list):  # several, by name
        found = {one.get("name"): one.get("template") for one in found}.get("default")
    return found


@functools.lru_cache(maxsize=4)
def corpus_tokens(
    name: str, corpus: str, part: "Part", root: pathlib.Path
) -> Int32[np.ndarray, " tokens"]:
    """Returns a part of a corpus as one sequence of a model's tokens.

    Documents are joined by newlines.

    Args:
      name: of the model, see `load_language_model`.
      corpus: name of a corpus of `hpcjax.data`, such as "kjv" or "python-library".
      part: "train", "validation" or "test".
      root: the folder of data sets.
    """
    from hpcjax import data

    text = "\n".join(data.read_part(root, corpus, part))
    return load_language_model(name, root).tokenizer.encode(text)


def _make_random_model() -> "Pretrained":
    import jax

    from hpcjax.models import LLAMA, CausalLmConfig
    from hpcjax.models.pretrained import Pretrained

    tied = dataclasses.replace(LLAMA, tied_head=True)
    config = CausalLmConfig(
        depth=4, width=16, heads=4, kv_heads=2, mlp_width=32, options=tied
    )
    empty = Pretrained(params=None, config=config, context=512, vocabulary=256)
    params, _ = empty.model.init(jax.random.key(0))
    return dataclasses.replace(empty, params=params)
