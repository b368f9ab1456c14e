"""Quantizes the first blocks of a language model and measures what it has lost."""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, get_args

import numpy as np

from hpcjax import compress, data, inference, runs
from hpcjax.compress import GptqOptions, GridSpec, PruneOptions
from hpcjax.core import checks, config
from hpcjax.core.errors import ConfigError
from hpcjax.inference import corpus_tokens, load_language_model

if TYPE_CHECKING:
    from hpcjax.models.pretrained import Pretrained

Method = Literal["none", "rtn", "gptq", "sparsegpt"]
METHODS: tuple[str, ...] = get_args(Method)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A model, what is done to its blocks, and the texts.

    Attributes:
      model: "smollm2", after `hpcjax data fetch smollm2`; the path of a GGUF file with
        its tokenizer; or "random", a tiny model of bytes that nobody has trained.
      blocks: how many, from the first on; None for all.
      method: "none", rounding to the nearest, GPTQ, or pruning by SparseGPT.
      grid: what weights are rounded to.
      gptq: options of GPTQ.
      pruning: options of SparseGPT.
      true_sequential: whether a matrix sees what the quantized ones before it give.
      corpus: whose part "train" calibrates and whose part "validation" evaluates.
      sequences: of the calibration, from random places of its text.
      time: tokens of each, and of a window of the evaluation.
      windows: of the evaluation, the first ones of its text.
      seed: of the calibration's places.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "model": "random",
        "blocks": "1",
        "sequences": "2",
        "time": "8",
        "windows": "2",
    }

    model: str = "smollm2"
    blocks: config.Size | None = 6
    method: Method = "gptq"
    grid: GridSpec = GridSpec(bits=3)
    gptq: GptqOptions = GptqOptions()
    pruning: PruneOptions = PruneOptions()
    true_sequential: bool = True
    corpus: str = "kjv"
    sequences: config.Size = 16
    time: config.Several = 256
    windows: config.Size = 16
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "ternary weights cannot be packed"
        packed = self.method in ("rtn", "gptq")
        checks.require(not (packed and self.grid.ternary), rule, method=self.method)

    @property
    def figures(self) -> Mapping[str, str]:  # pyrefly: ignore[bad-override]
        """What is found; objective and rounded only if asked for."""
        found = {
            "perplexity loss": ": on the evaluation's text; loss is its logarithm",
        }
        if self.method == "gptq":
            found["objective rounded"] = "matrix: tr(ΔᵀHΔ) of GPTQ and of rounding"
        return found

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        # As many as a block of SmolLM2 has; which, the model says.
        return {"matrix": 7} if self.method == "gptq" else {}


class Texts(NamedTuple):
    """Tokens: `[sequences, time]` for the calibration, `[tokens]` to evaluate."""

    calibration: np.ndarray
    evaluation: np.ndarray


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Quantizes, and evaluates the whole model."""
    model = load(cfg, ctx.data_root)
    texts = read_texts(cfg, ctx.data_root)
    params, reports = compressed(cfg, model, texts.calibration, ctx)
    found = inference.perplexity(
        functools.partial(
            inference.token_losses,
            inference.LanguageModel(params=params, model=model.model),
        ),
        texts.evaluation,
        window=cfg.time,
    )
    figures = {"perplexity": found.perplexity, "loss": found.loss}
    dataset = runs.measured(figures)
    if cfg.method != "gptq":
        return dataset
    columns = {
        "objective": ("matrix", [report.loss for report in reports]),
        "rounded": ("matrix", [report.rounded for report in reports]),
    }
    names = [f"{report.layer}/{report.path}" for report in reports]
    return dataset.assign(columns).assign_coords(matrix=names)


def load(cfg: Config, root: pathlib.Path) -> "Pretrained":
    """Returns the model.

    Raises:
      DataMissing: it is not here; the message says what to do.
      ConfigError: it has no blocks to walk through, or too few.
    """
    model = load_language_model(cfg.model, root).pretrained
    if cfg.blocks is not None and cfg.blocks > model.config.depth:
        raise ConfigError(
            f"the model has {model.config.depth} blocks: got blocks={cfg.blocks}"
        )
    return model


def read_texts(cfg: Config, root: pathlib.Path) -> Texts:
    """Returns the tokens of both texts.

    Raises:
      DataMissing: the corpus is not here.
      ConfigError: the evaluation's text is shorter than asked for.
    """
    evaluation = corpus_tokens(cfg.model, cfg.corpus, "validation", root)
    wanted = cfg.windows * cfg.time
    if len(evaluation) < wanted:
        raise ConfigError(
            f"the evaluation's text has {len(evaluation)} tokens: got "
            f"windows={cfg.windows}, time={cfg.time}"
        )
    training = corpus_tokens(cfg.model, cfg.corpus, "train", root)
    calibration = data.random_windows(training, cfg.sequences, cfg.time, cfg.seed)
    return Texts(calibration, evaluation[:wanted])


def compressed(
    cfg: Config, model: "Pretrained", calibration: np.ndarray, ctx: "runs.Context"
) -> "tuple[Any, tuple[compress.LayerReport, ...]]":
    """Returns the model's parameters with the first blocks compressed, and reports."""
    import jax
    import jax.numpy as jnp

    if cfg.method == "none":
        return model.params, ()
    whole = model.params["blocks"]
    first = jax.tree.map(lambda leaf: leaf[: cfg.blocks], whole)
    groups = model.parts.groups
    if cfg.method == "rtn":
        paths = [path for group in groups for path in group]
        done, reports = compress.round_blocks(first, paths, cfg.grid), ()
    else:
        tokens = jnp.asarray(calibration)
        inputs, _ = model.parts.embed.apply(model.params, {}, tokens, train=False)
        made = _walked(cfg, model, first, inputs, ctx)
        done, reports = made.params, made.reports
    blocks = jax.tree.map(
        lambda new, all_: jnp.concatenate([new, all_[len(new) :]]),
        compress.dequantize_params(done),
        whole,
    )
    return {**model.params, "blocks": blocks}, reports


def _walked(
    cfg: Config, model: "Pretrained", first: Any, inputs: Any, ctx: "runs.Context"
) -> "compress.Compressed":
    import itertools

    count = itertools.count(1)

    def report(found: "compress.LayerReport") -> None:
        ctx.record(next(count), loss=found.loss, damping=found.damping)

    given = model.parts.block, first, inputs, model.parts.groups
    if cfg.method == "gptq":
        return compress.quantize_blocks(
            *given,
            cfg.grid,
            cfg.gptq,
            true_sequential=cfg.true_sequential,
            report=report,
        )
    return compress.prune_blocks(
        *given, cfg.pruning, true_sequential=cfg.true_sequential, report=report
    )
