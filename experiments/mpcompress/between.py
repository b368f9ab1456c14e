"""Two processes that send each other codes, on a slow and on a fast link."""

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hpcjax import compress, cost, hostcomm, runs
from hpcjax.core import checks, config

if TYPE_CHECKING:
    import jax

    from hpcjax.runs.outlines import Labels

WITHOUT, ALL, LEARNT = "without", "identity", "autoencoder"
EIGHT, FOUR, TOP, PRETENDED = "8 bits", "4 bits", "Top-k", "decoded, then sent"
CODES = (WITHOUT, ALL, LEARNT, EIGHT, FOUR, TOP, PRETENDED)
LINKS = {"100 Mbit/s": 100e6 / 8, "10 Gbit/s": 10e9 / 8}
# By the model: as many stages for each width, or as many as the width asks for.
WIDTHS, LAYERS, FEW = (256, 512, 1024, 2048), 32, 4
WAYS = ("4 stages", "stages by width")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pretended(compress.Quantizer):
    """Rounds to 8 bits and sends float32, the control."""

    def encode(self, y: "jax.Array", given: Any) -> Any:
        """Returns what its code decodes to."""
        return super().decode(super().encode(y, given), y, given)

    def decode(self, code: Any, like: Any, given: Any) -> "jax.Array":
        """Returns the code."""
        del given
        return code.astype(like.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A network of two layers, x + tanh(x A) B, each a stage, and all its codecs.

    Attributes:
      rows: of a micro-batch.
      width: of what is sent.
      hidden: columns of A.
      micro_batches: of a step, all of which may be in flight.
      rounds: steps with each codec, in turns; one more before them does not count.
      d: numbers of the autoencoder's code; Top-k sends as many bytes.
      latency: seconds of both links.
      patience: seconds that a process waits for the other one.
      seed: of parameters and data.
    """

    factory: ClassVar[str] = "experiments.mpcompress.between_stage:work"
    smoke: ClassVar[Mapping[str, str]] = {
        "rows": "64",
        "width": "64",
        "hidden": "8",
        "micro_batches": "2",
        "rounds": "1",
        "d": "3",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "seconds": "link code round: of a step",
        "passes encode decode": "link code: seconds of a micro-batch in both stages, "
        "one after the other, and to encode and decode it alone",
        "up down": "link code: bytes of a step's arrays, over what the codec says",
        "saved": "link code: seconds of a micro-batch that the link has less to send",
        "micro_batches": ": of a step",
        "byte least": "link: seconds of a byte and of a message, fitted",
        "speedup": "link way width: of the autoencoder, by the model with these costs",
    }

    rows: config.Size = 512
    width: config.Size = 1024
    hidden: config.Size = 64
    micro_batches: config.Size = 4
    rounds: config.Size = 7
    d: config.Size = 50
    latency: config.NotNegative = 50e-6
    patience: config.Positive = 60.0
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.require(self.width % 4 == 0, "width must be of 4s", width=self.width)

    def labels(self) -> "Labels":
        """Returns those of the figures' dimensions."""
        own = {"link": tuple(LINKS), "code": CODES, "round": range(self.rounds)}
        return {**own, "way": WAYS, "width": WIDTHS}

    def codec(self, name: str) -> compress.Codec | None:
        """Returns what a row sends by."""
        learnt = compress.Autoencoder(d=self.d)
        shape, top = (self.rows, self.width), compress.TopK(grad="masked")
        return {
            ALL: compress.Identity(),
            LEARNT: learnt,
            EIGHT: compress.Quantizer(bits=8),
            FOUR: compress.Quantizer(bits=4),
            TOP: compress.equal_bytes(top, learnt, shape, "float32", where="pipeline"),
            PRETENDED: Pretended(bits=8),
        }.get(name)

    def wire(self, name: str) -> np.ndarray:
        """Returns bytes of a micro-batch up and down, as the codec says them."""
        codec, shape = self.codec(name) or compress.Identity(), (self.rows, self.width)
        up = codec.wire_bytes(shape, "float32", where="pipeline")
        return np.array([up, codec.slope_bytes(shape, "float32")])


@runs.measured
def run(cfg: Config, ctx: "runs.Context") -> dict[str, Any]:
    """Measures all codecs in turns on each link.

    Raises:
      ProcessLost: a process has died or hangs.
    """
    del ctx
    told: dict[str, list[Any]] = {}
    for rate in LINKS.values():
        link = hostcomm.Link(rate=rate, latency=cfg.latency)
        found = runs.in_processes(
            cfg.find_factory(), cfg, 2, link=link, patience=cfg.patience
        )
        for name, figure in _read(cfg, found, rate).items():
            told.setdefault(name, []).append(figure)
    figures = {name: np.array(each) for name, each in told.items()}
    return {**figures, "micro_batches": cfg.micro_batches}


def _read(cfg: Config, found: Any, rate: float) -> dict[str, Any]:
    """Returns the figures of one link, of what both processes tell."""
    first = found[0]
    wire = np.array([cfg.wire(name) for name in CODES])
    sent = np.array([[own["sent"][name] for own in found] for name in CODES])
    passes, encode, decode = (
        np.array([first["alone"][name][at] for name in CODES]) for at in range(3)
    )
    begin, end = (np.array([own["steps"][name] for name in CODES]) for own in found)
    arrays = sent / cfg.micro_batches - [first["headers"][name] for name in CODES]
    costs = fit(cfg, dict(zip(CODES, passes, strict=True)), first["link"])
    return {
        "seconds": np.maximum(begin, end)[..., 1] - np.minimum(begin, end)[..., 0],
        **{"passes": passes, "encode": encode, "decode": decode},
        **dict(zip(("up", "down"), (arrays / wire).T, strict=True)),
        "saved": (wire[0] - wire).sum(1) / rate,
        **{"byte": costs.byte, "least": costs.least},
        "speedup": [scale(costs, way) for way in WAYS],
    }


def fit(cfg: Config, passes: Mapping[str, float], link: Any) -> cost.CodedCosts:
    """Returns costs of seconds by codec and of a link's (α, β)."""
    # Of two stages: two products forward, again, and two of each backward.
    operations = 2 * 4 * 2 * 2 * cfg.rows * cfg.width * cfg.hidden
    own = passes[LEARNT] - passes[WITHOUT]
    number = max(own, 0.0) / (cfg.rows * cfg.width)
    return cost.CodedCosts(passes[WITHOUT] / operations, link[1], number, link[0])


def scale(costs: cost.CodedCosts, way: str) -> list[float]:
    """Returns speed-ups of an autoencoder of a twentieth, by width."""
    return [
        cost.compressed_step(
            width,
            compress.Autoencoder(d=width // 20),
            costs,
            **{"rows": 512, "time": 512, "layers": LAYERS},
            stages=FEW if way == WAYS[0] else math.ceil(FEW * width / WIDTHS[0]),
        ).speedup
        for width in WIDTHS
    ]
