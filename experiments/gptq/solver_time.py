"""How long GPTQ takes for a block, against the published algorithm in PyTorch."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from hpcjax import compress, perf, runs
from hpcjax.compress import GridSpec
from hpcjax.core import config
from hpcjax.models import LLAMA, CausalLmConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A block of LLaMA's architecture and its calibration, both random.

    Attributes:
      width: of the block.
      heads: of the queries.
      kv_heads: of keys and values.
      mlp_width: of the feed-forward part.
      sequences: of the calibration.
      time: tokens of each.
      bits: of the grid, one for each output.
      batch: sequences at once, on both sides.
      repetitions: rounds of the measurement.
      seed: of parameters and inputs.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "width": "16",
        "heads": "2",
        "kv_heads": "1",
        "mlp_width": "32",
        "sequences": "2",
        "time": "8",
        "repetitions": "2",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "seconds": "stage candidate repetition: of the block, or of its matrices alone",
        "loss": "path: our objective over theirs",
        "rounded": "path: that of rounding to the nearest over theirs",
    }

    width: int = 576
    heads: int = 9
    kv_heads: int = 3
    mlp_width: int = 1536
    sequences: config.Size = 16
    time: config.Size = 256
    bits: int = 3
    batch: config.Size = 8
    repetitions: config.Size = 20
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        # They check sizes and bits.
        self.model()
        GridSpec(bits=self.bits)

    def model(self) -> CausalLmConfig:
        """Returns the config of a model with one such block."""
        return CausalLmConfig(
            depth=1,
            width=self.width,
            heads=self.heads,
            kv_heads=self.kv_heads,
            mlp_width=self.mlp_width,
            options=LLAMA,
        )

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {
            "stage": ("block", "matrices"),
            "candidate": ("torch", "hpcjax"),
            "repetition": range(self.repetitions),
            "path": 7,
        }


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Quantizes the same block on both sides, then times both in turns."""
    import jax
    import xarray as xr

    from experiments.gptq import torch_side
    from hpcjax.core.errors import ConfigError

    if jax.default_backend() != "cpu":
        raise ConfigError(
            "PyTorch is compared on the CPU, set JAX_PLATFORMS=cpu: got "
            f"{jax.default_backend()}"
        )
    sides = Sides(cfg, torch_side)
    losses = sides.losses()
    stages = {"block": sides.block(), "matrices": sides.matrices()}
    measured = [
        perf.compare(thunks, "torch", repetitions=cfg.repetitions, warmup=1)
        for thunks in stages.values()
    ]
    seconds = xr.concat([each["seconds"] for each in measured], dim="stage")
    return runs.measured(
        {
            "seconds": seconds.assign_coords(stage=list(stages)),
            "loss": ("path", [ours for ours, _ in losses.values()]),
            "rounded": ("path", [rounded for _, rounded in losses.values()]),
        },
        coords={"path": list(losses)},
        attrs={"threads": torch_side.torch.get_num_threads()},
    )


class Sides:
    """One block, its parameters and inputs, for both sides."""

    def __init__(self, cfg: Config, side: Any) -> None:
        import jax

        from hpcjax.core import trees
        from hpcjax.models.parts import causal_lm_parts

        self.cfg, self.side = cfg, side
        config = cfg.model()
        # The vocabulary takes no part.
        parts = causal_lm_parts(config, cfg.time, 2)
        model = config.make((cfg.time,), 2)
        self.one, self.groups = parts.block, parts.groups
        self.params = model.init(jax.random.key(cfg.seed))[0]["blocks"]
        rng = np.random.default_rng(cfg.seed)
        # Directions of different strength, as activations have.
        strength = np.geomspace(0.1, 10, cfg.width)
        turn = np.linalg.qr(rng.standard_normal((cfg.width, cfg.width)))[0]
        x = rng.standard_normal((cfg.sequences, cfg.time, cfg.width))
        self.inputs = np.asarray(x * strength @ turn, np.float32)
        flat = trees.flatten(jax.tree.map(lambda leaf: leaf[0], self.params))
        self.weights = side.weights_of(flat)
        self.tensor = side.torch.from_numpy(self.inputs)
        options = config.options
        self.shape = side.Shape(
            cfg.heads, cfg.kv_heads, options.rope_theta, options.norm_eps
        )

    def ours(self) -> Any:
        """Returns our quantized block."""
        import jax.numpy as jnp

        return compress.quantize_blocks(
            self.one,
            self.params,
            jnp.asarray(self.inputs),
            self.groups,
            compress.GridSpec(bits=self.cfg.bits),
            batch=self.cfg.batch,
        )

    def theirs(self) -> Any:
        """Returns PyTorch's."""
        return self.side.quantize_block(
            self.weights,
            self.tensor,
            self.shape,
            self.groups,
            self.cfg.bits,
            batch=self.cfg.batch,
        )

    def losses(self) -> dict[str, tuple[float, float]]:
        """Returns our objective, and rounding's, over theirs for each matrix."""
        made, hessians, _ = self.theirs()
        of_path = {path: hessians[group[0]] for group in self.groups for path in group}
        found = {}
        for report in self.ours().reports:
            name = f"{report.path}/kernel"
            theirs = self.side.lost(
                self.weights[name], made[name], of_path[report.path]
            )
            found[report.path] = report.loss / theirs, report.rounded / theirs
        return found

    def block(self) -> dict[str, Callable[[], Any]]:
        """Returns thunks that quantize the block."""
        return {"torch": self.theirs, "hpcjax": lambda: self.ours().outputs}

    def matrices(self) -> dict[str, Callable[[], Any]]:
        """Returns thunks that quantize its matrices, given their Hessians."""
        import jax.numpy as jnp

        side, bits = self.side, self.cfg.bits
        _, hessians, _ = self.theirs()
        problems = [
            ([self.weights[f"{path}/kernel"] for path in group], hessians[group[0]])
            for group in self.groups
        ]
        own = [
            (
                jnp.concatenate([jnp.asarray(w.numpy().T) for w in weights], axis=1),
                jnp.asarray(hessian.numpy()),
            )
            for weights, hessian in problems
        ]

        def theirs() -> Any:
            for weights, hessian in problems:
                factor = side.factor_of(hessian, 0.01)
                for weight in weights:
                    side.quantize(weight, factor, bits)

        def ours() -> Any:
            spec = compress.GridSpec(bits=bits)
            return [compress.solve(*problem, spec).integers for problem in own]

        return {"torch": theirs, "hpcjax": ours}
