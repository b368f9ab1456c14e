"""Five analyses of POJ-104's programs learnt by a gated graph network; minutes a run.

For which `pip install 'hpcjax[ir]'`; nothing else is to be downloaded.
Expect: F1 of 0.95 for reachability, common subexpressions and data dependence, and
far less without the edges that decide (`hpcjax table programl/dataflow`).
"""

import dataclasses

from configs.train import programs
from hpcjax.data import ProgramsConfig


def _of(task, steps, **dataset):
    own = ProgramsConfig(task=task, steps=steps, holdout="test", **dataset)
    model = dataclasses.replace(programs.base.model, steps=steps)
    return dataclasses.replace(programs.base, dataset=own, model=model)


def _by_hops(cfg):
    """With small first gradients and open gates, see the page."""
    return dataclasses.replace(
        cfg,
        dataset=dataclasses.replace(cfg.dataset, block=8),
        model=dataclasses.replace(cfg.model, root_rows=0.02),
        optimizer=dataclasses.replace(cfg.optimizer, clip_norm=0.05, b2=0.99),
        train=dataclasses.replace(cfg.train, steps=900, eval_every=900),
    )


base = reachability = _of("reachability", 12)
data_dependence = _by_hops(_of("data_dependence", 12))
liveness = _of("liveness", 6)
subexpressions = _of("subexpressions", 6)
dominance = _of("dominance", 12)
reachability_blind = _of("reachability", 12, edges="no_control")
data_dependence_blind = _by_hops(_of("data_dependence", 12, edges="no_data"))
subexpressions_cdfg = _of("subexpressions", 6, edges="cdfg")
