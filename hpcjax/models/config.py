"""Configs of models: what is built, without JAX."""

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from hpcjax.core.errors import ConfigError, nearest

if TYPE_CHECKING:
    from hpcjax import core


def _arguments(config: Any) -> dict[str, Any]:
    """Returns the fields of a config as arguments of its factory."""
    return {
        field.name: getattr(config, field.name) for field in dataclasses.fields(config)
    }


def _check_literals(config: Any) -> None:
    """Raises ConfigError for a field whose value is none of its literals."""
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        allowed = _literals(hints[field.name])
        value = getattr(config, field.name)
        if allowed and value not in allowed:
            names = [str(option) for option in allowed]
            raise ConfigError(
                f"unknown {field.name}: got {field.name}={value!r}"
                f"{nearest(str(value), names)}"
            )


def _literals(hint: Any) -> tuple[Any, ...]:
    """Returns the values a hint allows: `Literal` or `Literal | None`, else nothing."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    parts = [_literals(part) for part in get_args(hint) if part is not type(None)]
    if len(parts) == 1 and parts[0]:
        return (*parts[0], None)
    return ()


def _check_sizes(config: Any, *names: str) -> None:
    """Raises ConfigError for a size below 1."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1: got {name}={value}")


def _check_heads(config: Any) -> None:
    """Raises ConfigError for heads that do not divide the width."""
    if config.width % config.heads:
        raise ConfigError(
            f"heads must divide width: got heads={config.heads}, width={config.width}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlpConfig:
    """A multilayer perceptron, see `models.mlp`.

    Attributes:
      widths: sizes of the hidden layers.
      activation: after every hidden layer.
      head_init: kernel of the last layer; with "zeros" the first loss is log(classes).
    """

    widths: tuple[int, ...] = (256,)
    activation: Literal["relu", "tanh", "gelu_tanh"] = "relu"
    head_init: Literal["lecun", "zeros"] = "lecun"

    def __post_init__(self) -> None:
        _check_literals(self)
        if any(width < 1 for width in self.widths):
            raise ConfigError(f"widths must be at least 1: got widths={self.widths}")

    def make(
        self, inputs: tuple[int, ...], outputs: int, policy: "core.Policy | None" = None
    ) -> "core.Model":
        """Builds the model for examples of shape `inputs` and `outputs` logits."""
        from hpcjax import core, models

        return models.mlp(
            inputs, outputs, policy=policy or core.Policy(), **_arguments(self)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNetConfig:
    """A residual network, see `models.resnet`.

    Attributes:
      depth: 8, 20 or 32 for small images, 18, 50 or 101 for full-size ones.
      width: channels of the first stage; None means 16 (small images) or 64.
      norm: "batch", or "group" with 16 channels a group.
      shortcut: "A" appends zero channels, "B" projects; None means A for small images.
      sync_axis: mesh axis over which batch statistics are taken; None: one device's.
      zero_init_residual: whether each block starts as the identity.
      head_init: kernel of the last layer; with "zeros" the first loss is log(classes).
    """

    depth: int = 8
    width: int | None = None
    norm: Literal["batch", "group"] = "batch"
    shortcut: Literal["A", "B"] | None = None
    sync_axis: str | None = None
    zero_init_residual: bool = False
    head_init: Literal["lecun", "zeros"] = "lecun"

    def __post_init__(self) -> None:
        _check_literals(self)
        if self.depth not in (8, 18, 20, 32, 50, 101):
            raise ConfigError(
                f"depth must be one of 8, 18, 20, 32, 50, 101: got depth={self.depth}"
            )
        if self.width is not None and self.width < 1:
            raise ConfigError(f"width must be at least 1: got width={self.width}")

    def make(
        self, inputs: tuple[int, ...], outputs: int, policy: "core.Policy | None" = None
    ) -> "core.Model":
        """Builds the model for images of shape `inputs` and `outputs` classes."""
        from hpcjax import core, models

        return models.resnet(
            inputs, outputs, policy=policy or core.Policy(), **_arguments(self)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class VggConfig:
    """A VGG network with batch norms, see `models.vgg`.

    Attributes:
      depth: 11 or 16.
      width: channels of the first stage.
    """

    depth: Literal[11, 16] = 16
    width: int = 64

    def __post_init__(self) -> None:
        _check_literals(self)
        _check_sizes(self, "width")

    def make(
        self, inputs: tuple[int, ...], outputs: int, policy: "core.Policy | None" = None
    ) -> "core.Model":
        """Builds the model for images of shape `inputs` and `outputs` classes."""
        from hpcjax import core, models

        return models.vgg(
            inputs, outputs, policy=policy or core.Policy(), **_arguments(self)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class UNetConfig:
    """A U-Net, logits for each pixel, see `models.unet`.

    Attributes:
      depth: how often the image is halved; 2^depth has to divide its sides.
      width: channels of the first level, doubled at each halving.
    """

    depth: int = 3
    width: int = 16

    def __post_init__(self) -> None:
        _check_sizes(self, "depth", "width")

    def make(
        self, inputs: tuple[int, ...], outputs: int, policy: "core.Policy | None" = None
    ) -> "core.Model":
        """Builds the model for images of shape `inputs` and `outputs` classes."""
        from hpcjax import core, models

        return models.unet(
            inputs, outputs, policy=policy or core.Policy(), **_arguments(self)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """LLaMA 3's slower rotation of features with long wavelengths.

    With s = (context / wavelength − low) / (high − low), cut to [0, 1], a frequency is
    multiplied by (1 − s) / factor + s.

    Attributes:
      factor: how much slower the longest wavelengths turn.
      low: a wavelength of context / low and more is turned slower by the whole factor.
      high: one of context / high and less is left as it is.
      context: the length the model was first trained with.
    """

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    context: int = 8192

    def __post_init__(self) -> None:
        _check_sizes(self, "context")
        if not (self.factor > 0 and self.high > self.low > 0):
            raise ConfigError(
                "rope scaling needs factor > 0 and high > low > 0: got "
                f"factor={self.factor}, low={self.low}, high={self.high}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Experts in place of one feed-forward part, see `layers.experts`.

    Attributes:
      count: how many there are.
      top_k: experts a token goes through, 1 or 2.
      capacity_factor: room of each expert, as a multiple of an even share of the tokens
        of a pass; what does not fit is left out, so that tokens then depend on others
        of their pass, also on later ones. None: everything fits.
      axis: inside `shard_map`, the mesh axis over which tokens and experts are split,
        see `layers.experts`; it wants a capacity_factor, and what lies below `experts/`
        split by experts.
      balance_weight: of the load-balance loss of each block in the objective.
      router_z_weight: of the router z-loss of each block.
    """

    count: int = 8
    top_k: int = 2
    capacity_factor: float | None = None
    axis: str | None = None
    balance_weight: float = 0.01
    router_z_weight: float = 0.0

    def __post_init__(self) -> None:
        if self.top_k not in (1, 2) or self.count < self.top_k:
            raise ConfigError(
                "top_k must be 1 or 2 and count at least as large: got "
                f"top_k={self.top_k}, count={self.count}"
            )
        if self.axis is not None and self.capacity_factor is None:
            raise ConfigError(
                f"experts over an axis need a capacity_factor: got axis={self.axis!r}"
            )
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            raise ConfigError(
                "capacity_factor must be positive: got "
                f"capacity_factor={self.capacity_factor}"
            )
        for name in ("balance_weight", "router_z_weight"):
            if not getattr(self, name) >= 0:
                raise ConfigError(
                    f"{name} must be at least 0: got {name}={getattr(self, name)}"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerOptions:
    """What distinguishes one family of transformers from another; defaults: GPT-2.

    Attributes:
      norm: LayerNorm, or RMSNorm without bias.
      norm_position: before each part, or after its addition.
      norm_eps: added to the variance.
      final_norm: whether a norm follows the last block.
      position: a learned table, one whose row is position + 2 (OPT), or rotation.
      rope_theta: base of the rotation's wavelengths.
      rope_scaling: LLaMA 3's change of the wavelengths; None: none.
      mlp: activation of the feed-forward part; "silu_gated" has a third matrix.
      experts: a mixture of experts as feed-forward part, each of them like `mlp`; None:
        none.
      use_bias: whether the blocks' matrices have biases.
      tied_head: whether the embedding table also gives the logits.
      embed_width: features of the table's vectors, as in OPT-350M: two matrices without
        bias lead from them to the blocks' width and back; None: that width itself.
      init_scale: standard deviation of matrices and tables.
      scale_residual: whether matrices ending a branch start smaller by √(2 depth).
    """

    norm: Literal["layer", "rms"] = "layer"
    norm_position: Literal["pre", "post"] = "pre"
    norm_eps: float = 1e-5
    final_norm: bool = True
    position: Literal["learned", "offset", "rope"] = "learned"
    rope_theta: float = 1e4
    rope_scaling: RopeScaling | None = None
    mlp: Literal["gelu_tanh", "gelu_erf", "relu", "silu_gated"] = "gelu_tanh"
    experts: ExpertsConfig | None = None
    use_bias: bool = True
    tied_head: bool = True
    embed_width: int | None = None
    init_scale: float = 0.02
    scale_residual: bool = True

    def __post_init__(self) -> None:
        _check_literals(self)
        _check_sizes(self, "embed_width")
        for name in ("norm_eps", "rope_theta", "init_scale"):
            value = getattr(self, name)
            if not value > 0:
                raise ConfigError(f"{name} must be positive: got {name}={value}")


GPT2 = TransformerOptions()
OPT = TransformerOptions(position="offset", mlp="relu", scale_residual=False)
LLAMA = TransformerOptions(
    norm="rms",
    position="rope",
    mlp="silu_gated",
    use_bias=False,
    tied_head=False,
    scale_residual=False,
)


BERT = TransformerOptions(
    norm_position="post",
    norm_eps=1e-12,
    final_norm=False,
    mlp="gelu_erf",
    scale_residual=False,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertConfig:
    """BERT, with or without its two pre-training heads, see `models.bert`.

    Attributes:
      depth: number of blocks.
      width: features of a token.
      heads: query, key and value heads.
      mlp_width: features inside the feed-forward part; None means 4 · width.
      head: both heads, that of the words, the encoder with its pooler, or it alone.
      remat: what the backward pass recomputes, as in `CausalLmConfig`.
    """

    depth: int = 2
    width: int = 128
    heads: int = 2
    mlp_width: int | None = None
    head: Literal["pretraining", "masked_lm", "pooler", "none"] = "pretraining"
    remat: Literal["none", "full", "dots", "offload"] = "none"

    def __post_init__(self) -> None:
        _check_literals(self)
        _check_sizes(self, "depth", "width", "heads", "mlp_width")
        _check_heads(self)

    def make(
        self, inputs: tuple[int, ...], outputs: int, policy: "core.Policy | None" = None
    ) -> "core.Model":
        """Builds the model for `inputs = (context, 3)` and `outputs` words."""
        from hpcjax import core, models

        return models.bert(
            inputs, outputs, policy=policy or core.Policy(), **_arguments(self)
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CausalLmConfig:
    """A decoder-only language model, see `models.causal_lm`.

    Attributes:
      depth: number of blocks.
      width: features of a token.
      heads: query heads.
      kv_heads: key and value heads; None means as many as query heads.
      head_dim: features of a head; None means width / heads, which must divide. One of
        its own is what is left of a model whose heads were pruned.
      mlp_width: features inside the feed-forward part; None means 4 · width.
      options: what distinguishes GPT-2, OPT and LLaMA.
      remat: what the backward pass recomputes: nothing; all but the blocks' inputs;
        "dots" all but those and the products without batch axes; "offload" as "full",
        the blocks' inputs waiting in the host's memory.
      attention: how it is computed; "auto" takes cuDNN's on a GPU in half precision.
      loss_chunk: places of time that logits are formed for at once in the loss; None
        means all.
      batch_axis: mesh axis that batches are split over, under `jit` and inside
        `jax.set_mesh`: what goes from block to block is held to that, so that the
        compiler gathers parameters where they are split over the same axis. None: the
        compiler chooses.
    """

    depth: int = 2
    width: int = 64
    heads: int = 4
    kv_heads: int | None = None
    head_dim: int | None = None
    mlp_width: int | None = None
    options: TransformerOptions = TransformerOptions()
    remat: Literal["none", "full", "dots", "offload"] = "none"
    attention: Literal["auto", "reference", "xla", "cudnn"] = "auto"
    loss_chunk: int | None = None
    batch_axis: str | None = None

    def __post_init__(self) -> None:
        _check_literals(self)
        _check_sizes(self, "depth", "width", "heads", "kv_heads", "head_dim")
        _check_sizes(self, "mlp_width", "loss_chunk")
        if self.head_dim is None:
            _check_heads(self)
        if self.heads % (self.kv_heads or self.heads):
            raise ConfigError(
                "kv_heads must divide heads: got "
                f"kv_heads={self.kv_heads}, heads={self.heads}"
            )
        if self.options.position == "rope" and self.head_size % 2:
            raise ConfigError(
                "rope needs an even number of features a head: got "
                f"width={self.width}, heads={self.heads}, head_dim={self.head_dim}"
            )

    @property
    def head_size(self) -> int:
        """Features of a head."""
        return self.head_dim or self.width // self.heads

    def make(
        self, inputs: tuple[int, ...], outputs: int, policy: "core.Policy | None" = None
    ) -> "core.Model":
        """Builds the model for `inputs = (context,)` and a vocabulary of `outputs`."""
        from hpcjax import core, models

        return models.causal_lm(
            inputs, outputs, policy=policy or core.Policy(), **_arguments(self)
        )
