"""What a finished run has learnt of forecasts, applied to other ones."""

import dataclasses
import functools
import math
import pathlib
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcjax.core import checks
from hpcjax.runs import directory, discover, training

if TYPE_CHECKING:
    import xarray as xr

    from hpcjax import train

_AXES = {
    "time": {"standard_name": "forecast_reference_time"},
    "lead_time": {"standard_name": "forecast_period"},
    "level": {"standard_name": "air_pressure", "units": "hPa"},
    "latitude": {"standard_name": "latitude", "units": "degrees_north"},
    "longitude": {"standard_name": "longitude", "units": "degrees_east"},
}
_METHODS = {"mean": "realization: mean", "std": "realization: standard_deviation"}


@dataclasses.dataclass(frozen=True, eq=False)
class Trained:
    """A model of forecasts as a run has left it; see `load_trained`.

    Attributes:
      id: of the run.
      task: of its data set, by whose training dates forecasts are standardised.
      params: of one model, the workers' mean.
      model_state: its statistics.
      rows: dates that are predicted at once.
    """

    id: str
    task: "train.Task"
    params: Any
    model_state: Any
    rows: int

    def predict(
        self, forecasts: "xr.Dataset", analyses: "xr.Dataset | None" = None
    ) -> "xr.Dataset":
        """Returns the predicted distribution of the target, of forecasts to come.

        Args:
          forecasts: with canonical names, as from `data.open_fields`; of the variables,
            leads, levels and places of the data set that was learnt, and of its first
            members.
          analyses: the truth when they start, where the run has it for an input.

        Returns:
          `mean` and `std` [time, latitude, longitude] in the target's unit, with
          attributes by CF; NaN where a member is. `data.to_weatherbench` gives them
          WeatherBench's names, and `metrics.case_study` scores them.

        Raises:
          DataFormatError: forecasts lack something, or are of other units or places.
        """
        source: Any = self.task.dataset.train
        reader = source.reader.open_others(forecasts, analyses)
        dates = np.arange(reader.members.sizes["time"])
        found = []
        for piece in np.array_split(dates, math.ceil(len(dates) / self.rows)):
            x, valid = source.describe(reader, piece)
            y = self._apply(self.params, self.model_state, x)
            both = np.stack([y.mean, y.std]).astype(np.float64)
            found.append(np.where(valid, both, np.nan))
        level, unit = source.statistics.level[0], source.statistics.unit[0]
        mean, std = np.concatenate(found, axis=1) * unit
        return _label(self.id, reader, {"mean": mean + level, "std": std})

    @functools.cached_property
    def _apply(self) -> Any:
        import jax

        model = self.task.model
        return jax.jit(lambda p, state, x: model.apply(p, state, x, train=False)[0])


def _label(run: str, reader: Any, values: dict[str, np.ndarray]) -> "xr.Dataset":
    """Returns a prediction with what CF says of it."""
    import xarray as xr

    from hpcjax.data import weather

    like = next(iter(reader.members.values()))
    name = str(like.name)
    _, standard, _ = weather.VARIABLES.get(name, ("", "", ""))
    known = {"standard_name": standard, "units": like.attrs.get("units", "")}
    named = {"short_name": name} | {key: each for key, each in known.items() if each}
    dims = ("time", "latitude", "longitude")
    coords = {
        each: (like[each].dims, like[each].to_numpy(), _AXES[each])
        for each in (*dims, "level")
        if each in like.coords
    }
    if reader.lead is not None:
        lead = reader.lead.astype("timedelta64[ns]")
        coords["lead_time"] = ((), lead, _AXES["lead_time"])
    fields = {
        key: (dims, each, named | {"cell_methods": _METHODS[key]})
        for key, each in values.items()
    }
    facts = {"Conventions": "CF-1.11", "title": f"{name}, post-processed"}
    return xr.Dataset(fields, coords, facts | {"source": f"hpcjax run {run}"})


def load_trained(run: str, *, root: pathlib.Path | None = None) -> Trained:
    """Returns what a finished run of `runs.training` has learnt of forecasts.

    Its data set is opened again, for statistics of training dates; checkpoints are
    verified. The model of a run on several devices is whole here.

    Args:
      run: id of the run.
      root: folder that holds `runs/`; default the working directory.

    Raises:
      ConfigError: no such run, it has not finished, is of other data, or its
        checkpoints are gone.
      CheckpointCorrupt: they cannot be verified.
      DataMissing: its data set is not here.
    """
    from hpcjax import train
    from hpcjax.core import per_device

    root = root or pathlib.Path.cwd()
    folder = directory.open_run(root, run)
    rule = "a run must have finished before its model is loaded"
    checks.require(folder.status == "done", rule, run=folder.id, is_now=folder.standing)
    cfg: Any = discover.load(str(folder.path / "config.json"), {}, root).config
    asked = getattr(getattr(cfg, "dataset", None), "objective", None)
    good = isinstance(cfg, training.TrainingConfig)
    rule = "a run must be a training on forecasts with members, in one process"
    good = good and getattr(asked, "name", "") == "postprocessing"
    good = good and cfg.processes == 1
    checks.require(good, rule, run=folder.id, config=type(cfg).__name__)
    whole = dataclasses.replace(cfg, parallel=None, codec=None)
    task = training.task(whole, directory.data_root(root))
    mesh = task.mesh(1)
    with train.Checkpoints(folder.path / "checkpoints", keep=cfg.train.keep) as kept:
        state = kept.restore(train.state_shapes(task, mesh), mesh=mesh).state
    params = per_device.average_outside(state.params)
    return Trained(folder.id, task, params, state.model_state, cfg.train.batch_size)
