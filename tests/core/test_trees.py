"""Paths, rules, dtypes, frozen dataclasses, and keys by name."""

import dataclasses
import re
import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from hpcjax.core import dtypes, errors, keys, structs, trees
from hpcjax.core.errors import ConfigError
from hpcjax.core.patterns import check_patterns


class Pair(NamedTuple):
    left: Any
    right: Any


@structs.pytree
class Node:
    value: Any
    name: str = structs.static(default="n")


TREE = {"a": Pair(1, [2, {"b": 3}]), "n": Node(value=(4, 5)), "none": None}


def test_paths_name_every_kind_of_node():
    assert trees.flatten(TREE) == {
        "a/left": 1,
        "a/right/0": 2,
        "a/right/1/b": 3,
        "n/value/0": 4,
        "n/value/1": 5,
    }
    doubled = {path: 2 * leaf for path, leaf in trees.flatten(TREE).items()}
    assert trees.unflatten(TREE, doubled) == jax.tree.map(lambda x: 2 * x, TREE)


names = st.text("abc", min_size=1, max_size=3)
nested = st.recursive(
    st.integers(),
    lambda inner: (
        st.dictionaries(names, inner, max_size=3) | st.lists(inner, max_size=3)
    ),
    max_leaves=8,
)


@given(nested)
def test_flatten_and_unflatten_are_inverse(tree):
    assert trees.unflatten(tree, trees.flatten(tree)) == tree


def test_other_paths_are_listed():
    with pytest.raises(KeyError, match=r"missing \['b'\], not in the tree \['c'\]"):
        trees.unflatten({"a": 1, "b": 2}, {"a": 1, "c": 2})


@given(st.lists(names, unique=True), st.lists(st.sampled_from(["a", "^b", "c$", "."])))
def test_rules_choose_the_first_match_or_say_why_not(paths, patterns):
    rules = [(pattern, number) for number, pattern in enumerate(patterns)]
    idle = [p for p in patterns if not any(re.search(p, path) for path in paths)]
    matches = {path: [n for p, n in rules if re.search(p, path)] for path in paths}
    if idle:
        with pytest.raises(ConfigError, match="rules that match no"):
            trees.choose(rules, paths)
    elif not all(matches.values()):
        with pytest.raises(ConfigError, match="matched by no rule"):
            trees.choose(rules, paths)
    else:
        wanted = {path: found[0] for path, found in matches.items()}
        assert trees.choose(rules, paths) == wanted


BAD_PATTERNS = {
    "(": "missing )",
    "*a": "nothing to repeat",
    "a{99999999999}": "the repetition number is too large",
}


@pytest.mark.parametrize("pattern", BAD_PATTERNS)
def test_rules_that_are_no_regexes_are_refused(pattern):
    words = re.escape(f"got {pattern!r}: {BAD_PATTERNS[pattern]}")
    # Refused even if an earlier rule takes all, or there is nothing to match.
    for paths in (["a"], []):
        with pytest.raises(ConfigError, match="rules must hold.*" + words):
            trees.choose([(".*", 0), (pattern, 1)], paths)


def test_one_string_is_not_taken_for_a_list_of_regexes():
    check_patterns("stacked", ["^a", "b$"])
    with pytest.raises(ConfigError, match=r"stacked must be a list.*got '\^a'"):
        check_patterns("stacked", "^a")


def test_rules_give_trees_and_sizes_count():
    params = {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3, jnp.bfloat16)}}
    chosen = trees.choose_tree([("bias", 0.0), (".*", 0.1)], params)
    assert chosen == {"dense": {"kernel": 0.1, "bias": 0.0}}
    assert trees.num_params(params) == 9
    assert trees.num_bytes(jax.eval_shape(lambda: params)) == 2 * 3 * 4 + 3 * 2


def test_pytrees_are_frozen_and_keep_static_fields():
    node = Node(value=jnp.ones(2), name="other")
    assert jax.tree.map(lambda x: x + 1, node).name == "other"
    assert jax.tree.structure(node) != jax.tree.structure(Node(value=jnp.ones(2)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        node.name = "x"


def test_policies_hold_floating_dtypes():
    with pytest.raises(
        ValueError, match="compute must be a floating dtype: got 'int8'"
    ):
        dtypes.Policy(compute="int8")


def test_keys_differ_by_name_and_step_and_are_the_same_everywhere():
    key = jax.random.key(7)
    made = [keys.derive(key, name, step) for name in "ab" for step in (None, 0, 1)]
    assert len({jax.random.key_data(k).tobytes() for k in made}) == 6
    traced = jax.jit(lambda k, step: keys.derive(k, "a", step))(key, 1)
    assert traced == keys.derive(key, "a", 1)
    again = jax.random.fold_in(jax.random.fold_in(key, zlib.crc32(b"a")), 1)
    assert traced == again


def test_errors_have_the_documented_exit_codes():
    codes = {
        "ConfigError": 2,
        "DataMissing": 3,
        "DataFormatError": 3,
        "Diverged": 4,
        "CheckpointCorrupt": 5,
        "DiskFull": 6,
        "RunBusy": 2,
        "Preempted": 75,
    }
    for name, code in codes.items():
        error = getattr(errors, name)
        assert error.exit_code == code
        assert issubclass(error, errors.HpcjaxError)
    assert errors.nearest("zzz", ["b", "a"]) == "; allowed: a, b"
    assert errors.nearest("zzz", []) == ""


def test_boxes_of_flax_have_the_paths_of_plain_trees():
    plain = {"dense": {"kernel": jnp.ones((2, 3)), "bias": jnp.zeros(3)}, "scale": 2.0}
    variables = nnx.State(jax.tree.map(nnx.Param, plain))
    boxed = jax.tree.map(lambda leaf: nn.Partitioned(leaf, (None,)), plain)
    for tree in (variables, boxed, {"dense": nnx.state(nnx.Dict(plain["dense"]))}):
        found = trees.flatten(tree)
        assert set(found) <= set(trees.flatten(plain))
        assert found["dense/kernel"].shape == (2, 3)
        back = trees.unflatten(tree, found)
        assert jax.tree.structure(back) == jax.tree.structure(tree)
    # Not entered where the caller says so.
    whole = trees.flatten(variables, lambda node: isinstance(node, nnx.Variable))
    assert isinstance(whole["scale"], nnx.Param)


def test_rules_may_be_for_what_is_masked_out():
    tree = {"bias": optax.MaskedNode(), "kernel": 3, "norm": optax.MaskedNode()}
    assert trees.paths(tree) == ["bias", "kernel", "norm"]
    assert list(trees.flatten(tree)) == ["kernel"]
    chosen = trees.choose_tree([("bias", 0.0), ("kernel", 0.1)], tree)
    assert chosen == {**tree, "kernel": 0.1}
    with pytest.raises(ConfigError, match=r"match no parameter: \['table'\]"):
        trees.choose_tree([("table", 0.0), (".*", 0.1)], tree)
    with pytest.raises(ConfigError, match=r"matched by no rule: \['kernel'\]"):
        trees.choose_tree([("bias", 0.0)], tree)
