"""Small models, batches and steps that the tests of K-FAC share."""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from hpcjax import core, models, optim, sharding
from hpcjax.core import per_device
from hpcjax.models import modules
from hpcjax.optim import kfac

FLOAT64 = core.Policy(param="float64", compute="float64", output="float64")


class OneConv(nnx.Module):
    """A convolution and the mean over positions: no nonlinearity, so g is known."""

    def __init__(self, channels, outputs, policy, **geometry):
        self.conv = modules.Conv(channels, outputs, policy=policy, **geometry)

    def __call__(self, x, *, train, key):
        return self.conv(x)


def one_conv(channels, outputs, *, policy=FLOAT64, **geometry):
    return models.from_nnx(lambda: OneConv(channels, outputs, policy, **geometry))


def cross_entropy(outputs, labels):
    losses = optax.softmax_cross_entropy_with_integer_labels(outputs, labels)
    return losses.mean(), None


def mlp(policy=None):
    return models.mlp((6,), 3, widths=(5, 4), policy=policy or core.Policy())


def batch(count, dtype=jnp.float32, seed=1):
    x = jax.random.normal(jax.random.key(seed), (count, 6), dtype)
    return x, jax.random.randint(jax.random.key(seed + 1), (count,), 0, 3)


def differentiated(chosen, model, params, x, y, *, active=None, **options):
    """Loss, gradients and statistics at one batch."""
    taps = kfac.make_taps(chosen, model, params, {}, x, active=active)

    def forward(params, taps):
        return model.apply(params, {}, x, train=True, taps=taps)

    return kfac.differentiate(forward, cross_entropy, params, taps, y, **options)


def step(chosen, model, tx, params, state, x, y, axes=None, terms=None):
    """One step of K-FAC and SGD, local gradients averaged over `axes`."""
    local = params if axes is None else core.vary(params, axes)
    active = kfac.statistics_due(state)
    found = differentiated(chosen, model, local, x, y, active=active)
    updates, state = tx.update(
        found.grads, state, params, taps=found.statistics, loss_terms=terms or len(x)
    )
    return optax.apply_updates(params, updates), state


def chain(transform, axes=None, rate=0.05):
    return optax.chain(
        optim.all_reduce_mean(axes), transform, optax.scale_by_learning_rate(rate)
    )


def grid_step(chosen, model, tx, mesh, state, check_vma=True):
    """The jitted step over a grid: `(params, state, x, y) -> (params, state)`."""

    def body(params, state, x, y):
        params, state = step(
            chosen, model, tx, params, per_device.enter(state), x, y, kfac.AXES
        )
        return params, per_device.leave(state)

    specs = per_device.specs(state)
    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(P(), specs, P(kfac.AXES), P(kfac.AXES)),
        out_specs=(P(), specs),
        check_vma=check_vma,
    )
    return jax.jit(mapped)


def on_grid(distribution, chosen, model, params, *, rate=0.05, **options):
    """A mesh, the state placed on it and the step, for K-FAC shared by 8 devices."""
    mesh = sharding.make_mesh(distribution.mesh_shape)
    transform = kfac.scale_by_kfac(
        chosen, learning_rate=rate, distribution=distribution, **options
    )
    tx = chain(transform, kfac.AXES, rate)
    state = per_device.expand(tx.init(params), mesh)
    state = jax.device_put(state, sharding.state_shardings(state, mesh))
    return mesh, state, grid_step(chosen, model, tx, mesh, state)


def alone(chosen, model, *, rate=0.05, **options):
    """The transform and the jitted step on one device."""
    tx = chain(kfac.scale_by_kfac(chosen, learning_rate=rate, **options), None, rate)
    return tx, jax.jit(functools.partial(step, chosen, model, tx))


def identities(chosen):
    """Statistics whose factors are identities."""
    return {b.path: {"a": jnp.eye(b.a), "g": jnp.eye(b.g)} for b in chosen.blocks}
