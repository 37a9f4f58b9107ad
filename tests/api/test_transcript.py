"""Text token by token: characters and stop strings across token borders."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from aspire_jax.tokenizer import load_tokenizer
from aspire_jax.transcript import Transcript


def test_pieces_stop_and_hold_back(folder):
    tokenizer = load_tokenizer(folder)

    @settings(max_examples=150, deadline=None)
    @given(
        st.text(alphabet="abhe \né€😀", max_size=24),
        st.lists(st.text(alphabet="abhe\né😀", min_size=1, max_size=4), max_size=3),
        st.integers(1, 5),
    )
    def check(text: str, stops: list[str], run: int) -> None:
        tokens = tokenizer.encode(text, add_bos=False)
        transcript = Transcript(tokenizer, [], stops)
        shown = ""
        for at in range(0, len(tokens), run):
            transcript.push(tokens[at : at + run])
            shown += transcript.take(final=False)
            assert not any(s in shown for s in stops)
            assert text.startswith(shown)
        transcript.finish()
        shown += transcript.take(final=True)
        assert shown == transcript.text
        n = len(transcript.token_ids)
        if not any(s in text for s in stops):
            assert shown == text and n == len(tokens) and not transcript.stopped
            return
        # The first token with which the text contains a stop string is the last one.
        assert transcript.stopped and transcript.token_ids == tokens[:n]
        whole = [tokenizer.decode(tokens[:k]).rstrip("\ufffd") for k in range(len(tokens) + 1)]
        assert any(s in whole[n] for s in stops) and not any(s in whole[n - 1] for s in stops)
        assert shown == whole[n][: min(whole[n].find(s) for s in stops if s in whole[n])]

    check()


def test_a_stop_token_is_no_text(folder):
    tokenizer = load_tokenizer(folder)
    tokens = tokenizer.encode("abc", add_bos=False)
    transcript = Transcript(tokenizer, [], ["c"])
    transcript.push(tokens, end_token=True)
    transcript.finish()
    assert transcript.text == "ab" and transcript.token_ids == tokens and not transcript.stopped


def test_without_tokenizer():
    transcript = Transcript(None, [], [])
    transcript.push([5, 6])
    transcript.finish()
    assert transcript.token_ids == [5, 6] and transcript.take(final=True) == ""
