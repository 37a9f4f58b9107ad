"""Sampling, per request, under a written contract.

From a token's raw logits to the token, in this order (what a request leaves out does nothing):

    1  logit bias is added
    2  repetition penalty: logits of tokens in the prompt or the answer are divided by it where positive, multiplied by
       it where negative; then frequency penalty times the number of times, and the presence penalty once, are taken
       from the logits of tokens in the answer
    3  before `min_tokens` tokens, the request's stop tokens (the model's end tokens among them) are ruled out
    4  division by the temperature; at temperature 0 the largest logit wins and nothing below applies
    5  top-k keeps the k largest logits
    6  top-p keeps, of what is left, the largest logits whose probabilities together first reach p
    7  min-p keeps, of what is left, the tokens at least min_p times as probable as the best
    8  the token is drawn from the softmax of what is left

Of equal logits the lowest token wins at temperature 0; equal logits at the border of top-k or top-p are kept
together, so that more than k tokens may stay. An answer is the tokens emitted so far; where a draft is verified, the
drafts before it count as emitted, and those that are rejected have left no trace. Log-probabilities are the log-softmax
of the raw logits, before step 1, of the target (full attention), never of a draft.

Step 8 is a perturbed maximum: with independent Gumbel noise added, the largest sum is a sample of the softmax.
`coupled` acceptance derives the noise of a token from the request's seed and the token's position in the sequence
alone, for drafts and for the target alike. A draft is right if it is the token that the target draws with the same
noise, so the text does not depend on the method, the batch, the slot or the draft length. `rejection` acceptance draws
drafts with noise of their own, accepts with probability min(1, p / q) and draws again from the positive part of p - q:
the same distribution and more acceptance, but the text depends on what was drafted.

The margin of a sampled token is a lower bound on how much the difference of two logits must change for another token
to be drawn with the same noise: through the perturbed scores, or across the border of top-k, top-p or min-p. At
temperature 0 that is the distance of the two best logits. Two methods whose logits differ by rounding may differ where
it is smaller than rounding, and nowhere else.
"""
