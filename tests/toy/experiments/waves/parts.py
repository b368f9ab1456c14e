"""What this paper adds to training configs."""

PARTS = {
    "dataset": {"waves": "experiments.waves.waves:WavesConfig"},
    "model": {"stencil": "experiments.waves.waves:StencilConfig"},
}
