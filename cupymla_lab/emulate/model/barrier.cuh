// What a thread waits with: mbarriers, named barriers, the barrier of the cluster, bulk groups. Waiting threads work on
// queued operations, and give up when the whole grid has stood still for too long.
//
// mbarriers are the hardware's own. Named barriers and the cluster's are counted in memory, because a thread that is
// blocked inside the hardware could neither help nor be told that another thread has failed.
#pragma once

#include "queue.cuh"

namespace cupymla::emulate {

// Nanoseconds.
constexpr uint32_t kNap = 100000;  // how long a thread that is held up does not look whether all have to stop

// mbarriers -------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void note_barrier_init(uint32_t barrier) {
  const uint32_t offset = offset_of_address(barrier);
  if (offset >= kSmemBytes) return;
  *const_cast<volatile uint64_t*>(&own_cta().barrier_inits[offset / 8]) = next_clock() << 16 | cluster_thread();
  __threadfence();
}

__device__ __forceinline__ void note_barrier_end(uint32_t barrier) {
  const uint32_t offset = offset_of_address(barrier);
  if (offset < kSmemBytes) *const_cast<volatile uint64_t*>(&own_cta().barrier_inits[offset / 8]) = 0;
}

// What uses a barrier from outside its CTA's generic proxy needs its initialisation fenced.
__device__ __forceinline__ void require_barrier(uint32_t barrier, bool by_hardware, uint32_t site) {
  const uint32_t offset = offset_of_address(barrier);
  if (offset >= kSmemBytes) return;
  const uint64_t word = watched(cta_of(rank_of_address(barrier)).barrier_inits[offset / 8]);
  if (word == 0) fail(kBarrierNotInitialised, site, offset);
  if (!by_hardware || !checking(kCheckInit)) return;
  const uint32_t thread = static_cast<uint32_t>(word) & 0x3fffu;
  if (watched(thread_of(thread).init_clock) <= word >> 16) fail(kBarrierNotFenced, site, offset, thread);
}

__device__ __forceinline__ void require_barriers(uint32_t barrier, uint32_t mask, uint32_t site) {
  if (mask == 0) return require_barrier(barrier, true, site);
  for (uint32_t rank = 0; rank < hardware::cluster_size(); ++rank) {
    if (mask >> rank & 1) require_barrier(hardware::map_to_rank(offset_of_address(barrier), rank), true, site);
  }
}

// A barrier's phase is not complete yet: do what could complete it.
__device__ __noinline__ void poll(uint32_t barrier, uint32_t site) {
  stop_if_asked();
  require_barrier(barrier, false, site);
  serve(barrier);
  Thread& mine = own_thread();
  const uint64_t now = hardware::global_nanoseconds();
  if (mine.poll_address != barrier || mine.poll_start_ns == 0) {
    mine.poll_address = barrier;
    mine.poll_start_ns = now;
  } else if (out_of_patience(mine.poll_start_ns)) {
    fail(kHang, site, offset_of_address(barrier), rank_of_address(barrier));
  }
#ifdef CUPYMLA_HOST_MACHINE
  machine::rest_at_barrier(*machine::current);
#else
  __nanosleep(64);
#endif
}

// Holds this thread up, so that others get far ahead of it.
__device__ __noinline__ void stall(uint32_t nanoseconds) {
  const uint64_t end = hardware::global_nanoseconds() + nanoseconds;
  for (uint64_t now = end - nanoseconds; now < end; now = hardware::global_nanoseconds()) {
    stop_if_asked();
    __nanosleep(end - now < kNap ? static_cast<uint32_t>(end - now) : kNap);
  }
  note_progress();
}

// Whether this thread is late now in mode random. With an odd seed one time of 16, whichever thread it is: then all
// roles fall behind by turns. With an even one every other time, but only in a few warps that the seed draws: so one
// role can fall behind all others, for as long as the kernel lets it.
__device__ __forceinline__ bool is_late() {
  const uint32_t seed = launch().seed;
  if (seed % 2) return chance(16);
  uint32_t x = (seed + 1) * 0x9e3779b9u ^ (cta_index(hardware::cluster_rank()) << 8) ^ thread_index() / 32;
  x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu, x ^= x >> 16;
  return x % 8 == 0 && chance(2);
}

// In mode random some threads take their time here.
__device__ __noinline__ void take_time() {
  if (launch().mode != kRandom || !launch().stalls || !is_late()) return;
  stall(draw_delay());
}

// Half of the seeds let threads be late before waits, and behind arrivals and barriers counted in memory, as well as
// behind waits. The others let roles fall farther behind each other, which shows other faults.
__device__ __forceinline__ void take_time_elsewhere() {
  if (launch().seed / 2 % 2 == 0) take_time();
}

// A barrier is about to be tested. Before the first test of a wait a thread may be late: what it waits for, and what
// comes after that if nothing keeps it, is over then.
__device__ __forceinline__ void begin_wait(uint32_t barrier) {
  const Thread& mine = own_thread();
  if (mine.poll_start_ns == 0 || mine.poll_address != barrier) take_time_elsewhere();
}

// A wait is over, after which a thread may be late too.
__device__ __forceinline__ void polled(uint32_t barrier) {
  Thread& mine = own_thread();
  if (mine.poll_start_ns) note_progress();
  mine.poll_start_ns = 0;
  take_time();
}

// Barriers counted in memory ----------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t generation_of(uint64_t word) { return static_cast<uint32_t>(word >> 32); }
__device__ __forceinline__ uint32_t arrived_of(uint64_t word) { return static_cast<uint32_t>(word & 0xffff); }

// Begins the next generation where everybody has arrived. Several threads may come to that at once: all of them tell the
// same result, which they have from `now`, and one of them begins.
__device__ __forceinline__ bool begin_next(CountedBarrier& barrier, uint64_t now, uint32_t absent, uint32_t expected) {
  if (arrived_of(now) + absent < expected) return false;
  *const_cast<volatile uint32_t*>(&barrier.result[generation_of(now) & 1]) = static_cast<uint32_t>(now >> 16 & 0xffff);
  __threadfence();
  const uint64_t next = static_cast<uint64_t>(generation_of(now) + 1) << 32;
  if (atomicCAS(reinterpret_cast<unsigned long long*>(&barrier.word), now, next) != now) return false;
  note_progress();
  return true;
}

// Counts one arrival and returns the generation it belongs to; the last one begins the next. `absent` threads have
// ended and count as arrived.
__device__ __forceinline__ uint32_t arrive_at(CountedBarrier& barrier, bool vote, uint32_t absent, uint32_t expected,
                                              bool relaxed = false) {
  const unsigned long long own = vote ? 0x10001ull : 1ull;
  __threadfence();
  const uint64_t before = atomicAdd(reinterpret_cast<unsigned long long*>(&barrier.word), own);
  races::meet(&barrier, generation_of(before), relaxed);
  begin_next(barrier, before + own, absent, expected);
  return generation_of(before);
}

// Whether that generation has passed. It also passes when threads that it would wait for have ended.
__device__ __forceinline__ bool passed(CountedBarrier& barrier, uint32_t generation, uint32_t absent,
                                       uint32_t expected) {
  const uint64_t now = watched(barrier.word);
  return generation_of(now) != generation || begin_next(barrier, now, absent, expected);
}

// Lets others run while that generation has not passed.
__device__ __forceinline__ void rest_at(const CountedBarrier& barrier, uint32_t generation) {
#ifdef CUPYMLA_HOST_MACHINE
  const uint64_t value = static_cast<uint64_t>(generation) << 32;
  machine::rest_until(*machine::current, &barrier.word, 0xffffffffull << 32, value, 16);
#else
  __nanosleep(32);
#endif
}

// barrier.sync, .arrive and .red; `count` 0 stands for all threads of the CTA that have not ended. Returns how many
// threads arrived in the high half and how many of them voted yes in the low half.
__device__ __noinline__ uint32_t named_barrier(uint32_t id, uint32_t count, bool waits, bool reduces, bool vote,
                                               uint32_t site) {
  stop_if_asked();
  Cta& home = own_cta();
  CountedBarrier& barrier = home.barriers[id % kNamedBarriers];
  const bool everybody = count == 0;
  const uint32_t expected = everybody ? block_threads() : count;
#ifdef CUPYMLA_HOST_MACHINE
  machine::look_at_barrier(*machine::current, id, generation_of(watched(barrier.word)), expected, reduces);
#endif
  const uint32_t generation = arrive_at(barrier, vote, everybody ? watched(home.exited) : 0, expected);
  if (!waits) {
    take_time_elsewhere();
    return 0;
  }
  const uint64_t start = hardware::global_nanoseconds();
  while (!passed(barrier, generation, everybody ? watched(home.exited) : 0, expected)) {
    stop_if_asked();
    help(home);
    if (out_of_patience(start)) fail(kHangNamedBarrier, site, id, arrived_of(watched(barrier.word)), expected);
    rest_at(barrier, generation);
  }
  races::part(&barrier, generation);
  __threadfence();
  const uint32_t voted = (expected - (everybody ? watched(home.exited) : 0)) << 16 |
                         watched(barrier.result[generation & 1]);
  take_time_elsewhere();
  return voted;
}

__device__ __forceinline__ void cluster_arrive(uint32_t site) {
  stop_if_asked();
#ifdef CUPYMLA_HOST_MACHINE
  machine::look_at_cluster_barrier(*machine::current, true);
#endif
  Cta& first = cta_of(0);
  const uint32_t expected = hardware::cluster_size() * block_threads();
  const uint32_t absent = watched(first.cluster_exited);
  own_thread().cluster_word = arrive_at(first.cluster, false, absent, expected, races::is_relaxed(site));
  take_time_elsewhere();
}

__device__ __noinline__ void cluster_wait(uint32_t site) {
#ifdef CUPYMLA_HOST_MACHINE
  machine::look_at_cluster_barrier(*machine::current, false);
#endif
  Cta& first = cta_of(0);
  const uint32_t expected = hardware::cluster_size() * block_threads(), generation = own_thread().cluster_word;
  const uint64_t start = hardware::global_nanoseconds();
  while (!passed(first.cluster, generation, watched(first.cluster_exited), expected)) {
    stop_if_asked();
    help(own_cta());
    if (out_of_patience(start)) {
      fail(kHangClusterBarrier, site, arrived_of(watched(first.cluster.word)), expected);
    }
    rest_at(first.cluster, generation);
  }
  races::part(&first.cluster, generation);
  __threadfence();
  take_time_elsewhere();
}

// Bulk groups -------------------------------------------------------------------------------------------------------

// A bulk copy to global memory: executed now, or kept until this thread waits for its group.
__device__ __forceinline__ void issue_store(const uint64_t* words, uint32_t count, uint32_t site) {
  if (!deferred()) {
    execute_store(words);
    return;
  }
  uint64_t kept[22];
  for (uint32_t i = 0; i < count; ++i) kept[i] = words[i];
  kept[1] = own_thread().groups;
  enqueue(kStore, site, kept, count);
}

// Executes this thread's copies of all groups but the last `newest` ones.
__device__ __noinline__ void run_groups(uint32_t newest) {
  Cta& home = own_cta();
  const uint32_t groups = own_thread().groups, me = cluster_thread();
  if (watched(home.head) == watched(home.tail)) return;
  lock_and_help(home);
  for (uint32_t at = watched(home.head); at != watched(home.tail); ++at) {
    Operation& slot = home.queue[at % kQueue];
    if (state_of(slot) != kPending || slot.kind != kStore || watched(slot.thread) != me) continue;
    if (static_cast<uint32_t>(watched(slot.words[1])) + newest >= groups) continue;
    const Operation operation = slot;
    execute_store(operation.words);
    set_state(slot, kDone);
  }
  retire(home);
  unlock(home);
}

// The end of a thread ---------------------------------------------------------------------------------------------

// The last thread of a CTA looks at what it leaves behind.
__device__ __noinline__ void leave(uint32_t site) {
  stop_if_asked();
  races::leave();
  Cta& home = own_cta();
  const uint32_t ended = atomicAdd(&home.exited, 1u) + 1;
  if (ended == block_threads()) {
    for (uint32_t at = watched(home.head); at != watched(home.tail); ++at) {
      const Operation& slot = home.queue[at % kQueue];
      if (state_of(slot) != kPending) continue;
      if (slot.kind == kLoad || slot.kind == kTile) fail(kCopyNeverWaited, slot.site, slot.thread & 1023u);
      if (slot.kind == kStore) fail(kStoreNeverWaited, slot.site, slot.thread & 1023u);
      if (slot.kind != kCommit) fail(kMmaNeverCompleted, slot.site, slot.thread & 1023u);
    }
    const uint32_t live = watched(home.live_allocations);
    if (live) fail(kLeak, site, live);
  }
  __threadfence();
  atomicAdd(&cta_of(0).cluster_exited, 1u);
  note_progress();
}

}  // namespace cupymla::emulate
