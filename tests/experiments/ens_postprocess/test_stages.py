"""The three stages, trained on the circle as its table does, by one seed."""

import pytest

from hpcjax import runs


@pytest.mark.slow
@pytest.mark.acceptance("ens-postprocess", 8)
def test_five_members_corrected_in_stages_are_better_than_ten(tmp_path):
    """And than EMOS of each point, with a spread that fits the errors."""

    def score(variant, *, after=None, **given):
        made = runs.run(
            f"ens_postprocess/circle:{variant}",
            {f"dataset.{name}": value for name, value in given.items()},
            root=tmp_path,
            resume=after,
            fork=after is not None,
            quiet=True,
        )
        last = made.dataset.isel(eval_step=-1)
        names = ("crps", "square", "variance", "inside")
        found = {name: float(last[f"val_{name}"]) for name in names}
        found["ratio"] = (found["variance"] / found["square"]) ** 0.5
        return made.id, found

    _, five = score("raw")
    _, ten = score("raw", members="10")
    _, point = score("emos_point")
    before, staged = score("staged")
    _, joint = score("joint", after=before)
    assert five["ratio"] < 0.7
    # Nothing but the spread has changed.
    assert joint["square"] == pytest.approx(staged["square"], rel=1e-6)
    assert joint["square"] <= 0.85**2 * five["square"]
    assert joint["crps"] <= min(0.7 * ten["crps"], 0.85 * point["crps"])
    assert joint["crps"] < 0.95 * staged["crps"]
    assert 0.9 <= joint["ratio"] <= 1.2
    assert joint["inside"] == pytest.approx(0.8, abs=0.06)
