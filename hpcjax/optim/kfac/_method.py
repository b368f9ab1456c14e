"""K-FAC in the training loop: a backward pass that also computes its statistics."""

from typing import Any

import optax

from hpcjax.core import checks
from hpcjax.core.keys import BatchKey
from hpcjax.core.method import DATA_AXIS, Gradients, Optimization, PassResult, StepInput
from hpcjax.core.varying import vary
from hpcjax.optim.differentiation import Differentiated, Forward, Loss
from hpcjax.optim.kfac._blocks import make_taps
from hpcjax.optim.kfac._fisher import differentiate
from hpcjax.optim.kfac._transform import Curvature, statistics_due
from hpcjax.optim.methods import differentiate_pass


def optimization(
    tx: optax.GradientTransformation, curvature: Curvature
) -> Optimization:
    """Returns K-FAC with its backward pass and mesh, for `optim.data_parallel`.

    Args:
      tx: a chain that contains `curvature.scale(...)`.
      curvature: the layers that it observes, and the mesh axes.
    """
    checks.require_has("a kfac.Curvature", ("plan", "axes"), curvature=curvature)
    grid = curvature.distribution

    def mesh_shape(devices: int) -> dict[str, int]:
        if grid is None:
            return {DATA_AXIS: devices}
        return dict(grid.mesh_shape)

    return Optimization(
        tx, gradients_with_statistics(curvature), curvature.axes, mesh_shape
    )


def gradients_with_statistics(curvature: Curvature) -> Gradients:
    """Returns the backward pass that observes the layers of a plan.

    Statistics are computed only in steps whose update uses them, which the optimizer's
    state tells.
    """

    def gradients(one_pass: StepInput, params: Any, state: Any) -> PassResult:
        params = vary(params, one_pass.axes)
        taps = make_taps(
            curvature.plan,
            one_pass.model,
            params,
            one_pass.model_state,
            one_pass.batch["x"],
            active=statistics_due(state),
        )

        def observe(
            forward: Forward, loss: Loss, params: Any, labels: Any, *, key: BatchKey
        ) -> Differentiated:
            fisher = curvature.fisher
            return differentiate(
                forward, loss, params, taps, labels, fisher=fisher, key=key
            )

        result, differentiated = differentiate_pass(one_pass, params, observe)
        observed = {"taps": differentiated.statistics}
        return result._replace(extras=result.extras | observed)

    return gradients
