"""Plans of shared weights: budgets, groups, windows."""

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcjax.compress import sharing
from hpcjax.compress.sharing import Layer, SharingOptions, make_plan
from hpcjax.core.errors import ConfigError

GROUPS = (0, 1, 2, 3, *[4] * 6, 5, 6, 7, *[8] * 6, 9, 10, 11, *[12] * 6, 13)


def wide_resnet():
    """The 29 layers of WRN-28-10, and its 36,461,232 weights."""
    shapes, inputs = [(16, 3, 3, 3)], 16
    for width in (160, 320, 640):
        for block in range(4):
            shapes += [(width, inputs, 3, 3), (width, width, 3, 3)]
            if not block:
                shapes.append((width, inputs, 1, 1))
            inputs = width
    shapes.append((10, 640))
    return [Layer(f"layer_{i}", shape) for i, shape in enumerate(shapes)]


WRN = wide_resnet()
WHOLE = sum(layer.size for layer in WRN)


def sizes(plan):
    return dict(plan.stores)


@pytest.mark.acceptance("ssn", 2)
def test_budgets_of_the_manual_groups():
    assert (len(WRN), WHOLE) == (29, 36_461_232)
    half = make_plan(WRN, GROUPS, WHOLE // 2)
    assert sizes(half) == {4: 514_275, 8: 2_057_102, 12: 8_228_407}
    quarter = make_plan(WRN, GROUPS, WHOLE // 4)
    assert sizes(quarter) == {4: 80_213, 8: 320_853, 12: 1_283_410}
    for tenths in (1, 2):
        with pytest.raises(ConfigError, match=r"7,43\d,\d{3} are kernels"):
            make_plan(WRN, GROUPS, WHOLE * tenths // 10)


@pytest.mark.parametrize("upsample", ["inter", "repeat", "mask", "wavg", "none"])
def test_the_least_budget_of_the_message_is_enough_and_one_less_is_not(upsample):
    options = SharingOptions(upsample=upsample)
    with pytest.raises(ConfigError) as error:
        make_plan(WRN, GROUPS, 1, options)
    least = int(str(error.value).split()[6].rstrip(",").replace(",", ""))
    assert make_plan(WRN, GROUPS, least, options).weights == least
    with pytest.raises(ConfigError):
        make_plan(WRN, GROUPS, least - 1, options)


@given(
    groups=st.lists(st.integers(0, 3), min_size=2, max_size=8),
    budget=st.integers(200, 900),
)
@settings(max_examples=50)
def test_stores_and_own_kernels_add_up_to_the_budget(groups, budget):
    layers = [Layer(str(i), (2 + i, 3)) for i in range(len(groups))]
    options = SharingOptions(upsample="repeat")
    plan = make_plan(layers, groups, budget, options)
    alone = [i for i, group in enumerate(groups) if groups.count(group) == 1]
    own = sum(layers[i].size for i in alone)
    assert {i for i, w in enumerate(plan.windows) if w.kind == "own"} == set(alone)
    if len(alone) < len(groups):
        assert sum(sizes(plan).values()) == budget - own
        assert plan.weights == budget
        shares = dict.fromkeys(sizes(plan), 0)
        for layer, group in zip(layers, groups, strict=True):
            if group in shares:
                shares[group] += layer.size
        for group, numbers in sizes(plan).items():
            exact = (budget - own) * shares[group] / sum(shares.values())
            assert abs(numbers - exact) < 1


@pytest.mark.acceptance("ssn", 8)
def test_a_new_size_begins_behind_others_or_where_the_store_begins():
    layers = [Layer(str(size), (size, 1)) for size in (40, 60, 30)]
    options = SharingOptions(templates=1)
    plan = make_plan(layers, (0, 0, 0), 100, options)
    # Behind 40 there is no second window of 60; behind that one, a third of 30.
    assert [window.start for window in plan.windows] == [0, 0, 60]


def test_aligned_windows_leave_what_a_count_by_hand_leaves():
    two = [Layer("a", (60, 1)), Layer("b", (60, 1))]
    assert sharing.report(make_plan(two, (0, 0), 100)).unused == {0: 0.4}
    for budget in (WHOLE // 10, WHOLE // 2, WHOLE, 2 * WHOLE):
        plan = make_plan(WRN, (0,) * 29, budget)
        used = np.zeros(budget, bool)
        for layer, window in plan:
            if window.kind == "templates":
                size = window.templates * layer.size
                assert 0 <= window.start <= window.start + size <= budget
                assert window.start % size == 0
                used[window.start : window.start + size] = True
            else:
                used[: math.prod(window.reduced)] = True
        unused = sharing.report(plan).unused[0]
        assert unused == pytest.approx(1 - used.mean(), abs=1e-5)


@pytest.mark.acceptance("ssn", 8)
@given(
    rows=st.lists(st.integers(1, 9), min_size=2, max_size=9), budget=st.integers(9, 60)
)
@settings(max_examples=50)
def test_circular_windows_use_all_numbers_equally(rows, budget):
    layers = [Layer(str(i), (n, 1)) for i, n in enumerate(rows)]
    options = SharingOptions(placement="circular")
    plan = make_plan(layers, (0,) * len(rows), budget, options)
    counts = np.zeros(budget, int)
    for layer, window in plan:
        assert window.kind == "templates"
        for step in range(window.templates * layer.size):
            counts[(window.start + step) % budget] += 1
    assert counts.max() - counts.min() <= 1
    if sum(w.templates * x.size for x, w in plan) >= budget:
        assert sharing.report(plan).unused == {0: 0.0}


def test_layers_of_one_shape_lie_side_by_side_from_the_commonest_on():
    shapes = [(4, 5), (3, 3), (3, 3), (3, 3)]
    layers = [Layer(str(i), shape) for i, shape in enumerate(shapes)]
    plan = make_plan(layers, (0,) * 4, 27, SharingOptions(templates=1))
    # Three windows of 9 fill the store; the 20 numbers would begin at 20: they do at 0.
    assert [window.start for window in plan.windows] == [0, 0, 9, 18]


@pytest.mark.acceptance("ssn", 8)
def test_a_plan_is_the_same_in_another_process():
    code = (
        "from tests.compress.sharing.test_plan import WRN, WHOLE, GROUPS, make_plan\n"
        "print(make_plan(WRN, GROUPS, WHOLE // 2).digest)"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    plan = make_plan(WRN, GROUPS, WHOLE // 2)
    assert other.stdout.strip() == plan.digest
    assert hash(plan) == hash(make_plan(WRN, GROUPS, WHOLE // 2))
    assert plan.digest != make_plan(WRN, GROUPS, WHOLE // 2 + 1).digest


def test_groups():
    layers = [Layer("a", (2, 3)), Layer("b", (3, 2)), Layer("c", (2, 3))]
    assert sharing.group_all(layers) == (0, 0, 0)
    assert sharing.group_alone(layers) == (0, 1, 2)
    assert sharing.group_by_shape(layers) == (0, 1, 0)
    for seed in range(20):
        assert set(sharing.group_at_random(layers * 2, 4, seed)) == set(range(4))
    drawn = {sharing.group_at_random(layers * 2, 2, seed) for seed in range(20)}
    assert len(drawn) > 5


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: make_plan([], (), 10), "at least one layer"),
        (lambda: make_plan(WRN, (0, 1), WHOLE), "each of the 29 layers"),
        (lambda: make_plan(WRN, (0,) * 29, -5), "at least"),
        (lambda: sharing.group_at_random(WRN, 30, 0), "number of layers, 29"),
        (
            lambda: make_plan(WRN, (0,) * 29, 10**6, SharingOptions(upsample="none")),
            "at least 3,686,400",
        ),
        (
            lambda: make_plan(
                [Layer("a", (1, 2)), Layer("b", (1, 9))],
                (0, 0),
                9,
                SharingOptions(combine="emb"),
            ),
            "only a has 4",
        ),
        (lambda: sharing.plan_candidates(WRN, 64), "too small for candidates"),
        (lambda: sharing.plan_candidates(WRN[:1], 640), "two layers"),
        (
            lambda: sharing.plan_candidates(WRN, 64, SharingOptions(combine="avg")),
            "combine",
        ),
    ],
)
def test_impossible_plans_are_refused(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


@pytest.mark.parametrize("budget", [20.5, "20"])
def test_a_budget_is_a_whole_number(budget):
    layers = [sharing.Layer("a", (4, 8)), sharing.Layer("b", (4, 8))]
    with pytest.raises(ConfigError, match="budget must be a whole number"):
        sharing.make_plan(layers, (0, 0), budget)
