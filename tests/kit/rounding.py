"""Allowed differences between two training runs that add the same numbers in another order.

Derived from the number format, so that they hold on every processor and torch:

- fp32: loss and gradient norm are sums that another order moves by a few units in the last place (ulp, 2**-23); ULPS
  of them are allowed.
- bf16 and fp16: a token's loss is rounded to half an ulp (2**-8 and 2**-11), independently of other tokens', and the
  loss is a mean over some 4096 of them: half an ulp / sqrt(4096). The gradient norm is a root of few large sums, whose
  roundings do not average out as well: a quarter of an ulp.

An error of 1e-5, relative, is five times the allowance in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

from training_run import Recorded, largest_difference

FP32_ULP = 2.0**-23
BF16_ULP = 2.0**-7
FP16_ULP = 2.0**-10
ULPS = 16


@dataclass(frozen=True)
class Allowance:
    """Largest relative differences of any step.

    Attributes:
        loss: of the training loss.
        grad_norm: of the gradient norm.
    """

    loss: float
    grad_norm: float


ALLOWANCES = {
    "fp32": Allowance(ULPS * FP32_ULP, ULPS * FP32_ULP),
    "bf16": Allowance(BF16_ULP / 2 / 4096**0.5, BF16_ULP / 4),
    "fp16": Allowance(FP16_ULP / 2 / 4096**0.5, FP16_ULP / 4),
}
"""By precision."""


def assert_equal(run: Recorded, *, reference: Recorded, precision: str = "fp32") -> None:
    """Assert that two runs took the same steps up to rounding.

    Args:
        run: the run that is judged.
        reference: of the same samples in every step.
        precision: `fp32`, `bf16` or `fp16`.
    """
    assert len(run.steps) == len(reference.steps) > 0, f"{len(run.steps)} steps, not {len(reference.steps)}"
    allowed = ALLOWANCES[precision]
    for key, limit in (("lm_loss", allowed.loss), ("grad_norm", allowed.grad_norm)):
        difference = largest_difference(run, reference=reference, key=key)
        assert difference <= limit, f"{key} differs by {difference:.2e}; rounding in {precision} allows {limit:.2e}"
