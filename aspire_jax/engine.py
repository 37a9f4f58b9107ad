"""The engine's static configuration and its state: everything the loop carries, as data."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import flax.struct
import jax
import jax.numpy as jnp

import pallas_kernels as pk
from aspire_jax import cache as kv
from aspire_jax import model
from aspire_jax import reproducible as exact
from aspire_jax.config import ModelConfig
from aspire_jax.context import ContextPolicy, Plan, Room
from aspire_jax.costs import TERMS, CostModel
from aspire_jax.draft_length import DraftLengthPolicy, instrumented, most_emitted_of, pauses, signals_of
from aspire_jax.sampling import rows as sampling_rows
from aspire_jax.sampling.rows import Sampling, Support
from aspire_jax.shapes import Shapes

RUNNING, STOP, LENGTH = 0, 1, 2
# Keys the tile loop reads at a time, at most: smaller blocks cost more than they save on a CPU.
_BLOCK = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine:
    """Static configuration; hashable, the static argument of every jitted function here.

    Attributes:
      config: the model.
      context, draft_length: the method's two policies.
      batch: slots B.
      capacity: tokens a slot can hold, prompt and completion; whole pages.
      max_new: size of a slot's output buffer in tokens.
      max_stop: stop tokens a request may name.
      page_size: tokens a page.
      consecutive: the promise that each row owns consecutive pages, so that its cache reads as one view.
      unrolled: layers as a Python loop with a cache leaf each (fast on a CPU), or under `lax.scan` (small programs).
      dense: batched step shapes exist (see `shapes.Shapes`).
      mixed: rows may draft and verify in one step.
      dtype: name of the cache's dtype.
      sampling: what is served beyond greedy decoding; None for greedy decoding alone.
      reproducible: logits equal plain decoding's bit for bit (see `aspire_jax.reproducible`); one step shape.
      implementation: of attention: "xla", or "pallas" (the kernels of `pallas_kernels`; layers scanned).
      interpret: the kernels run in Pallas's interpreter, on any device and slowly; for tests.
    """

    config: ModelConfig
    context: ContextPolicy
    draft_length: DraftLengthPolicy
    batch: int
    capacity: int
    max_new: int
    max_stop: int = 8
    page_size: int = 16
    consecutive: bool = True
    unrolled: bool = True
    dense: bool = True
    mixed: bool = True
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    sampling: Support | None = None
    reproducible: bool = False
    implementation: Literal["xla", "pallas"] = "xla"
    interpret: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.page_size <= 512:
            raise ValueError(f"page_size: {self.page_size}, expected 1 to 512")
        if self.capacity < 1 or self.capacity % self.page_size:
            raise ValueError(f"capacity: {self.capacity}, expected whole pages of {self.page_size} tokens")
        if self.reproducible and self.capacity % self.block:
            raise ValueError(f"capacity: {self.capacity}, expected whole blocks of {self.block} tokens (reproducible)")
        if self.implementation not in ("xla", "pallas"):
            raise ValueError(f"implementation: {self.implementation!r}, expected 'xla' or 'pallas'")
        if self.implementation == "pallas" and self.reproducible:
            raise ValueError("implementation: 'pallas', expected 'xla' where reproducible")
        if self.instrumented and self.implementation != "xla":
            raise ValueError(f"implementation: {self.implementation!r}, expected 'xla' where drafts are recorded")
        if self.implementation == "pallas" and self.unrolled:
            raise ValueError(
                "unrolled: True, expected False with implementation 'pallas' (kernels take a stacked cache)"
            )

    @property
    def plan(self) -> Plan:
        """What the context policy needs from the forward."""
        return self.context.plan(self.config)

    @property
    def d_max(self) -> int:
        """Most drafts a row may hold; 0 where nothing is drafted."""
        return self.draft_length.d_max

    @property
    def signals(self) -> tuple[str, ...]:
        """Signals of a draft that the draft-length policy asks for."""
        return signals_of(self.draft_length)

    @property
    def most_emitted(self) -> int | None:
        """Tokens a verification may emit, where the draft-length policy bounds them."""
        return most_emitted_of(self.draft_length)

    @property
    def instrumented(self) -> bool:
        """Whether verifications measure what tracing wants to know."""
        return instrumented(self.draft_length)

    @property
    def pauses(self) -> bool:
        """Whether phases without a draft have a program of their own (see `pause`)."""
        return pauses(self.draft_length) and not self.instrumented

    @property
    def pages(self) -> int:
        """Pages of a row."""
        return self.capacity // self.page_size

    @property
    def nowhere(self) -> int:
        """A page that no cache has: what is written to it is dropped."""
        return self.batch * self.pages

    @property
    def block(self) -> int:
        """Keys that are read at a time: by the tile loop many, by the kernels a page's."""
        if self.implementation == "pallas":
            return self.page_size
        if self.reproducible:
            return exact.block_of(self.page_size)
        return min(self.capacity, _BLOCK // self.page_size * self.page_size)

    @property
    def selected(self) -> int:
        """Pages a row may select."""
        return self.context.capacity(self.room)

    @property
    def room(self) -> Room:
        """The room of a row, for the context policy."""
        return Room(self.pages, self.page_size, self.max_new, self.d_max, self.kernels)

    @property
    def kernels(self) -> pk.Implementation:
        """How the functions of `pallas_kernels` run."""
        if self.implementation == "xla":
            return "xla"
        return "interpret" if self.interpret else "triton"

    @property
    def selection_shape(self) -> tuple[int, ...]:
        """Shape of the state's `selection`."""
        heads = (self.config.n_kv_heads,) if self.plan.per_head else ()
        return (self.plan.n_sets, self.batch, *heads, self.selected)

    @property
    def copies(self) -> bool:
        """Whether drafting rows read a compact copy of their selected pages."""
        return self.implementation == "xla"

    @property
    def tile(self) -> int:
        """Query tokens of a tile: 16 query rows fill the CPU's vector registers."""
        return max(1, 16 // self.config.group)

    def tokenwise(self, count: jax.Array, width: int = exact.WIDTH) -> model.Tokenwise:
        """The model's arithmetic on packed tokens of which the first `count` matter, by `width` where reproducible."""
        return model.Tokenwise(self.config, exact.by_width(count, width) if self.reproducible else exact.at_once)

    @property
    def shapes(self) -> Shapes:
        """The step shapes to compile and to choose from."""
        return Shapes(
            batch=self.batch,
            d_max=self.d_max,
            capacity=self.capacity,
            block=self.block,
            dense=self.dense and not self.reproducible,
            refreshes=len(self.plan.refresh_layers) / self.config.n_layers,
            mixed=self.mixed,
            width=exact.WIDTH if self.reproducible else None,
            alone=self.implementation == "pallas",
            few=self.instrumented,
        )


@flax.struct.dataclass
class Slots:
    """Requests in flight, one a row. A free slot is inactive.

    Attributes:
      table: [B, P] page table.
      length: [B] committed tokens, whose keys and values are in the cache.
      pending: [B] the last token emitted (or the prompt's last), not in the cache yet.
      drafts: [B, d_max] drafted tokens; drafted: [B] how many of them count.
      fresh: [B] bool, nothing of this request was measured yet, or not since a pause: it must verify first.
      stale: [B] bool, the selection (and with it the compact context) no longer holds.
      active: [B] bool; reason: [B] RUNNING, STOP or LENGTH.
      out: [B, max_new] tokens emitted; margin: [B, max_new] float32, how far their logit lay above the second best
        (for a sampled token see `aspire_jax.sampling`); emitted: [B] how many; held: [B, max_new] int8, on a
        verification's first token the drafts it held, -1 on its others.
      max_new: [B] tokens the request may emit; stop: [B, max_stop] stop tokens, -1 where unused.
      steps, drafted_total, accepted_total, verifications: [B] counts since admission.
    """

    table: jax.Array
    length: jax.Array
    pending: jax.Array
    drafts: jax.Array
    drafted: jax.Array
    fresh: jax.Array
    stale: jax.Array
    active: jax.Array
    reason: jax.Array
    out: jax.Array
    margin: jax.Array
    held: jax.Array
    emitted: jax.Array
    max_new: jax.Array
    stop: jax.Array
    steps: jax.Array
    drafted_total: jax.Array
    accepted_total: jax.Array
    verifications: jax.Array


@flax.struct.dataclass
class State:
    """Everything the loop carries. Donate it: the cache is updated in place.

    Attributes:
      cache: committed keys and values.
      tail: those of the tokens drafted since the last verification.
      compact: the selected pages of each row, copied together: k, v per layer [Hkv, B, selected * page_size, D]; no
        tokens where the implementation reads them where they lie.
      selection: [n_sets, B, selected] positions in the page table, -1 where unused; [n_sets, B, Hkv, selected] where
        the plan has a selection for each KV head. Of stale rows an old one: `upkeep.renew` makes the next.
      read: [d_max, *selection] the selection that each draft held was made with; [0, ...] unless the engine is
        instrumented.
      slots: the requests.
      sampling: their sampling parameters, and what sampling remembers of them; None where the engine is greedy.
      context, draft_length: the policies' states.
      cost: the cost model the draft-length policy plans with.
      work: [4] work done since the host last set it to zero.
      idle: scalar int32, steps since a row last drafted or held a draft.
      shape_steps: [number of shapes] int32, steps by shape since `init`.
    """

    cache: kv.KVCache
    tail: kv.Tail
    compact: kv.KVCache
    selection: jax.Array
    read: jax.Array
    slots: Slots
    sampling: Sampling | None
    context: Any
    draft_length: Any
    cost: CostModel
    work: jax.Array
    idle: jax.Array
    shape_steps: jax.Array


def init(engine: Engine, cost: CostModel) -> State:
    """The state of an engine with all slots free."""
    b, c, dtype = engine.batch, engine.config, jnp.dtype(engine.dtype)

    def pair(middle: tuple[int, ...]) -> tuple[kv.Leaves, kv.Leaves]:
        k, v = (kv.zeros(c, middle, dtype, engine.unrolled) for _ in range(2))
        return k, v

    def ints(*shape: int) -> jax.Array:
        return jnp.zeros((b, *shape), jnp.int32)

    slots = Slots(
        table=kv.consecutive_table(b, engine.pages),
        length=ints(),
        pending=ints(),
        drafts=ints(engine.d_max),
        drafted=ints(),
        fresh=jnp.ones((b,), bool),
        stale=jnp.ones((b,), bool),
        active=jnp.zeros((b,), bool),
        reason=ints(),
        out=ints(engine.max_new),
        margin=jnp.zeros((b, engine.max_new), jnp.float32),
        held=jnp.full((b, engine.max_new), -1, jnp.int8),
        emitted=ints(),
        max_new=ints(),
        stop=ints(engine.max_stop) - 1,
        steps=ints(),
        drafted_total=ints(),
        accepted_total=ints(),
        verifications=ints(),
    )
    return State(
        cache=kv.KVCache(*pair((b * engine.pages, engine.page_size))),
        tail=kv.Tail(*pair((b, engine.d_max))),
        compact=kv.KVCache(*pair((b, engine.selected * engine.page_size * engine.copies))),
        selection=jnp.full(engine.selection_shape, -1, jnp.int32),
        read=jnp.full((engine.d_max if engine.instrumented else 0, *engine.selection_shape), -1, jnp.int32),
        slots=slots,
        sampling=sampling_rows.init(engine.sampling, c.vocab_size, b, engine.max_new, engine.d_max)
        if engine.sampling
        else None,
        context=engine.context.init(c, b, engine.room),
        draft_length=engine.draft_length.init(b),
        cost=cost,
        work=jnp.zeros((TERMS,), jnp.float32),
        idle=jnp.zeros((), jnp.int32),
        shape_steps=jnp.zeros((len(engine.shapes.all),), jnp.int32),
    )
