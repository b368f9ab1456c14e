"""Averages of models in small, changing groups that wait for nobody: WAGMA-SGD.

"Breaking (Global) Barriers in Parallel Stochastic Optimization with Wait-Avoiding
Group Averaging", Li, Ben-Nun, Nadiradze, Di Girolamo, Dryden, Alistarh, Hoefler, TPDS
2021.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hpcjax.averaging.vectors import require_same_start
from hpcjax.averaging.workers import (
    MODEL_ORDERS,
    Averaging,
    ModelExchange,
    Order,
    averaging,
    mesh_exchange,
)
from hpcjax.core import checks
from hpcjax.core.varying import vary
from hpcjax.hostcomm import GroupAllreduce, GroupTrace, Transport, butterfly_masks
from hpcjax.hostcomm.groups import LateRule, require_sizes

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
    trace: GroupTrace | None = None,
) -> Averaging:
    """Returns workers that average their models in groups of a butterfly.

    A worker makes its own update, W' = W + U(g). The models of its group in this round
    are summed, and W <- sum / S. If the worker was late, the sum contains an older
    model of it instead of W', and W <- (sum + W') / (S + 1), so that its update is not
    lost. Every tau-th round is the mean of all workers, who wait for each other.
    Averages are computed in float32.

    On hosts the first worker that reaches a round starts it for all. On a mesh no
    worker can be late by itself: without a `trace` this is group averaging that waits;
    with one it repeats that run, old models included. The repetition shows how
    training converges, and nothing about its time.

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
      trace: of all workers, recorded or simulated, with these settings; a mesh only.
        Every device then keeps its last models, as many as the largest staleness needs,
        and contributes that of the step which the trace says.

    Raises:
      ConfigError: sizes that are no powers of two, S > P or tau < 1; by `init`: workers
        that begin with different parameters; a trace of other settings, or of a part
        that is not a run's first; or, by `step`,
        of other workers than the axis has, or one that cannot be: a model is averaged
        that was not written yet, or an old one in a round of all.
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

        average = functools.partial(
            group_average, group_size=group_size, tau=tau, axis_name=over,
            groups=groups, late_rule=late_rule,
        )  # fmt: skip
        if trace is None:
            exchange = mesh_exchange(over, lambda step, vector: average(vector, step))
        else:
            _check_trace(trace)
            same = (trace.group_size, trace.tau, trace.groups)
            rule = f"the trace must be of these settings: its own are {same}"
            own = (group_size, tau or 0, groups)
            checks.require(own == same, rule, settings=own)
            exchange = _replayed(trace, over, average)
        told = lambda: None  # noqa: E731
    else:
        checks.require(trace is None, "hosts make a trace and take none", trace=trace)
        settings = {
            "wait_avoiding": wait_avoiding, "groups": groups, "method": method,
            "ring": ring,
        }  # fmt: skip
        host = _Host(over, group_size, tau, late_rule, settings)
        exchange = ModelExchange(host.average, host.start, host.finish)
        told = host.trace
    return averaging(tx, exchange, order=order, average_state=average_state, trace=told)


def _replayed(
    trace: GroupTrace, axis: str, group_mean: Callable[..., jax.Array]
) -> ModelExchange:
    """Returns averages to which late workers give old models, as a trace says.

    Every device keeps its last models in a ring. One round reaches back to the model of
    `written[step]`, at most `staleness` steps ago, so that so many places and one more
    are enough: in the place of step t there is the model of t until step t + ring.
    """
    ring = int(trace.staleness().max()) + 1

    def remember(vector):
        # All places hold the first model; "step -1" is the last one of the ring.
        return jnp.broadcast_to(vector, (ring, *vector.shape))

    def average(step, vector, models):
        size = jax.lax.axis_size(axis)
        checks.require(size == trace.size, f"the axis has {size} devices", P=trace.size)
        written = jnp.asarray(trace.written)[step, jax.lax.axis_index(axis)]
        models = models.at[step % ring].set(vector)
        sent = models[written % ring]
        return group_mean(vector, step, sent=sent, late=written < step), models

    return ModelExchange(average, axis=axis, remember=remember)


def _check_trace(trace: GroupTrace) -> None:
    # Models and optimizers' states at the start of a later part are not in its trace.
    rule = "only a run from its begin can be repeated: the trace is of a later part"
    checks.require(trace.first == 0, rule, first=trace.first)
    checks.require_choice("groups", trace.groups, ("butterfly", "fixed"))
    steps = np.arange(trace.steps)
    known = bool(np.all((trace.written >= -1) & (trace.staleness() >= 0)))
    rule = "a trace must not average a model before it is written"
    checks.require(known, rule, steps=trace.steps)
    if trace.tau:
        late = bool(trace.late()[steps % trace.tau == trace.tau - 1].any())
        rule = "nobody can be late in a round of all"
        checks.require(not late, rule, tau=trace.tau)


class _Host:
    """`GroupAllreduce`s, one from each start to the next finish."""

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
        self._make = lambda size, first: GroupAllreduce(
            transport, size, group_size, tau, first=first, **settings
        )
        self._groups: GroupAllreduce | None = None
        self._first = 0

    def start(self, step: int, vector: Any, params: Any, **settings: Any) -> None:
        settings["late_rule"] = self._late_rule
        require_same_start(self._transport, step, vector, params, **settings)
        self._groups, self._first = self._make(vector.size, step), step
        self._groups.start(vector, check=False)

    def average(self, step: int, vector: Any, memory: Any) -> tuple[Any, Any]:
        groups, number = self._started(), step - self._first
        groups.post(number, vector)
        return groups.result(number).mean(vector, self._late_rule), memory

    def finish(self) -> None:
        self._started().finish()

    def trace(self) -> GroupTrace | None:
        return self._groups.trace() if self._groups else None

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
