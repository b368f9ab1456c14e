"""Loading a model from a checkpoint, and saving one in Hugging Face's layout."""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from hpcjax.core import files, trees
from hpcjax.core.dtypes import Policy
from hpcjax.core.errors import ConfigError, DataFormatError, DataMissing
from hpcjax.core.model import Model
from hpcjax.models.bert_config import BertConfig
from hpcjax.models.parts import Parts, causal_lm_parts
from hpcjax.models.pretrained import _architecture, names
from hpcjax.models.pretrained._architecture import Architecture, FamilyName
from hpcjax.models.pretrained._convert import is_packed, read_params, write_tensors
from hpcjax.models.pretrained._gguf import read_gguf
from hpcjax.models.pretrained._gptq import join_packed, matrix_tensors
from hpcjax.models.pretrained._gptq_config import QUANTIZE_CONFIG, describe_matrices
from hpcjax.models.pretrained._safetensors import (
    SINGLE,
    read_safetensors,
    save_tensors,
)
from hpcjax.models.transformer_config import CausalLmConfig

CONFIG = "config.json"
_DIVISORS = "rope_freqs.weight"  # of a GGUF file
# Ids of special tokens, which generation needs: key of `config.json`, and of GGUF.
_SPECIAL = {
    "bos_token_id": "tokenizer.ggml.bos_token_id",
    "eos_token_id": "tokenizer.ggml.eos_token_id",
    "pad_token_id": "tokenizer.ggml.padding_token_id",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pretrained:
    """A language model with its parameters.

    Attributes:
      params: a tree like that of the model's `init`, in `policy.param`.
      config: the model's config.
      context: rows of the position table; without a table the longest sequence it was
        trained for.
      vocabulary: number of words.
      policy: dtypes of the model.
      metadata: content of the checkpoint's `config.json`, or the keys of a GGUF file,
        which include the tokenizer.
    """

    params: Any
    config: CausalLmConfig | BertConfig
    context: int
    vocabulary: int
    policy: Policy = Policy()
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)

    @functools.cached_property
    def model(self) -> Model:
        """The network, whose state is empty, `{}`."""
        inputs = (self.context, 3)[: 1 + isinstance(self.config, BertConfig)]
        return self.config.make(inputs, self.vocabulary, self.policy)

    @functools.cached_property
    def parts(self) -> Parts:
        """The network in parts, see `causal_lm_parts`; raises ConfigError for BERT."""
        if isinstance(self.config, BertConfig):
            raise ConfigError("BERT cannot be cut into parts: it is no causal model")
        return causal_lm_parts(self.config, self.context, self.vocabulary, self.policy)

    @property
    def family(self) -> FamilyName:
        """The family as which it can be saved; raises ConfigError if there is none."""
        return _architecture.family_of(self.config)


def load(
    source: str | pathlib.Path,
    *,
    policy: Policy | None = None,
    checkpoint_format: str | None = None,
) -> Pretrained:
    """Loads GPT-2, OPT, BLOOM, LLaMA or BERT; matrices packed by GPTQ stay packed.

    Args:
      source: a folder with `config.json` and `model.safetensors`, or its shards with
        their index; or a GGUF file of llama's architecture.
      policy: dtypes of the model; parameters are converted to `policy.param`, except
        packed matrices.
      checkpoint_format: of packed matrices, "gptq" or "gptq_v2", overriding what
        tensors and config say; see `load_gptq`.

    Returns:
      The model with its parameters, on the default device.

    Raises:
      DataMissing: the folder or a file of it does not exist.
      DataFormatError: a file is truncated or damaged, or its tensors are not those of
        its config.
      UnsupportedOp: an architecture, an option or a number format that is not
        implemented.
      ConfigError: sizes that do not divide, another checkpoint_format.
    """
    path = pathlib.Path(source)
    if not path.exists():
        raise DataMissing(f"no folder and no file {path}")
    if path.is_dir():
        metadata = files.read_object(path / CONFIG)
        stored = join_packed(read_safetensors(path), path, checkpoint_format)
        architecture = _architecture.from_json(metadata, stored, str(path / CONFIG))
        family = names.FAMILIES[architecture.family]
    else:
        metadata, stored = read_gguf(path)
        stored = dict(stored)
        divisors = stored.pop(_DIVISORS, None)
        shapes = {name: tensor.shape for name, tensor in stored.items()}
        architecture = _architecture.from_gguf(metadata, shapes, str(path))
        if divisors is not None:
            architecture = _divide_frequencies(architecture, divisors.read(), str(path))
        family = names.GGUF_LLAMA
    # A damaged depth is noticed before shapes are made for so many layers.
    depth = architecture.config.depth
    if depth > len(stored):
        raise DataFormatError(
            f"{path}: should have {depth} layers: got {len(stored)} tensors"
        )
    empty = Pretrained(
        params=None,
        config=architecture.config,
        context=architecture.context,
        vocabulary=architecture.vocabulary,
        policy=policy or Policy(),
        metadata=metadata,
    )
    params = read_params(
        family, stored, _param_shapes(empty), architecture.config, str(path)
    )
    return dataclasses.replace(empty, params=params)


def save(
    folder: str | pathlib.Path,
    pretrained: Pretrained,
    *,
    checkpoint_format: str = "gptq_v2",
) -> None:
    """Writes `model.safetensors` and `config.json`, which `transformers` reads.

    Packed matrices are written in GPTQ's layout, with scales in float16, and
    describe_matrices in `config.json`. Both files are written completely before they
    replace older ones. If the process dies between the two replacements, the folder
    lacks `config.json`, so that it cannot be loaded with tensors of another model.

    Args:
      folder: created if it does not exist; other files in it are kept.
      pretrained: the model; its metadata may be empty.
      checkpoint_format: of packed matrices, "gptq" or "gptq_v2".

    Raises:
      ConfigError: no family's `config.json` can express the model, its parameters are
        not those of its config, or packed ones do not fit the layout (see
        `save_gptq`).
      DiskFull: no space is left; what was there is untouched.
    """
    folder, family = pathlib.Path(folder), pretrained.family
    _check_params(pretrained)
    architecture = Architecture(
        family, pretrained.config, pretrained.context, pretrained.vocabulary
    )
    content = _architecture.to_json(architecture)
    metadata = pretrained.metadata
    for key, other in _SPECIAL.items():
        if key in metadata or other in metadata:
            content[key] = metadata.get(key, metadata.get(other))
    written = write_tensors(
        names.FAMILIES[family], pretrained.params, pretrained.config
    )
    packed = {}
    if written.packed:
        packed = matrix_tensors(written.packed, checkpoint_format)
        content["quantization_config"] = describe_matrices(
            written.packed, checkpoint_format
        )
    with (
        files.replacing(folder / CONFIG) as described_in,
        files.replacing(folder / SINGLE) as stored_in,
    ):
        save_tensors(stored_in, written.tensors | packed)
        files.write_json(described_in, content)
        # The old configs would describe the new tensors wrongly.
        (folder / QUANTIZE_CONFIG).unlink(missing_ok=True)
        (folder / CONFIG).unlink(missing_ok=True)


def _divide_frequencies(
    found: Architecture, divisors: np.ndarray, source: str
) -> Architecture:
    """Returns an architecture whose rotary frequencies are divided, each by its own."""
    config: Any = found.config
    good = np.isfinite(divisors).all() and (divisors > 0).all()
    if divisors.shape != (config.head_size // 2,) or not good:
        raise DataFormatError(
            f"{source}: expected {config.head_size // 2} positive numbers in "
            f"{_DIVISORS}, found {divisors.tolist()!r:.60}"
        )
    known = tuple(map(_architecture.as_decimal, divisors.tolist()))
    options = dataclasses.replace(config.options, rope_divisors=known)
    return found._replace(config=dataclasses.replace(config, options=options))


def _param_shapes(pretrained: Pretrained) -> Any:
    """Returns shapes and dtypes of a model's parameters."""
    return jax.eval_shape(pretrained.model.init, jax.random.key(0))[0]


def _check_params(pretrained: Pretrained) -> None:
    """Raises ConfigError unless paths and shapes are those of the model's `init`."""
    wanted = trees.flatten(_param_shapes(pretrained))
    own = trees.flatten(pretrained.params, is_packed)
    for path in [*wanted, *own]:
        leaves = wanted.get(path), own.get(path)
        want, have = (None if leaf is None else leaf.shape for leaf in leaves)
        if want != have:
            raise ConfigError(
                f"parameters are not those of the config: {path} should have shape "
                f"{want}: got {have}"
            )
