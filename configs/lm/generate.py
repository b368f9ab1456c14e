"""SmolLM2-135M continues a text; 10 s on 2 cores, most of it reading and compiling.

Needs `hpcjax data fetch smollm2`. `hpcjax run lm/generate --prompt "Once upon a time"`;
`hpcjax run lm/generate:chat --prompt "Why is the sky blue?"` asks a question.
Expect: English that goes on with the prompt, about 40 tokens a second on 2 cores.
"""

import dataclasses

from experiments.lm.generate import Config
from hpcjax.inference import Sampler

needs = ("smollm2",)

sampled = Config()
greedy = dataclasses.replace(sampled, sampler=Sampler(temperature=0.0))
chat = dataclasses.replace(
    greedy,
    chat=True,
    prompt="What is the capital of France, and what is it known for?",
    max_new_tokens=128,
)
base = sampled
