"""The host's side of decoding: admits prompts into slots, runs steps, hands out text, refills finished slots.

The loops on the device (`step.run`, `pause.run`) know nothing of text or of waiting prompts; everything here
happens between runs.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Literal, Self

import jax
import numpy as np

from aspire_jax import costs, prefix
from aspire_jax.answers import Row, completion
from aspire_jax.cache import KVCache
from aspire_jax.engine import RUNNING, STOP, Engine, State
from aspire_jax.hooks import Hooks
from aspire_jax.loading import Model
from aspire_jax.observation import window_of
from aspire_jax.prefill import chunks
from aspire_jax.programs import Programs, compiled, rehearse
from aspire_jax.request import Prepared
from aspire_jax.results import Chunk, Completion, Report, Stats
from aspire_jax.sampling import params as sampling_params
from aspire_jax.sizing import machine_prior
from aspire_jax.step import NEVER
from aspire_jax.transcript import Transcript

# Tokens of a prompt that one call prefills; the fastest on a CPU.
CHUNK = 256
# Steps between two looks of the host: often enough for text to flow and stop strings to be noticed, seldom enough
# to cost nothing.
RUN_STEPS = 16
# Steps without a draft after which the program without drafts takes over; its return costs one step that measures.
PATIENCE = 4

ProgressCallback = Callable[[Report], None]


class Stream(Iterator[Chunk]):
    """An iterator of `Chunk`s; answers come in the order in which they finish.

    Attributes:
      report: the figures of the run so far.
      fit: the cost model's fit, which a later call may go on with.
      progress: the callback; may be set before the first chunk is asked for.
      cache: after the last chunk, the cache, if it was to be kept.
    """

    def __init__(
        self,
        model: Model,
        requests: Sequence[Prepared],
        engine: Engine,
        *,
        fit: costs.Fit | None = None,
        progress: ProgressCallback | None = None,
        cache: KVCache | None = None,
        keep_cache: bool = False,
        hooks: Hooks | None = None,
    ) -> None:
        """Begins nothing yet: the first chunk asked for compiles and prefills.

        Args:
          model, requests, engine: as `prepare` and `engine_for` made them.
          fit, progress: as `stream`.
          cache: one that already holds the prompts, request i in slot i; it is taken over (donated).
          keep_cache: hand the cache out at the end, in place of freeing it.
          hooks: called where a request takes or leaves a slot.
        """
        if cache is not None and len(requests) > engine.batch:
            raise ValueError(f"cache: {len(requests)} requests, expected no more than its {engine.batch} slots")
        self.report = Report(
            requests=len(requests),
            prompt_tokens=sum(len(r.tokens) - 1 for r in requests),
            planned_tokens=sum(r.max_new for r in requests),
        )
        self.fit = costs.Fit(machine_prior(model)) if fit is None else fit
        self.cache: KVCache | None = cache
        self._model, self._engine, self._keep, self._hooks = model, engine, keep_cache, hooks
        self.progress = progress
        self._queue = collections.deque(requests)
        self._rows: list[Row | None] = [None] * engine.batch
        self._held = [np.zeros((0,), np.int32)] * engine.batch  # what was prefilled into each slot
        if cache is not None:
            self._held[: len(requests)] = [r.tokens[:-1] for r in requests]
        self._finished = Stats(steps=0, drafted=0, accepted=0, verifications=0, emitted=0)
        self._pausing = False  # whether the batch decodes plainly for the time being
        self._chunks: Generator[Chunk] = self._serve()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        return next(self._chunks)

    def collect(self) -> list[Completion]:
        """Runs to the end; the completions that were still to come, in the order of the prompts."""
        done = [chunk.completion for chunk in self if chunk.completion is not None]
        return sorted(done, key=lambda completion: (completion.index, completion.choice))

    def close(self) -> None:
        """Stops, and frees the slots' memory."""
        self._chunks.close()

    def _serve(self) -> Generator[Chunk]:
        self._tell("compile")
        started = time.perf_counter()
        programs = compiled(self._engine, self._model.params, CHUNK)
        cost = costs.CostModel(jax.device_put(self.fit.coefficients, programs.home))
        if self.cache is None:
            state = programs.init(cost)
        else:
            state, self.cache = dataclasses.replace(programs.blank(cost), cache=self.cache), None
        if not programs.rehearsed:
            cache = rehearse(programs, self._engine, self._model.params, state)
            state = dataclasses.replace(programs.blank(cost), cache=cache)
        self.report.compile_seconds = time.perf_counter() - started
        while self._queue or any(self._rows):
            while self._queue and None in self._rows:
                request = self._queue.popleft()
                state = self._admit(programs, state, self._slot_for(request), request)
            state = self._run(programs, state)
            state, chunks = self._harvest(programs, state)
            self._tell("decode")
            yield from chunks
        if self._keep:
            self.cache = state.cache

    def _slot_for(self, request: Prepared) -> int:
        """The free slot that holds most of the prompt's beginning already; of equals the first."""
        free = [slot for slot, row in enumerate(self._rows) if row is None]
        return max(free, key=lambda slot: (prefix.usable(request.tokens[:-1], self._held[slot], CHUNK), -slot))

    def _admit(self, programs: Programs, state: State, slot: int, request: Prepared) -> State:
        """Prefills a prompt into a free slot and starts it."""
        started = time.perf_counter()
        row = np.int32(slot)
        state = self._prefill(programs, state, slot, request.tokens[:-1])
        stop = np.full((self._engine.max_stop,), -1, np.int32)
        stop[: len(request.stop_ids)] = request.stop_ids
        length, last = len(request.tokens) - 1, request.tokens[-1]
        engine, settings = self._engine, None
        if engine.sampling is not None:
            settings = sampling_params.settings(
                engine.sampling, request.sampling, request.tokens, engine.config.vocab_size
            )
        state = programs.admit(state, row, np.int32(length), last, np.int32(request.max_new), stop, settings)
        if programs.observe is not None:
            window, count = window_of(request.tokens, self._engine.plan.prompt_window)
            state = programs.observe(self._model.params, state, row, window, np.int32(count))
        if self._hooks is not None:
            policy = jax.device_put(self._hooks.admitted(state.draft_length, slot, request), programs.home)
            state = dataclasses.replace(state, draft_length=policy)
        self.report.prefill_seconds += time.perf_counter() - started
        prompt = [int(t) for t in request.tokens[-32:]]
        transcript = Transcript(self._model.tokenizer, prompt, request.stop, request.sampling.min_tokens)
        self._rows[slot] = Row(request, transcript)
        return state

    def _prefill(self, programs: Programs, state: State, slot: int, prompt: np.ndarray) -> State:
        """Brings a prompt's keys and values into a slot: what another slot holds of it from there."""
        row = np.int32(slot)
        source, begun = prefix.longest(prompt, self._held, slot, CHUNK)
        if begun and source != slot:
            state = programs.copy_prefix(state, np.int32(source), row, np.int32(begun))
            jax.block_until_ready(state.slots.length)
            self._tell("prefill")
        self.report.reused += begun
        for tokens, start, count in chunks(prompt[begun:], CHUNK):
            state = programs.prefill(self._model.params, state, row, tokens, np.int32(begun + start), np.int32(count))
            jax.block_until_ready(state.slots.length)
            self.report.prefilled += count
            self._tell("prefill")
        self._held[slot] = prompt
        return state

    def _run(self, programs: Programs, state: State) -> State:
        """A run of steps, timed; the cost model learns from it."""
        until_finished = 0 if self._queue else self._engine.batch
        jax.block_until_ready(state.slots.length)
        started = time.perf_counter()
        limits = np.int32(RUN_STEPS), np.int32(until_finished), np.int32(-1)
        patience = NEVER if programs.pause is None else PATIENCE
        if self._pausing:
            state = programs.pause(self._model.params, state, *limits)
        else:
            state = programs.run(self._model.params, state, *limits, np.int32(patience))
        work = np.array(state.work)  # waits for the run
        seconds = time.perf_counter() - started
        # A pause that takes no step at all is one that the policy wants no more.
        self._pausing = work[0] > 0 if self._pausing else min(work[0], int(state.idle)) >= patience
        self.fit.update(work, seconds)
        self.report.decode_seconds += seconds
        self.report.steps += int(work[0])
        self.report.work = tuple(a + float(b) for a, b in zip(self.report.work, work, strict=True))
        self.report.cost = tuple(float(b) for b in self.fit.coefficients)
        cost = costs.CostModel(jax.device_put(self.fit.coefficients, programs.home))
        return dataclasses.replace(state, cost=cost, work=jax.device_put(np.zeros_like(work), programs.home))

    def _harvest(self, programs: Programs, state: State) -> tuple[State, list[Chunk]]:
        """Takes the new tokens out of the slots, ends requests at their stop strings, frees finished slots."""
        names = (
            "out",
            "margin",
            "held",
            "emitted",
            "reason",
            "active",
            "steps",
            "drafted_total",
            "accepted_total",
            "verifications",
        )
        # Copies: the state is donated to the next run, and on a CPU these would be views of it.
        slots = {name: np.array(getattr(state.slots, name)) for name in names}
        chunks, ended = [], False
        for slot, row in enumerate(self._rows):
            if row is None:
                continue
            reason, emitted = slots["reason"][slot], int(slots["emitted"][slot])
            before = len(row.transcript.token_ids)
            row.transcript.push(slots["out"][slot, row.seen : emitted], end_token=reason == STOP)
            row.seen = emitted
            row.stats = Stats(
                steps=int(slots["steps"][slot]),
                drafted=int(slots["drafted_total"][slot]),
                accepted=int(slots["accepted_total"][slot]),
                verifications=int(slots["verifications"][slot]),
                emitted=emitted,
            )
            done = row.transcript.stopped or reason != RUNNING
            if done:
                row.transcript.finish()
            chunk = Chunk(
                id=row.request.id,
                index=row.request.index,
                text=row.transcript.take(final=done),
                token_ids=row.transcript.token_ids[before:],
                choice=row.request.choice,
                completion=completion(row, int(reason), slots, state, slot) if done else None,
            )
            self.report.completion_tokens += len(chunk.token_ids)
            if chunk.completion is not None and self._hooks is not None:
                self._hooks.finished(state.draft_length, slot, row.request, chunk.completion)
            if done:
                ended |= bool(slots["active"][slot])
                slots["active"][slot] = False
                self._finished = _sum(self._finished, row.stats)
                self._rows[slot] = None
                self.report.finished += 1
                self.report.planned_tokens -= row.request.max_new - len(row.transcript.token_ids)
            if chunk.text or chunk.token_ids or done:
                chunks.append(chunk)
        total = _sum(self._finished, *(row.stats for row in self._rows if row is not None))
        for name in ("drafted", "accepted", "verifications", "emitted"):
            setattr(self.report, name, getattr(total, name))
        if ended:
            active = jax.device_put(slots["active"], programs.home)
            state = dataclasses.replace(state, slots=dataclasses.replace(state.slots, active=active))
        return state, chunks

    def _tell(self, stage: Literal["compile", "prefill", "decode"]) -> None:
        self.report.stage = stage
        if self.progress is not None:
            self.progress(self.report)


def _sum(*stats: Stats) -> Stats:
    names = [f.name for f in dataclasses.fields(Stats)]
    return Stats(**{name: sum(getattr(s, name) for s in stats) for name in names})
