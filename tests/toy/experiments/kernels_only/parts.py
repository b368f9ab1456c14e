"""What this paper adds to training configs."""

PARTS = {"parallel": {"kernels_only": "experiments.kernels_only.spread:KernelsConfig"}}
