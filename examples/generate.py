"""Answers for a few prompts, in ten lines.

    python examples/generate.py [MODEL]

MODEL: a converted folder or "smollm2-135m" (the default; converted into the cache folder on first use).
"""

import sys

import aspire_jax

model = aspire_jax.load(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m")
prompts = ["The capital of France is", [{"role": "user", "content": "Name three colours."}]]
for answer in aspire_jax.generate(model, prompts, max_tokens=24):
    each = answer.stats.mean_accepted_length
    print(f"{answer.index}: {answer.text!r} ({answer.finish_reason}, {each:.1f} tokens a verification)")
