"""A mean of one network and a spread of another."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from hpcjax.core.dtypes import Policy
from hpcjax.core.keys import Key, derive
from hpcjax.core.model import LOSSES, SEEN, Model, Tap
from hpcjax.models._postprocess import Gaussian, check_inputs
from hpcjax.models.model_config import ModelConfig
from hpcjax.models.modules import FLOAT32
from hpcjax.models.postprocess_config import BIAS, INCEPTION

MEAN, SPREAD, FOLD = "mean", "spread", "fold_"


def mean_and_spread(
    inputs: Any,
    outputs: int,
    *,
    mean: ModelConfig = BIAS,
    spread: ModelConfig = INCEPTION,
    folds: int = 1,
    joint: bool = False,
    axes: tuple[int, int] = (1, 1),
    channels: Sequence[str] = (),
    policy: Policy = FLOAT32,
) -> Model:
    """Returns the model whose μ one model puts out, and σ another; they share nothing.

    With folds the first is there further times, each to learn from other dates: what
    it says of those it has not learnt is in `apart`. Only training asks for it.

    Args:
      inputs: shapes of "members" and "fields" of one example.
      outputs: 2.
      mean: a model of forecasts, of which μ is taken.
      spread: likewise, of which σ is taken.
      folds: parts of the dates, each unknown to one of the further means; 1 for none.
      joint: whether the means are as they are: they and their losses have no gradient,
        statistics of their norms stay, and no optimizer moves them.
      axes: how many leads and levels the channels of "fields" are of.
      channels: their names.
      policy: dtypes of parameters and products.

    Examples:
      >>> from hpcjax.models import EmosConfig, RawConfig
      >>> shapes = {"members": (4, 8, 5, 1), "fields": (4, 8, 5)}
      >>> model = mean_and_spread(shapes, 2, mean=EmosConfig(), spread=RawConfig())
      >>> sorted(model.init(jax.random.key(0))[0])
      ['mean']
    """
    check_inputs(inputs)
    given = {"axes": axes, "channels": channels}
    first = mean.make(inputs, outputs, policy, **given)
    names = [f"{FOLD}{at}" for at in range(folds)] if folds > 1 else []
    networks = {MEAN: first, SPREAD: spread.make(inputs, outputs, policy, **given)}
    networks |= dict.fromkeys(names, first)

    def init(key: jax.Array) -> tuple[Any, Any]:
        drawn = {
            name: model.init(derive(key, name)) for name, model in networks.items()
        }
        params = {name: each for name, (each, _) in drawn.items() if each}
        return params, _join({name: state for name, (_, state) in drawn.items()})

    def apply(
        params: Any,
        state: Any,
        x: Any,
        *,
        train: bool,
        key: Key | None = None,
        taps: Mapping[str, Tap] | None = None,
    ) -> tuple[Any, Any]:
        found, states = {}, {name: _part(state, name) for name in networks}
        for name, model in networks.items():
            if name in names and not train:
                continue
            found[name], states[name] = model.apply(
                params.get(name, {}),
                states[name],
                x,
                train=train and (name == SPREAD or not joint),
                key=None if key is None else derive(key, name),
                taps=_taps_of(taps, name),
            )
        hold = jax.lax.stop_gradient if joint else lambda value: value
        apart = tuple(hold(found[name].mean) for name in names if train)
        mean = hold(found[MEAN].mean)
        return Gaussian(mean, found[SPREAD].std, apart), _join(states)

    layers = tuple(
        each._replace(path=f"{name}/{each.path}")
        for name, model in networks.items()
        for each in model.layers
    )
    drawn = jax.eval_shape(init, jax.random.key(0))[0] if joint else {}
    frozen = tuple(f"^{name}/" for name in drawn if name != SPREAD)
    return Model(init, apply, layers, frozen=frozen)


def _taps_of(taps: Mapping[str, Tap] | None, name: str) -> Mapping[str, Tap] | None:
    if taps is None:
        return None
    start = f"{name}/"
    own = {path: tap for path, tap in taps.items() if path.startswith(start)}
    return {path.removeprefix(start): tap for path, tap in own.items()}


def _join(states: Mapping[str, Any]) -> dict[str, Any]:
    """Returns one state, with the losses of all in one place, and what was seen."""
    rest = {
        name: {key: each for key, each in state.items() if key not in (LOSSES, SEEN)}
        for name, state in states.items()
    }
    losses = {name: state[LOSSES] for name, state in states.items() if LOSSES in state}
    seen = {
        f"{name}/{path}": record
        for name, state in states.items()
        for path, record in state.get(SEEN, {}).items()
    }
    further = {LOSSES: losses, SEEN: seen}
    return {name: each for name, each in (rest | further).items() if each}


def _part(state: Any, name: str) -> dict[str, Any]:
    losses = state.get(LOSSES, {})
    own = {LOSSES: losses[name]} if name in losses else {}
    return {**state.get(name, {}), **own}
