"""LLaMA-7B's shape with a draft of two layers, acceptance forced; a GPU, 5 min.

Random weights in bfloat16, 13 GB. What counts as accepted is drawn beforehand.
Expect: at least 1.5 times plain decoding's rate at 0.7 of the drafts accepted, not
measured yet (`hpcjax table specdec/speedup --tier gpu`).
"""

from experiments.specdec.speedup import Config

base = Config()
