"""Times on the GPU by CUDA events, the machine's ceilings measured the same way, and host time per call.

One call stands between two events; the L2 cache is flushed before it by reading a buffer of three times its size, so
that it holds nothing of the call's and nothing that would have to be written back meanwhile. While the flush runs the
host enqueues what follows, so host time stays out of the measurement; where a call takes the host longer, a kernel that
waits goes before the flush. Calls that are compared alternate, so that clocks and heat are the same for all. Every
function works on the current device and stream of CuPy.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

REPEATS = 15
WARM_UP = 3
MATMUL_SIZE = 8192
STREAM_BYTES = 2 << 30

# A GPU that has just worked hard runs at a lower clock for a while (seen on an H200: by 10%): every measurement starts
# from the same rest.
SETTLE_SECONDS = 0.2

# 16-byte loads, eight in flight per thread; the sum is stored only if it takes a value no buffer here adds up to, so
# that the loads cannot be dropped.
_READ_SOURCE = r"""
extern "C" __global__ void __launch_bounds__(512) cupymla_read(const uint4* __restrict__ data, unsigned long long count,
                                                               unsigned* sink) {
    const unsigned long long step = static_cast<unsigned long long>(gridDim.x) * blockDim.x;
    unsigned long long at = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    unsigned sum = 0;
    for (; at + 7 * step < count; at += 8 * step) {
        uint4 part[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) part[i] = __ldcs(data + at + i * step);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum |= part[i].x | part[i].y | part[i].z | part[i].w;
    }
    for (; at < count; at += step) {
        const uint4 part = __ldcs(data + at);
        sum |= part.x | part.y | part.z | part.w;
    }
    if (sum == 0x80000000u) *sink = sum;
}
"""
_HOLD_SOURCE = r"""
extern "C" __global__ void cupymla_hold(long long cycles) {
    const long long begin = clock64();
    while (clock64() - begin < cycles) {}
}
"""
COVERED_US = 20.0
"""Host time that the flush covers on every GPU."""

_CYCLES_PER_US = 2000
"""No GPU's clock is higher, so a wait is never shorter than asked for."""

_EMPTY_SOURCE = 'extern "C" __global__ void cupymla_empty() {}'


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this GPU reaches at most, measured now.

    Attributes:
        cublas_bf16_tflops: a bf16 matrix product of size 8192 on normal random data, in 10**12 operations per second.
        cublas_fp8_tflops: the same of e4m3 with bf16 results, None where torch, which makes it, or the GPU cannot.
        copy_tbps: device-to-device copy, bytes read plus bytes written, in 10**12 bytes per second.
        read_tbps: reading alone, in 10**12 bytes per second.
        empty_us: what an empty kernel reads between its two events, in microseconds.
    """

    cublas_bf16_tflops: float
    copy_tbps: float
    read_tbps: float
    empty_us: float
    cublas_fp8_tflops: float | None = None

    def as_dict(self) -> dict[str, float]:
        """The fields as benchmark files spell them, those that were measured."""
        return {name: round(value, 3) for name, value in asdict(self).items() if value is not None}


class Timer:
    """Times launches on the current device, with a cold L2."""

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        l2_bytes = cupy.cuda.Device().attributes["L2CacheSize"]
        self._flush = _read(cupy.zeros(3 * l2_bytes // 4, dtype=cupy.uint32), keep=True)
        self._start, self._end = cupy.cuda.Event(), cupy.cuda.Event()

        self._hold = cupy.RawKernel(_HOLD_SOURCE, "cupymla_hold")

    def _once(self, call: Callable[[], object], hold_us: float) -> float:
        import numpy as np

        if hold_us:
            self._hold((1,), (1,), (np.int64(hold_us * _CYCLES_PER_US),))
        self._flush()
        self._start.record()
        call()
        self._end.record()
        self._end.synchronize()
        return float(self._cupy.cuda.get_elapsed_time(self._start, self._end)) * 1e3

    def _warm_up(self, calls: Mapping[str, Callable[[], object]]) -> float:
        """Run the calls untimed; returns the host time of the slowest one, in microseconds."""
        slowest = 0.0
        for number in range(WARM_UP):
            for call in calls.values():
                self._end.record()
                self._end.synchronize()
                begin = time.perf_counter()
                call()
                # The last time, when everything is compiled.
                if number == WARM_UP - 1:
                    slowest = max(slowest, (time.perf_counter() - begin) * 1e6)
        return slowest

    def us(self, call: Callable[[], object], repeats: int = REPEATS) -> float:
        """Median time of what `call` enqueues on the current stream, in microseconds.

        Args:
            call: enqueues the work; a prepared call, so that the host is ready before the flush ends.
            repeats: timed runs, at least 10; three more run first, untimed.
        """
        return self.alternating_us({"": call}, repeats)[""]

    def alternating_us(self, calls: Mapping[str, Callable[[], object]], repeats: int = REPEATS) -> dict[str, float]:
        """Median times of several calls, by name, which alternate: each runs once, then each again.

        Args:
            calls: as `call` of `us`.
            repeats: as of `us`, of each.
        """
        time.sleep(SETTLE_SECONDS)
        host_us = self._warm_up(calls)
        hold_us = 2 * host_us if host_us > COVERED_US else 0.0
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(max(repeats, 10)):
            for name, call in calls.items():
                samples[name].append(self._once(call, hold_us))
        return {name: statistics.median(times) for name, times in samples.items()}


def empty_us(timer: Timer) -> float:
    """What an empty kernel reads between two events, in microseconds."""
    import cupy

    kernel = cupy.RawKernel(_EMPTY_SOURCE, "cupymla_empty")
    return timer.us(lambda: kernel((1,), (32,), ()), repeats=50)


def matmul() -> Callable[[], object]:
    """A bf16 matrix product of size 8192 by cuBLAS: torch's if it is there and sees the GPU, else CuPy's."""
    torch = _torch()
    if torch is None:
        return _cupy_matmul()
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda").to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return _on_stream(torch, lambda: torch.matmul(a, b, out=out))


def fp8_matmul() -> Callable[[], object] | None:
    """An e4m3 matrix product of size 8192 with bf16 results by cuBLAS through torch; None where there is none."""
    torch = _torch()
    if torch is None or torch.cuda.get_device_capability() < (8, 9):
        return None
    a, b = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device="cuda")
    return _on_stream(
        torch,
        lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True),
    )


def _torch() -> Any:
    """torch, None where it is not installed or sees no GPU."""
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def _on_stream(torch: Any, call: Callable[[], object]) -> Callable[[], object]:
    """What a call of torch does, on CuPy's current stream."""
    import cupy

    address = cupy.cuda.get_current_stream().ptr
    # torch knows its own default stream, not an external one with address 0.
    stream = torch.cuda.ExternalStream(address) if address else torch.cuda.default_stream()

    def run() -> None:
        with torch.cuda.stream(stream):
            call()

    torch.cuda.synchronize()
    return run


def _cupy_matmul() -> Callable[[], object]:
    import cupy
    import numpy as np
    from cupy.cuda import cublas, device, runtime

    n = MATMUL_SIZE
    rng = cupy.random.default_rng(0)
    # The upper half of a float32 is the bfloat16 nearest below it.
    a, b = ((rng.standard_normal((n, n), dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16) for _ in range(2))
    out = cupy.empty((n, n), np.uint16)
    one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
    bf16, fp32 = runtime.CUDA_R_16BF, cublas.CUBLAS_COMPUTE_32F

    def run() -> None:
        handle = device.get_cublas_handle()
        cublas.gemmEx(
            handle, cublas.CUBLAS_OP_T, cublas.CUBLAS_OP_N, n, n, n, one.ctypes.data,
            a.data.ptr, bf16, n, b.data.ptr, bf16, n, zero.ctypes.data, out.data.ptr, bf16, n,
            fp32, cublas.CUBLAS_GEMM_DEFAULT,
        )  # fmt: skip

    return run


def _read(data: Any, keep: bool = False) -> Callable[[], object]:
    """Reading a buffer; `keep` makes L2 hold what is read rather than let go of it first."""
    import cupy
    import numpy as np

    source = _READ_SOURCE.replace("__ldcs", "__ldcg") if keep else _READ_SOURCE
    kernel = cupy.RawKernel(source, "cupymla_read")
    sink = cupy.zeros(1, dtype=cupy.uint32)
    blocks = 4 * cupy.cuda.Device().attributes["MultiProcessorCount"]
    arguments = (data, np.uint64(data.nbytes // 16), sink)
    return lambda: kernel((blocks,), (512,), arguments)


def _copy(target: Any, source: Any) -> Callable[[], object]:
    return lambda: target.data.copy_from_device_async(source.data, source.nbytes)


def ceilings(timer: Timer) -> Ceilings:
    """Measure what this GPU reaches at most; takes a few seconds and 4 GiB of its memory."""
    import cupy

    nothing = empty_us(timer)
    matmul_us = timer.us(matmul()) - nothing
    fp8 = fp8_matmul()
    fp8_us = timer.us(fp8) - nothing if fp8 else None
    source = cupy.arange(STREAM_BYTES // 4, dtype=cupy.uint32)
    target = cupy.empty_like(source)
    copy_us = timer.us(_copy(target, source)) - nothing
    read_us = timer.us(_read(source)) - nothing
    return Ceilings(
        cublas_bf16_tflops=2 * MATMUL_SIZE**3 / matmul_us / 1e6,
        copy_tbps=2 * STREAM_BYTES / copy_us / 1e6,
        read_tbps=STREAM_BYTES / read_us / 1e6,
        empty_us=nothing,
        cublas_fp8_tflops=2 * MATMUL_SIZE**3 / fp8_us / 1e6 if fp8_us else None,
    )


def host_us(
    call: Callable[[], object], synchronize: Callable[[], object], calls: int = 200, batches: int = 15
) -> float:
    """Median host time of one call, in microseconds.

    Args:
        call: what is timed; a launch that returns without waiting.
        synchronize: waits for the device; run between batches, untimed, so that the launch queue never fills up and
            blocks the host.
        calls: in a batch; below the driver's queue depth of 1024.
        batches: whose median is taken, after one that is not.
    """
    samples = []
    for _ in range(batches + 1):
        synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        samples.append((time.perf_counter() - start) / calls * 1e6)
    synchronize()
    return statistics.median(samples[1:])


def host_us_in_turns(
    calls: Mapping[str, Callable[[], object]],
    synchronize: Callable[[], object],
    rounds: int = 40,
    seconds: float = 5.0,
) -> dict[str, float]:
    """Host times of several calls that take turns, in microseconds: those of the round that took least in all.

    A virtual machine's host is disturbed for seconds at a time, by half and more of a call's time. The round is one, so
    that its times can be compared.

    Args:
        calls: by name.
        synchronize: as of `host_us`.
        rounds: how many at most.
        seconds: how long rounds are begun.
    """
    end = time.monotonic() + seconds
    batch = _batch(next(iter(calls.values())), synchronize)
    found: list[dict[str, float]] = []
    while not found or (len(found) < rounds and time.monotonic() < end):
        found.append({name: host_us(call, synchronize, batch) for name, call in calls.items()})
    return min(found, key=lambda times: sum(times.values()))


def _batch(call: Callable[[], object], synchronize: Callable[[], object]) -> int:
    """How many calls to time at a time: as many as a GPU does in 50 ms, from 20 to 200."""
    call()
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return max(20, min(200, int(0.05 / (time.perf_counter() - start))))
