"""Workers that average models keep the contract of transforms, each as one."""

import jax
import optax
import pytest

from hpcjax import averaging
from hpcjax.core import parts
from hpcjax.optim import contract

pytestmark = pytest.mark.smoke

# Eager SGD on a mesh is no worker but whole rounds; see test_eager_method.py.
NAMES = tuple(name for name in parts.list_places("averaging") if name != "eager")
# Models that are averaged with few others are not those of one device. A worker's state
# holds copies of its model: it begins from values, not from shapes or stand-ins. And
# without parameters there is nothing to average, which it says.
CANNOT = {
    *("same_when_sharded", "starts_from_shapes", "marks_parameters"),
    "takes_unusual_shapes",
}


def as_transform(name):
    """Returns a worker, alone on its axis, whose updates are how its model moved."""
    config = parts.classes("averaging")[name]()
    worker = config.make("data", optax.sgd(0.1, 0.9), workers=1, steps=10)

    def update(grads, state, params):
        given = jax.tree.map(lambda leaf: leaf[None], (grads, state, params))
        moved = jax.vmap(worker.step, axis_name="data")(*given)
        new, state = jax.tree.map(lambda leaf: leaf[0], moved)
        return jax.tree.map(lambda a, b: (a - b).astype(b.dtype), new, params), state

    return optax.GradientTransformation(worker.init, update)


@pytest.mark.parametrize("check", sorted(set(contract.CHECKS) - CANNOT))
@pytest.mark.parametrize("name", NAMES)
def test_a_worker_keeps_the_contract(name, check):
    subject = contract.Subject(as_transform(name))
    if check in contract.checks_of(subject):
        contract.CHECKS[check](subject)


def test_every_kind_of_worker_is_a_part():
    made = {"adpsgd", "dpsgd", "local_sgd", "sgp", "wagma"}
    assert made == set(NAMES)
    assert made <= set(averaging.__all__)
