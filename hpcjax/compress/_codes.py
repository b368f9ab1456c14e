"""What codecs of activations compute: codes, their sums over devices, their gradients.

See `hpcjax.compress.activations`.
"""

import dataclasses
import functools
import math
import operator
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from hpcjax.core import masks, shards, tallies, trees
from hpcjax.core.deferred import realize
from hpcjax.core.errors import ConfigError
from hpcjax.core.extremes import largest
from hpcjax.core.keys import derive, whole_batch
from hpcjax.core.model import Model
from hpcjax.core.varying import vary, varying_axes

if TYPE_CHECKING:
    from hpcjax.compress.activations import Codec

CODECS, _STEPS = "codecs", "codec_steps"
LARGEST = float(jnp.finfo(jnp.float16).max)
_SUMS = re.compile(r"(^|/)(attention/output|mlp/down)/kernel$")
Code = tuple[jax.Array, jax.Array]


def draw_autoencoder(
    key: jax.Array, width: int, d: int, dtype: Any
) -> dict[str, jax.Array]:
    """Draws encoder [d, width] and decoder [width, d] by Xavier's rule."""
    limit = math.sqrt(6 / (width + d))
    shapes = {"encoder": (d, width), "decoder": (width, d)}
    return {
        name: jax.random.uniform(derive(key, name), shape, dtype, -limit, limit)
        for name, shape in shapes.items()
    }


def project(y: jax.Array, matrix: jax.Array) -> jax.Array:
    """Returns y times the transposed matrix, accumulated in float32."""
    matrix = matrix.T.astype(y.dtype)
    return jnp.matmul(y, matrix, preferred_element_type=jnp.float32)


def find_scales(y: Any) -> jax.Array:
    """Returns each channel's largest magnitude, float32 [width]."""
    return largest(jnp.abs(jnp.asarray(y, jnp.float32)).reshape(-1, y.shape[-1]), 0)


def quantize(y: jax.Array, bits: int) -> Code:
    """Returns packed integers and scales; what is not finite makes a scale so."""
    scale = find_scales(y)
    scale = jnp.where(jnp.isinf(scale), scale, jnp.minimum(scale, LARGEST))
    scale = scale.astype(jnp.float16)
    half = 2 ** (bits - 1)
    by = y.astype(jnp.float32) / (scale.astype(jnp.float32) + 1e-6)
    q = jnp.clip(jnp.round(by * half), -half, half - 1) + half
    chunks = jnp.split(q.astype(jnp.uint8), 8 // bits, axis=-1)
    return functools.reduce(lambda high, low: (high << bits) | low, chunks), scale


def dequantize(packed: jax.Array, scale: jax.Array, bits: int) -> jax.Array:
    """Returns what `quantize` has packed, float32."""
    half, shifts = 2 ** (bits - 1), range(8 - bits, -1, -bits)
    chunks = [(packed >> shift) & (2**bits - 1) for shift in shifts]
    q = jnp.concatenate(chunks, axis=-1).astype(jnp.float32) - half
    return q / half * scale.astype(jnp.float32)


def choose_entries(y: jax.Array, k: int, key: jax.Array | None) -> Code:
    """Returns k entries and their int32 indices: the largest, or drawn with a key.

    By counts: to sort a layer's activations takes longer than the layer. NaN is sent.
    """
    flat = jnp.ravel(y)
    if key is None:
        scores = jnp.where(jnp.isnan(flat), jnp.inf, jnp.abs(flat))
    else:
        scores = jax.random.uniform(key, flat.shape)
    chosen = masks.keep_largest(scores, k)
    indices = jnp.nonzero(chosen, size=k)[0].astype(jnp.int32)
    return flat[indices], indices


def scatter(values: jax.Array, indices: jax.Array, like: Any) -> jax.Array:
    """Returns values at their indices of an array like `like`, and zeros."""
    # Of their own type, so that inside `shard_map` both differ along the same axes.
    zeros = jnp.zeros_like(values, shape=math.prod(like.shape))
    return zeros.at[indices].set(values).reshape(like.shape).astype(like.dtype)


def sum_codes(
    codec: "Codec", axes: tuple[str, ...], y: jax.Array, given: Any
) -> jax.Array:
    """Returns what decodes from the sum of codes."""
    code = lax.psum(codec.encode(y, given), axes)
    return codec.decode(jax.tree.map(shards.received, code), y, given)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def gather_codes(
    codec: "Codec", axes: tuple[str, ...], y: jax.Array, given: Any
) -> tuple[jax.Array, Any]:
    """Returns the sum of what decodes from the codes of all devices, and its counts."""
    return _gather_forward(codec, axes, y, given)[0]


def _gather_forward(
    codec: "Codec", axes: tuple[str, ...], y: jax.Array, given: Any
) -> tuple[tuple[jax.Array, Any], Any]:
    own = given
    if codec.draws:  # others on devices with other rows of the batch, too
        places = tuple(sorted({*axes, *varying_axes(y)}))
        own = {"key": jax.random.fold_in(given["key"], lax.axis_index(places))}
    code = codec.encode(y, own)
    every = jax.tree.map(lambda leaf: _gather(leaf, axes), code)
    like = jax.ShapeDtypeStruct(y.shape, y.dtype)
    parts = jax.vmap(lambda one: codec.decode(one, like, given))(every)
    return (parts.sum(0), codec.count(every)), codec.keep(code)


def _gather(leaf: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    # Typed as equal on all devices, or the step would be refused.
    cuts = tuple((-1 - leaf.ndim, axis) for axis in axes)
    return shards.gather_equal(leaf[None], cuts)


def _gather_backward(
    codec: "Codec", axes: tuple[str, ...], code: Any, slopes: tuple[jax.Array, Any]
) -> tuple[jax.Array, None]:
    # The slope of the sum is equal on all devices, that of y is each one's own.
    return codec.back(vary(slopes[0], axes), code), None


gather_codes.defvjp(_gather_forward, _gather_backward)


def compress_sums(model: Model, codec: "Codec", passes: int) -> Model:
    """Returns the network with a codec; see `Codec.apply_to`."""
    shapes, _ = jax.eval_shape(model.init, jax.random.key(0))
    kernels = list_kernels(shapes)
    depth, start = check_stack(kernels, codec)
    codec = dataclasses.replace(codec, start=start, warmup=codec.warmup * passes)
    made = _Compressed(model, codec, kernels, depth)
    added = *model.added, CODECS, _STEPS, *codec.figures
    return model._replace(init=made.init, apply=made.apply, cut=None, added=added)


def list_kernels(shapes: Any) -> dict[str, Any]:
    """Returns the kernels of a stack whose outputs are summed, by path."""
    return {
        path: leaf
        for path, leaf in trees.flatten(shapes).items()
        if _SUMS.search(path) and leaf.ndim == 3
    }


class _Compressed(NamedTuple):
    """A network and the codec of its sums, which starts at a layer that it names."""

    model: Model
    codec: Any
    kernels: dict[str, Any]
    depth: int

    def init(self, key: jax.Array) -> tuple[Any, Any]:
        """Draws the network, and what the codec learns."""
        params, state = self.model.init(key)
        learnt: dict[str, Any] = {}
        for path in self.kernels:
            layers = jnp.arange(self.codec.start, self.depth)
            if own := draw_layers(self.codec, key, path, self.kernels[path], layers):
                learnt = put(learnt, path.rpartition("/")[0], own)
        # Devices' states are averaged: a count is a float32, exact below 2²⁴.
        names = (*self.codec.figures, *[_STEPS] * bool(self.codec.warmup))
        state = {**state, **dict.fromkeys(names, jnp.float32(0))}
        return ({**params, CODECS: learnt} if learnt else params), state

    def apply(
        self,
        params: Any,
        state: Any,
        x: Any,
        *,
        train: bool,
        key: Any = None,
        **options: Any,
    ) -> tuple[Any, Any]:
        """Computes outputs, until the first passes of training without the codec."""
        own, codec = dict(state), self.codec
        steps = own.pop(_STEPS, None)
        before = {name: own.pop(name) for name in codec.figures if name in own}
        plain = {name: leaf for name, leaf in params.items() if name != CODECS}
        coded = plain
        if train or not getattr(codec, "skip_in_validation", False):
            coded = self._give(plain, realize(params.get(CODECS, {})), key)

        def run(params: Any) -> tuple[Any, Any, Any]:
            with tallies.tallying() as counted:
                y, new = self.model.apply(
                    params, own, x, train=train, key=key, **options
                )
            found = {name: counted.get(name, jnp.float32(0)) for name in before}
            return y, new, jax.tree.map(_sum_everywhere, found)

        if steps is None:
            y, new, counted = run(coded)
        else:
            # All devices take one branch, with all its collectives.
            warm = steps < codec.warmup
            y, new, counted = lax.cond(warm, lambda: run(plain), lambda: run(coded))
            new = {**new, _STEPS: steps + train}
        return y, new | {name: n + train * counted[name] for name, n in before.items()}

    def _give(self, params: Any, learnt: Any, key: Any) -> Any:
        """Returns parameters whose cut kernels have the codec."""
        key = jax.random.key(0) if key is None else whole_batch(key)
        before = (self.codec.start, 0)  # layers, whose codecs are never used
        learnt = jax.tree.map(lambda leaf: jnp.pad(leaf, (before, *_NONE)), learnt)
        layers = jnp.arange(self.depth)
        return give_codecs(params, self.kernels, self.codec, learnt, key, layers)


_NONE = ((0, 0), (0, 0))


def draw_layers(
    codec: "Codec", key: jax.Array, path: str, like: Any, layers: jax.Array
) -> dict[str, jax.Array]:
    """Draws what a codec learns for one kind of sums, stacked, of these layers."""
    keys = layer_keys(derive(key, f"{CODECS}/{path}"), layers)
    return jax.vmap(lambda one: codec.init(one, like.shape[-1], like.dtype))(keys)


def give_codecs(
    params: Any,
    kernels: Iterable[str],
    codec: "Codec",
    learnt: Any,
    key: jax.Array,
    layers: jax.Array,
) -> Any:
    """Returns parameters whose kernels have the codec where devices sum products.

    What is learnt has a row for each of the layers, as the kernels have.
    """
    for path in kernels:
        node = _at(params, path)
        if not (isinstance(node, shards.Part | shards.Shard) and _sums(node)):
            continue
        given = _at(learnt, path.rpartition("/")[0]) if learnt else {}
        if codec.draws:
            given = {"key": layer_keys(derive(key, path), layers)}
        coded = dataclasses.replace(node, codec=codec, given=given)
        params = put(params, path, coded)
    return params


def _sum_everywhere(count: jax.Array) -> jax.Array:
    axes = tuple(sorted(varying_axes(count)))
    return lax.psum(count, axes) if axes else count


def layer_keys(key: jax.Array, layers: jax.Array) -> jax.Array:
    """Returns a key for each of the layers of these numbers."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, layers)


def check_stack(kernels: dict[str, Any], codec: "Codec") -> tuple[int, int]:
    """Returns the depth of the stack, and where in it the codec starts.

    A stack is of layers, or of groups of them, whose layers start together.

    Raises:
      ConfigError: a model that is not compressed so.
    """
    if not kernels:
        raise ConfigError(
            "a codec compresses the sums of attention/output and mlp/down in a stack "
            "of layers, as those of model=causal_lm: got a model without"
        )
    for leaf in kernels.values():
        codec.check_width(leaf.shape[-1])
    depth = next(iter(kernels.values())).shape[0]
    group = sum("attention/output" in path for path in kernels) or 1
    start = depth // 2 * group if codec.start is None else codec.start
    if start >= depth * group or start % group:
        of = f", and the first of {group} that are stacked" if group > 1 else ""
        raise ConfigError(
            f"codec.start must be a layer of the stack{of}: got {start}, "
            f"{depth * group} layers"
        )
    return depth, start // group


def _sums(node: Any) -> bool:
    """Says whether devices have parts of a kernel's inputs, and all of its outputs."""
    kept = node.cuts if isinstance(node, shards.Part) else node.kept
    inputs, outputs = (
        [axis for at, axis in kept if at == dim and lax.axis_size(axis) > 1]
        for dim in (-2, -1)
    )
    if inputs and outputs:
        raise ConfigError(
            "a codec takes whole activations: got a kernel whose outputs are cut over "
            f"{', '.join(outputs)}, too: set parallel.row=1"
        )
    return bool(inputs)


def _at(tree: Any, path: str) -> Any:
    return functools.reduce(operator.getitem, path.split("/"), tree)


def put(tree: Any, path: str, leaf: Any) -> Any:
    """Returns a tree with a leaf at a path."""
    name, _, rest = path.partition("/")
    return {**tree, name: put(tree.get(name, {}), rest, leaf) if rest else leaf}
