"""Averages of models in small, changing groups that wait for nobody: WAGMA-SGD.

"Breaking (Global) Barriers in Parallel Stochastic Optimization with Wait-Avoiding
Group Averaging", Li, Ben-Nun, Nadiradze, Di Girolamo, Dryden, Alistarh, Hoefler, TPDS
2021.
"""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from hpcjax.core import checks
from hpcjax.core.varying import vary
from hpcjax.hostcomm import GroupAllreduce, GroupTrace, Transport, butterfly_masks
from hpcjax.hostcomm.groups import LateRule, require_sizes
from hpcjax.optim.flat_model import agree
from hpcjax.optim.model_averaging import (
    MODEL_ORDERS,
    Averaging,
    ModelExchange,
    Order,
    averaging,
    mesh_exchange,
)

Groups = Literal["butterfly", "fixed"]


def wagma(  # noqa: PLR0913 - an argument for each option
    over: Transport | str,
    tx: optax.GradientTransformation,
    *,
    group_size: int,
    tau: int | None = 10,
    late_rule: LateRule = "conditional",
    order: Order = "update_then_average",
    average_state: tuple[str, ...] = (),
    wait_avoiding: bool = True,
    groups: Groups = "butterfly",
    method: Literal["doubling", "halving"] = "doubling",
    ring: int | None = None,
) -> Averaging:
    """Returns workers that average their models in groups of a butterfly.

    W' = W + U(g); in the group of the round, W <- sum / S, or (sum + W') / (S + 1) if
    this worker was late, so that the sum holds an older model of it; every tau-th
    round is the mean of all, who wait for each other. Averages are of float32.

    On hosts the first worker of a round wakes all. On a mesh nobody can be late: this
    is group averaging that waits; `wagma_replay` repeats a real run there.

    Args:
      over: the transport of a host, or the name of a mesh axis.
      tx: makes updates of a worker's own gradients.
      group_size: S, a power of two, as the number of workers; the square root of that
        is a good one.
      tau: rounds from one mean of all to the next; None: there is none.
      late_rule: "always" adds W' in all partial rounds, as the authors' code does.
      order: "average_then_update" averages before the gradient is applied, likewise.
      average_state: fields of the optimizer's state that are averaged too, as "mu".
      wait_avoiding: False makes every group wait for its members; hosts only.
      groups: "fixed" are the same in all rounds.
      method: of sums between hosts, see `hostcomm.GroupAllreduce`.
      ring: how many rounds a late worker may miss, likewise. Matters without `tau`,
        where one that falls further behind ends the run with an error.

    Raises:
      ConfigError: sizes that are no powers of two, S > P or tau < 1; by `init`: workers
        that begin with different parameters.
      TypeError: parameters of integers, with their paths; by `init`.

    Examples:
      >>> from hpcjax.hostcomm import connected
      >>> worker = wagma(connected(1)[0], optax.sgd(0.5), group_size=1)
      >>> params = {"w": jnp.ones(2)}
      >>> params, state = worker.step({"w": jnp.ones(2)}, worker.init(params), params)
      >>> params, state = worker.finish(state, params)
      >>> params["w"].tolist()
      [0.5, 0.5]
    """
    checks.require_choice("late_rule", late_rule, ("conditional", "always"))
    checks.require_choice("order", order, MODEL_ORDERS)
    if isinstance(over, str):
        checks.require_choice("groups", groups, ("butterfly", "fixed"))
        checks.require_choice("method", method, ("doubling", "halving"))
        checks.require_count(1, tau=1 if tau is None else tau)
        require_sizes(group_size)

        def average(step, vector):
            return group_average(
                vector, step, group_size=group_size, tau=tau, axis_name=over,
                groups=groups, late_rule=late_rule,
            )  # fmt: skip

        exchange, trace = mesh_exchange(over, average), None
    else:
        settings = {
            "wait_avoiding": wait_avoiding, "groups": groups, "method": method,
            "ring": ring,
        }  # fmt: skip
        host = _Host(over, group_size, tau, late_rule, settings)
        exchange = ModelExchange(host.start, host.average, host.finish)
        trace = host.trace
    return averaging(
        tx, exchange, order=order, average_state=average_state, trace=trace
    )


class _Host:
    """A `GroupAllreduce` that is made once the size of the model is known."""

    def __init__(
        self,
        transport: Transport,
        group_size: int,
        tau: int | None,
        late_rule: LateRule,
        settings: dict[str, Any],
    ) -> None:
        self._transport, self._late_rule = transport, late_rule
        # One that is never started tells at once what cannot be.
        GroupAllreduce(transport, 1, group_size, tau, **settings)
        self._make = lambda size: GroupAllreduce(
            transport, size, group_size, tau, **settings
        )
        self._groups: GroupAllreduce | None = None

    def start(self, vector: Any, params: Any, **settings: Any) -> None:
        settings["late_rule"] = self._late_rule
        agree(self._transport, vector, params, **settings)
        self._groups = self._make(vector.size)
        self._groups.start(vector, check=False)

    def average(self, step: int, vector: Any) -> Any:
        groups = self._started()
        groups.post(step, vector)
        return groups.result(step).mean(vector, self._late_rule)

    def finish(self) -> None:
        self._started().finish()

    def trace(self) -> GroupTrace:
        return self._started().trace()

    def _started(self) -> GroupAllreduce:
        checks.require(self._groups is not None, "`init` comes first", groups=None)
        return self._groups  # pyrefly: ignore[bad-return]


def group_average(
    vector: jax.Array,
    step: Any,
    *,
    group_size: int,
    tau: int | None,
    axis_name: str,
    groups: Groups = "butterfly",
    late_rule: LateRule = "conditional",
    sent: jax.Array | None = None,
    late: Any = False,
) -> jax.Array:
    """Returns the average of one round, for use inside `shard_map`.

    A phase is one `ppermute` with rank XOR mask. Rounds repeat after L / gcd(L, l):
    each distinct one is a branch, and all devices take the same.

    Args:
      vector: this device's W'.
      step: the round, the same on all devices.
      group_size: S.
      tau: every tau-th round is of all; None: none is.
      axis_name: the mesh axis.
      groups: "fixed" are those of the first round.
      late_rule: "always" adds W' in all partial rounds.
      sent: what this device contributes to a partial round; None: W'.
      late: whether that is an older model.

    Raises:
      ConfigError: the axis or S is no power of two, or S is larger than the axis.
    """
    checks.require_choice("groups", groups, ("butterfly", "fixed"))
    ranks = jax.lax.axis_size(axis_name)
    masks = schedule(ranks, group_size, groups)
    sent = vector if sent is None else sent
    late = vary(jnp.asarray(late), axis_name) | (late_rule == "always")

    def partial(of_round):
        def branch(vector, sent, late):
            total = sent
            for mask in of_round:
                pairs = [(rank, rank ^ mask) for rank in range(ranks)]
                total = total + jax.lax.ppermute(total, axis_name, pairs)
            mixed = (total + vector) / (group_size + 1)
            return jnp.where(late, mixed, total / group_size)

        return branch

    def mean(vector, sent, late):
        del sent, late
        return vary(jax.lax.pmean(vector, axis_name), axis_name)

    branches = [partial(of_round) for of_round in masks] + [mean] * (tau is not None)
    which = step % len(masks)
    if tau is not None:
        which = jnp.where((step + 1) % tau == 0, len(masks), which)
    given = vary((vector, sent), axis_name)
    return jax.lax.switch(which, branches, *given, late)


def schedule(ranks: int, group_size: int, groups: Groups) -> list[tuple[int, ...]]:
    """Returns the masks of all distinct rounds, after which they repeat.

    Examples:
      >>> schedule(8, 4, "butterfly")
      [(1, 2), (4, 1), (2, 4)]
      >>> schedule(8, 4, "fixed")
      [(1, 2)]
    """
    first = butterfly_masks(ranks, group_size, 0)
    bits = max(ranks.bit_length() - 1, 1)
    distinct = bits // math.gcd(bits, len(first)) if groups == "butterfly" else 1
    return [butterfly_masks(ranks, group_size, number) for number in range(distinct)]
