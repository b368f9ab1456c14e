"""No value that a field of a part may have ends a run as a fault of this house."""

import contextlib
import dataclasses
import types
import typing

import pytest

from hpcjax import core, train
from hpcjax.core import parts
from hpcjax.core.errors import HpcjaxError
from hpcjax.runs import overrides
from tests.data.registry import REGISTRY
from tests.train import combinations

KINDS = (
    "optimizer",
    "exchange",
    "backward",
    "averaging",
    "sparsity",
    "state",
    "parallel",
)
ROWS, DEVICES = 8, 4


def variants(config):
    """Yields the config with every value of every field that has a list of them.

    And with every config that a field may hold, and all values of its fields.
    """
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        for kind in alternatives(hints[field.name]):
            values = ()
            if typing.get_origin(kind) is typing.Literal:
                values = typing.get_args(kind)
            elif dataclasses.is_dataclass(kind):
                held = getattr(config, field.name)
                made = held if type(held) is kind else default(kind)
                values = () if made is None else (made, *(v for _, v in variants(made)))
            for value in values:
                try:
                    yield (
                        f"{field.name}={value}",
                        dataclasses.replace(config, **{field.name: value}),
                    )
                except HpcjaxError:
                    continue


def default(kind):
    try:
        return kind()
    except TypeError:  # it has fields that must be given
        return None


def alternatives(hint):
    """Returns the types of a union, without what is annotated to them."""
    if typing.get_origin(hint) is typing.Annotated:
        return alternatives(typing.get_args(hint)[0])
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [each for one in typing.get_args(hint) for each in alternatives(one)]
    return [hint]


def trace(model, own, **chosen):
    """Traces a step, or is refused."""
    made = {"optimizer": combinations.config("optimizer", "sgd"), **chosen}
    names = {"averaging": "averaged"}
    given = {names.get(kind, kind): part for kind, part in made.items()}
    try:
        method = train.compose(
            model,
            own,
            given.pop("optimizer"),
            batch_size=ROWS,
            steps=4,
            devices=DEVICES,
            **given,
        )
        task = train.supervised(model, method, own)
        mesh = task.mesh(DEVICES)
        state = train.state_shapes(task, mesh)
        batch = train.batch_shapes(task, ROWS, mesh)
        train.train_step(task, mesh, state).trace(state, batch)
    except HpcjaxError:
        return


@contextlib.contextmanager
def told(label):
    """Tells which value it was."""
    try:
        yield
    except Exception as error:
        error.add_note(label)
        raise


NAMED = [(kind, name) for kind in KINDS for name in parts.classes(kind)]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), NAMED)
def test_every_value_of_a_part_trains_or_is_refused(kind, name):
    model, own = combinations.problem("mlp")
    for label, part in variants(combinations.config(kind, name)):
        with told(label):
            trace(model, own, **{kind: part})


@pytest.mark.slow
@pytest.mark.parametrize("name", parts.classes("model"))
def test_every_value_of_a_model_trains_or_is_refused(name, tiny_root):
    cls = parts.classes("model")[name]
    own = next(
        dataset
        for dataset in (make().load(tiny_root) for make in REGISTRY.values())
        if cls.takes(dataset.objective)
    )
    for label, config in variants(overrides.parse(cls(), cls.smoke)):
        with told(label):
            try:
                model = config.make(own.inputs, own.outputs, core.Policy(), **own.given)
            except HpcjaxError:
                continue
            trace(model, own)
