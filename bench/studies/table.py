"""The studies, in the order in which they are run."""

from __future__ import annotations

from bench.studies import accepted_length, constants, oracle_gap, stale_costs
from bench.studies.study import Study

STUDIES: dict[str, Study] = {
    study.STUDY.name: study.STUDY
    for study in (accepted_length, constants, oracle_gap, stale_costs)
}  # fmt: skip
