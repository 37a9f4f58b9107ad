"""The studies, in the order in which they are run."""

from __future__ import annotations

from bench.studies import (
    accepted_length,
    constants,
    draft_length,
    oracle_gap,
    page_size,
    recall,
    refresh_layer,
    stale_costs,
)
from bench.studies.study import Study

# Traces first: what records them is gone again when prompts are prefilled for the others.
_ALL = (accepted_length, constants, oracle_gap, stale_costs, draft_length, refresh_layer, page_size, recall)
STUDIES: dict[str, Study] = {study.STUDY.name: study.STUDY for study in _ALL}
