"""What bridges share of `dsa_attention`: its name, and the names of the indexer's arguments."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ..errors import InputError

OPERATOR = "dsa_attention"

INDEXER = {"iq": "q", "ik": "k", "iw": "weights"}
"""The indexer's arrays by the names that its own operators have for them."""


@contextlib.contextmanager
def index_errors() -> Iterator[None]:
    """Errors of the indexer's operators, in the names of `dsa_attention`."""
    own = {theirs: name for name, theirs in INDEXER.items()}
    try:
        yield
    except InputError as error:
        name = own.get(error.argument, error.argument)
        raise InputError(name, error.expected, error.got, OPERATOR) from None


def require_keys(kv: Any, ik: Any) -> None:
    """Raise InputError unless there is a key for each token. What else kv should be, the attention's checks say."""
    axis = ik.ndim - 2
    if kv.ndim > axis and kv.shape[axis] != ik.shape[axis]:
        expected = f"as many keys as kv has tokens, {kv.shape[axis]}"
        raise InputError("ik", expected, f"shape {list(ik.shape)}", OPERATOR)


def require_owner(flag: str, value: bool, owner: str, array: Any) -> None:
    """Raise InputError for a flag that is on without what it belongs to."""
    if value and array is None:
        raise InputError(flag, f"False without {owner}", "True", OPERATOR)


def index_arguments(iq: Any, ik: Any, iw: Any) -> dict[str, Any]:
    """The indexer's arrays as its operators take them."""
    return dict(zip(INDEXER.values(), (iq, ik, iw), strict=True))
