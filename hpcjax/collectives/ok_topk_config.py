"""Config of Ok-Topk; importing this module imports no JAX."""

import dataclasses
import math
from typing import Annotated, ClassVar, Literal

from hpcjax.collectives.exchange_config import SparseConfig
from hpcjax.core import checks
from hpcjax.core.config import AtLeast, Size


def _is_correction(name: str, value: tuple[float, float, float, float]) -> None:
    low, high, down, up = value
    good = all(map(math.isfinite, value))
    good = good and 0 <= low <= 1 <= high and min(down, up) >= 1
    rule = f"{name} must be (low, high, down, up), low <= 1 <= high, factors >= 1"
    checks.require(good, rule, **{name: value})


Correction = Annotated[tuple[float, float, float, float], _is_correction]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OkTopkConfig(SparseConfig):
    """Ok-Topk: members add up regions of the vector, and share about k largest sums.

    Every member selects about k entries of largest magnitude and sends each to the
    member that owns its region. Owners add up their entries. All members together
    select about k of the sums, and gather these survivors. Entries that were not sent
    or whose sums did not survive stay in the residual.

    Attributes:
      tau: every tau steps, new regions are chosen such that owners receive equally
        many entries.
      tau_prime: every tau_prime steps, thresholds are exact; in between, they are
        corrected by about a percent per step.
      capacity_factor: size of buffers relative to k. A threshold that would select more
        than capacity_factor · k or fewer than k / capacity_factor entries is replaced
        by an exact one, since corrections are too small if gradients change fast.
      balance: whether survivors are redistributed evenly before the gather; "auto"
        where it is needed. On devices, "never" gathers whole buffers, far more words.
      global_threshold: how the k-th largest sum is found: from 31 counts ("bisect");
        from four histograms ("histogram"), for links of high latency; or by gathering
        all sums ("gather"), as in the released code, with no bound on the words.
      repartition: how regions are chosen: by the mean of the members' cuts, by counts
        of all members' entries ("pooled"), or with equal lengths ("even").
      strict_volume: never selects more than k entries, locally or jointly, so that
        every step sends less than 6 k words.
      local_correction: (low, high, down, up); with fewer than low · k selected entries
        the local threshold is divided by down, with more than high · k multiplied by
        up.
      joint_correction: likewise for the joint threshold.

    References:
      Li and Hoefler, Near-Optimal Sparse Allreduce for Distributed Deep Learning, PPoPP
      2022.
    """

    factory: ClassVar[str] = "hpcjax.collectives.ok_topk:OkTopk"

    tau: Size = 64
    tau_prime: Size = 32
    capacity_factor: Annotated[float, AtLeast(1.0)] = 1.34
    balance: Literal["auto", "always", "never"] = "auto"
    global_threshold: Literal["bisect", "histogram", "gather"] = "bisect"
    repartition: Literal["mean", "pooled", "even"] = "mean"
    strict_volume: bool = False
    local_correction: Correction = (2 / 3, 5 / 4, 1.012, 1.012)
    joint_correction: Correction = (2 / 3, 4 / 3, 1.008, 1.008)
