"""Codecs between the stages of a pipeline; see `Codec.apply_between`."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from hpcjax.compress._codes import (
    CODECS,
    check_stack,
    draw_layers,
    give_codecs,
    layer_keys,
    list_kernels,
    put,
)
from hpcjax.core import checks
from hpcjax.core.deferred import realize
from hpcjax.core.errors import ConfigError
from hpcjax.core.keys import derive
from hpcjax.core.model import Between, Cut, Model
from hpcjax.core.varying import varying_axes

if TYPE_CHECKING:
    from hpcjax.compress.activations import Codec

STAGES = "stages"


def compress_between(model: Model, codec: "Codec", stages: int, tensor: int) -> Model:
    """Returns the network whose stages send codes; see `Codec.apply_between`."""
    if model.cut is None:
        raise ConfigError("a codec between stages takes models with core.Model.cut")
    shapes, _ = jax.eval_shape(model.init, jax.random.key(0))
    kernels = list_kernels(shapes)
    depth, start = check_stack(kernels, codec)
    rule = "stages must divide the depth of the model"
    checks.require(stages > 1 and depth % stages == 0, rule, depth=depth, stages=stages)
    begins = range(0, depth, depth // stages)
    coded = [stage for stage in range(1, stages) if begins[stage] >= start]
    if not coded:
        raise ConfigError(
            "codec.start must be at most the first layer of the last stage, or nothing "
            f"is compressed: got {start}, stages begin at {list(begins)}"
        )
    like = next(iter(kernels.values()))
    codec = dataclasses.replace(codec, start=start)
    summed = kernels if tensor > 1 else {}
    made = _Between(model, codec, range(coded[0], stages), like, summed)
    added = *model.added, CODECS
    return model._replace(init=made.init, apply=made.apply, cut=made.cut, added=added)


class _Between(NamedTuple):
    """A network and the codec of what the stages of a range are sent."""

    model: Model
    codec: Any
    stages: range
    like: Any  # a kernel, whose outputs are as wide
    summed: Mapping[str, Any]  # kernels whose products devices of a stage sum, by path

    def init(self, key: jax.Array) -> tuple[Any, Any]:
        """Draws the network, and what the codec learns for each of the stages."""
        params, state = self.model.init(key)
        key, like = derive(key, f"{CODECS}/{STAGES}"), self.like
        own = jax.vmap(lambda one: self.codec.init(one, like.shape[-1], like.dtype))(
            layer_keys(key, jnp.arange(self.stages.start, self.stages.stop))
        )
        if own:
            params = {**params, CODECS: {STAGES: own}}
        for path, each in self.summed.items():
            own = draw_layers(self.codec, key, path, each, jnp.arange(each.shape[0]))
            stack, _, inner = path.rpartition("/")[0].partition("/")
            if own:
                params = put(params, f"{stack}/{CODECS}/{inner}", own)
        return params, state

    def apply(self, params: Any, state: Any, x: Any, **options: Any) -> Any:
        """Computes the network in one piece, which sends nothing."""
        plain = _without(params)
        stack = self.model.cut().stack  # pyrefly: ignore[not-callable]
        plain[stack] = _without(plain[stack])
        return self.model.apply(plain, state, x, **options)

    def cut(self) -> Cut:
        """Returns the network's parts, which are not given what the codec learns."""
        cut = self.model.cut()  # pyrefly: ignore[not-callable]
        own = Between(
            encode=self.encode,
            decode=self.decode,
            coded=self.stages.start,
            through=getattr(self.codec, "grad", "exact") == "through",
            skips=getattr(self.codec, "skip_in_validation", False),
            give=self.give if self.summed else None,
            start=self.codec.start,
        )
        return cut._replace(
            first=lambda rest, x: cut.first(_without(rest), x),
            last=lambda rest, y: cut.last(_without(rest), y),
            between=own,
        )

    def encode(
        self, rest: Any, y: Any, stage: Any, key: jax.Array, sent: Any = None
    ) -> Any:
        """Returns the code of what a stage is sent; devices draw other places."""
        if sent is not None or not self.codec.draws:
            return self.codec.encode(y, {**self.given(rest, stage), "sent": sent})
        key = jax.random.fold_in(derive(key, f"{CODECS}/{STAGES}"), stage)
        for axis in sorted(varying_axes(y)):
            key = jax.random.fold_in(key, lax.axis_index(axis))
        return self.codec.encode(y, {"key": key})

    def decode(self, rest: Any, code: Any, like: Any, stage: Any) -> Any:
        """Returns what a stage computes with."""
        return self.codec.decode(code, like, self.given(rest, stage))

    def give(self, blocks: Any, layers: jax.Array, key: jax.Array) -> Any:
        """Returns blocks whose kernels have the codec, where devices sum products."""
        inner = [path.partition("/")[2] for path in self.summed]
        plain, learnt = _without(blocks), realize(blocks.get(CODECS, {}))
        return give_codecs(plain, inner, self.codec, learnt, key, layers)

    def given(self, rest: Any, stage: Any) -> Any:
        """Returns what the codec has learnt for a stage."""
        own = realize(rest.get(CODECS, {})).get(STAGES, {})
        place = stage - self.stages.start
        return jax.tree.map(lambda leaf: leaf[place], own)


def _without(rest: Any) -> Any:
    return {name: own for name, own in rest.items() if name != CODECS}
