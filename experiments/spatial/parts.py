"""What this paper adds to the parts of every training config; imports no JAX."""

PARTS = {"dataset": {"noise": "experiments.spatial.noise:NoiseConfig"}}
