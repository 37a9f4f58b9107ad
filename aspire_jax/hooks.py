"""The host's hand in a draft-length policy's state: what no policy can know from inside the loop."""

from __future__ import annotations

from typing import Any, Protocol

from aspire_jax.request import Prepared
from aspire_jax.results import Completion


class Hooks(Protocol):
    """Called by `host.Stream` between runs of steps, in the order in which requests take and leave slots."""

    def admitted(self, state: Any, slot: int, request: Prepared) -> Any:
        """The draft-length policy's state, changed or not, now that `request` starts in row `slot`."""

    def finished(self, state: Any, slot: int, request: Prepared, completion: Completion) -> None:
        """Looks at the state of a row whose request is done, before another takes it over."""
