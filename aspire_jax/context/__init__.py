"""Context policies: which pages a drafting row may read. One policy a file; `policy` has the interface."""

from __future__ import annotations

from aspire_jax.context.blend import BlendContext
from aspire_jax.context.none import NoContext
from aspire_jax.context.pages import always, best_pages, pages_of, top_pages
from aspire_jax.context.policy import ContextPolicy, Plan, PromptObserver, PromptWeights, Room, Scores, State
from aspire_jax.context.refresh import PageMass, RefreshContext
from aspire_jax.context.snapkv import SnapKVContext
from aspire_jax.context.streaming import StreamingContext
from aspire_jax.context.vegas import VegasContext

__all__ = [
    "BlendContext",
    "ContextPolicy",
    "NoContext",
    "PageMass",
    "Plan",
    "PromptObserver",
    "PromptWeights",
    "RefreshContext",
    "Room",
    "Scores",
    "SnapKVContext",
    "State",
    "StreamingContext",
    "VegasContext",
    "always",
    "best_pages",
    "pages_of",
    "top_pages",
]
