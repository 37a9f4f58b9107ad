"""Sampling on a command line: options for what requests do not say themselves."""

from __future__ import annotations

import argparse
from typing import Any


def add(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Adds the options that decide how a token is drawn; returns their group."""
    group = parser.add_argument_group(
        "sampling", "for prompts that do not say themselves; greedy decoding where not given"
    )
    group.add_argument("--temperature", type=float, metavar="T", help="0 (default) is greedy decoding")
    group.add_argument("--top-k", type=int, metavar="K", help="draw from the K best tokens")
    group.add_argument("--top-p", type=float, metavar="P", help="draw from the best tokens of probability P together")
    group.add_argument(
        "--min-p", type=float, metavar="P", help="draw from tokens at least P times as probable as the best"
    )
    group.add_argument("--repetition-penalty", type=float, metavar="R", help="above 1 for fewer tokens seen before")
    group.add_argument("--presence-penalty", type=float, metavar="R", help="above 0 for fewer tokens of the answer")
    group.add_argument("--frequency-penalty", type=float, metavar="R", help="the same, each time it occurs")
    group.add_argument("--seed", type=int, metavar="S", help="the first answer's; the next ones count on from it")
    return group


def add_all(parser: argparse.ArgumentParser) -> None:
    """Adds those that decide how a token is drawn, and those that decide what is answered."""
    group = add(parser)
    group.add_argument("--min-tokens", type=int, metavar="N", help="no end before N tokens")
    group.add_argument("--logprobs", type=int, metavar="K", help="with log-probabilities, and the K best at each place")
    group.add_argument("--n", type=int, metavar="N", help="answers to each prompt")
    group.add_argument(
        "--acceptance", choices=("coupled", "rejection"), default="coupled",
        help="coupled (default): the seed alone decides the answer; rejection: more drafts accepted",
    )  # fmt: skip


def given(args: argparse.Namespace) -> dict[str, Any]:
    """The options as `request.prepare` and `generate` take them; None where not given."""
    from aspire_jax.sampling.params import SAMPLING

    return {name: getattr(args, name, None) for name in SAMPLING}
