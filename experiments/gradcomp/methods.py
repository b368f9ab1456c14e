"""The methods that are compared: what each sends, and what computes it."""

from collections.abc import Mapping

from hpcjax import collectives
from hpcjax.collectives.config import ExchangeConfig
from hpcjax.perf.exchange_methods import (
    Dense,
    Method,
    MsTopK,
    PowerSgd,
    SignSgd,
    TopK,
)

HALF = Dense(value_bytes=2)
RANKS, DENSITIES = (4, 8, 16), (0.001, 0.01, 0.1)


def _all() -> list[tuple[Method, ExchangeConfig]]:
    pairs: list[tuple[Method, ExchangeConfig]] = []
    for rank in RANKS:
        pairs.append((PowerSgd(rank=rank), collectives.PowerSgdConfig(rank=rank)))
    for share in DENSITIES:
        config = collectives.MsTopKConfig(density=share)
        pairs.append((MsTopK(density=share), config))
    for share in DENSITIES:
        config = collectives.TopKConfig(density=share)
        pairs.append((TopK(density=share), config))
    pairs.append((SignSgd(), collectives.SignConfig()))
    return pairs


CONFIGS: Mapping[str, ExchangeConfig] = {m.label: config for m, config in _all()}
METHODS: Mapping[str, Method] = {m.label: m for m, _ in _all()} | {HALF.label: HALF}
