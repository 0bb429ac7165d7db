"""What the replay takes a multiprocessor to be able to do."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates and latencies of a Hopper multiprocessor, in cycles and bytes per cycle.

    [G]: CUDA C++ Programming Guide, arithmetic throughput for compute capability 9.0, and shared memory. [M]: measured
    on an H200 with all multiprocessors at it (the kernels' READMEs), at 1.755 GHz. [A]: assumed; the two for clusters
    are near what microbenchmarks of loads from distributed shared memory are said to give (some 3 TB/s, 180 cycles).

    Attributes:
        solo: between plain instructions of one warp, dependences counted in [A].
        alu: an instruction of the pipe for integers and logic [G].
        fma: of the fp32 pipe [G].
        imad: of the half of it that does integer products [G].
        xu: of the pipe for special functions [G].
        shared_bytes: of the banks [G].
        shared_latency: of a load [A].
        exchange_latency: of a shuffle [A].
        tensor_columns: of an accumulator with 64 rows and 16 steps, in bf16 or fp16 [G].
        product_latency: from the end of a group's last product to what waits for it [A].
        product_queue: products of a warp that wait for their turn before it has to wait itself [A].
        warp_products: multiply-adds of an mma of fp16 or bf16 that a scheduler's tensor core does; of its 512 for
            wgmma, 62% are said to be reached (Luo et al. 2024, arXiv:2402.13499).
        warp_product_latency: of an mma whose operands are there (33 cycles for m16n8k16, the same).
        gather_bytes: out of L2 [M].
        l2_latency: of a load, under load [A].
        memory_bytes: out of device memory, what nobody has asked for before; infinite where all lies in L2.
        memory_latency: of that.
        store_bytes: to L2 [A].
        reduce_bytes: of fp32 sums in L2 [M]; 16.4, 9.9, 6.9 with 8192, 32768, 131072 rows.
        reduce_queue: bytes that are under way before a warp has to wait [A].
        cluster_bytes: to another multiprocessor's shared memory [A].
        cluster_queue: bytes of that which are under way before a warp has to wait [A].
        cluster_latency: of that, and of arrivals there [A].
        wake: from the end of a phase to the first instruction behind a wait for it [A].
        named: of a named barrier [A].
        proxy_fence: of fence.proxy.async [A].
        cta_fence: of a fence of the CTA [A].
        gpu_fence: of one of the GPU or the cluster [A].
    """

    solo: float = 1.5
    alu: float = 2.0
    fma: float = 1.0
    imad: float = 2.0
    xu: float = 8.0
    shared_bytes: float = 128.0
    shared_latency: float = 30.0
    exchange_latency: float = 25.0
    tensor_columns: float = 2.0
    product_latency: float = 30.0
    product_queue: float = 2.0
    warp_products: float = 317.0
    warp_product_latency: float = 33.0
    gather_bytes: float = 37.0
    l2_latency: float = 700.0
    memory_bytes: float = math.inf
    memory_latency: float = 0.0
    store_bytes: float = 32.0
    reduce_bytes: float = 16.4
    reduce_queue: float = 8192.0
    cluster_bytes: float = 16.0
    cluster_queue: float = 4096.0
    cluster_latency: float = 190.0
    wake: float = 25.0
    named: float = 20.0
    proxy_fence: float = 15.0
    cta_fence: float = 15.0
    gpu_fence: float = 700.0


# For kernels that read each byte once. Memory: 4.41 TB/s for 132 multiprocessors at 1.755 GHz [M], and a latency under
# that load [A]; L2's without load (262 cycles: Luo et al. 2024, arXiv:2402.13499).
FROM_MEMORY = Rates(memory_bytes=19.0, memory_latency=1000.0, l2_latency=270.0)
