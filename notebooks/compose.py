import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium")


@app.cell
def _():
    import marimo as mo

    mo.md("""
    # A transform in a training loop of your own

    Every optimizer here is an [optax](https://optax.readthedocs.io) transform: two pure
    functions, `init(params)` and `update(gradients, state, params)`. Nothing else of
    hpcjax is needed to use one. This page trains a small network on handwritten digits
    in plain JAX, with a direction from **Jorge** and a step length from SGD.
    """)
    return (mo,)


@app.cell
def _():
    import jax
    import jax.numpy as jnp
    import matplotlib.pyplot as plt
    import numpy as np
    import optax

    from hpcjax import data, models, optim

    return data, jax, jnp, models, np, optax, optim, plt


@app.cell
def _(mo):
    mo.md("""
    ## Data and model

    A data set has sources that are read by index; here they fit into memory, so each is
    gathered once. A model is a pair of pure functions as well.
    """)
    return


@app.cell
def _(data, jax, models, np):
    digits = data.DigitsConfig().load()
    images, held_out = (
        part.gather(np.arange(len(part))) for part in (digits.train, digits.validation)
    )
    model = models.mlp(digits.inputs, digits.outputs, widths=(64,))
    start, _ = model.init(jax.random.key(0))
    print(
        len(digits.train), "images to learn from,", len(digits.validation), "held out"
    )
    return held_out, images, model, start


@app.cell
def _(mo):
    mo.md("""
    ## The chain

    `optim.graft(direction, magnitude)` asks two transforms about the same gradients
    and, for each parameter, steps along the first as far as the second would have gone.
    `scale_by_jorge` gives preconditioned directions without ever inverting a matrix;
    `scale_by_momentum` is SGD's heavy ball. The learning rate comes last, as always in
    optax, and any other transform of optax may stand in between.

    Within `shard_map` the chain would begin with `optim.all_reduce_mean("data")`.
    """)
    return


@app.cell
def _(optax, optim):
    RATE = 0.05
    transforms = {
        "SGD": optax.chain(
            optim.scale_by_momentum(0.9),
            optax.scale_by_learning_rate(RATE),
        ),
        "Jorge, grafted": optax.chain(
            optim.graft(
                optim.scale_by_jorge(update_every=5, init="grad"),
                optim.scale_by_momentum(0.9),
            ),
            optax.scale_by_learning_rate(RATE),
        ),
    }
    return (transforms,)


@app.cell
def _(mo):
    mo.md("""
    ## The loop

    `update` is called inside `jit` like any other function, and the state is a pytree.
    """)
    return


@app.cell
def _(held_out, images, jax, jnp, model, np, optax, optim, start):
    def loss(params, x, y):
        logits, _ = model.apply(params, {}, x, train=True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    @jax.jit
    def error(params):
        logits, _ = model.apply(params, {}, held_out["x"], train=False)
        return jnp.mean(logits.argmax(-1) != held_out["y"])

    def train(tx, epochs=8, batch=64):
        examples = len(images["y"])
        whole = examples // batch * batch

        @jax.jit
        def step(params, state, x, y):
            gradients = jax.grad(loss)(params, x, y)
            updates, state = tx.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        params, state, errors = start, tx.init(start), []
        order = np.random.default_rng(0)
        for _ in range(epochs):
            for rows in order.permutation(examples)[:whole].reshape(-1, batch):
                x, y = images["x"][rows], images["y"][rows]
                params, state = step(params, state, x, y)
            errors.append(float(error(params)))
        return errors, optim.inspect(state)

    return (train,)


@app.cell
def _(train, transforms):
    outcomes = {name: train(tx) for name, tx in transforms.items()}
    for _name, (_errors, _) in outcomes.items():
        print(f"{_name:15} validation error by epoch:", *(f"{e:.3f}" for e in _errors))
    return (outcomes,)


@app.cell
def _(outcomes, plt):
    _figure, _axes = plt.subplots(figsize=(5, 3), layout="constrained")
    for _name, (_errors, _) in outcomes.items():
        _axes.plot(range(1, len(_errors) + 1), _errors, marker="o", label=_name)
    _axes.set(xlabel="epoch", ylabel="validation error", yscale="log")
    _axes.legend(frameon=False)
    _figure
    return


@app.cell
def _(mo):
    mo.md("""
    One seed, one rate and one small network: this shows how the parts fit together,
    not which is better. For that, see the tables: `hpcjax list`.

    ## Looking inside

    `optim.inspect` finds what transforms want to have logged, wherever they are in a
    chain. For Jorge: how far a preconditioner moved, and whether any is in trouble.
    """)
    return


@app.cell
def _(mo, outcomes):
    _, _figures = outcomes["Jorge, grafted"]
    for _name, _value in _figures.items():
        print(f"{_name:24} {float(_value):.4g}")
    mo.md("\n".join(f"- `{name}`: {float(v):.4g}" for name, v in _figures.items()))
    return


if __name__ == "__main__":
    app.run()
