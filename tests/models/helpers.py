"""Instances of the registry and a loss, shared by the tests of this room."""

import functools
import operator
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hpcjax import core, metrics, models
from tests.models.registry import REGISTRY


class Instance(NamedTuple):
    model: core.Model
    params: object
    state: object
    x: jax.Array
    labels: object


def make(entry, policy=None):
    return entry.config.make(
        entry.inputs, entry.outputs, policy or core.Policy(), **entry.given
    )


def output_shapes(entry, size):
    """What the model gives for a batch, a tree of shapes."""
    if isinstance(entry.config, models.DlrmConfig):
        return (size,)
    if isinstance(entry.config, models.KgeConfig):
        width = entry.config.width
        (edges, _), (_, negatives) = entry.inputs.values()
        ends = (size, 2, edges, width)
        return models.LinkScores(
            queries=ends,
            answers=ends,
            negatives=(size, 2, negatives, width),
            table=(entry.outputs, width),
            distance=entry.config.decoder == "transe",
        )
    if isinstance(entry.config, models.GgnnConfig):
        return (size, entry.inputs[0], entry.outputs)
    if isinstance(entry.inputs, Mapping):
        return models.Gaussian(*2 * [(size, *entry.inputs["fields"][:2])])
    if isinstance(entry.config, models.BertConfig):
        return models.BertOutputs((size, entry.inputs[0], entry.outputs), (size, 2))
    places = entry.inputs if entry.dtype == "int32" else ()
    if isinstance(entry.config, models.UNetConfig):
        places = entry.inputs[:2]
    if isinstance(entry.config, models.VolumeUNetConfig):
        places = entry.inputs[:3]
    return (size, *places, entry.outputs)


def batch_of(entry, size, seed=0):
    rng = np.random.default_rng(seed)
    if isinstance(entry.config, models.DlrmConfig):
        dense = rng.normal(size=(size, *entry.inputs["dense"]))
        ids = rng.integers(0, sum(entry.given["tables"]), (size, *entry.inputs["ids"]))
        x = {"dense": jnp.asarray(dense, "float32"), "ids": jnp.asarray(ids, "int32")}
        return x, {"y": jnp.asarray(rng.integers(0, 2, size))}
    if isinstance(entry.config, models.KgeConfig):
        x = {
            name: jnp.asarray(rng.integers(0, 2, (size, *shape)), "int32")
            for name, shape in entry.inputs.items()
        }
        return x, {"scored": jnp.ones((size, entry.inputs["triples"][0]))}
    if isinstance(entry.config, models.GgnnConfig):
        (vertices, edges), words = entry.inputs, entry.given["tables"][0]
        bounds = {"texts": words, "selected": 2, "flows": 3, "positions": 4}
        bounds |= {"senders": vertices, "receivers": vertices}
        places = dict.fromkeys(("texts", "selected"), vertices)
        x = {
            name: rng.integers(0, below, (size, places.get(name, edges)))
            for name, below in bounds.items()
        }
        x = {name: jnp.asarray(each, "int32") for name, each in x.items()}
        return x, jnp.asarray(rng.integers(0, 2, (size, vertices)))
    if isinstance(entry.inputs, Mapping):
        x = {
            name: jnp.asarray(rng.normal(size=(size, *shape)), "float32")
            for name, shape in entry.inputs.items()
        }
        return x, jnp.asarray(rng.normal(size=output_shapes(entry, size).mean), "f4")
    shape = (size, *entry.inputs)
    if entry.dtype == "int32":
        x = rng.integers(0, entry.outputs, shape).astype(np.int32)
    else:
        x = rng.normal(size=shape).astype(np.float32)
    if isinstance(entry.config, models.BertConfig):
        x[..., 1] %= 2
        x[..., 2] = np.arange(shape[1]) < shape[1] - np.arange(size)[:, None] % 3
    labels = jax.tree.map(
        lambda shape: jnp.asarray(rng.integers(0, shape[-1], shape[:-1])),
        output_shapes(entry, size),
        is_leaf=lambda leaf: type(leaf) is tuple,
    )
    return jnp.asarray(x), labels


def noisy(tree, scale=0.2, seed=0):
    """Adds noise to every leaf, so that no bias or scale keeps its trivial start."""
    leaves, structure = jax.tree.flatten(tree)
    rng = np.random.default_rng(seed)
    return jax.tree.unflatten(
        structure,
        [leaf + scale * np.abs(rng.normal(size=leaf.shape)) for leaf in leaves],
    )


@functools.cache
def instance(name, compute="float32"):
    entry = REGISTRY[name]
    model = make(entry, core.Policy(compute=compute))
    params, state = jax.jit(model.init)(jax.random.key(0))
    x, labels = batch_of(entry, 4)
    cast = jax.tree.map(lambda leaf: leaf.astype("float32"), noisy((params, state)))
    return Instance(model, *cast, x, labels)


def loss(model, params, state, x, labels, taps=None, train=True):
    logits, new = model.apply(params, state, x, train=train, taps=taps)
    if isinstance(logits, models.Gaussian):
        return jnp.mean(metrics.crps_gaussian(*logits, labels)), new
    if isinstance(logits, models.LinkScores):
        totals = metrics.link_totals(logits, {**labels, "x": x})
        return totals.means()["loss"], new
    if isinstance(labels, dict):
        return metrics.click_totals(logits, labels).means()["loss"], new
    losses = jax.tree.leaves(jax.tree.map(metrics.cross_entropy, logits, labels))
    return functools.reduce(operator.add, losses), new
