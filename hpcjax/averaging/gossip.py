"""SGD whose workers average with few others: D-PSGD, AD-PSGD and push-sum (SGP).

The decentralised baselines of WAGMA-SGD, with its interface.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hpcjax.averaging.vectors import flat, like, require_same_start
from hpcjax.averaging.workers import (
    Averaging,
    AveragingState,
    Own,
    averaging,
    begin,
    first_step,
    full,
    host_exchange,
    local_update,
    lowered,
    mesh_exchange,
)
from hpcjax.core import checks, keys
from hpcjax.core.per_device import unwrap, wrap
from hpcjax.core.varying import after, vary
from hpcjax.hostcomm import (
    PairAverages,
    PushSum,
    Tag,
    Transport,
    exponential_offsets,
    neighbour_mean,
)
from hpcjax.optim.full_precision import raise_precision


def dpsgd(over: Transport | str, tx: optax.GradientTransformation) -> Averaging:
    """Returns workers that average with their two neighbours in a ring.

    W <- (W_left + W + W_right) / 3 + U(g), with g taken before the average; of two
    workers each has one neighbour. Waits for the neighbours' last step.

    Args:
      over: the transport of a host, or the name of a mesh axis.
      tx: makes updates of a worker's own gradients.

    References:
      Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms?,
      NeurIPS 2017, Algorithm 1.

    Examples:
      >>> from hpcjax.hostcomm import connected
      >>> worker = dpsgd(connected(1)[0], optax.sgd(0.5))
      >>> params, _ = worker.step(jnp.ones(2), worker.init(jnp.ones(2)), jnp.ones(2))
      >>> params.tolist()
      [0.5, 0.5]
    """
    if isinstance(over, str):

        def on_mesh(step, vector):
            del step
            ranks = jax.lax.axis_size(over)
            offsets = {place % ranks for place in (-1, 1)} - {0}
            total = vector
            for offset in sorted(offsets):
                total = total + _shifted(vector, offset, over)
            return total / (1 + len(offsets))

        exchange = mesh_exchange(over, on_mesh)
    else:
        kind = over.new_kind("ring")

        def on_host(step, vector):
            return neighbour_mean(over, vector, Tag(kind, step))

        exchange = host_exchange(over, kind, on_host)
    return averaging(tx, exchange, order="average_then_update")


def _shifted(vector: jax.Array, offset: int, axis: str) -> jax.Array:
    """Returns what comes from the device so many places before ours."""
    ranks = jax.lax.axis_size(axis)
    pairs = [(rank, (rank + offset) % ranks) for rank in range(ranks)]
    return jax.lax.ppermute(vector, axis, pairs)


def sgp(
    over: Transport | str,
    tx: optax.GradientTransformation,
    *,
    neighbours: int = 2,
    overlap: int = 0,
) -> Averaging:
    """Returns workers that push shares of their models on, with weights.

    Gradients are taken at z = x / w, which is what `step` returns as parameters; x and
    w are pushed: x <- x + U(g), then a share of both stays and as much goes to each
    out-neighbour on a directed exponential graph. Sums of x and of w are kept.

    Args:
      over: the transport of a host, or the name of a mesh axis.
      tx: makes updates of a worker's own gradients.
      neighbours: to whom a worker pushes in a step.
      overlap: by how many steps a message may be late before it is waited for; 0 on a
        mesh.

    Raises:
      ConfigError: an overlap on a mesh.

    References:
      Assran et al., Stochastic Gradient Push for Distributed Deep Learning, ICML 2019,
      Algorithm 1.

    Examples:
      >>> from hpcjax.hostcomm import connected
      >>> worker = sgp(connected(1)[0], optax.sgd(0.5))
      >>> params, _ = worker.step(jnp.ones(2), worker.init(jnp.ones(2)), jnp.ones(2))
      >>> params.tolist()
      [0.5, 0.5]
    """
    worker = _Pusher(over, tx, neighbours, overlap)
    return Averaging(worker.begin, worker.start, worker.step, worker.finish)


class _Pusher:
    """The functions of `sgp`."""

    def __init__(
        self,
        over: Transport | str,
        tx: optax.GradientTransformation,
        neighbours: int,
        overlap: int,
    ) -> None:
        self._tx, self._over, self._neighbours = tx, over, neighbours
        if isinstance(over, str):
            self._axis, self._push = over, _MeshPush(over, neighbours, overlap)
        else:
            self._axis = None
            self._push = PushSum(over, neighbours=neighbours, overlap=overlap)
        # On a mesh the whole step is compiled; extras may then hold functions.
        self._moved = self._numerator if self._axis else jax.jit(self._numerator)

    def begin(self, params: Any) -> AveragingState:
        own = begin(self._tx, params)[1]._replace(weight=self._keep(1.0))
        return AveragingState(first_step(self._axis), wrap(own, self._axis))

    def start(self, state: AveragingState, params: Any) -> None:
        if not isinstance(self._over, str):
            vector = flat(full(params, state.own.master))
            own = {"neighbours": self._neighbours}
            require_same_start(self._over, int(state.step), vector, params, **own)

    def step(
        self, grads: Any, state: AveragingState, params: Any, **extras: Any
    ) -> tuple[Any, AveragingState]:
        own = unwrap(state.own)
        own = own._replace(weight=self._weight(own))
        values, inner = self._moved(grads, own, params, extras)
        number = int(state.step) if self._axis is None else state.step
        pushed = self._push.push(number, self._given(values), own.weight)
        return self._estimate(pushed, params, inner, state.step + 1)

    def finish(self, state: AveragingState, params: Any) -> tuple[Any, AveragingState]:
        own = unwrap(state.own)
        weight = self._weight(own)
        values = flat(full(params, own.master)) * weight
        pushed = self._push.finish(self._given(values), weight)
        return self._estimate(pushed, params, own.inner, state.step)

    def _numerator(
        self, grads: Any, own: Own, params: Any, extras: Mapping[str, Any]
    ) -> tuple[jax.Array, Any]:
        """Adds U(g) to x = w z, not to z."""
        precise = full(params, own.master)
        moved, inner = local_update(self._tx, grads, own.inner, precise, extras)
        before = flat(precise)
        return before * own.weight + (flat(moved) - before), inner

    def _estimate(
        self, pushed: Any, params: Any, inner: Any, step: Any
    ) -> tuple[Any, AveragingState]:
        vector, weight = pushed
        params, master = _become(vector / weight, params)
        own = Own(inner, master, self._keep(weight))
        return params, AveragingState(step, wrap(own, self._axis))

    def _weight(self, own: Own) -> Any:
        """Returns the weight: on hosts a float of double precision."""
        if self._axis is not None:
            return own.weight
        return float(np.asarray(own.weight).view(np.float64)[0])

    def _keep(self, weight: Any) -> Any:
        """Returns how the state holds a weight.

        On hosts weights are of double precision, so that their sum does not leak. JAX
        has none by default: the state holds their bits, as two words.
        """
        if self._axis is not None:
            return jnp.asarray(weight, jnp.float32)
        return np.array([weight], np.float64).view(np.uint32)

    def _given(self, vector: jax.Array) -> Any:
        return np.asarray(vector) if self._axis is None else vector


@jax.jit
def _become(vector: jax.Array, params: Any) -> tuple[Any, tuple[jax.Array, ...]]:
    """Returns parameters and their copies from a vector of float32."""
    return lowered(like(vector, raise_precision(params)), params)


class _MeshPush:
    """What `PushSum` does, on a mesh, where no message is late."""

    def __init__(self, axis: str, neighbours: int, overlap: int) -> None:
        checks.require_count(1, neighbours=neighbours)
        alone = "overlap must be 0 on a mesh, where nobody is late"
        checks.require(overlap == 0, alone, overlap=overlap)
        self._axis, self._neighbours = axis, neighbours

    def push(
        self, step: Any, values: jax.Array, weight: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        ranks = jax.lax.axis_size(self._axis)
        powers = max((ranks - 1).bit_length(), 1)
        period = powers // math.gcd(powers, self._neighbours)

        def pushing(number):
            offsets = exponential_offsets(ranks, number, self._neighbours)

            def branch(values, weight):
                # The values are of after the step's exchange, the weight of before.
                weight = after(weight, values)
                shares = jax.tree.map(
                    lambda leaf: leaf / (len(offsets) + 1), (values, weight)
                )
                total = shares
                for offset in offsets:
                    came = jax.tree.map(
                        lambda leaf: _shifted(leaf, offset, self._axis),  # noqa: B023
                        shares,
                    )
                    total = jax.tree.map(jnp.add, total, came)
                return total

            return branch

        branches = [pushing(number) for number in range(period)]
        given = vary((values, weight), self._axis)
        return jax.lax.switch(step % period, branches, *given)

    def finish(
        self, values: jax.Array, weight: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return values, weight


def adpsgd(
    over: Transport | str, tx: optax.GradientTransformation, *, seed: int = 0
) -> Averaging:
    """Returns workers whose models are averaged with those of random others.

    Half of the workers ask, the others answer. On hosts a thread does so, see
    `hostcomm.PairAverages`: nobody waits, and who meets whom when is up to the clock.
    On a mesh nobody can be late: all meet somebody in every step, pairs drawn anew,
    after the gradients were taken and before they are applied.

    Args:
      over: the transport of a host, or the name of a mesh axis.
      tx: makes updates of a worker's own gradients.
      seed: of who is asked; on a mesh the same on all devices.

    Raises:
      ConfigError: by `step` on hosts: steps are not counted from `init`, whose
        parameters are those that the thread goes on with.

    References:
      Lian et al., Asynchronous Decentralized Parallel Stochastic Gradient Descent,
      ICML 2018.

    Examples:
      >>> from hpcjax.hostcomm import connected
      >>> worker = adpsgd(connected(1)[0], optax.sgd(0.5))
      >>> params, _ = worker.step(jnp.ones(2), worker.init(jnp.ones(2)), jnp.ones(2))
      >>> params.tolist()
      [0.5, 0.5]
    """
    if isinstance(over, str):
        exchange = mesh_exchange(over, lambda *given: _pair_means(over, seed, *given))
        return averaging(tx, exchange, order="average_then_update")
    running: list[tuple[PairAverages, int]] = []

    @jax.jit
    def change_of(grads, own, params, extras):
        precise = full(params, own.master)
        moved, inner = local_update(tx, grads, own.inner, precise, extras)
        return flat(moved) - flat(precise), inner

    def start(state, params):
        vector, number = flat(full(params, state.own.master)), int(state.step)
        require_same_start(over, number, vector, params)
        pairs = PairAverages(over, np.asarray(vector), seed, first=number)
        running[:] = [(pairs, number)]

    def step(grads, state, params, **extras):
        pairs, first = running[-1]
        rule = f"step must be {first + pairs.added}, counted from `init`"
        checks.require(state.step == first + pairs.added, rule, step=state.step)
        change, inner = change_of(grads, state.own, params, extras)
        model = pairs.add(np.asarray(change))
        params, master = _become(model, params)
        return params, AveragingState(state.step + 1, Own(inner, master))

    def finish(state, params):
        params, master = _become(running[-1][0].finish(), params)
        return params, AveragingState(state.step, Own(state.own.inner, master))

    return Averaging(
        lambda params: AveragingState(0, begin(tx, params)[1]), start, step, finish
    )


def _pair_means(axis: str, seed: int, step: Any, vector: jax.Array) -> jax.Array:
    """Returns the mean of ours and that of who is met in a step; alone, our own."""
    ranks = jax.lax.axis_size(axis)

    def meeting(turn):
        pairs = list(enumerate(meetings(ranks, turn)))
        return lambda vector: (vector + jax.lax.ppermute(vector, axis, pairs)) / 2

    branches = [meeting(turn) for turn in range((ranks + 1) // 2)]
    key = keys.derive(jax.random.key(seed), "pairs", step)
    turn = jax.random.randint(key, (), 0, len(branches))
    return jax.lax.switch(turn, branches, vary(vector, axis))


def meetings(ranks: int, turn: int) -> list[int]:
    """Returns whom each rank meets: even ones odd ones, one of an odd number itself.

    In ceil(P / 2) turns every even rank meets every odd one.

    Examples:
      >>> [meetings(4, turn) for turn in range(2)]
      [[1, 0, 3, 2], [3, 2, 1, 0]]
      >>> meetings(3, 1)
      [0, 2, 1]
    """
    met = list(range(ranks))
    asking = (ranks + 1) // 2
    for place in range(asking):
        even, odd = 2 * place, 2 * ((place + turn) % asking) + 1
        if odd < ranks:
            met[even], met[odd] = odd, even
    return met
