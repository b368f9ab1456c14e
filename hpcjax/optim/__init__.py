"""Optimizer transforms in optax's form, and their configs."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

PARTS = {
    "optimizer": {
        "sgd": "SgdConfig",
        "adamw": "AdamWConfig",
        "lamb": "LambConfig",
        "adagrad": "AdagradConfig",
        "row_adagrad": "RowAdagradConfig",
        "jorge": "JorgeConfig",
        "jorge_from_sgd": "JorgeFromSgdConfig",
        "shampoo": "ShampooConfig",
        "kfac": "KfacConfig",
    },
    "schedule": {
        "constant": "ConstantConfig",
        "cosine": "CosineConfig",
        "stepdecay": "StepDecayConfig",
        "linear": "LinearConfig",
        "polynomial": "PolynomialConfig",
        "exponential": "ExponentialConfig",
        "piecewise": "PiecewiseConfig",
        "piecewise_interpolate": "PiecewiseInterpolateConfig",
        "onecycle": "OneCycleConfig",
        "linear_onecycle": "LinearOneCycleConfig",
        "warmup_cosine": "WarmupCosineConfig",
        "warmup_exponential": "WarmupExponentialConfig",
    },
    "backward": {
        "partial": "PartialBackwardConfig",
        "random_freezing": "RandomFreezingConfig",
        "pipedream": "PipedreamConfig",
    },
    "state": {"sparse": "SparseStateConfig", "tiled": "TiledConfig"},
    "sparsity": {
        "prune": "PruneConfig",
        "dynamic": "DynamicConfig",
        "straight_through": "StraightThroughConfig",
        "top_kast": "TopKastConfig",
        "movement": "MovementConfig",
        "soft_threshold": "SoftThresholdConfig",
        "l0": "L0Config",
        "variational_dropout": "VariationalDropoutConfig",
    },
}
