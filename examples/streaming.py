"""Answers piece by piece as they come, each request with its own limits, more requests than slots.

python examples/streaming.py [MODEL]
"""

import sys

import aspire_jax
from aspire_jax import Request

model = aspire_jax.load(sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m")
requests = [
    Request(id="list", prompt="One, two, three,", max_tokens=20),
    Request(id="line", prompt="def add(a, b):\n", stop="\n\n", max_tokens=40),
    Request(id="short", prompt="The sun is", max_tokens=5),
]
stream = aspire_jax.stream(model, requests, slots=2)
for chunk in stream:
    print(f"{chunk.id}: {chunk.text!r}")
    if chunk.completion is not None:
        print(f"{chunk.id}: finished, {chunk.completion.finish_reason}, {chunk.completion.usage}")

report = stream.report
print(f"{report.completion_tokens} tokens, {report.tokens_per_second:.0f} a second, acceptance {report.acceptance:.0%}")
