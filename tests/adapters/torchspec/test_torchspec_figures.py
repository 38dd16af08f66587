"""TorchSpec's padded trainer on 8 ranks (R8): figures of benchmarks/adapters/torchspec.py."""

import pytest

from benchmarks.adapters.torchspec import Way, draw_lengths, measure, measure_inferred

STOCK = Way("stock")


@pytest.fixture(scope="module")
def lengths():
    return draw_lengths()


@pytest.mark.parametrize(
    ("micro_batch_size", "step_time", "padded"), [(1, 2.88, 1.0), (2, 3.72, 1.50), (4, 4.56, 2.13)]
)
def test_the_lengths_are_such_that_round_robin_is_as_slow_as_upstream_is(lengths, micro_batch_size, step_time, padded):
    stock = measure(lengths, way=STOCK, micro_batch_size=micro_batch_size)
    assert stock.step_time == pytest.approx(step_time, rel=0.02)
    assert stock.padded_tokens == pytest.approx(padded, rel=0.02)


@pytest.mark.parametrize(
    ("way", "micro_batch_size", "step_time"),
    [
        (Way("B", window=2), 1, 2.0),
        (Way("B", window=2), 2, 2.3),
        (Way("B", window=2), 4, 2.4),
        (Way("B", window=4), 1, 1.6),
        (Way("B", window=4), 2, 1.7),
        (Way("B", window=4), 4, 1.75),
        (Way("C"), 1, 1.06),
        (Way("C"), 2, 1.06),
        (Way("C"), 4, 1.06),
        (Way("C", window=2), 2, 1.06),
    ],
    ids=lambda value: value.name if isinstance(value, Way) else None,
)
def test_windows_and_presorting_shorten_the_step(lengths, way, micro_batch_size, step_time):
    balanced = measure(lengths, way=way, micro_batch_size=micro_batch_size)
    stock = measure(lengths, way=STOCK, micro_batch_size=micro_batch_size)
    assert balanced.step_time <= step_time
    assert balanced.rank_variance < stock.rank_variance / 2
    assert balanced.max_delay <= 2 * way.window


def test_assigning_alone_saves_padding_but_no_time(lengths):
    """Ranks with equal counts wait for the longest sample, whoever has it."""
    stock, by_tokens, padded = (
        measure(lengths, way=way, micro_batch_size=2) for way in (STOCK, Way("A", cost="tokens"), Way("A"))
    )
    assert by_tokens.step_time == padded.step_time == stock.step_time
    assert padded.padded_tokens < 1.2 < stock.padded_tokens < by_tokens.padded_tokens


def test_a_window_mends_what_inference_does_to_a_presorted_order(lengths):
    fewer = lengths[:4805]
    alone = measure_inferred(fewer, way=Way("C"), micro_batch_size=2)
    mended = measure_inferred(fewer, way=Way("C", window=2), micro_batch_size=2)
    assert mended.step_time < 1.6 < 1.7 < alone.step_time
