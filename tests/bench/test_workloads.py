"""Lengths as arguments, and prompts chosen by them."""

from __future__ import annotations

import argparse

import pytest

from aspire_jax import InputError
from bench import workloads


@pytest.mark.parametrize(
    ("text", "value", "name"),
    [
        ("7000", 7000, "7,000"),
        ("7k", 7000, "7,000"),
        ("16k-18k", (16000, 18000), "16k-18k"),
        ("500-900", (500, 900), "500-900"),
    ],
)
def test_length(text, value, name):
    assert workloads.length(text) == value and workloads.name(value) == name


@pytest.mark.parametrize("text", ["", "0", "k", "7k-", "9-5", "1-2-3", "-5", "7.5k"])
def test_length_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected tokens like 7000 or a bucket like 1k-2k"):
        workloads.length(text)


def test_a_bucket_has_whole_prompts_of_its_lengths(model, data):
    lengths = [len(r.tokens) for r in workloads.choose(model, data, 5, (40, 80), 8)]
    assert sorted(lengths) == [50, 55, 60, 65, 70]
    twice = [
        [r.tokens.tolist() for r in workloads.choose(model, data, 2, (20, 80), 8, seed)] for seed in (1, 1, 2, 3, 4)
    ]
    assert twice[0] == twice[1] and any(other != twice[0] for other in twice[2:])
    with pytest.raises(InputError, match="data: 5 prompts of 40 to 80 tokens, expected 6"):
        workloads.choose(model, data, 6, (40, 80), 8)
    with pytest.raises(InputError, match="bucket 40-130, expected lengths of at most 120 tokens"):
        workloads.choose(model, data, 1, (40, 130), 8)
    with pytest.raises(InputError, match="without --data"):
        workloads.choose(model, [], 1, (40, 80), 8)


def test_near_cuts_what_is_long_enough(model, data):
    chosen = workloads.choose(model, data, 3, 60, 8)
    assert all(57 < len(r.tokens) <= 60 and not r.stop_ids for r in chosen)
    with pytest.raises(InputError, match="data: 4 prompts of at least 60 tokens, expected 5"):
        workloads.near(model, data, 5, 60, 8)
    with pytest.raises(InputError, match=r"context: 125 tokens, expected at most 120 \(128 less the answer\)"):
        workloads.near(model, data, 1, 125, 8)
