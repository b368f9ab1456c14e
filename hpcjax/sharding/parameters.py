"""Sharding the parameters of a language model over a mesh, for programs of `jit`.

A table gives the logical axes of each parameter by its path, such as `("embed", "ff")`,
and rules map logical axes to mesh axes. The compiler inserts the communication.
"""

import functools
import logging
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hpcjax.core import trees
from hpcjax.core.errors import ConfigError, nearest
from hpcjax.core.model import Decoder
from hpcjax.sharding.mesh import DATA_AXIS, data_axes
from hpcjax.sharding.stages import STAGE_AXIS

log = logging.getLogger(__name__)

MODEL_AXIS = "model"
Meaning = Literal["embed", "heads", "kv", "ff", "vocab", "layers", "expert"]
Rules = Mapping[str, str]

_TENSOR: Rules = dict.fromkeys(("heads", "kv", "ff", "vocab"), MODEL_AXIS)
PRESETS: Mapping[str, Rules] = {
    "dp": {},
    "fsdp": {"embed": DATA_AXIS},
    "tp": _TENSOR,
    "tp+fsdp": {**_TENSOR, "embed": DATA_AXIS},
    "ep": {"expert": MODEL_AXIS},
    "pp": {"layers": STAGE_AXIS},
}
# The logical axes of a parameter by the end of its path. Below `blocks` the axis
# `layers` precedes them.
AXES: tuple[tuple[str, tuple[Meaning | None, ...]], ...] = (
    (r"embed/table", ("vocab", "embed")),
    (r"(position|types)/table", (None, "embed")),
    (r"attention/query/kernel", ("embed", "heads")),
    (r"attention/(key|value)/kernel", ("embed", "kv")),
    (r"attention/output/kernel", ("heads", "embed")),
    (r"(attention/output|mlp/down)/(encoder|decoder)", (None, None)),
    (r"codecs/stages/(encoder|decoder)", (None, None, None)),
    (r"attention/query/bias", ("heads",)),
    (r"attention/(key|value)/bias", ("kv",)),
    (r"mlp/(up|gate)/kernel", ("embed", "ff")),
    (r"mlp/(up|gate)/bias", ("ff",)),
    (r"mlp/down/kernel", ("ff", "embed")),
    (r"(attention/output|mlp/down)/bias", ("embed",)),
    (r"mlp/router/kernel", ("embed", None)),
    (r"experts/(up|gate)", ("expert", "embed", "ff")),
    (r"experts/(up|gate)_bias", ("expert", "ff")),
    (r"experts/down", ("expert", "ff", "embed")),
    (r"experts/down_bias", ("expert", "embed")),
    (r"\w*norm/(scale|bias)", ("embed",)),
    (r"head/kernel", ("embed", "vocab")),
    (r"decoder_bias", ("vocab",)),
    (r"(project_in|project_out|pooler|transform|order)/kernel", ("embed", None)),
    (r"(pooler|transform|order)/bias", (None,)),
)


def rules(preset: str) -> Rules:
    """Returns `{logical axis: mesh axis}` of a preset; other axes are not split.

    - `"dp"`: parameters are replicated; only batches are split, over `"data"`.
    - `"fsdp"`: the model's width is split over `"data"`, as batches are. Set the
      model's `batch_axis="data"`, or the compiler may split activations by features
      instead of gathering parameters.
    - `"tp"`: heads, the inner features of the feed-forward part, and the vocabulary of
      table and head are split over `"model"`. Query, key, value, up and gate are thus
      split by columns and output and down by rows, which takes two all-reduces a layer
      in the forward pass.
    - `"tp+fsdp"`: both of these.
    - `"ep"`: experts are split over `"model"`.
    - `"pp"`: layers are split over `"stage"`, as the stages of a pipeline hold them.

    Raises:
      ConfigError: an unknown preset.

    References:
      Shoeybi et al., Megatron-LM, arXiv 1909.08053, §3; Rajbhandari et al., ZeRO, arXiv
      1910.02054, §5.

    Examples:
      >>> rules("fsdp")
      {'embed': 'data'}
    """
    if preset not in PRESETS:
        hint = nearest(preset, PRESETS)
        raise ConfigError(f"unknown preset: got preset={preset!r}{hint}")
    return dict(PRESETS[preset])


def logical_axes(params: Any) -> dict[str, tuple[Meaning | None, ...]]:
    """Returns the logical axes of each parameter of a language model, by path.

    It also takes an optimizer's state, whose paths end like those of the parameters;
    scalars have no axes.

    Args:
      params: a tree of arrays or shapes.

    Raises:
      ConfigError: parameters that are not in `AXES`, all listed, or a parameter with
        another number of axes.

    Examples:
      >>> import jax
      >>> kernel = jax.ShapeDtypeStruct((2, 8, 32), "float32")
      >>> logical_axes({"blocks": {"mlp": {"up": {"kernel": kernel}}}})
      {'blocks/mlp/up/kernel': ('layers', 'embed', 'ff')}
    """
    known, unknown = {}, []
    for path, leaf in trees.flatten(params).items():
        axes = () if leaf.ndim == 0 else _axes_of(path)
        if axes is None:
            unknown.append(path)
        elif len(axes) != leaf.ndim:
            raise ConfigError(f"{path} must have axes {axes}: got shape {leaf.shape}")
        else:
            known[path] = axes
    if unknown:
        raise ConfigError(f"parameters matched by no rule: {unknown}")
    return known


def parameter_shardings(
    params: Any,
    mesh: Mesh,
    preset: str | Rules,
    *,
    decoder: Decoder | None = None,
) -> Any:
    """Returns the shardings of a language model's parameters on a mesh.

    Key and value heads, and the vocabulary, are replicated if the mesh axis does not
    divide their number, which is logged once. Everything else must be divisible.

    Args:
      params: arrays or shapes, such as `jax.eval_shape(model.init, key)[0]`, or an
        optimizer's state over them.
      mesh: with the axes that the rules name.
      preset: a name, see `rules`, or rules of your own.
      decoder: `model.decoder`; needed where heads are split.

    Returns:
      A tree like `params` of `NamedSharding`, for `jax.device_put` and `jax.jit`.

    Raises:
      ConfigError: an unknown preset or logical axis, a mesh without an axis of the
        rules, parameters that no language model has, or a number of heads, features,
        experts or layers that the mesh axis does not divide.

    Examples:
      >>> import jax
      >>> from hpcjax import sharding
      >>> mesh = sharding.make_mesh({"model": 1})
      >>> head = {"head": {"kernel": jax.ShapeDtypeStruct((8, 50), "float32")}}
      >>> parameter_shardings(head, mesh, "tp")["head"]["kernel"].spec
      P(None, 'model')
    """
    chosen = rules(preset) if isinstance(preset, str) else dict(preset)
    _check_rules(chosen, mesh)
    flat = trees.flatten(params)
    shardings = {}
    for path, axes in logical_axes(params).items():
        parts = [
            _split(_Axis(path, meaning, size), chosen, mesh, decoder)
            for meaning, size in zip(axes, flat[path].shape, strict=True)
        ]
        shardings[path] = NamedSharding(mesh, PartitionSpec(*parts))
    return trees.unflatten(params, shardings)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of batches: rows split over the data axes, if there are any.

    Examples:
      >>> from hpcjax import sharding
      >>> batch_sharding(sharding.make_mesh({"data": 1, "model": 1})).spec
      P('data',)
    """
    whole = mesh.axis_names in ((MODEL_AXIS,), (STAGE_AXIS,))
    spec = PartitionSpec() if whole else PartitionSpec(data_axes(mesh))
    return NamedSharding(mesh, spec)


class _Axis(NamedTuple):
    """One axis of a parameter."""

    path: str
    meaning: Meaning | None
    size: int


def _axes_of(path: str) -> tuple[Meaning | None, ...] | None:
    """Returns the logical axes of a parameter, None if the table has none."""
    for pattern, axes in AXES:
        if re.search(rf"(^|/)({pattern})$", path):
            stacked = re.search(r"(^|/)blocks/", path)
            return ("layers", *axes) if stacked else axes
    return None


def _check_rules(chosen: Rules, mesh: Mesh) -> None:
    meanings = get_args(Meaning)
    for meaning, axis in chosen.items():
        if meaning not in meanings:
            raise ConfigError(f"unknown axis {meaning!r}{nearest(meaning, meanings)}")
        if axis not in mesh.axis_names:
            raise ConfigError(
                f"{meaning!r} is to be split over the mesh axis {axis!r}: got a mesh "
                f"with {mesh.axis_names}"
            )


def _split(
    axis: _Axis, chosen: Rules, mesh: Mesh, decoder: Decoder | None
) -> str | None:
    """Returns the mesh axis over which an axis of a parameter is split, or None."""
    if axis.meaning is None or axis.meaning not in chosen:
        return None
    name = chosen[axis.meaning]
    devices, count, what = mesh.shape[name], axis.size, axis.meaning
    if what in ("heads", "kv"):
        if decoder is None:
            raise ConfigError("heads are only split with decoder=, their sizes")
        # Features could be divisible where heads are not, but then a head would be on
        # two devices, and its attention would need communication.
        count = decoder.heads if what == "heads" else decoder.kv_heads
    if count % devices == 0:
        return name
    if what in ("kv", "vocab"):
        _log_replicated(
            "key and value heads" if what == "kv" else what, count, name, devices
        )
        return None
    raise ConfigError(
        f"{what} must be divisible by the mesh axis {name!r}: got {what}={count}, "
        f"{name}={devices} ({axis.path})"
    )


@functools.cache
def _log_replicated(what: str, count: int, axis: str, devices: int) -> None:
    log.info("%s: %d on each of %d devices of %r", what, count, devices, axis)
