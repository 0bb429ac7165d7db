"""The errors themselves: what they show of a value, and that they survive being pickled and copied."""

from __future__ import annotations

import copy
import pickle

import pytest

from cupymla.errors import CompileError, CupymlaError, DriverError, InputError, UnsupportedError, shown

HUGE = 10**5000
"""An integer that Python refuses to print: it has more than 4300 digits."""


class Mute:
    """An object without a text."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


ERRORS: list[CupymlaError] = [
    InputError("q", "an array", "a word", "attn_dist"),
    InputError("a", "b", "c"),
    UnsupportedError("attn_dist", "cuda:0", "the CPU"),
    CompileError("kernel.cu", "does not compile", "line 3: no"),
    DriverError(1, "CUDA_ERROR_INVALID_VALUE", "invalid argument", "launching"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_errors_cross_processes(error: CupymlaError, protocol: int) -> None:
    """Same class, same text and same attributes in the process that receives it, as multiprocessing needs."""
    for copied in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error), copy.deepcopy(error)):
        assert type(copied) is type(error)
        assert str(copied) == str(error)
        assert vars(copied) == vars(error)
        assert copied.args == error.args


def test_values_are_shown_short_and_without_fail() -> None:
    assert shown("a") == "'a'"
    assert shown("a", str) == "a"
    assert shown(HUGE) == "int"
    assert shown(Mute()) == "Mute"
    assert shown("x" * 78) == repr("x" * 78), "80 characters fit"
    assert shown("x" * 79) == "'" + "x" * 76 + "..."


def test_input_error_keeps_words_and_shows_anything_else() -> None:
    """A sentence that a check wrote is never cut; a value is shown as `shown` does."""
    words = "an array " * 20
    assert InputError("q", "x", words).got == words
    assert InputError("q", "x", None).got == "None"
    assert InputError("q", "x", HUGE).got == "int"
    assert "got Mute" in str(InputError("q", "x", Mute()))
