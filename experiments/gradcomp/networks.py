"""Networks whose gradients are exchanged, with the published shapes."""

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcjax import core, models

if TYPE_CHECKING:
    from hpcjax.cost.exchange_methods import Shape

IMAGE, CLASSES = (224, 224, 3), 1000
BLOCKS = "blocks/"
PLACES = 128


class Network(NamedTuple):
    """A model, the shape of one example, and its classes or words."""

    make: Callable[[], "core.Model"]
    example: tuple[int, ...]
    outputs: int


def _resnet(inputs: tuple[int, ...], classes: int, depth: int) -> Network:
    def make() -> "core.Model":
        return models.resnet(inputs, classes, depth=depth)

    return Network(make, inputs, classes)


def _bert_base() -> "core.Model":
    config, context, vocabulary = models.preset("bert-base")
    return models.bert(
        (context,),
        vocabulary,
        depth=config.depth,
        width=config.width,
        heads=config.heads,
        head="pooler",
    )


PUBLISHED: Mapping[str, Network] = {
    "resnet50": _resnet(IMAGE, CLASSES, 50),
    "resnet101": _resnet(IMAGE, CLASSES, 101),
    "bert_base": Network(_bert_base, (PLACES,), 30522),
}
NETWORKS = {"resnet8": _resnet((16, 16, 3), 10, 8), **PUBLISHED}


@functools.cache
def shapes_of(name: str) -> "tuple[Shape, ...]":
    """Returns the shapes of a network's gradients, blocks that are stacked apart."""
    import jax

    from hpcjax.core import trees

    params, _ = jax.eval_shape(NETWORKS[name].make().init, jax.random.key(0))
    shapes = []
    for path, leaf in trees.flatten(params).items():
        if path.startswith(BLOCKS):
            count, *own = leaf.shape
            shapes += [tuple(own)] * count
        else:
            shapes.append(leaf.shape)
    return tuple(shapes)


def passes(
    name: str, batch: int, seed: int
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Returns what computes a loss, and what computes its gradients too.

    Args:
      name: of a network.
      batch: examples, random images or tokens.
      seed: of parameters and examples.
    """
    import jax
    import jax.numpy as jnp

    network, key = NETWORKS[name], jax.random.key(seed)
    model = network.make()
    params, state = jax.jit(model.init)(core.derive(key, "init"))
    shape, drawn = (batch, *network.example), core.derive(key, "batch")
    words = len(network.example) == 1
    if words:
        x = jax.random.randint(drawn, shape, 0, network.outputs)
    else:
        x = jax.random.normal(drawn, shape)

    def loss(params: Any) -> jax.Array:
        y, _ = model.apply(params, state, x, train=True)
        # Any loss that needs all outputs: it takes next to no time.
        return jnp.mean((y.pooled if words else y) ** 2)

    forward, both = jax.jit(loss), jax.jit(jax.value_and_grad(loss))
    return (
        lambda: jax.block_until_ready(forward(params)),
        lambda: jax.block_until_ready(both(params)),
    )
