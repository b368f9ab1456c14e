"""Ranks of right answers among all, and what is made of them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpcjax.core.method import Batch, Totals

_SLICE = 2**22  # scores that are in memory at a time


def rank_of(
    scores: Float[Array, " candidates"], answer: Int[Array, ""], known: Int[Array, " k"]
) -> Float[Array, ""]:
    """Returns the filtered rank of an answer, from 1; of equal scores the mean rank.

    1 + #{higher} + #{equal} / 2, over the candidates but the answer and what is known.

    Args:
      scores: of all candidates.
      answer: number of the right one, from 0.
      known: other right ones, which do not count; the answer and numbers of no
        candidate may be among them.

    Returns:
      The rank; NaN if a score is NaN, or the answer's not finite, or it is none of the
      candidates.

    Examples:
      >>> float(rank_of(jnp.array([3.0, 1.0, 1.0, 2.0]), 1, jnp.array([0, 4])))
      2.5
    """
    how = {"mode": "fill", "fill_value": jnp.nan, "wrap_negative_indices": False}
    own = scores.at[answer].get(**how)
    others = _leave_out(scores, answer, known)
    higher, equal = jnp.sum(others > own), jnp.sum(others == own)
    good = jnp.isfinite(own) & ~jnp.any(jnp.isnan(scores))
    return jnp.where(good, 1 + higher + equal / 2, jnp.nan)


def _leave_out(scores: jax.Array, answer: jax.Array, known: jax.Array) -> jax.Array:
    """Returns scores that are −∞ where they do not count."""
    how = {"mode": "drop", "wrap_negative_indices": False}
    return scores.at[known].set(-jnp.inf, **how).at[answer].set(-jnp.inf, **how)


def link_totals(outputs: Any, batch: Batch) -> Totals:
    """Sums over links the loss, and of those that are held out what their ranks are.

    Args:
      outputs: what scores links, `models.LinkScores`.
      batch: "x" and "scored" of `data.LinksConfig`; of training links "hidden", where
        they are asked for; of held-out ones "known", and in validation "weight".

    Returns:
      Sums of means over both directions, tails and heads: "loss", the cross-entropy
      (nats) of the right one among its negatives; or among all entities but those that
      are known, and then "mrr", one over its rank among these, and "hits10", whether
      this is at most 10. The count is the number of links.
    """
    answers = _answers(batch)
    if "negatives" in batch["x"]:
        links = {"loss": _negative_losses(outputs, batch, answers)}
    else:
        links = _rank(outputs, answers, jnp.swapaxes(batch["known"], 1, 2))
    return _sum_links(links, batch)


def _answers(batch: Batch) -> jax.Array:
    """Returns the right tails, and heads, [batch, 2, edges]."""
    triples = batch["x"]["triples"]
    return jnp.stack([triples[..., 2], triples[..., 0]], axis=1)


def _sum_links(links: dict[str, jax.Array], batch: Batch) -> Totals:
    """Sums figures of links in both directions, [batch, 2, edges], by weight."""
    weight = batch["scored"]
    if "weight" in batch:
        weight = weight * batch["weight"][:, None]
    # What fills up may be of any value, but is not scored.
    shape = links["loss"].shape
    counted = jnp.broadcast_to(weight[:, None] > 0, shape)
    sums = {
        name: jnp.sum(weight[:, None] * jnp.where(counted, each, 0)) / 2
        for name, each in links.items()
    }
    return Totals(sums, jnp.sum(weight))


def _negative_losses(outputs: Any, batch: Batch, answers: jax.Array) -> jax.Array:
    """Returns cross-entropies among negatives, [batch, 2, edges]."""
    right = outputs.score_answers()
    wrong = outputs.score(outputs.queries, outputs.negatives)
    hidden = batch["x"]["negatives"][:, :, None] == answers[..., None]
    if "hidden" in batch:
        hidden = hidden | batch["hidden"]
    every = jnp.concatenate([right[..., None], jnp.where(hidden, -jnp.inf, wrong)], -1)
    return jax.nn.logsumexp(every, axis=-1) - right


def _rank(outputs: Any, answers: jax.Array, known: jax.Array) -> dict[str, jax.Array]:
    """Returns losses, reciprocal ranks and hits among all rows, [batch, 2, edges]."""

    def one(given: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        query, answer, others = given
        # The answer's score is of the same product as the others': ties stay ties.
        scores = outputs.score(query[None], outputs.table)[0]
        kept = _leave_out(scores, answer, others)
        loss = jnp.logaddexp(jax.nn.logsumexp(kept), scores[answer]) - scores[answer]
        return rank_of(scores, answer, others), loss

    shape = answers.shape
    given = (outputs.queries, answers, known)
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:]), given)
    slices = max(1, _SLICE // len(outputs.table))
    ranks, losses = jax.lax.map(one, flat, batch_size=slices)
    return _figures(ranks.reshape(shape), losses.reshape(shape))


def _figures(ranks: jax.Array, losses: jax.Array) -> dict[str, jax.Array]:
    hits = jnp.where(jnp.isnan(ranks), jnp.nan, ranks <= 10)
    return {"loss": losses, "mrr": 1 / ranks, "hits10": hits}


class RankParts(NamedTuple):
    """What a slice of all candidates says of held-out links, each [batch, 2, edges].

    Attributes:
      own: the right answer's score, if it is in the slice, else −∞.
      higher: how many that count have a higher score than the answer.
      equal: how many have its score.
      logsum: the logarithm of the sum of their scores' exponentials; NaN if one is.
    """

    own: Float[Array, "..."]
    higher: Float[Array, "..."]
    equal: Float[Array, "..."]
    logsum: Float[Array, "..."]

    def add(self, other: "RankParts") -> "RankParts":
        """Returns what both slices say."""
        own, logsum = jnp.maximum, jnp.logaddexp
        sums = self.higher + other.higher, self.equal + other.equal
        return RankParts(
            own(self.own, other.own), *sums, logsum(self.logsum, other.logsum)
        )


def rank_slice(
    outputs: Any, batch: Batch, own: Any, first: Any, count: Any
) -> RankParts:
    """Counts of a slice of all rows what `link_totals` counts of all.

    A first pass over the slices finds `own`, for ties must stay ties: the scores are of
    the same products. A second one counts, and `rank_totals` is of the sum of its
    parts.

    Args:
      outputs: `models.LinkScores`, whose `table` has the rows of the slice.
      batch: of held-out links, in numbers of all rows.
      own: scores of right answers, [batch, 2, edges].
      first: number of the slice's first row.
      count: rows of the slice; what the table has besides fills up.
    """
    answers, rows = _answers(batch), outputs.table
    here = jnp.arange(len(rows)) < count

    def one(given: tuple[jax.Array, ...]) -> RankParts:
        query, answer, others, own = given
        scores = outputs.score(query[None], rows)[0]
        how = {"mode": "fill", "fill_value": -jnp.inf, "wrap_negative_indices": False}
        mine = scores.at[answer - first].get(**how)
        kept = jnp.where(
            here, _leave_out(scores, answer - first, others - first), -jnp.inf
        )
        lost = jnp.any(jnp.isnan(scores) & here)
        logsum = jnp.where(lost, jnp.nan, jax.nn.logsumexp(kept))
        return RankParts(mine, jnp.sum(kept > own), jnp.sum(kept == own), logsum)

    given = (outputs.queries, answers, jnp.swapaxes(batch["known"], 1, 2), own)
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:]), given)
    parts = jax.lax.map(one, flat, batch_size=max(1, _SLICE // len(rows)))
    return jax.tree.map(lambda x: x.reshape(answers.shape), parts)


def rank_totals(parts: RankParts, batch: Batch) -> Totals:
    """Returns what `link_totals` does, of the sum of parts of all rows."""
    ranks = 1 + parts.higher + parts.equal / 2
    good = jnp.isfinite(parts.own) & ~jnp.isnan(parts.logsum)
    losses = jnp.logaddexp(parts.logsum, parts.own) - parts.own
    return _sum_links(_figures(jnp.where(good, ranks, jnp.nan), losses), batch)
