"""Figures that a config declares once, and what `run` must return of them."""

import dataclasses
import io
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pytest
from rich.console import Console

from hpcjax import runs
from hpcjax.core import ConfigError
from hpcjax.core.config import Config, Size
from hpcjax.data import DigitsConfig
from hpcjax.runs import discover, outlines, results, show
from hpcjax.runs.training import TrainingConfig
from hpcjax.sharding import ZeroConfig
from hpcjax.train.config import TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Waves(Config):
    figures: ClassVar[Mapping[str, str]] = {
        "height": "place time: above the mean",
        "rows unique": ": of a batch",
        "drawn": "draw",
    }

    times: Size = 2

    def labels(self) -> "runs.Labels":
        return {"place": ("sea", "bay"), "time": range(self.times), "draw": 3}


VALUES = {"height": np.arange(4.0).reshape(2, 2), "rows": 5, "unique": 2.5}
VALUES |= {"drawn": [1, 2, 3]}


@runs.simulated
def run(cfg: Waves) -> "runs.Figures":
    """Returns heights."""
    assert isinstance(cfg, Waves)
    return VALUES


def test_values_get_dimensions_labels_meanings_and_source():
    made = outlines.explain(Waves(), run(Waves(), None))
    assert made["height"].sel(place="bay", time=1) == 3
    assert made["height"].dims == ("place", "time")
    assert made["height"].attrs["long_name"] == "above the mean"
    assert made["unique"].attrs["long_name"] == "of a batch"
    assert made["unique"] == 2.5
    assert "draw" not in made.coords  # a number of draws, without labels
    assert "long_name" not in made["drawn"].attrs
    assert made.attrs == {"source": "simulated"}
    assert run.__doc__ == "Returns heights."


def test_meanings_are_kept_by_the_file_and_over_seeds(tmp_path):
    made = outlines.explain(Waves(), run(Waves()))
    results.write(made, tmp_path / "r.nc", {})
    back = results.over_seeds(dict.fromkeys((0, 1), results.read(tmp_path / "r.nc")))
    assert back["rows"].attrs["long_name"] == "of a batch"
    assert back["rows"].values.tolist() == [5, 5]


@pytest.mark.parametrize("source", results.SOURCES)
def test_the_three_sources_are_decorators_with_or_without_a_context(source):
    of_source = getattr(runs, source)
    for function in (lambda cfg: VALUES, lambda cfg, ctx: {**VALUES, "rows": ctx}):
        made = of_source(function)(Waves(), 7)
        assert made.attrs["source"] == source
    assert made["rows"] == 7
    assert of_source({"x": 1.0}).attrs["source"] == source


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"rest": 1}, r"Waves declares .*'unique'\]: got others, \['rest'\], and lack"),
        ({"rows": None}, r"got others, \[\], and lack \['rows'\]"),
        ({"height": [1.0, 2.0]}, r"height is of \{'place': 2, 'time': 2\}.*\(2,\)"),
        ({"drawn": 1.0}, r"drawn is of \{'draw': 3\}: got values of shape \(\)"),
    ],
)
def test_what_is_not_as_declared_is_refused(changed, told):
    values: dict[str, Any] = VALUES | changed
    values = {name: value for name, value in values.items() if value is not None}
    with pytest.raises(ConfigError, match=told):
        runs.measured(lambda cfg: values)(Waves())


def test_the_outline_is_what_the_config_declares():
    form = outlines.of_config(Waves(times=4))
    assert form.columns["height"] == "place time"
    assert form.columns["rows"] == form.columns["unique"] == ""
    assert form.differences(run(Waves())) == ["time is [0, 1], not [0, 1, 2, 3]"]
    assert outlines.of_config(Waves()).differences(run(Waves())) == []


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unlabelled(Config):
    figures: ClassVar[Mapping[str, str]] = {"height": "place"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Silent(Config):
    """It declares nothing."""


def test_what_cannot_be_outlined_is_told():
    with pytest.raises(ConfigError, match=r"labels must be given of \['place'\]"):
        outlines.of_config(Unlabelled())
    with pytest.raises(ConfigError, match=r"Silent must declare `figures`"):
        outlines.of_config(Silent())


def test_a_training_has_the_figures_of_its_parts_and_data_set():
    cfg = TrainingConfig(parallel=ZeroConfig(), train=TrainConfig(steps=5))
    form = outlines.of_config(cfg)
    assert form.columns["replicated"] == ""
    assert form.columns["val_error"] == "eval_step"
    assert list(form.labels["step"]) == [1, 2, 3, 4, 5]
    assert form.labels["eval_step"] == [5]
    every = dataclasses.replace(cfg, train=TrainConfig(steps=5, eval_every=2))
    assert outlines.of_config(every).labels["eval_step"] == [2, 4, 5]
    metrics = DigitsConfig.objective.metrics
    assert {f"val_{metric}" for metric in metrics} < set(form.columns)


def test_show_prints_figures_with_their_meanings():
    loaded = discover.Loaded(name="a/b", variant="c", config=Waves(), base=Waves())
    console = Console(file=io.StringIO(), width=200)
    console.print(show.page(None, loaded))
    text = " ".join(console.file.getvalue().split())
    assert "height place time above the mean" in text
    assert "unique of a batch" in text
