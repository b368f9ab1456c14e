"""Embeddings of knowledge graphs: a vector for each entity, two for each relation."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from hpcjax.core import checks
from hpcjax.core.dtypes import Policy
from hpcjax.core.keys import Key
from hpcjax.core.model import Model
from hpcjax.core.structs import pytree, static
from hpcjax.models._from_nnx import from_nnx
from hpcjax.models.kge_config import KgeConfig
from hpcjax.models.modules import FLOAT32, param


@pytree
class LinkScores:
    """What scores links: of tails, and then of heads.

    Attributes:
      queries: vectors that answers are compared with, [batch, 2, edges, width].
      answers: those of right ones, likewise.
      negatives: those of wrong ones, which the queries of an example share, [batch, 2,
        negatives, width]; None without.
      table: those of all entities, [entities, width].
      distance: whether scores are −‖query − answer‖, not products.
    """

    queries: Float[Array, "batch two edges width"]
    answers: Float[Array, "batch two edges width"]
    negatives: Float[Array, "batch two negatives width"] | None
    table: Float[Array, "entities width"]
    distance: bool = static()

    def score_answers(self) -> Float[Array, "batch two edges"]:
        """Returns the scores of right answers."""
        return self.score(self.queries[..., None, :], self.answers[..., None, :])[
            ..., 0, 0
        ]

    def score(
        self, queries: Float[Array, "... n width"], answers: Float[Array, "... m width"]
    ) -> Float[Array, "... n m"]:
        """Returns the score of each answer to each query, float32."""
        if not self.distance:
            how = {"preferred_element_type": jnp.float32}
            return jnp.einsum("...nd,...md->...nm", queries, answers, **how)
        queries, answers = (x.astype(jnp.float32) for x in (queries, answers))
        apart = queries[..., :, None, :] - answers[..., None, :, :]
        square = jnp.sum(jnp.square(apart), axis=-1)
        # The root has no gradient at 0.
        return -jnp.sqrt(jnp.where(square > 0, square, 1)) * (square > 0)


def compose(decoder: str, entity: jax.Array, relation: jax.Array | None) -> jax.Array:
    """Returns the query of an entity and a relation, see `kge`."""
    if relation is None:
        return entity
    if decoder == "distmult":
        return entity * relation
    if decoder == "transe":
        return entity + relation
    (a, b), (x, y) = (jnp.split(each, 2, axis=-1) for each in (entity, relation))
    return jnp.concatenate([a * x - b * y, a * y + b * x], axis=-1)


class _Kge(nnx.Module):
    """The network of `kge`."""

    def __init__(self, tables: tuple[int, ...], config: KgeConfig, policy: Policy):
        entities, relations = tables
        normal = nnx.initializers.normal(config.spread)
        self.decoder, self.compute = config.decoder, policy.compute
        self.table = param((entities, config.width), normal, policy.param)
        shape, self.related = (relations, config.width), config.decoder != "dot"
        if self.related:
            self.relations = param(shape, normal, policy.param)
            self.inverses = param(shape, normal, policy.param)

    def __call__(
        self, x: Mapping[str, jax.Array], *, train: bool, key: Key | None
    ) -> LinkScores:
        del train, key
        heads, relations, tails = jnp.moveaxis(x["triples"], -1, 0)
        given = jnp.stack([heads, tails], axis=1)
        vectors = None
        if self.related:
            both = [
                _look_up(each, relations) for each in (self.relations, self.inverses)
            ]
            vectors = jnp.stack(both, axis=1).astype(self.compute)
        # One look-up of all entities: its gradient is one sum over rows.
        width = given[0].size
        negatives = x.get("negatives")
        wanted = [given.reshape(len(given), -1)]
        if negatives is not None:
            wanted.append(negatives.reshape(len(given), -1))
        rows = _look_up(self.table, jnp.concatenate(wanted, axis=1))
        rows = rows.astype(self.compute)
        ends = rows[:, :width].reshape(*given.shape, -1)
        wrong = None
        if negatives is not None:
            wrong = rows[:, width:].reshape(*negatives.shape, -1)
        return LinkScores(
            queries=compose(self.decoder, ends, vectors),
            answers=ends[:, ::-1],
            negatives=wrong,
            table=self.table[...].astype(self.compute),
            distance=self.decoder == "transe",
        )


def _look_up(table: nnx.Param, numbers: jax.Array) -> jax.Array:
    """Returns rows; NaN for a number that is no row, not another row."""
    how = {"mode": "fill", "fill_value": jnp.nan, "wrap_negative_indices": False}
    return table.get_value().at[numbers].get(**how)


def kge(
    inputs: Mapping[str, tuple[int, ...]],
    outputs: int,
    *,
    tables: tuple[int, ...],
    policy: Policy = FLOAT32,
    **options: Any,
) -> Model:
    """Returns embeddings that score links (h, r, t) of a knowledge graph.

    DistMult Σ h r t; ComplEx Re Σ h r t̄; TransE −‖h + r − t‖; "dot" Σ h t, which
    knows no relation. A query is h and r combined, which is compared with all t; and
    heads are asked for by t and another vector of r, that of its inverse.

    Parameters are `table` [entities, width] and `relations`, `inverses` [relations,
    width].

    Args:
      inputs: shapes of an example's "triples" and "negatives".
      outputs: number of entities.
      tables: numbers of entities and of relations.
      policy: dtypes; scores are float32.
      **options: the fields of `KgeConfig`.

    Returns:
      The model, which puts out `LinkScores`.

    Raises:
      ConfigError: other tables or inputs, or fields that `KgeConfig` refuses.

    Examples:
      >>> shapes = {"triples": (8, 3), "negatives": (2, 4)}
      >>> model = kge(shapes, 14, tables=(14, 55), width=6)
      >>> jax.tree.map(lambda p: p.shape, model.init(jax.random.key(0))[0])
      {'inverses': (55, 6), 'relations': (55, 6), 'table': (14, 6)}

    References:
      Yang et al. 2015 (DistMult); Trouillon et al. 2016 (ComplEx); Bordes et al. 2013
      (TransE); Lacroix et al. 2018 (inverse relations).
    """
    config = KgeConfig.of(options, kge)
    rule = "tables must be (entities, relations), and inputs triples and negatives"
    good = len(tables) == 2 and tables[0] == outputs
    named = isinstance(inputs, Mapping) and {"triples"} <= set(inputs)
    checks.require(good and named, rule, tables=tables, outputs=outputs, inputs=inputs)
    checks.require_count(1, entities=tables[0], relations=tables[1])
    return from_nnx(lambda: _Kge(tables, config, policy), table=True)
