"""kfac-jax 0.0.8, asked for curvature and for steps by `experiments.kaisa.peer`.

Runs in the environment that `make .cache/peers/kfac-jax` makes and imports nothing of
hpcjax: it gets a network as a list of layers, and its parameters and a batch as arrays.
"""

import gc
import importlib.metadata
import multiprocessing.connection
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import kfac_jax  # pyrefly: ignore[missing-import]
import numpy as np

Params = dict[str, dict[str, jax.Array]]
Arrays = dict[str, np.ndarray]
NAMES = ("kernel", "bias")


def forward(
    layers: Sequence[Mapping[str, Any]], params: Params, x: jax.Array
) -> jax.Array:
    """Applies convolutions and dense layers, each but the last followed by tanh."""
    for number, layer in enumerate(layers):
        kernel, bias = (params[layer["path"]][name] for name in NAMES)
        if layer["kind"] == "conv":
            x = jax.lax.conv_general_dilated(
                x,
                kernel,
                window_strides=layer["strides"],
                padding=[tuple(pair) for pair in layer["padding"]],
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
        else:
            x = x.reshape(x.shape[0], -1) @ kernel
        x = x + bias
        x = jnp.tanh(x) if number < len(layers) - 1 else x
    return x


class Problem:
    """A network with its parameters and one batch, and kfac-jax's ways with them."""

    def __init__(self, options: Mapping[str, Any], arrays: Mapping[str, np.ndarray]):
        self.options, self.layers = options, options["layers"]
        self.exact_power = options["method"] == "eigen"
        self.batch = (jnp.asarray(arrays["x"]), jnp.asarray(arrays["y"]))
        self.params: Params = {
            layer["path"]: {
                name: jnp.asarray(arrays[f"{layer['path']}/{name}"]) for name in NAMES
            }
            for layer in self.layers
        }
        self.key = jax.random.key(0)
        self.optimizer, self.state, self.count = None, None, 0

    def loss(self, params: Params, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Returns the mean cross-entropy, and tells kfac-jax that it is one."""
        x, y = batch
        logits = forward(self.layers, params, x)
        kfac_jax.register_softmax_cross_entropy_loss(logits, y)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1)
        return -jnp.mean(chosen)

    def curvature(self) -> Arrays:
        """Returns what kfac-jax makes of this batch alone.

        By layer and name: the gradient, the preconditioned gradient; by layer: factors
        `a` and `g` and the `scale` that the block puts before their product.
        """
        estimator = kfac_jax.BlockDiagonalCurvature(
            self.loss, default_estimation_mode=self.options["estimation_mode"]
        )
        arguments, damping = (self.params, self.batch), self.options["damping"]
        state = estimator.init(self.key, arguments, None, None)

        @jax.jit
        def run(state: Any) -> Any:
            state = estimator.update_curvature_matrix_estimate(
                state, 0.0, 1.0, damping, len(self.batch[0]), self.key, arguments
            )
            gradient = jax.grad(self.loss)(*arguments)
            made = estimator.multiply_inverse(
                state, gradient, damping, self.exact_power, False, None
            )
            return state, gradient, made

        state, gradient, made = run(state)
        found = flat("gradient", gradient) | flat("preconditioned", made)
        for path, leaves in estimator.params_block_index.items():
            number = leaves["kernel"]
            a, g = (factor.value for factor in state.blocks_states[number].factors)
            scale = estimator.blocks[number].fixed_scale()
            found |= {f"a/{path}": a, f"g/{path}": g, f"scale/{path}": scale}
        return {name: np.asarray(array) for name, array in found.items()}

    def change(self, count: int) -> Arrays:
        """Returns what the first `count` steps add to the parameters."""
        start = jax.tree.map(np.array, self.params)
        self.steps(count)
        added = jax.tree.map(np.subtract, self.params, start)
        return {name: np.asarray(leaf) for name, leaf in flat("change", added).items()}

    def steps(self, count: int) -> dict[str, Any]:
        """Takes `count` steps from where the last ones ended and waits for them."""
        if self.optimizer is None:
            self.optimizer, self.state = self.start()
        rates = {
            name: jnp.asarray(self.options[name])
            for name in ("learning_rate", "momentum", "damping")
        }
        stats: Any = {}
        began = time.perf_counter()
        for number in range(self.count, self.count + count):
            self.params, self.state, stats = self.optimizer.step(
                self.params,
                self.state,
                self.key,
                batch=self.batch,
                global_step_int=number,
                **rates,
            )
        jax.block_until_ready((self.params, self.state))
        seconds = time.perf_counter() - began
        self.count += count
        return {"seconds": seconds, "loss": float(stats["loss"])}

    def start(self) -> tuple[Any, Any]:
        """Returns the optimizer without its adaptive parts, and its first state."""
        optimizer = kfac_jax.Optimizer(
            jax.value_and_grad(self.loss),
            l2_reg=0.0,
            num_burnin_steps=0,
            estimation_mode=self.options["estimation_mode"],
            curvature_update_period=self.options["factor_update_steps"],
            inverse_update_period=self.options["inv_update_steps"],
            use_exact_inverses=self.exact_power,
        )
        return optimizer, optimizer.init(self.params, self.key, self.batch)


def flat(prefix: str, tree: Params) -> dict[str, jax.Array]:
    """Returns the arrays of parameters' shape as `{"prefix/layer/name": array}`."""
    return {
        f"{prefix}/{path}/{name}": leaves[name]
        for path, leaves in tree.items()
        for name in NAMES
    }


def answer(problems: list[Problem], name: str, given: Sequence[Any]) -> Any:
    """Returns the answer to one request; `problems` holds the newest problem."""
    if name == "versions":
        names = ("kfac-jax", "jax")
        return {name: importlib.metadata.version(name) for name in names}
    if name == "problem":
        problems[:] = [Problem(*given)]
        return None
    (problem,) = problems
    asked = {
        "curvature": problem.curvature,
        "steps": problem.steps,
        "change": problem.change,
    }
    return asked[name](*given)


def main() -> None:
    """Answers requests until the other side closes the connection."""
    connection = multiprocessing.connection.Connection(int(sys.argv[1]))
    gc.disable()  # as our side is timed
    problems: list[Problem] = []
    while True:
        try:
            name, given = connection.recv()
        except EOFError:
            return
        try:
            reply = answer(problems, name, given), ""
        except Exception:
            reply = None, traceback.format_exc()
        connection.send(reply)


if __name__ == "__main__":
    main()
