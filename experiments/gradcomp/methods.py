"""The methods that are compared, by their labels in tables and calibrations."""

from collections.abc import Mapping

from hpcjax import collectives
from hpcjax.collectives import ExchangeConfig
from hpcjax.cost import Dense, Exchanged, PricedExchange

HALF = Dense(value_bytes=2)
RANKS, DENSITIES = (4, 8, 16), (0.001, 0.01, 0.1)


def _configs() -> Mapping[str, ExchangeConfig]:
    powers = {f"PowerSGD r={r}": collectives.PowerSgdConfig(rank=r) for r in RANKS}
    sampled = {
        f"MSTop-k {100 * share:g}%": collectives.MsTopKConfig(density=share)
        for share in DENSITIES
    }
    exact = {
        f"Top-k {100 * share:g}%": collectives.TopKConfig(density=share)
        for share in DENSITIES
    }
    return powers | sampled | exact | {"signSGD": collectives.SignConfig()}


CONFIGS = _configs()
METHODS: Mapping[str, PricedExchange] = {
    label: Exchanged(name=label, exchange=config) for label, config in CONFIGS.items()
} | {HALF.label: HALF}
