import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium")


@app.cell
def _():
    import marimo as mo

    mo.md("""
    # An optimizer of your own

    Three steps: write it as a transform, let the **contract** of `tests/optim` test it,
    and train with it. The example is *Lion* (Chen et al., *Symbolic Discovery of
    Optimization Algorithms*, arXiv 2302.06675): the sign of an average of momentum and
    gradient,

    $$u = \\mathrm{sign}(\\beta_1 m + (1-\\beta_1) g), \\qquad
    m \\leftarrow \\beta_2 m + (1-\\beta_2) g, \\qquad
    \\theta \\leftarrow \\theta - \\eta\\,(u + \\lambda\\theta).$$
    """)
    return (mo,)


@app.cell
def _():
    import os

    # Before JAX starts: devices for the part of the contract that needs several.
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

    from typing import Any, NamedTuple

    import jax
    import jax.numpy as jnp
    import optax

    from hpcjax import data, models, optim, sharding, train

    return (
        Any,
        NamedTuple,
        data,
        jax,
        jnp,
        models,
        optax,
        optim,
        sharding,
        train,
    )


@app.cell
def _(mo):
    mo.md("""
    ## 1. The transform

    A transform gives updates without a learning rate. Its state is a pytree; a
    `NamedTuple` gives the parts names.
    """)
    return


@app.cell
def _(Any, NamedTuple, jax, jnp, optax):
    class LionState(NamedTuple):
        momentum: Any

    def scale_by_lion(b1=0.9, b2=0.99):
        def init(params):
            return LionState(jax.tree.map(jnp.zeros_like, params))

        def update(updates, state, params=None):
            del params

            def mix(share):
                return jax.tree.map(
                    lambda m, g: share * m + (1 - share) * g, state.momentum, updates
                )

            return jax.tree.map(jnp.sign, mix(b1)), LionState(mix(b2))

        return optax.GradientTransformation(init, update)

    return (scale_by_lion,)


@app.cell
def _(mo):
    mo.md("""
    ## 2. The contract

    What every transform must do to work in the training loop, on one device or many,
    and with the rest of optax: no second compilation, the same under `jit` and
    `shard_map`, dtypes kept, finite for gradients of 0 and of 1e20, and so on.
    `optim.check_contract` makes all checks and names the first that fails.
    """)
    return


@app.cell
def _(mo, optim, scale_by_lion):
    try:
        optim.check_contract(scale_by_lion())
        found = "nothing"
    except AssertionError as error:
        found = f"{error} ({error.__notes__[0]})"
    print("first attempt:", found)
    mo.md(f"It finds: **{found}**.")
    return


@app.cell
def _(mo):
    mo.md("""
    Integers cannot be trained, and a user wants to hear of it before the first step.
    `optim.in_full_precision` sees to that. It also keeps the momentum in float32 where
    parameters are bfloat16: an average of (1 - 0.99) g would vanish in the rounding.

    The rest is a chain: weight decay behind the sign, and the rate.
    """)
    return


@app.cell
def _(optax, optim, scale_by_lion):
    def lion(learning_rate, b1=0.9, b2=0.99, weight_decay=0.0):
        return optim.in_full_precision(
            optax.chain(
                scale_by_lion(b1, b2),
                optim.add_weight_decay(weight_decay),
                optax.scale_by_learning_rate(learning_rate),
            )
        )

    return (lion,)


@app.cell
def _(jax, lion, mo, optim):
    checks = optim.check_contract(lion(1e-3, weight_decay=0.1))
    print(f"{len(checks)} checks hold on {jax.device_count()} devices:", *checks)
    mo.md("All hold: " + ", ".join(f"`{check}`" for check in checks) + ".")
    return


@app.cell
def _(mo):
    mo.md("""
    ### Keeping it tested

    In a checkout, a line in `tests/optim/registry.py` puts it under the suite:
    `pytest tests/optim -k lion`. An optimizer of a package of your own needs no line
    there: call `optim.check_contract`, as in the cell above, in a test of yours.

    A dataclass with the factory's fields and `make(steps)` brings it to the command
    line: name it in the union of an experiment's config, and
    `hpcjax run mine/digits optimizer=lion optimizer.lr=3e-4` works, with `sweep`,
    tables and reports.

    ## 3. Training with it

    In the loop that every system here uses.
    """)
    return


@app.cell
def _(data, jax, lion, models, optim, sharding, train):
    class Kept(list):
        """A recorder that keeps the records."""

        def write(self, record):
            self.append(dict(record))

        def rewind(self, step):
            del step
            return 0.0

    def validation_errors(tx):
        digits = data.DigitsConfig().load()
        model = models.mlp(digits.inputs, digits.outputs, widths=(64,))
        records = Kept()
        train.fit(
            train.supervised(model, tx, digits),
            train.TrainConfig(steps=120, batch_size=64, eval_every=30),
            seed=0,
            mesh=sharding.data_mesh(min(2, jax.device_count())),
            recorder=records,
        )
        return [record["val_error"] for record in records if "val_error" in record]

    errors = {
        "lion": validation_errors(lion(3e-3, weight_decay=0.01)),
        "sgd": validation_errors(optim.sgd(0.1)),
    }
    for _name, _values in errors.items():
        print(f"{_name:5} validation error:", *(f"{value:.3f}" for value in _values))
    return (errors,)


@app.cell
def _(errors, mo):
    mo.md(
        "| | " + " | ".join(f"step {step}" for step in (30, 60, 90, 120)) + " |\n"
        "| --- | --- | --- | --- | --- |\n"
        + "\n".join(
            f"| {name} | " + " | ".join(f"{value:.3f}" for value in values) + " |"
            for name, values in errors.items()
        )
    )
    return


@app.cell
def _(mo):
    mo.md("""
    Both were trained on two devices, where there are as many. One seed and two untuned
    rates say nothing about which is better: that is what `hpcjax sweep` and a table are
    for.
    """)
    return


if __name__ == "__main__":
    app.run()
