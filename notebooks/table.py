import marimo

__generated_with = "0.25.2"
app = marimo.App(width="medium")


@app.cell
def _():
    import marimo as mo

    mo.md("""
    # A table and its verdicts

    Each paper's relation is a **claim**: a number read off a table, and a bound. The
    table names the runs behind it, so one command makes it and fails if a claim does:

    ```
    hpcjax table jorge/quickstart
    ```

    That one takes a minute. This page makes a **reduced** table in less, from the same
    parts. Its runs are too small to say anything about the paper: what it shows is how
    a table is declared, made and judged.
    """)
    return (mo,)


@app.cell
def _():
    import pathlib
    import tempfile
    import textwrap

    from hpcjax import runs

    # Runs and papers of your own lie below a root, usually the working directory.
    temporary = tempfile.TemporaryDirectory(prefix="hpcjax-")
    root = pathlib.Path(temporary.name)
    return root, runs, textwrap


@app.cell
def _(mo):
    mo.md("""
    ## What there is

    `find_tables` knows every table of every paper, yours included.
    """)
    return


@app.cell
def _(mo, root, runs):
    mo.md(
        "\n".join(
            f"- `{name}`: {table.title}"
            for name, table in runs.find_tables(root).items()
        )
    )
    return


@app.cell
def _(mo):
    mo.md("""
    ## Declaring one

    A table is an object in `experiments/<paper>/tables.py`: rows, each with a config,
    overrides and seeds; a function that makes an `xarray.Dataset` of them; and claims.
    A claim that is missing its number has failed.
    """)
    return


@app.cell
def _(mo, root, textwrap):
    SOURCE = '''
    """A reduced table: it says nothing about any paper."""

    from hpcjax.runs import Claim, Runs, Table, Tier, time_to_target

    SMALL = {"model": "mlp", "train.steps": "60", "train.eval_every": "2"}

    REDUCED = Table(
        id="reduced/steps",
        title="Reduced: steps to 6 % error with a perceptron, one seed",
        paper="none: settings of a notebook",
        columns={"best": "best error", "steps": "steps", "ratio": "steps / SGD's"},
        reduce=lambda rows: time_to_target(
            rows, "sgd", metric="val_error", target=0.06
        ),
        tiers={
            "cpu": Tier(
                minutes=0.2,
                runs={
                    "sgd": Runs(config="jorge/digits:sgd", overrides=SMALL),
                    "jorge": Runs(config="jorge/digits:jorge", overrides=SMALL),
                },
                claims={
                    "reaches": Claim(
                        relation="SGD reaches 6 % within its 60 steps",
                        ours=lambda table: table["steps"].sel(row="sgd").item(),
                        at_most=60,
                    ),
                    "impossible": Claim(
                        relation="no validation image is ever misread (it fails)",
                        ours=lambda table: table["best"].min().item(),
                        at_most=0.0,
                    ),
                },
            )
        },
    )
    '''
    place = root / "experiments" / "reduced" / "tables.py"
    place.parent.mkdir(parents=True)
    place.write_text(textwrap.dedent(SOURCE).lstrip())
    mo.md(f"```python\n{place.read_text()}```")
    return (place,)


@app.cell
def _(mo):
    mo.md("""
    ## Making it

    Runs that are missing are run; those that are there are used again, if not a key of
    their config has changed.
    """)
    return


@app.cell
def _(place, root, runs):
    assert place.exists()
    result = runs.build_table("reduced/steps", root=root, progress=False)
    table = result.dataset[["best", "steps", "ratio"]].to_dataframe()
    print(table.round(4))
    table
    return (result,)


@app.cell
def _(mo):
    mo.md("""
    ## The verdicts

    The second claim cannot hold: it is there to show what that looks like. The command
    would exit with status 1.
    """)
    return


@app.cell
def _(mo, result):
    lines = [
        f"{verdict.relation}: {verdict.ours:.4g} ({verdict.bound}): "
        + ("holds" if verdict.holds else "FAILS")
        for verdict in result.verdicts
    ]
    print(*lines, sep="\n")
    print("the table as a whole", "passes" if result.passed else "FAILS")
    mo.md("\n".join(f"- {line}" for line in lines))
    return


@app.cell
def _(mo):
    mo.md("""
    ## What is behind them

    Every run keeps its config, its provenance and its records.
    """)
    return


@app.cell
def _(result):
    for _run in result.runs:
        print(_run["row"], _run["id"], _run["config_digest"])
    return


@app.cell
def _(mo):
    mo.md("""
    ## Committed results

    `--record` writes cells, verdicts, runs and provenance beside the table's
    definition. `--check` makes the table again and compares: a cell with an interval
    must lie within it, any other must be equal to six digits.
    """)
    return


if __name__ == "__main__":
    app.run()
