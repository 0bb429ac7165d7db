"""What bindings to kernels share, without a GPU: tensor maps of arguments."""

from __future__ import annotations

import pytest

from cupymla.errors import DriverError, InputError
from cupymla.ops import gpu
from cupymla.tensormap import TileMap


@pytest.mark.parametrize("stride", [0, 1152])
def test_a_driver_that_refuses_broadcast_axes_names_the_argument(stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = DriverError(1, "CUDA_ERROR_INVALID_VALUE", "invalid argument", "encoding a map")

    def refuse(request: TileMap) -> None:
        raise failure

    monkeypatch.setattr(gpu, "encoded", refuse)
    request = TileMap(4096, "bfloat16", (576, 16, 4, 1), (stride, 18432, 1152), (64, 16, 1, 1))
    with pytest.raises((DriverError, InputError)) as caught:
        gpu.tiles(request, "dout", "sparse_mla_bwd")
    if stride:
        assert caught.value is failure
        return
    assert isinstance(caught.value, InputError)
    assert (caught.value.argument, caught.value.operator) == ("dout", "sparse_mla_bwd")
    assert "broadcast" in caught.value.expected
    assert "(0, 18432, 1152)" in caught.value.got
