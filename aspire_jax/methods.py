"""The table of methods: a method is a context policy, a draft-length policy, and whether rows mix."""

from __future__ import annotations

import dataclasses

from aspire_jax.context import ContextPolicy, NoContext, RefreshContext
from aspire_jax.draft_length import AspireDraftLength, DraftLengthPolicy, NoDraft


@dataclasses.dataclass(frozen=True)
class Method:
    """One row of the table.

    Attributes:
      context: which pages a draft may read.
      draft_length: when a row verifies.
    """

    context: ContextPolicy
    draft_length: DraftLengthPolicy


METHODS: dict[str, Method] = {
    "autoregressive": Method(NoContext(), NoDraft()),
    "aspire": Method(RefreshContext(), AspireDraftLength()),
}
