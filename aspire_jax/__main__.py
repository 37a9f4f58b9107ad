"""`python -m aspire_jax` is `aspire`."""

from __future__ import annotations

import sys

from aspire_jax.cli import process

if __name__ == "__main__":
    sys.exit(process())
