"""CHAI's tables: quality and bytes by clusters, the elbow, and time on a GPU."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from experiments.chai.decode import CLUSTERED, OWN
from hpcjax.runs import reduce
from hpcjax.runs.pictures import Dots, Lines, Scatter
from hpcjax.runs.tables import Claim, Runs, Table, on_cpu, on_gpu

if TYPE_CHECKING:
    import xarray as xr

SEEDS = (0, 1, 2)
DRAWS = (0, 1, 2, 3, 4)
# Tokens behind so many are foretold in every row, whatever its window.
LONGEST = 20


def _runs() -> dict[str, Runs]:
    """Returns the rows; what a draw decides has several seeds."""
    found = {"dense": Runs(config="chai/smollm2:dense")}
    for count in (6, 4):
        own = {"clusters": str(count)}
        rows = {
            "online": Runs(config="chai/smollm2:online", seeds=SEEDS, overrides=own),
            "static, same text": Runs(config="chai/smollm2:static", overrides=own),
            "static, Python": Runs(config="chai/smollm2:static_python", overrides=own),
            "random": Runs(config="chai/smollm2:random", seeds=DRAWS, overrides=own),
            "SpAtten": Runs(config="chai/smollm2:spatten", overrides=own),
            "DejaVu": Runs(config="chai/smollm2:dejavu", overrides=own),
            "DejaVu, oracle": Runs(config="chai/smollm2:oracle", overrides=own),
        }
        found |= {f"k = {count}, {name}": runs for name, runs in rows.items()}
    found["k = 4, online, values shared"] = Runs(
        config="chai/smollm2:online",
        seeds=SEEDS,
        overrides={"clusters": "4", "clustering.share_values": "true"},
    )
    for window in (10, LONGEST):
        found[f"k = 6, online, W = {window}"] = Runs(
            config="chai/smollm2:online",
            seeds=SEEDS,
            overrides={"clustering.window": str(window)},
        )
    return found


@reduce.by_row
def _quality(row: "xr.Dataset") -> reduce.Cells:
    """Returns perplexities and accuracies, means over the seeds, and what is kept."""
    run = reduce.first(row)
    late = row["loss"].sel(place=slice(LONGEST + 1, None)).mean("place")
    return {
        **reduce.extent(row["perplexity"], "perplexity"),
        "late": np.exp(late).mean(),
        "accuracy": row["accuracy"].mean(),
        "normalized": row["normalized"].mean(),
        "share": run["share"],
        "kept": run["bytes"] / run["dense"],
        "native": run["bytes"] / run["native"],
        "read": run["read"] / run["dense"],
        "off": abs(row["bytes"] - row["formula"]).max(),
    }


QUALITY = Table(
    id="chai/quality",
    shows=(
        "Attention heads of a language model were put together in clusters, or left "
        "out. Towards the lower left is better: fewer bytes, less perplexity; random "
        "clusters are the control."
    ),
    picture=Scatter("kept", "perplexity", by=", ", front=("least", "least"), log=True),
    title="SmolLM2-135M with clusters of heads, or fewer heads, in its last 15 layers",
    paper="ICML 2024, abstract: at most 3.2 points of accuracy lost on five tasks",
    caption=(
        "SmolLM2-135M-Instruct, 9 heads in each of 30 layers, the first 15 with a "
        "cluster for each head. Its 3 key heads are repeated to 9 first (mode expand): "
        "what is saved is saved of that cache, three times the model's own. Stand-in "
        "text: 32 passages of 96 tokens from held-out chapters of the King James "
        "Bible; perplexity of the tokens behind the window of 5, or W, and of those "
        "behind 20 in every row. online: k-means for each passage, 3 seeds. static: "
        "by mean maps of 32 texts of 64 tokens, other chapters or Python's library. "
        "random: one draw for all passages, 5 draws. SpAtten and DejaVu keep k of 9 "
        "heads for each token instead, and SpAtten a share of the tokens that falls to "
        "0.9 in the last layer; both free no memory, as a later token may ask for what "
        "this one does without. DejaVu: predictors of width 128, fitted to the 32 "
        "texts of the same book; oracle: the heads of the largest outputs. Other rows "
        "have one seed; brackets: least and most. Accuracy: 32 questions which of four "
        "verses of a book comes next, at most 64 tokens, by Σ log p and by that over "
        "the number of tokens; chance is 0.25, the standard error about 0.08, though "
        "all rows have the same questions. KV bytes read: by formula, those that the "
        "last token of a passage needs."
    ),
    columns={
        "perplexity": "perplexity",
        "late": "behind 20 tokens",
        "accuracy": "accuracy",
        "normalized": "normalized",
        "share": "Σk / LH",
        "kept": "KV bytes / dense, expanded",
        "native": "KV bytes / native",
        "read": "KV bytes read / dense",
        "off": "bytes off the formula",
    },
    reduce=_quality,
    tiers=on_cpu(
        minutes=16.0,
        runs=_runs(),
        claims={
            "close": reduce.over("perplexity", "k = 6, online", "dense")
            .at_most(1.35, "k = 6, online: perplexity over the dense model's")
            .fails({"k = 6, online": "k = 6, random"}),
            "four": reduce.over("perplexity", "k = 4, online", "k = 4, random")
            .at_most(0.9, "k = 4: perplexity online over that of random clusters")
            .fails({"k = 4, online": "k = 4, random"}),
            "six": reduce.over("perplexity", "k = 6, online", "k = 6, random")
            .at_most(0.95, "k = 6: perplexity online over that of random clusters")
            .fails({"k = 6, online": "k = 6, random"}),
            "bytes": reduce.cell("kept", "k = 4, online")
            .at_most(0.9, "k = 4: bytes of keys and values over those of all heads")
            .fails({"k = 4, online": "dense"}),
        },
    ),
)

# (row, config, whether the authors have published its list)
_CACHES = (
    ("LLaMA-7B, params7b", "chai/memory:seven", True),
    ("LLaMA-33B, params33b", "chai/memory:thirty", True),
    ("LLaMA-7B, default of the patch", "chai/memory:patch", True),
    ("SmolLM2, k = 6, expand", "chai/memory:expand", False),
    ("SmolLM2, k = 6, within_group", "chai/memory:within_group", False),
    ("SmolLM2, k = 6, cross_group", "chai/memory:cross_group", False),
)
_TWO = "SmolLM2, k = 2, cross_group"


def _caches() -> dict[str, Runs]:
    found = {row: Runs(config=config) for row, config, _ in _CACHES}
    found[_TWO] = Runs(
        config="chai/memory:cross_group", overrides={"clusters": "[9,2]"}
    )
    return found


def _memory(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    """Returns bytes and the shares that are saved of them."""
    run = reduce.by_run(rows)
    return run[["bytes", "formula", "share"]].assign(
        saved=1 - run["bytes"] / run["dense"],
        native=run["bytes"] / run["native"],
        used=1 - run["used"] * run["bytes"] / run["dense"],
    )


def _apart(one: str, other: str) -> reduce.Number:
    """Returns the largest difference of two columns."""
    return abs(reduce.of(one) - reduce.of(other)).largest()


def _saving(row: str, name: str, figure: float) -> Claim:
    claim = abs(reduce.cell("saved", row) - figure).at_most(
        5e-5, f"{name}: how far the saving is from the formula's {figure:.2%}"
    )
    return claim.fails({row: _TWO})


MEMORY = Table(
    id="chai/memory",
    title="Keys and values in memory with the published lists of clusters",
    paper="ICML 2024, abstract: up to 21.4 % of the cache saved",
    caption=(
        "One request, 64 tokens, float16, arrays made by the same compaction as in "
        "decoding; bytes grow with the tokens. The abstract's 21.4 % needs "
        "Σk / LH = 0.572, which none of the published lists has. SmolLM2's 9 heads "
        "share 3 keys; k in the last 15 of 30 layers. expand repeats keys and values "
        "first, and what it saves is saved of three times the native cache. "
        "cross_group has slots for min(k, 3) keys; used: what is saved if only the "
        "slots counted that random clusters read."
    ),
    shows=(
        "Keys of clustered heads were left out of a model's cache, by the published "
        "lists. Each dot is what that saved; the filled ones should be the published "
        "shares."
    ),
    picture=Dots("saved", label="of the dense keys and values saved"),
    columns={
        "bytes": "bytes",
        "formula": "by formula",
        "share": "Σk / LH",
        "saved": "saved of dense",
        "used": "saved, used slots",
        "native": "bytes / native",
    },
    reduce=_memory,
    tiers=on_cpu(
        minutes=0.5,
        runs=_caches(),
        claims={
            "formula": _apart("bytes", "formula")
            .at_most(0.0, "bytes in memory and by formula, the largest difference")
            .fails({_CACHES[0][0]: _CACHES[2][0]}, only=("bytes",)),
            "seven": _saving(_CACHES[0][0], "params7b", 0.1914),
            "thirty": _saving(_CACHES[1][0], "params33b", 0.2647),
            "patch": _saving(_CACHES[2][0], "default of the patch", 0.3164),
        },
    ),
)

# Of 9 heads, as many as the table of perplexities has.
_COUNTS = (2, 4, 6)


def _elbow(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    """Returns a row for each layer."""
    run, other = (reduce.first(rows[text]) for text in ("kjv", "python"))
    columns = {f"error_{k}": run["error"].sel(count=k, drop=True) for k in _COUNTS}
    found = run[["threshold", "knee"]].assign({**columns, "other": other["threshold"]})
    names = [f"layer {layer}" for layer in range(run.sizes["layer"])]
    return found.rename(layer="row").assign_coords(row=names)


@reduce.Number
def _later_half(table: "xr.Dataset") -> float:
    """Returns the mean error of the later half of the layers over the earlier's."""
    half, error = table.sizes["row"] // 2, table["error_4"]
    return float(error[-half:].mean() / error[:half].mean())


ELBOW = Table(
    id="chai/elbow",
    title="Clusters of heads that each layer of SmolLM2-135M asks for",
    paper="ICML 2024: errors of k-means over k, an elbow read off a plot",
    caption=(
        "Maps of the first 64 tokens of 32 chapters of the King James Bible, k-means "
        "for each; errors over that of one cluster, summed over the texts. threshold: "
        "the least k whose error is at most 5 %; knee: the k farthest below the chord. "
        "Python: the threshold's k on 32 files of Python's library. 9 heads a layer. "
        "The authors calibrate LLaMA and OPT on C4."
    ),
    shows=(
        "The heads of each layer were put into 2, 4 and 6 clusters. The error should "
        "fall from the first layers to the last: later heads are more alike."
    ),
    picture=Lines(
        "layer {}", ("error_2", "error_4", "error_6"), label="error of the clusters"
    ),
    columns={
        **{f"error_{k}": f"error, k = {k}" for k in _COUNTS},
        "threshold": "k, threshold",
        "knee": "k, knee",
        "other": "k, threshold, Python",
    },
    reduce=_elbow,
    tiers=on_cpu(
        minutes=3.0,
        runs={
            "kjv": Runs(config="chai/elbow:kjv"),
            "python": Runs(config="chai/elbow:python"),
        },
        claims={
            "late": _later_half.at_most(
                1.0, "error with 4 clusters, later half of layers / earlier"
            ).fails({f"layer {i}": f"layer {29 - i}" for i in range(30)}),
        },
    ),
)

# Of an H200, in bytes a second. Attention of all heads that does not reach its share of
# it is taken as if it did.
BANDWIDTH, REACHED = 4.3e12, 0.5


def _decode(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    """Returns times, and each, were it no slower than `REACHED`, over clusters'."""
    import xarray as xr

    run = reduce.single(rows)
    median = run["seconds"].median("repetition")
    own = run["seconds"].sel(candidate=CLUSTERED, drop=True)
    taken = run["seconds"].clip(max=run["bytes"] / BANDWIDTH / REACHED)
    return xr.Dataset(
        {
            "microseconds": 1e6 * median,
            "ratio": (taken / own).median("repetition"),
            "rate": run["bytes"] / median / 1e9,
            "error": run["error"],
            "mixed": run["mixed"],
        }
    ).rename(candidate="row")


DECODE = Table(
    id="chai/decode",
    title="Time of one token's attention, 4 clusters of 32 heads against all heads",
    paper="ICML 2024, abstract: up to 1.73 times as fast a token, LLaMA-7B",
    caption=(
        "16 requests, 8192 keys each, head size 128, bfloat16, random numbers and "
        "clusters; attention alone. xla, cudnn: jax.nn.dot_product_attention; what "
        "does not reach half of 4.3 TB/s is compared as if it did. Bytes "
        "say at most 1.78: 2.147 GB of all heads, 1.208 GB of clusters. 20 attentions "
        "in one program."
    ),
    benchmark=True,
    columns={
        "microseconds": "µs",
        "ratio": "this / clusters",
        "rate": "GB/s",
    },
    reduce=_decode,
    tiers=on_gpu(
        minutes=1.0,
        runs={"all": Runs(config="chai/decode")},
        claims={
            "faster": reduce.least("ratio", OWN, "xla", "cudnn")
            .at_least(1.3, "the fastest attention of all heads over that of clusters")
            .fails(dict.fromkeys((OWN, "xla", "cudnn"), CLUSTERED)),
            "error": reduce.most("error")
            .at_most(2e-3, "clusters: largest difference to float32")
            .fails(columns={"error": "mixed"}),
        },
    ),
)


def _latency(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    """Puts a row for each length of prompt and method; times over all heads'."""
    import xarray as xr

    seconds = reduce.single(rows)["seconds"]
    parts = {}
    for length in seconds["prompt"].values:
        found = {}
        for what in seconds["what"].values:
            part = seconds.sel(prompt=length, what=what, drop=True)
            table = reduce.ratios(part, "all heads")
            found |= {
                str(name).replace(kind, f"{kind}_{what}"): table[name]
                for kind in ("milliseconds", "ratio")
                for name in table
                if str(name).startswith(kind)
            }
        parts[f"{length} tokens"] = xr.Dataset(found)
    return reduce.stack(parts, "row", between=", ")


def _latency_claims(longest: str) -> dict[str, Claim]:
    row, control = f"{longest}, clusters", f"{longest}, k = H"
    return {
        "first": reduce.cell("ratio_first", row)
        .at_most(0.9, f"first token behind {longest}: clusters over all heads")
        .fails({row: control}),
        "all": reduce.cell("ratio_all", row)
        .at_most(0.9, f"all tokens behind {longest}: clusters over all heads")
        .fails({row: control}),
    }


LATENCY = Table(
    id="chai/latency",
    title="Time to the first token and to 32, by the length of the prompt",
    paper="ICML 2024, abstract: up to 1.73 times as fast to the first token, LLaMA-7B",
    caption=(
        "Random weights, greedy, one prompt; all that is done is counted: reading the "
        "window with all heads, clustering, copying the cache. cpu: 2 layers of width "
        "512, 16 heads in 4 clusters in both, float32. gpu: LLaMA-7B's shapes, the "
        "authors' params7b (32 heads in 4 clusters in the last 14 of 32 layers), "
        "bfloat16. k = H: as many clusters as heads, the negative control."
    ),
    benchmark=True,
    shows=(
        "A language model read prompts of growing length with all heads, and with "
        "clusters of heads. Below the dashed line the first word is a tenth sooner."
    ),
    picture=Lines(
        "{} tokens",
        "ratio_first",
        bound="first",
        label="time to first token / all heads",
        x_label="tokens of the prompt",
    ),
    columns={
        "milliseconds_first": "ms, first token",
        "ratio_first": "/ all heads",
        "milliseconds_all": "ms, 32 tokens",
        "ratio_all": "/ all heads",
    },
    reduce=_latency,
    tiers=on_cpu(
        minutes=8.0,
        runs={"all": Runs(config="chai/latency:small")},
        claims=_latency_claims("8192 tokens"),
    )
    | on_gpu(
        minutes=4.0,
        runs={"all": Runs(config="chai/latency:llama7b")},
        claims=_latency_claims("8192 tokens"),
    ),
)
