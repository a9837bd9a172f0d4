"""Numbers on the command line, in one line each where they are refused."""

import argparse


def positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 0 < number < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r}: allowed is an integer from 1 to {2**31 - 1}")
    return number


def positives(text: str) -> tuple[int, ...]:
    """Numbers separated by commas."""
    return tuple(map(positive, text.split(",")))
