import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch.errors import UsageError
from autobatch.splits import balanced, samples_per_replica, splits_of


@given(st.integers(1, 3000), st.integers(1, 8), st.integers(0, 300), st.booleans())
def test_every_split_hits_the_target_exactly_and_stays_under_the_ceiling(share, replicas, ceiling, uneven):
    target = share * replicas
    for split in splits_of(target, replicas, ceiling=ceiling, uneven=uneven):
        assert split.target == target
        assert split.micro_batch <= ceiling
        assert max(split.micro_batches) - min(split.micro_batches) <= 1
        assert split.uniform or uneven


def test_uneven_splits_of_256_are_the_31_largest_sizes_that_matter():
    splits = splits_of(256, 1, ceiling=256, uneven=True)
    assert len(splits) == 31
    assert [s.accumulation for s in splits] == sorted(s.accumulation for s in splits)


def test_uniform_splits_are_the_divisors():
    assert [s.micro_batch for s in splits_of(250, 1, ceiling=130, uneven=False)] == [125, 50, 25, 10, 5, 2, 1]


def test_a_prime_target_has_only_two_uniform_splits():
    assert [s.accumulation for s in splits_of(257, 1, ceiling=300, uneven=False)] == [1, 257]


@given(st.integers(1, 5000), st.data())
def test_balanced_sizes_differ_by_at_most_one_and_sum_up(samples, data):
    parts = data.draw(st.integers(1, samples))
    sizes = balanced(samples, parts)
    assert sum(sizes) == samples
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1


def test_a_target_that_replicas_cannot_share_names_the_nearest_ones():
    with pytest.raises(UsageError, match="use 255 or 258"):
        samples_per_replica(256, 3)


@pytest.mark.parametrize("target", [0, -4])
def test_a_target_below_one_is_refused(target):
    with pytest.raises(UsageError, match="at least 1 sample"):
        samples_per_replica(target, 1)
