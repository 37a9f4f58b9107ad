"""The pure functions under the API, jitted in a program of one's own: no files, no threads, no hidden state.

    python examples/pure_layer.py

A tiny random model decodes two prompts with both methods; the tokens are the same.
"""

import jax
import jax.numpy as jnp
import numpy as np

from aspire_jax import ModelConfig, params, pure
from aspire_jax.context import RefreshContext
from aspire_jax.draft_length import FixedDraftLength

config = ModelConfig(
    family="llama",
    vocab_size=97,
    d_model=48,
    n_layers=3,
    n_heads=6,
    n_kv_heads=2,
    head_dim=8,
    d_ff=64,
    norm_eps=1e-5,
    max_length=512,
    tie_embeddings=True,
)
weights = pure.unstack(params.random(config, jax.random.key(0)))  # a leaf a layer: what the unrolled engine reads
prompts = [np.arange(3, 90, dtype=np.int32), np.arange(50, 70, dtype=np.int32)]
CHUNK, NEW = 64, 24

# The engine is static; the state is donated, so that its cache is updated in place.
init = jax.jit(pure.init, static_argnums=0)
prefill = jax.jit(pure.prefill, static_argnums=0, donate_argnums=2)
admit = jax.jit(pure.admit, static_argnums=0, donate_argnums=1)
run = jax.jit(pure.run, static_argnums=0, donate_argnums=2)


def decode(method: pure.Method | str) -> np.ndarray:
    engine = pure.configure(config, method, batch=len(prompts), capacity=128, max_new=NEW)
    # A cost model in any unit: only the ratios of its coefficients matter to a scheduler.
    state = init(engine, pure.CostModel(jnp.asarray([1.0, 0.1, 1e-4, 1e-5], jnp.float32)))
    nothing = np.full(engine.max_stop, -1, np.int32)
    for slot, prompt in enumerate(prompts):
        row = np.int32(slot)
        # All but the last token; the last one is the first step's input.
        for tokens, start, count in pure.chunks(prompt[:-1], CHUNK):
            state = prefill(engine, weights, state, row, tokens, np.int32(start), np.int32(count))
        state = admit(engine, state, row, np.int32(len(prompt) - 1), prompt[-1], np.int32(NEW), nothing)
    state = run(engine, weights, state, np.int32(1000), np.int32(engine.batch))
    slots = state.slots
    print(
        f"{int(slots.steps.max())} steps, {int(slots.accepted_total.sum())} of {int(slots.drafted_total.sum())} drafts"
    )
    return np.asarray(slots.out)


plain = decode("autoregressive")
# A method is a row of a table: which pages a draft reads, when a row verifies.
drafted = decode(pure.Method(RefreshContext(k_min=2, recent=1), FixedDraftLength(gamma=3)))
assert np.array_equal(plain, drafted)
print("equal:", plain[0].tolist())
