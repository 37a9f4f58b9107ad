"""The paper's runs as scenes: its machine's step times, and acceptances with its means and its spread.

Synchronised methods keep their tabulated draft and verify times and their own acceptance at five drafts. The methods
that mix rows share ASPIRE's machine and one set of acceptances: the mean is fitted to ASPIRE-Fixed's tokens per
verification at five drafts, the spread (requests and spans that differ) to ASPIRE's acceptance at its own, longer,
drafts. What their schedulers make of it, draft lengths, tokens per verification, speed, is simulated.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bench.simulation import machine
from bench.simulation.acceptance import Generator, tokens_per_verification
from bench.simulation.replay import Scene

# The table's names of the methods, by the library's; its MagicDec does not say which selection it uses.
SYNCHRONISED = {"magicdec-streaming": "MagicDec", "vegas": "Vegas", "aspire-fixed": "ASPIRE-Fixed"}
MIXED = {"aspire-fsm": "ASPIRE-FSM", "aspire": "ASPIRE"}
REQUESTS, POSITIONS, D_MAX = 64, 256, 32
# ASPIRE's own limit, within which its acceptance was measured.
_ASPIRE_D_MAX = 16
# Requests differ half as much as spans of one request do, in log-odds.
_OF_REQUEST = 0.5
_MOST_SPREAD = 3.0


class Cell(NamedTuple):
    """One entry of the paper's table 1."""

    model: str
    workload: str

    def paper(self, method: str) -> float:
        """The paper's speedup over AutoRegressive of a method of the table."""
        column = machine.WORKLOADS.index(self.workload)
        return machine.tables()["speedup"][self.model][method][column]

    @property
    def plain(self) -> float:
        """Tokens per second of AutoRegressive in the paper."""
        column = machine.WORKLOADS.index(self.workload)
        return machine.tables()["throughput_tok_s"][self.model]["AutoRegressive"][column]


CELLS = [Cell(model, workload) for model in machine.MODELS for workload in machine.WORKLOADS]


def synchronised(cell: Cell, method: str, seed: int) -> Scene:
    """The scene of a synchronised method, named as in the table."""
    figures = machine.row(cell.workload, cell.model, method)
    made = Generator(REQUESTS, POSITIONS, D_MAX, of_request=0.0, of_span=0.0, seed=seed)
    mean = made.fitted(machine.GAMMA, figures.per_verification)
    costs = machine.coefficients(cell.workload, cell.model, method)
    return Scene(made.acceptance(mean, _starts(cell, method, seed)), figures.batch, costs, costs)


def spread(cell: Cell) -> float:
    """Standard deviation of log-odds along a request, at which ASPIRE's drafts are accepted as often as it reports.

    Zero where even acceptances without any spread, fitted to ASPIRE-Fixed, are more than ASPIRE reports.
    """
    aspire = machine.row(cell.workload, cell.model, "ASPIRE")
    fixed = machine.row(cell.workload, cell.model, "ASPIRE-Fixed")
    assert aspire.acceptance is not None
    drafts = min((aspire.per_verification - 1) / (aspire.acceptance / 100), _ASPIRE_D_MAX)
    low, high = 0.0, _MOST_SPREAD
    for _ in range(6):
        middle = (low + high) / 2
        made = _generator(middle, seed=0)
        run = made.run(made.fitted(machine.GAMMA, fixed.per_verification))
        below, above = int(drafts), min(int(drafts) + 1, _ASPIRE_D_MAX)
        found = np.interp(drafts, [below, above], [tokens_per_verification(run, g) for g in (below, above)])
        if found - 1 < drafts * aspire.acceptance / 100:
            low = middle
        else:
            high = middle
    return low


def mixed(cell: Cell, of_span: float, seed: int) -> Scene:
    """The scene that the methods which mix rows share."""
    figures = machine.row(cell.workload, cell.model, "ASPIRE")
    made = _generator(of_span, seed)
    target = machine.row(cell.workload, cell.model, "ASPIRE-Fixed").per_verification
    mean = made.fitted(machine.GAMMA, target)
    costs = machine.mixed_coefficients(cell.workload, cell.model)
    return Scene(made.acceptance(mean, _starts(cell, "ASPIRE", seed)), figures.batch, costs, costs)


def _generator(of_span: float, seed: int) -> Generator:
    return Generator(REQUESTS, POSITIONS, D_MAX, of_request=_OF_REQUEST * of_span, of_span=of_span, seed=seed)


def _starts(cell: Cell, method: str, seed: int) -> np.ndarray:
    """Committed tokens where each request's stretch begins: anywhere along a generation."""
    generated = machine.row(cell.workload, cell.model, method).generated
    first = machine.PROMPT[cell.workload]
    return first + np.random.default_rng(seed).uniform(0, generated, REQUESTS)
