"""The objectives of the data sets of this room.

A data set of another kind brings its own: a `core.Objective` beside its config.
"""

import dataclasses

from hpcjax.core.objective import Numbers, Objective

IMAGES = Numbers(rank=3)  # [height, width, channels]
VOLUMES = Numbers(rank=4)  # [depth, height, width, channels]

CLASSIFICATION = Objective(
    name="classification",
    inputs=IMAGES,
    outputs=Numbers(rank=1),
    score="hpcjax.metrics.totals:label_totals",
    metrics={"loss": "low", "error": "low"},
    classes=True,
)
LANGUAGE = Objective(
    name="language",
    inputs=Numbers(rank=1, tokens=True),
    outputs=Numbers(rank=2),
    score="hpcjax.metrics.totals:label_totals",
    metrics={"loss": "low", "error": "low"},
    classes=True,
)
MASKED = Objective(
    name="masked",
    inputs=Numbers(rank=2, tokens=True),
    outputs={"tokens": Numbers(rank=2), "order": Numbers(rank=1)},
    score="hpcjax.metrics.totals:masked_language_totals",
    metrics={
        "loss": "low",
        "token_loss": "low",
        "token_error": "low",
        "order_loss": "low",
        "order_error": "low",
    },
)
SEGMENTATION = Objective(
    name="segmentation",
    inputs=IMAGES,
    outputs=Numbers(rank=3),
    score="hpcjax.metrics.totals:segmentation_totals",
    metrics={"loss": "low", "error": "low", "overlap": "high", "area": "neither"},
    classes=True,
)
VOLUME_SEGMENTATION = dataclasses.replace(
    SEGMENTATION, name="volume_segmentation", inputs=VOLUMES, outputs=VOLUMES
)
REGRESSION = Objective(
    name="regression",
    inputs=VOLUMES,
    outputs=Numbers(rank=1),
    score="hpcjax.metrics.totals:regression_totals",
    metrics={"loss": "low", "error": "low"},
)
VERTICES = Objective(
    name="vertices",
    inputs=Numbers(rank=0, tokens=True),
    outputs=Numbers(rank=1),
    score="hpcjax.metrics.totals:label_totals",
    metrics={"loss": "low", "error": "low"},
    classes=True,
)
BLOCKS = Objective(
    name="blocks",
    inputs={"features": Numbers(rank=2), "senders": Numbers(rank=1, tokens=True)},
    outputs=Numbers(rank=2),
    score="hpcjax.metrics.totals:label_totals",
    metrics={"loss": "low", "error": "low"},
    classes=True,
)
PARTS = Objective(
    name="parts",
    inputs={"features": Numbers(rank=2)},
    outputs=Numbers(rank=2),
    score="hpcjax.metrics.totals:label_totals",
    metrics={"loss": "low", "error": "low"},
    classes=True,
)
PROGRAMS = Objective(
    name="programs",
    inputs={
        name: Numbers(rank=1, tokens=True)
        for name in (
            *("texts", "selected"),
            *("senders", "receivers", "flows", "positions"),
        )
    },
    outputs=Numbers(rank=2),
    score="hpcjax.metrics.totals:positive_totals",
    # F1 of a whole set is 2 · true / (predicted + actual).
    metrics={
        **{"loss": "low", "true": "neither"},
        **{"predicted": "neither", "actual": "neither"},
    },
    classes=True,
)
ALGORITHMS = Objective(
    name="algorithms",
    inputs={**PROGRAMS.inputs, "graphs": Numbers(rank=1, tokens=True)},
    outputs=Numbers(rank=2),
    score="hpcjax.metrics.totals:class_totals",
    metrics={"loss": "low", "error": "low", "top5_error": "low"},
    classes=True,
)
CLICKS = Objective(
    name="clicks",
    inputs={"dense": Numbers(rank=1), "ids": Numbers(rank=1, tokens=True)},
    outputs=Numbers(rank=0),
    score="hpcjax.metrics.totals:click_totals",
    metrics={"loss": "low", "error": "low"},
)
FIELD = Numbers(rank=2)  # [latitude, longitude]
POSTPROCESSING = Objective(
    name="postprocessing",
    inputs={"members": Numbers(rank=4), "fields": Numbers(rank=3)},
    outputs={"mean": FIELD, "std": FIELD},
    score="hpcjax.metrics.totals:gaussian_totals",
    # Of √(variance / square) 1 is best.
    metrics={
        **{"loss": "low", "eecrps": "low", "square": "low", "variance": "neither"},
        **{"spread": "low", "crps": "low", "inside": "neither"},
    },
)
FIELDS = Objective(
    name="fields",
    inputs=IMAGES,
    outputs=Numbers(rank=3),
    score="hpcjax.metrics.totals:field_totals",
    # The loss of a forecast over `persistence` is what is left to be explained.
    metrics={"loss": "low", "close": "high", "persistence": "neither"},
)
LINKS = Objective(
    name="links",
    inputs={
        "triples": Numbers(rank=2, tokens=True),
        "negatives": Numbers(rank=2, tokens=True),
    },
    outputs=Numbers(rank=2),
    score="hpcjax.metrics.ranking:link_totals",
    metrics={"loss": "low"},
    held_out={"mrr": "high", "hits10": "high"},
)
