"""GPU kernels of the mixed forward for Pallas's Triton backend, each beside its jnp twin of the same signature.

Nothing here knows of engines, methods or models; arguments are arrays. `implementation` chooses: "triton" compiles for
a GPU, "interpret" runs the same kernel step by step on any device (slow: for tests), "xla" is the twin.

    mixed_attention   rows with any number of queries over page lists of their own, split over the keys, and combined
                      with the step's new tokens                                    attention.py, splits.py, combine.py
    page_scores       softmax mass of every page under a known log-sum-exp          scores.py
    select_pages      the k best pages of each row, recent ones always in           select.py
    write_pages       a step's keys and values into their pages, in place           write.py
"""

from pallas_kernels.attention import mixed_attention
from pallas_kernels.combine import NewTokens, Tail
from pallas_kernels.launch import IMPLEMENTATIONS, Implementation
from pallas_kernels.lists import PageLists, QueryRows, selected_pages, whole_table
from pallas_kernels.scores import page_scores
from pallas_kernels.select import select_pages
from pallas_kernels.write import write_pages

__all__ = [
    "IMPLEMENTATIONS",
    "Implementation",
    "NewTokens",
    "PageLists",
    "QueryRows",
    "Tail",
    "mixed_attention",
    "page_scores",
    "select_pages",
    "selected_pages",
    "whole_table",
    "write_pages",
]
