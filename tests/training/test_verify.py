"""`--balance-verify`: a first step that is wrong ends every rank before the optimizer; a healthy run is left as it is."""

from __future__ import annotations

ERRORS = {
    # packing
    "a-sample-is-lost": "the last sample of a micro-batch is left out, and filler takes its place",
    "a-sample-runs-twice": "the shortest sample of a micro-batch runs in place of its longest one too",
    "two-samples-are-joined": "the first two samples of a micro-batch are one sequence to attention",
    "a-boundary-is-late": "the second sequence of a micro-batch begins one step of padding too late",
    # positions
    "positions-go-on": "positions are counted through a micro-batch, not from zero in each sequence",
    "positions-begin-at-one": "positions are counted from one",
    # masks
    "padding-is-learned": "filler counts as learned tokens",
    "the-mask-is-late": "the loss mask is that of the token before",
    # weights
    "samples-count-alike": "gradients are the mean of samples, not of tokens",
    "a-sample-counts-twice": "the gradient of one sample of the step is doubled",
}
"""What must be found, in fp32 and in bf16; `tests/kit/wrong_steps.py` has a function of each name."""
