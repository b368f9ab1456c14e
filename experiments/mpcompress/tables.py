"""The table of compressed activations: bytes of sums, read from the compiled step."""

from hpcjax.runs import reduce
from hpcjax.runs.pictures import Dots
from hpcjax.runs.reduce import cell
from hpcjax.runs.tables import Runs, Table, on_cpu

EIGHT, FOUR, TWO = "8 bits", "4 bits", "2 bits"
LEARNT, TOP, RANDOM = "autoencoder, 3 of 64", "Top-k", "Random-k"
ALL, ALL_LAYERS = "without", "2 bits, all layers"
PRETENDED = "decoded, then summed"
CODECS = (EIGHT, FOUR, TWO, LEARNT, TOP, RANDOM, ALL_LAYERS)


def _on(name: str = "", **overrides: str) -> Runs:
    own = {f"codec.{key}": text for key, text in overrides.items()}
    return Runs(config=f"mpcompress/sums{name}", overrides=own)


BYTES = Table(
    id="mpcompress/bytes",
    title="Compressed activations: bytes that a device sends to sum them",
    paper=(
        "Bian et al., MLSys 2024: codecs of activations in tensor parallelism; by "
        "gathers of four devices 8 bits are as much as the sum of float16, which "
        "follows from its form"
    ),
    caption=(
        "Four layers of width 64 on 4 simulated devices, 256 tokens, float32; sums of "
        "the last two layers, of all layers in one row, read from the compiled step. "
        "bytes: a device's in a step; codec: over what the codec says of itself; "
        "float32: over an all-reduce; float16: the codec's over one of float16, "
        "computed. Top-k and Random-k send the autoencoder's bytes. decoded, then "
        "summed: 8 bits, the control."
    ),
    shows=(
        "What devices send to sum activations was compressed, and counted in the "
        "compiled program. Further left sends less; a codec that only pretends to, the "
        "control, sends all."
    ),
    picture=Dots("part", label="bytes / those of an all-reduce of float32", log=True),
    columns={
        "sums": "bytes",
        "ratio": ("codec", lambda run: run["sums"] / run["wire"]),
        "part": ("float32", lambda run: run["sums"] / run["whole"]),
        "gathered": ("gathered", lambda run: run["gathers"] / run["wire"]),
        "half": "float16",
    },
    tiers=on_cpu(
        minutes=6.0,
        devices=4,
        runs={
            ALL: _on(":whole"),
            EIGHT: _on(),
            FOUR: _on(bits="4"),
            TWO: _on(bits="2"),
            LEARNT: _on(":autoencoder"),
            TOP: _on(":topk"),
            RANDOM: _on(":randomk"),
            ALL_LAYERS: _on(bits="2", start="0"),
            PRETENDED: _on(":pretended"),
        },
        claims={
            "to the byte": abs(reduce.of("ratio", *CODECS) - 1)
            .largest()
            .at_most(0.01, "of what the codec says, the farthest")
            .fails({EIGHT: PRETENDED}),
            "gathered": reduce.least("gathered", EIGHT, FOUR, TWO, TOP, RANDOM)
            .at_least(0.99, "of a codec's bytes that are gathered as codes, at least")
            .fails({EIGHT: PRETENDED}),
            "2 bits": cell("part", TWO)
            .at_most(0.13, "of an all-reduce's bytes by 2 bits on 4 devices")
            .fails({TWO: EIGHT}),
            "8 bits": abs(cell("half", EIGHT) - 1)
            .at_most(0.01, "between a gather of 8 bits and a sum of float16 at t = 4")
            .fails({EIGHT: FOUR}),
        },
    ),
)
