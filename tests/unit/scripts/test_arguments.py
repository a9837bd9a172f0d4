"""Numbers that several scripts read alike."""

import argparse

import pytest
from arguments import positive, positives


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "1e23", "nan", "inf", "", "1" + "0" * 23])
def test_what_is_no_positive_integer_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match=rf"^'{text}': allowed is an integer from"):
        positive(text)


def test_lists():
    assert positives("1_000,7") == (1000, 7)
