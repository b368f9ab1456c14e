"""Overrides: keys, values, switches, and what the messages say."""

import contextlib
import dataclasses
import math
import random
import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcjax.core.errors import ConfigError
from hpcjax.runs import overrides, values
from tests.runs.example_config import (
    CosineConfig,
    ExampleConfig,
    JorgeConfig,
    NeedyConfig,
    SgdConfig,
    StepsConfig,
)

BASE = ExampleConfig()


def parsed(*args, base=BASE):
    return overrides.parse(base, overrides.pairs(args))


def at(config, path):
    for name in path.split("."):
        config = getattr(config, name)
    return config


def message(*args, base=BASE):
    with pytest.raises(ConfigError) as caught:
        parsed(*args, base=base)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("steps=7", 7),
        ("steps=-7", -7),
        ("steps=1_000", 1000),
        ("optimizer.lr=0.3", 0.3),
        ("optimizer.lr=-1e-3", -0.001),
        ("optimizer.lr=3", 3.0),
        ("optimizer.lr=inf", math.inf),
        ("optimizer.lr=-Inf", -math.inf),
        ("optimizer.lr=0.0e-999", 0.0),
        ("optimizer.lr=5e-324", 5e-324),
        ("model.code=1e999", "1e999"),
        ("optimizer.damping=dynamic", "dynamic"),
        ("optimizer.damping=1e-4", 1e-4),
        ("model.bias=false", False),
        ("model.bias=True", True),
        ("model.bias=TRUE", True),
        ("model.norm=group", "group"),
        ("model.clip=none", None),
        ("model.clip=None", None),
        ("model.clip=1", 1.0),
        ("model.name=two words, and = a comma", "two words, and = a comma"),
        ("model.name=-dash", "-dash"),
        ("model.name=--help", "--help"),
        ("model.name=", ""),
        ("model.name=[1,2]", "[1,2]"),
        ("model.code=7", 7),
        ("model.code=seven", "seven"),
        ("model.widths=[64,10]", (64, 10)),
        ("model.widths=[ 64 , 10 ]", (64, 10)),
        ("model.widths=[]", ()),
        ("model.rules=[[bias,false],[.*,true]]", (("bias", False), (".*", True))),
        ("model.rules=[['a[0-9]{1,2}',True]]", (("a[0-9]{1,2}", True),)),
        ("model.kernels=[[1,2],[3,4]]", ((1, 2), (3, 4))),
        ("model.blocks=[[1],[],[2,3]]", ((1,), (), (2, 3))),
        ("model.blocks=none", None),
        ('model.tags=[a,"b,c"," d",""]', ("a", "b,c", " d", "")),
        ("model.tags=[-a,--b]", ("-a", "--b")),
    ],
)
def test_value_of_a_key(override, value):
    got = at(parsed(override), override.partition("=")[0])
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("steps=many", ["steps must be int", "'many'"]),
        ("steps=1e3", ["steps must be int", "'1e3'"]),
        ("steps=1.5", ["steps must be int", "'1.5'"]),
        ("steps=1e999999999", ["steps must be int"]),
        ("steps=nan", ["steps must be int"]),
        ("steps=", ["steps must be int", "''"]),
        ("optimizer.lr=fast", ["optimizer.lr must be float", "'fast'"]),
        ("optimizer.lr=true", ["optimizer.lr must be float"]),
        ("optimizer.damping=static", ["float | 'dynamic'", "'static'"]),
        ("model.bias=1", ["model.bias must be bool", "'1'"]),
        ("optimizer.lr=1e999", ["optimizer.lr", "float can hold", "1e999"]),
        ("optimizer.damping=-1e999", ["optimizer.damping", "-1e999"]),
        ("optimizer.lr=1e-400", ["optimizer.lr", "float can hold", "1e-400"]),
        ("model.clip=-0.10E-400", ["model.clip", "-0.10E-400"]),
        ("model.widths=" + "[" * 9999 + "]" * 9999, ["model.widths", "too deep"]),
        ("model.norm=layer", ["'batch' | 'group'", "'layer'"]),
        ("model.clip=null", ["float | none", "'null'"]),
        ("model.widths=64,10", ["[int, ...]", "[64,10]", "'64,10'"]),
        ("model.widths=[64,x]", ["model.widths[1] must be int", "'x'"]),
        ("model.widths=[64,,10]", ["model.widths is not a list", "[64,,10]"]),
        ("model.widths=[{a: b}]", ["model.widths[0] must be int"]),
        ("model.widths=[64,10", ["[int, ...]"]),
        ("model.kernels=[[1,2,3]]", ["model.kernels[0]", "[int, int]"]),
        ("model.kernels=[[1,2]", ["model.kernels is not a list"]),
        ('model.tags=["a]', ["model.tags is not a list"]),
        ("model.widths=[0]", ["model: widths must be positive"]),
        ("model.name=refused", ["model: name must not be refused"]),
        ("layers=[cosine]", ["layers[0]", "config"]),
        ("model=3", ["model is a group", "model.widths"]),
        ("optimizer=adam", ["jorge | sgd", "'adam'"]),
        ("extra=needy", ["extra.size has no default"]),
        ("extra=cosin", ["cosine | needy | none", "did you mean 'cosine'"]),
        ("steps", ["key=value", "'steps'"]),
        ("=3", ["unknown key ''"]),
    ],
)
def test_refused(override, parts):
    text = message(override)
    for part in parts:
        assert part in text


def test_a_key_given_twice():
    with pytest.raises(ConfigError, match=r"twice: seed=1 and seed=2"):
        overrides.pairs(["seed=1", "steps=3", "seed=2"])


@pytest.mark.parametrize(
    "args",
    [
        ("optimizer=sgd", "optimizer.momentum=0.8"),
        ("optimizer.momentum=0.8", "optimizer=sgd"),
    ],
)
def test_a_switch_comes_before_the_keys_below_it(args):
    assert parsed(*args).optimizer == SgdConfig(momentum=0.8)


def test_a_switch_takes_defaults_and_a_member_in_place_stays():
    base = ExampleConfig(optimizer=JorgeConfig(lr=7.0))
    assert parsed("optimizer=sgd", base=base).optimizer == SgdConfig()
    assert parsed("optimizer=jorge", base=base) == base


def test_switches_inside_switches():
    config = parsed(
        "optimizer.schedule.at=[0.1]", "optimizer.schedule=steps", "optimizer=sgd"
    )
    assert config.optimizer == SgdConfig(schedule=StepsConfig(at=(0.1,)))
    assert parsed("optimizer.schedule=none", base=config).optimizer == SgdConfig()
    assert parsed("extra=cosine", "extra.warmup=2").extra == CosineConfig(warmup=2)
    assert parsed("extra.size=2", "extra=needy").extra == NeedyConfig(size=2)


def test_values_that_are_not_text_are_checked_too():
    config = overrides.parse(
        BASE,
        {"seed": 3, "model.widths": (1, 2), "optimizer": SgdConfig(lr=2.0)},
    )
    assert (config.seed, config.model.widths) == (3, (1, 2))
    assert config.optimizer == SgdConfig(lr=2.0)
    for path, value in {"seed": 1.5, "model.bias": 1, "optimizer": 3}.items():
        with pytest.raises(ConfigError, match=path):
            overrides.parse(BASE, {path: value})


def test_unknown_key_names_the_nearest_with_type_value_and_help():
    text = message("optimizer.precond_evry=3")
    assert "did you mean 'optimizer.precond_every'" in text
    assert "(int, here 10: steps between updates.)" in text


def test_the_last_part_alone_is_enough_for_a_hint():
    assert "'optimizer.lr'" in message("lr=0.3")
    assert "'model.widths'" in message("width=[3]")


def test_key_of_another_member():
    text = message("optimizer.momentum=0.8")
    assert "belongs to optimizer=sgd" in text
    assert "optimizer=jorge" in text
    assert "of optimizer=sgd" in message("optimizer.momentun=0.8")
    after = message("optimizer=sgd", "optimizer.damping=0.8")
    assert "belongs to optimizer=jorge" in after
    nested = message("optimizer.schedule.at=[0.1]")
    assert "optimizer.schedule=steps" in nested


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("optimizer.precond", "did you mean 'optimizer.precond_every'"),
        ("model.lr", "did you mean 'optimizer.lr'"),
        # A word of what a key's help says.
        ("model.between", "did you mean 'optimizer.precond_every' .*between updates"),
        ("model.zzzzzz", "keys: model.widths, (model[.][a-z]+(, )?)+$"),
    ],
)
def test_of_a_key_in_a_group_that_is_there_only_the_last_part_is_in_doubt(key, words):
    assert re.search(words, message(f"{key}=1"))


def test_a_key_far_from_all_lists_them():
    assert "keys: optimizer, optimizer.lr" in message("zzzzzzzz=1")


def typo(key, rng):
    place = rng.randrange(len(key))
    letter = rng.choice(string.ascii_lowercase)
    kind = rng.randrange(4)
    if kind == 0:
        return key[:place] + key[place + 1 :]
    if kind == 1:
        return key[:place] + letter + key[place:]
    if kind == 2:
        return key[:place] + letter + key[place + 1 :]
    return key[:place] + key[place : place + 2][::-1] + key[place + 2 :]


@pytest.mark.faults(19)
def test_four_hundred_typos():
    rng = random.Random(0)
    known = overrides.keys(BASE)
    allowed = [path for path, key in known.items() if key.settable]
    right = wrong = 0
    while right + wrong < 400:
        key = rng.choice(allowed)
        bad = typo(key, rng)
        if bad in known or bad == key:
            continue
        hint = message(f"{bad}=1")
        if f"did you mean {key!r}" in hint:
            right += 1
        else:
            wrong += 1
    assert right / 400 >= 0.95, (right, wrong)


def test_keys_carry_type_value_and_help():
    known = overrides.keys(BASE)
    assert known["optimizer"].value == "jorge"
    assert known["optimizer"].type == "jorge | sgd"
    assert known["model"].group
    assert not known["model"].settable
    assert known["extra"].settable
    assert known["model.blocks"].type == "[[int, ...], ...] | none"
    helped = overrides.keys(ExampleConfig(optimizer=SgdConfig()))
    assert helped["optimizer.momentum"].help == "decay of the buffer."


def test_keys_of_a_base_class_keep_its_help():
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Nesterov(SgdConfig):
        """SGD that looks ahead.

        Attributes:
          ahead: by how many steps.
        """

        ahead: int = 1

    known = overrides.keys(Nesterov())
    assert known["momentum"].help == "decay of the buffer."
    assert known["ahead"].help == "by how many steps."


def test_two_members_of_one_name_are_refused():
    other = dataclasses.make_dataclass("SGD", [("lr", float)])
    with pytest.raises(ConfigError, match="named 'sgd'"):
        values.members(SgdConfig | other)
    tagged = dataclasses.make_dataclass("Tagged", [("type", float)])
    with pytest.raises(ConfigError, match="'type'"):
        values.members(SgdConfig | tagged)


def test_a_type_no_override_can_give():
    sizes = ("sizes", dict[str, int], dataclasses.field(default_factory=dict))
    odd = dataclasses.make_dataclass("Odd", [sizes], frozen=True)
    with pytest.raises(ConfigError, match="sizes must be dict"):
        overrides.parse(odd(), {"sizes": "{}"})


HINTS = st.sampled_from(
    [
        str,
        str | None,
        int | str,
        tuple[str, ...],
        tuple[str | None, ...],
        tuple[tuple[int | str, ...], ...],
        str | tuple[int, ...],
    ]
)
WORDS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["none", "7", "1e3", "[1]", "[", '"', '"a"', "a,b", " a", "[a,b]"]),
)


def of(hint, draw):
    if hint in (tuple[str, ...], tuple[str | None, ...]):
        return tuple(draw(st.lists(WORDS, max_size=3)))
    if hint == tuple[tuple[int | str, ...], ...]:
        inner = st.lists(st.one_of(WORDS, st.integers()), max_size=3).map(tuple)
        return tuple(draw(st.lists(inner, max_size=3)))
    return draw(WORDS)


@pytest.mark.slow
@given(st.data())
def test_what_is_written_reads_back(data):
    hint = data.draw(HINTS)
    value = of(hint, data.draw)
    try:
        text = values.write(value, hint)
    except ConfigError:
        # A str that reads as another member of the union has no text.
        assert hint not in (str, tuple[str, ...])
    else:
        assert values.read(text, hint, "key") == value


@given(st.text(max_size=20))
def test_any_text_is_a_value_or_one_clear_error(text):
    for hint in (int, float, bool, tuple[int, ...] | None):
        with contextlib.suppress(ConfigError):
            value = values.read(text, hint, "key")
            again = values.decode(values.encode(value, hint, "key"), hint, "key")
            assert again == pytest.approx(value, nan_ok=True)


def test_members_that_many_others_have_are_told_once():
    from hpcjax.runs.training import TrainingConfig

    tree = values.encode(TrainingConfig(), TrainingConfig)
    absent = overrides._absent(TrainingConfig, tree, set())
    told = [(key.path, choice) for key, choice in absent]
    assert ("model.gate", "model=ggnn") in told
    assert len(told) < 3 * len(set(told))
