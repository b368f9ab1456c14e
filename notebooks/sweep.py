import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium")


@app.cell
def _():
    import marimo as mo

    mo.md("""
    # A sweep, read as one labelled array

    A sweep runs one config under many overrides, by as many processes as you like, and
    gathers what came out in one `xarray.Dataset` whose dimensions are what was varied.
    The same on the command line:

    ```
    hpcjax sweep jorge/digits:sgd optimizer.lr=0.01,0.1,1.0 seed=0,1 model=mlp
    ```
    """)
    return (mo,)


@app.cell
def _():
    import pathlib
    import tempfile

    import matplotlib.pyplot as plt

    from hpcjax.runs import sweeps

    # Sweeps and runs lie below a root, usually the working directory.
    temporary = tempfile.TemporaryDirectory(prefix="hpcjax-")
    root = pathlib.Path(temporary.name)
    return plt, root, sweeps


@app.cell
def _(mo):
    mo.md("""
    ## What is varied

    Three learning rates under two seeds, judged by the least validation error. The
    other keys make a run short: a perceptron in place of the ResNet, and 40 steps.
    Ranges such as `log(1e-3,1)` with the samplers `random`, `halton`, `tpe` or `gp`
    work in the same way.
    """)
    return


@app.cell
def _(sweeps):
    axes, fixed = sweeps.parse(
        {
            "optimizer.lr": "0.01,0.1,1.0",
            "seed": "0,1",
            "optimizer.schedule": "constant",
            "model": "mlp",
            "train.steps": "40",
            "train.eval_every": "10",
        }
    )
    plan = sweeps.Sweep(
        config="jorge/digits:sgd", axes=tuple(axes), overrides=fixed, by="val_error"
    )
    print("varied:", *axes, "- trials:", plan.total)
    return (plan,)


@app.cell
def _(mo):
    mo.md("""
    ## Running it

    Killed in the middle, the same call would go on with what is missing: trials that
    have ended are never run again.
    """)
    return


@app.cell
def _(plan, root, sweeps):
    result = sweeps.run_sweep(plan, name="rates", root=root, parallel=2, quiet=True)
    print(result.successes, "of", plan.total, "trials have a value")
    return (result,)


@app.cell
def _(mo):
    mo.md("""
    ## Reading it

    `value` is what trials are judged by, and every variable of the runs' own results
    is there as well, with the swept keys as dimensions.
    """)
    return


@app.cell
def _(result):
    print(result.dataset["value"].to_series().unstack("seed").round(3))
    result.dataset
    return


@app.cell
def _(result):
    middle = result.dataset["value"].median("seed")
    best = result.best
    print("best learning rate:", float(middle.idxmin("optimizer.lr")))
    print("least mean:", float(best["optimizer.lr"]), best["value"].values.round(3))
    return


@app.cell
def _(plt, result):
    _figure, (_left, _right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    for _rate in result.dataset["optimizer.lr"].values:
        _curve = result.dataset["val_error"].sel({"optimizer.lr": _rate})
        _left.plot(_curve["eval_step"], _curve.mean("seed"), label=f"{_rate:g}")
    _left.set(xlabel="step", ylabel="validation error, mean of seeds")
    _left.legend(title="learning rate", frameon=False)
    for _seed in result.dataset["seed"].values:
        result.dataset["value"].sel(seed=_seed).plot(
            ax=_right, xscale="log", marker="o", label=f"seed {_seed}"
        )
    _right.set(title="", xlabel="learning rate", ylabel="least validation error")
    _right.legend(frameon=False)
    _figure
    return


@app.cell
def _(mo, plan):
    mo.md(f"""
    `hpcjax sweep {plan.config} … --plot` draws a picture like the right one for every
    axis. `--launcher slurm` and `--launcher ray` start the same workers elsewhere.
    """)
    return


if __name__ == "__main__":
    app.run()
