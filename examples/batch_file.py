"""A batch of prompts in a JSONL file through the command line, and its answers read back.

python examples/batch_file.py [MODEL]
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
lines = [
    {"id": "colours", "messages": [{"role": "user", "content": "Name three colours."}]},
    {"id": "code", "prompt": "import numpy as", "stop": "\n", "max_tokens": 8},
]
with tempfile.TemporaryDirectory() as folder:
    source, output = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["generate", "--model", model, "--input", source, "--output", output, "--max-tokens", "24"]
    # `aspire generate ...` in a shell. Interrupted, it would go on with --resume.
    subprocess.run([sys.executable, "-m", "aspire_jax", *command], check=True)
    with output.open(encoding="utf-8") as file:
        for answer in map(json.loads, file):
            print(answer["id"], repr(answer["text"]), answer["finish_reason"], answer["usage"])
