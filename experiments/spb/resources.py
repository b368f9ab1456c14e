"""What each role computes, keeps and sends, read from its compiled program."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

from hpcjax import layers, optim, perf, runs
from hpcjax.core import config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A network of equal layers, and how it is cut.

    Attributes:
      network: "chain" of products with tanh between, or "cnn" of 3x3 convolutions with
        shortcuts and no downsampling.
      k: blocks of equally many layers; as many workers.
      layers: of a block, q.
      width: features or channels.
      size: sides of the images of a cnn.
      rows: examples of a worker.
      seed: not used; nothing is drawn.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "k": "2",
        "layers": "1",
        "width": "4",
        "size": "4",
        "rows": "2",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "flops exact": "role: of backward over role k's; by counting products",
        "memory": "role: bytes of temporaries",
        "sent sent_zeros": "role: bytes, with contributor averages and with zeros",
    }

    network: Literal["chain", "cnn"] = "chain"
    k: config.Size = 4
    layers: config.Size = 4
    width: config.Size = 256
    size: config.Size = 16
    rows: config.Size = 128
    seed: config.Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {"role": range(1, self.k + 1)}


def network(cfg: Config) -> tuple[Callable[..., Any], dict[str, Any], Any]:
    """Returns a loss, and the shapes of its parameters and of its batch."""
    import jax
    import jax.numpy as jnp

    def chain(x: Any, kernel: Any) -> Any:
        return jnp.tanh(x @ kernel)

    def convolution(x: Any, kernel: Any) -> Any:
        y = layers.conv(
            x,
            kernel,
            None,
            strides=(1, 1),
            padding="SAME",
            dilation=(1, 1),
            compute="float32",
        )
        return x + jax.nn.silu(y)

    square = cfg.width, cfg.width
    layer, kernel, image = chain, square, ()
    if cfg.network == "cnn":
        layer, kernel, image = convolution, (3, 3, *square), (cfg.size, cfg.size)

    def loss(params: dict[str, Any], x: Any) -> Any:
        for name in sorted(params):
            x = layer(x, params[name])
        return jnp.mean(x**2)

    count = cfg.k * cfg.layers
    params = {
        f"layer_{index:03}": jax.ShapeDtypeStruct(kernel, "float32")
        for index in range(count)
    }
    return loss, params, jax.ShapeDtypeStruct((cfg.rows, *image, cfg.width), "float32")


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Compiles the program of every role."""
    import jax

    loss, params, x = network(cfg)
    k, q = cfg.k, cfg.layers
    names = sorted(params)
    blocks = optim.Blocks(tuple(tuple(names[j * q : (j + 1) * q]) for j in range(k)))
    forward = perf.flops(jax.jit(loss).lower(params, x).compile())
    roles = range(1, k + 1)
    programs = [
        jax.jit(optim.partial_value_and_grad(loss, blocks, role))
        .lower(params, x)
        .compile()
        for role in roles
    ]
    flops = [perf.flops(program) - forward for program in programs]
    memory = [_temporaries(program) for program in programs]
    size = 4 * sum(params[name].size for name in blocks.paths[0])
    who = optim.roles(k, k, 0)  # Worker w has role w + 1.
    columns = {
        "flops": [own / flops[-1] for own in flops],
        "exact": [(2 * role * q - 1) / (2 * k * q - 1) for role in roles],
        "memory": memory,
        "sent": optim.contributor_bytes([size] * k, who).total,
        "sent_zeros": optim.contributor_bytes([size] * k, who, "zeros").total,
    }
    made = {name: ("role", list(values)) for name, values in columns.items()}
    return runs.measured(made, coords={"role": list(roles)})


def _temporaries(program: Any) -> int:
    return perf.temporary_memory(program)
