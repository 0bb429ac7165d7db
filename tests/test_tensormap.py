"""Tensor maps: the driver gets exactly the request, and a request that it would refuse is named before."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from fake_driver import FakeDriver, installed, needs_gpu
from threads_kit import in_threads

from cupymla import driver, tensormap
from cupymla.errors import DriverError, InputError
from cupymla.tensormap import TileMap

P, U32, E = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int
ARGUMENTS = [P, E, U32, P, P, P, P, P, E, E, E, E]
GOOD = TileMap(0x7F0000001000, "bfloat16", (576, 8192), (1152,), (64, 64))


class FakeEncoder:
    """cuTensorMapEncodeTiled: notes its arguments, and writes a count of its calls into the map."""

    def __init__(self, fake: FakeDriver) -> None:
        self.seen: list[dict[str, Any]] = []
        self.result = 0
        fake.answer("cuTensorMapEncodeTiled", ARGUMENTS, self._encode)

    def _encode(self, target: int, dtype: int, rank: int, ptr: int, *rest: Any) -> int:
        shape, strides, box, steps, interleave, swizzle, promotion, fill = rest

        def read(kind: Any, address: int, count: int) -> list[int]:
            return list((kind * count).from_address(address))

        self.seen.append(
            {
                "target": target,
                "dtype": dtype,
                "ptr": ptr,
                "shape": read(ctypes.c_uint64, shape, rank),
                "strides": read(ctypes.c_uint64, strides, rank - 1),
                "box": read(ctypes.c_uint32, box, rank),
                "steps": read(ctypes.c_uint32, steps, rank),
                "modes": (interleave, swizzle, promotion, fill),
            }
        )
        if not self.result:
            ctypes.memset(target, len(self.seen), 128)
        return self.result


@pytest.fixture
def encoder(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEncoder]:
    with installed(monkeypatch) as fake:
        yield FakeEncoder(fake)


def test_request_arrives_whole(encoder: FakeEncoder) -> None:
    request = TileMap(
        0x10, "float32", (4, 5, 6), (16, 2**40 - 16), (4, 5, 256), swizzle=32, l2_promotion=128, fill="nan"
    )
    made = tensormap.encode(request)
    (seen,) = encoder.seen
    assert seen == {
        "target": made.address,
        "dtype": 7,
        "ptr": 0x10,
        "shape": [4, 5, 6],
        "strides": [16, 2**40 - 16],
        "box": [4, 5, 256],
        "steps": [1, 1, 1],
        "modes": (0, 1, 2, 1),
    }
    assert made.data == b"\x01" * 128
    assert made.request == request


def test_enum_values_are_those_of_the_bindings() -> None:
    from cuda.bindings import driver as bindings

    types = bindings.CUtensorMapDataType
    for label, (value, _) in tensormap._TYPES.items():
        carrier = "uint8" if label.startswith(("float8", "float4")) or label in ("bool", "int8") else label
        carrier = "uint16" if label == "int16" else carrier
        assert getattr(types, f"CU_TENSOR_MAP_DATA_TYPE_{carrier.upper()}").value == value
    for span, value in tensormap._SWIZZLES.items():
        name = f"{span}B" if span else "NONE"
        assert getattr(bindings.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{name}").value == value
    for size, value in tensormap._L2_PROMOTIONS.items():
        name = f"L2_{size}B" if size else "NONE"
        assert getattr(bindings.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{name}").value == value


def test_bytes_are_aligned_wherever_the_allocator_puts_them() -> None:
    assert {tensormap.EncodedMap().address % 128 for _ in range(200)} == {0}


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5])
def test_every_rank(encoder: FakeEncoder, rank: int) -> None:
    tensormap.encode(TileMap(0x100, "uint8", (256,) * rank, (256,) * (rank - 1), (128,) + (1,) * (rank - 1)))
    assert encoder.seen[0]["strides"] == [256] * (rank - 1)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": (2**32, 1)},
        {"strides_bytes": (0,)},
        {"box": (64, 256)},
        {"box": (256, 1), "swizzle": 0},
        {"box": (8, 1), "swizzle": 32},
        {"fill": "nan"},
        {"dtype": "float8_e4m3fn", "box": (128, 1)},
        {"dtype": "float4_e2m1fn_x2", "box": (128, 1)},
    ],
)
def test_extremes_within_the_limits_are_encoded(encoder: FakeEncoder, change: dict[str, Any]) -> None:
    tensormap.encode(GOOD._replace(**change))
    assert len(encoder.seen) == 1


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"shape": (), "strides_bytes": (), "box": ()}, "shape"),
        ({"shape": (16,) * 6, "strides_bytes": (16,) * 5, "box": (16,) * 6}, "shape"),
        ({"shape": (0, 8)}, "shape"),
        ({"shape": (2**32 + 1, 8)}, "shape"),
        ({"strides_bytes": ()}, "strides_bytes"),
        ({"strides_bytes": (2, 1152)}, "strides_bytes"),
        ({"strides_bytes": (1144,)}, "strides_bytes"),
        ({"strides_bytes": (-1152,)}, "strides_bytes"),
        ({"strides_bytes": (2**40,)}, "strides_bytes"),
        ({"box": (64,)}, "box"),
        ({"box": (64, 0)}, "box"),
        ({"box": (64, 257)}, "box"),
        ({"box": (12, 1)}, "box"),
        ({"box": (72, 1)}, "box"),
        ({"box": (64, 1), "swizzle": 64}, "box"),
        ({"dtype": "complex64"}, "dtype"),
        ({"ptr": 0x1008}, "ptr"),
        ({"ptr": 0}, "ptr"),
        ({"swizzle": 16}, "swizzle"),
        ({"l2_promotion": 32}, "l2_promotion"),
        ({"fill": "one"}, "fill"),
        ({"fill": "nan", "dtype": "int32", "box": (32, 1)}, "fill"),
    ],
)
def test_what_the_driver_would_refuse_is_named_first(encoder: FakeEncoder, change: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        tensormap.encode(GOOD._replace(**change))
    assert caught.value.argument == f"tensor map {field}"
    assert encoder.seen == []


def test_refusal_by_the_driver_shows_the_request(encoder: FakeEncoder) -> None:
    encoder.result = 1
    with pytest.raises(DriverError, match=r"encoding TileMap\(.*bfloat16.*CUDA_ERROR_INVALID_VALUE"):
        tensormap.encode(GOOD)


def test_cache_returns_one_map_per_request_and_forgets_the_oldest(encoder: FakeEncoder) -> None:
    first = tensormap.encoded(GOOD)
    assert tensormap.encoded(GOOD) is first
    assert tensormap.encoded(GOOD._replace(swizzle=0)) is not first
    for i in range(tensormap._CACHED_MAPS):
        tensormap.encoded(GOOD._replace(ptr=0x100000 + 16 * i))
    calls = len(encoder.seen)
    assert tensormap.encoded(GOOD) is not first
    assert len(encoder.seen) == calls + 1


def test_cache_keeps_what_is_in_use(encoder: FakeEncoder) -> None:
    """A map that every call asks for survives any number of others."""
    first = tensormap.encoded(GOOD)
    for i in range(2 * tensormap._CACHED_MAPS):
        tensormap.encoded(GOOD._replace(ptr=0x100000 + 16 * i))
        assert tensormap.encoded(GOOD) is first


def test_failed_request_is_not_remembered(encoder: FakeEncoder) -> None:
    encoder.result = 1
    with pytest.raises(DriverError):
        tensormap.encoded(GOOD)
    encoder.result = 0
    assert tensormap.encoded(GOOD).request == GOOD


def test_cache_under_threads(encoder: FakeEncoder) -> None:
    """Every thread gets a map of its own request, while entries are evicted under it."""
    wrong: list[TileMap] = []

    def work(seed: int) -> None:
        for i in range(400):
            request = GOOD._replace(ptr=0x1000 + 16 * ((seed * 37 + i) % 400))
            if tensormap.encoded(request).request != request:
                wrong.append(request)

    in_threads([partial(work, seed) for seed in range(4)])
    assert wrong == []


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("dtype", list(tensormap._TYPES))
def test_real_driver_takes_what_the_checks_pass(dtype: str, swizzle: int) -> None:
    """Also the bytes: equal to those that the bindings' own call makes."""
    if driver.compute_capability(0) < (9, 0):
        pytest.skip("tensor maps need compute capability 9.0")
    cupy = pytest.importorskip("cupy")
    memory = cupy.empty(1 << 16, cupy.uint8)
    value, itemsize = tensormap._TYPES[dtype]
    request = TileMap(
        memory.data.ptr, dtype, (64, 8, 4), (1024, 8192), ((swizzle or 32) // itemsize, 8, 1), swizzle, l2_promotion=128
    )
    bindings = driver._bindings()
    with driver.on_device(0):
        made = tensormap.encode(request)
        reference = driver.check(
            bindings.cuTensorMapEncodeTiled(
                bindings.CUtensorMapDataType(value),
                3,
                request.ptr,
                [bindings.cuuint64_t(n) for n in request.shape],
                [bindings.cuuint64_t(n) for n in request.strides_bytes],
                [bindings.cuuint32_t(n) for n in request.box],
                [bindings.cuuint32_t(1)] * 3,
                bindings.CUtensorMapInterleave(0),
                bindings.CUtensorMapSwizzle(tensormap._SWIZZLES[swizzle]),
                bindings.CUtensorMapL2promotion(2),
                bindings.CUtensorMapFloatOOBfill(0),
            ),
            "encoding by the bindings",
        )
    assert made.data == b"".join(int(word).to_bytes(8, "little") for word in reference.opaque)
