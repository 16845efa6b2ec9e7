import pytest
from hypothesis import given
from hypothesis import strategies as st

from autobatch.errors import UsageError
from autobatch.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GiB", 2 << 30),
        ("500MB", 500_000_000),
        ("1.5 GiB", 3 << 29),
        ("1073741824", 1 << 30),
        ("16g", 16_000_000_000),
        ("64 kib", 64 << 10),
        ("7B", 7),
    ],
)
def test_sizes_are_read_as_people_write_them(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1 potato", "1iB", "1e9", "2 GiB GiB"])
def test_what_is_no_size_is_refused_in_one_line(text):
    with pytest.raises(UsageError, match="it is not a size; write it like 2GiB"):
        parse_size(text)


@given(st.integers(0, 1 << 50))
def test_a_size_is_shown_to_within_a_percent(size):
    shown = format_size(size)
    assert parse_size(shown) == pytest.approx(size, rel=0.01, abs=6)
