"""The environment variables, as the package reads them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cupymla import config
from cupymla.errors import InputError

FOLDERS: dict[str, Callable[[], object]] = {
    "CUPYMLA_CACHE_DIR": config.cache_dir,
    "CUPYMLA_READONLY_CACHE": config.readonly_caches,
    "CUPYMLA_CUTLASS": config.cutlass_dir,
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_home_that_nobody_has_is_refused_by_the_variables_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "~no-such-user-anywhere/kernels")
    with pytest.raises(InputError, match="no-such-user-anywhere") as caught:
        FOLDERS[name]()
    assert caught.value.argument == name


@pytest.mark.parametrize("name", FOLDERS)
def test_the_users_own_home_is_expanded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", os.sep + "home-of-test")
    monkeypatch.setenv(name, "~/kernels")
    folder = Path(os.sep + "home-of-test", "kernels")
    assert FOLDERS[name]() in (folder, (folder,))
