"""Compiled forward passes of real networks, one for each batch."""

from collections.abc import Callable, Sequence
from typing import Any

from experiments.gradcomp.networks import NETWORKS
from hpcjax.core import checks


def compile_batches(
    name: str, batches: Sequence[int], seed: int
) -> dict[int, Callable[[], Any]]:
    """Returns, by batch, what runs a forward pass in bfloat16 and waits for it.

    Weights and inputs are random: energy and latency do not depend on them.

    Raises:
      ConfigError: a network of which there are only formulas.
    """
    checks.require_choice("model", name, tuple(NETWORKS))
    import jax
    import jax.numpy as jnp

    from hpcjax import core

    network, key = NETWORKS[name], jax.random.key(seed)
    model = network.make()

    def half(tree: Any) -> Any:
        return jax.tree.map(
            lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, tree
        )

    params, state = half(jax.jit(model.init)(core.derive(key, "init")))

    @jax.jit
    def forward(params: Any, state: Any, x: jax.Array) -> Any:
        return model.apply(params, state, x, train=False)[0]

    def make(batch: int) -> Callable[[], Any]:
        shape = (batch, *network.example)
        if len(network.example) == 1:
            drawn = core.derive(key, "tokens", batch)
            x = jax.random.randint(drawn, shape, 0, network.outputs)
        else:
            drawn = core.derive(key, "images", batch)
            x = jax.random.normal(drawn, shape, jnp.bfloat16)
        return lambda: jax.block_until_ready(forward(params, state, x))

    return {batch: make(batch) for batch in batches}
