"""FLOPs as a polynomial in the length of a sequence, with terms for attention within a window."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class FlopsPolynomial:
    """FLOPs of one sequence of length L: `(linear + expert_linear)*L + quadratic*L² + Σ c*causal_pairs(L, w)`.

    Attributes:
        linear: FLOPs per token.
        quadratic: FLOPs per squared token.
        expert_linear: FLOPs per token in routed experts, which an expert-parallel group shares.
        windows: pairs `(keys w that a query attends to, FLOPs c)` of sliding-window and of sparse attention,
            ascending.

    Example:
        >>> FlopsPolynomial(linear=10, quadratic=1)(8)
        144
    """

    linear: int = 0
    quadratic: int = 0
    expert_linear: int = 0
    windows: tuple[tuple[int, int], ...] = ()

    def __add__(self, other: FlopsPolynomial) -> FlopsPolynomial:
        windows = dict(self.windows)
        for window, coefficient in other.windows:
            windows[window] = windows.get(window, 0) + coefficient
        return FlopsPolynomial(
            self.linear + other.linear,
            self.quadratic + other.quadratic,
            self.expert_linear + other.expert_linear,
            tuple(sorted(windows.items())),
        )

    def __call__(self, length: int) -> int:
        """FLOPs of one sequence of `length` tokens."""
        in_windows = sum(coefficient * causal_pairs(length, window=w) for w, coefficient in self.windows)
        return (self.linear + self.expert_linear) * length + self.quadratic * length**2 + in_windows


def causal_pairs(length: int, *, window: int) -> int:
    """Twice the query-key pairs that a causal window of `window` tokens computes; L² while it covers all.

    The window's exact count is `wL - w(w-1)/2`; full attention's is `L(L+1)/2`, of which L² leaves out the
    diagonal, as is usual. Sparse attention that picks `window` keys a query computes the same number of pairs.

    Example:
        >>> causal_pairs(100, window=10)
        1910
    """
    return 2 * window * length - window * (window - 1) if window < length else length**2
