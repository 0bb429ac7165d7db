// Asynchronous operations between issue and execution. In mode eager they are executed when they are issued; in mode
// lazy only when a thread waits for a barrier that they, or a commit behind them, complete; in mode random by chance
// anywhere between the two.
//
// Operations of one thread are executed in the order of issue, as the ISA orders pipelined ones. A thread that waits
// takes part in whatever its CTA's queue executes, so that large products are computed by many threads.
#pragma once

#include "move.cuh"
#include "tile.cuh"
#ifdef CUPYMLA_HOST_MACHINE
#include "announce.hpp"
#include "product.hpp"
#endif

// Defined by the translated module: executes the copy instruction of that number on these operands.
extern "C" __device__ void cupymla_emulate_dispatch(cupymla::uint32_t number, const cupymla::uint64_t* operands);

namespace cupymla::emulate {

// Addresses are kept in one form, whatever the hardware's: the CTA's rank above 24 bits of offset.
__device__ __forceinline__ uint32_t kept_address(uint32_t address) {
  return hardware::rank_of_shared(address) << 24 | (address & 0xffffffu);
}
__device__ __forceinline__ uint32_t rank_of_address(uint32_t address) { return address >> 24; }
__device__ __forceinline__ uint32_t offset_of_address(uint32_t address) { return address & 0xffffffu; }

__device__ __forceinline__ bool chance(uint32_t one_in) {
  Thread& mine = own_thread();
  uint32_t x = launch().seed * 0x9e3779b9u ^ (cta_index(hardware::cluster_rank()) << 12) ^ thread_index();
  x ^= (mine.serial++ + 1) * 0x85ebca6bu;
  x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu, x ^= x >> 16;
  return x % one_in == 0;
}

// Nanoseconds that something takes longer than usual in mode random.
constexpr uint32_t kLongestStall = 64000000;

__device__ __forceinline__ uint32_t draw_delay() {
  uint32_t nanoseconds = 1000;
  while (nanoseconds < kLongestStall && !chance(8)) nanoseconds *= 2;
  return nanoseconds;
}

// Whether what is issued now waits for somebody who needs it.
__device__ __forceinline__ bool deferred() {
  const uint32_t mode = launch().mode;
  return mode == kLazy || (mode == kRandom && chance(2));
}

// A bulk copy to global memory, from its number and operands: the number says which of the module's instructions, or
// that it is a scatter, which this thread carries out.
constexpr uint32_t kScatter = 0xffffffffu;

__device__ __noinline__ void execute_store(const uint64_t* words) {
  const auto number = static_cast<uint32_t>(words[0]);
  if (number != kScatter) return cupymla_emulate_dispatch(number, words + 3);
  const Tile tile(words + 3);
  for (uint32_t row = 0; row < 4; ++row) scatter_row(tile, *find_map(tile.map), row);
  __threadfence();
}

// Shared work ---------------------------------------------------------------------------------------------------

__device__ __noinline__ void work_item(const Job& job, Cta& home, uint32_t item) {
  const Operation operation = job.operation;
  if (operation.kind == kMma) {
    const Mma mma(operation.words, operation.thread);
    const Shape shape = mma.shape();
    if (job.phase == 0) {
      const uint32_t a_rows = shape.m * a_copies(mma, shape);
      if (item < a_rows) {
        read_a(mma, shape, item / shape.m, item % shape.m, operation, home);
      } else {
        read_b(mma, shape, item - a_rows, operation, home);
      }
    } else {
      multiply(mma, shape, item % shape.m, item / shape.m * kColumnsPerItem, home);
    }
    return;
  }
  if (operation.kind == kTile) {
    const Tile tile(operation.words);
    return copy_tile_row(tile, *find_map(tile.map), item);
  }
  const TmemCopy copy(operation.words);
  const uint32_t first = operation.thread >> 10;
  const uint32_t half = item / copy.rows();
  copy_row(copy, copy.cta_group == 1 ? first : (first & ~1u) | half, item % copy.rows(), operation);
}

// Takes items of the CTA's current job until there are none. The ticket's number may belong to a job that began since
// it was looked at; it then has to be done all the same.
__device__ __noinline__ void help(Cta& home) {
  uint64_t ticket = watched(home.ticket);
  if (ticket >> 32 == 0) return;
  if (static_cast<uint32_t>(ticket) >= watched(home.jobs[(ticket >> 32) % kJobs].total)) return;
  while (true) {
    ticket = atomicAdd(reinterpret_cast<unsigned long long*>(&home.ticket), 1ull);
    const uint32_t epoch = static_cast<uint32_t>(ticket >> 32), item = static_cast<uint32_t>(ticket);
    Job& job = home.jobs[epoch % kJobs];
    if (item >= watched(job.total) || watched(job.epoch) != epoch) return;
    __threadfence();
    work_item(job, home, item);
    __threadfence();
    atomicAdd(&job.done, 1u);
  }
}

__device__ __noinline__ void share(Cta& home, const Operation& operation, uint32_t phase, uint32_t total) {
  const uint32_t epoch = watched(home.epoch) + 1;
  Job& job = home.jobs[epoch % kJobs];
  *const_cast<volatile uint32_t*>(&job.epoch) = 0;
  __threadfence();
  job.operation = operation;
  job.phase = phase;
  job.total = total;
  job.done = 0;
  __threadfence();
  *const_cast<volatile uint32_t*>(&job.epoch) = epoch;
  *const_cast<volatile uint32_t*>(&home.epoch) = epoch;
  __threadfence();
  atomicExch(reinterpret_cast<unsigned long long*>(&home.ticket), static_cast<unsigned long long>(epoch) << 32);
  while (watched(job.done) < total) {
    help(home);
    stop_if_asked();
    if (watched(job.done) < total) __nanosleep(32);
  }
  __threadfence();
}

// Handing work over ---------------------------------------------------------------------------------------------

// A request to cancel a cluster that has not begun, among the operations that signal a barrier: its number.
constexpr uint32_t kTryCancel = 0xffffffffu;

// Answers with four words: 1 and the first CTA of the cluster that is handed over, or zeros where there is none. That
// is so on a GPU always: what has begun there is the hardware's affair.
__device__ __noinline__ void answer_request(const uint64_t* words) {
  const auto barrier = static_cast<uint32_t>(words[1]), mask = static_cast<uint32_t>(words[2]);
  const uint32_t place = offset_of_address(static_cast<uint32_t>(words[3])), offset = offset_of_address(barrier);
  uint32_t answer[4] = {0, 0, 0, 0};
#ifdef CUPYMLA_HOST_MACHINE
  answer[0] = machine::take_cluster(answer + 1);
#endif
  for (uint32_t rank = 0; rank < hardware::cluster_size(); ++rank) {
    if (mask ? !(mask >> rank & 1) : rank != rank_of_address(barrier)) continue;
    const uint4 value{answer[0], answer[1], answer[2], answer[3]};
    hardware::store_cluster_16(hardware::map_to_rank(place, rank), value);
    __threadfence();
    hardware::complete_bytes_in_cluster(hardware::map_to_rank(offset, rank), 16);
  }
}

// Copies between CTAs -------------------------------------------------------------------------------------------

// Beside the number of a copy, or of a reduction, from shared memory to shared memory.
constexpr uint32_t kBetweenCtas = 0x80000000u, kAtOnce = 0x40000000u;
constexpr uint32_t kCopyNumber = kAtOnce - 1;

// A shared-memory address in the form that all CTAs of the cluster know it by.
__device__ __forceinline__ uint64_t cluster_form(uint64_t address) {
  const uint32_t kept = kept_address(static_cast<uint32_t>(address));
  return hardware::map_to_rank(offset_of_address(kept), rank_of_address(kept));
}

// Operands from words[3] on: destination, barrier, source, bytes. The instruction names its source as a place of the
// CTA that issues it, and a thread of another one may be the one that executes the copy. So it goes by words.
__device__ __noinline__ void copy_between(const Operation& operation) {
  const auto to = static_cast<uint32_t>(operation.words[3]), barrier = static_cast<uint32_t>(operation.words[4]);
  const uint32_t offset = static_cast<uint32_t>(operation.words[5]) & 0xffffffu;
  const uint32_t from = hardware::map_to_rank(offset, operation.thread >> 10);
  const auto bytes = static_cast<uint32_t>(operation.words[6]);
  for (uint32_t at = 0; at < bytes; at += 16) hardware::store_cluster_16(to + at, hardware::load_cluster_16(from + at));
  __threadfence();
  hardware::fence_proxy_async();
  hardware::complete_bytes_in_cluster(barrier, bytes);
}

// Execution -----------------------------------------------------------------------------------------------------

__device__ __forceinline__ void commit(const Operation& operation) {
  const uint32_t barrier = static_cast<uint32_t>(operation.words[0]), mask = static_cast<uint32_t>(operation.words[1]);
  __threadfence();
  hardware::fence_proxy_async();
  for (uint32_t rank = 0; rank < hardware::cluster_size(); ++rank) {
    if (mask ? !(mask >> rank & 1) : rank != rank_of_address(barrier)) continue;
    const uint32_t target = hardware::map_to_rank(offset_of_address(barrier), rank);
    races::hand(target, operation.words[2]);
    hardware::arrive_in_cluster(target);
  }
  races::drop(operation.words[2]);
}

__device__ __forceinline__ void require_peer(const Mma& mma, uint32_t site) {
  if (mma.cta_group == 2 && watched(cta_of(mma.rank ^ 1).exited) == block_threads()) fail(kPeerGone, site);
}

__device__ __noinline__ void execute(Cta& home, const Operation& operation) {
  switch (operation.kind) {
    case kMma: {
      const Mma mma(operation.words, operation.thread);
      const Shape shape = mma.shape();
      require_peer(mma, operation.site);
#ifdef CUPYMLA_HOST_MACHINE
      multiply_on_host(mma, shape, operation, home);
#else
      *const_cast<volatile uint64_t*>(&home.b_sum) = 0;
      share(home, operation, 0, shape.m * a_copies(mma, shape) + shape.n);
      check_collector(mma, watched(home.b_sum), operation, home);
      share(home, operation, 1, shape.m * ((shape.n + kColumnsPerItem - 1) / kColumnsPerItem));
#endif
      break;
    }
    case kTmemCopy: {
      const TmemCopy copy(operation.words);
      share(home, operation, 0, copy.rows() * copy.cta_group);
      break;
    }
    case kShift: {
      const uint32_t rank = operation.thread >> 10;
      shift_down(static_cast<uint32_t>(operation.words[0]), rank);
      if (operation.words[1] == 2) shift_down(static_cast<uint32_t>(operation.words[0]), rank ^ 1);
      break;
    }
    case kTile: {
      const Tile tile(operation.words);
      const TileInfo& info = *find_map(tile.map);
      share(home, operation, 0, tile_rows(tile, info));
      complete_tile(tile, info);
      break;
    }
    case kCommit: commit(operation); break;
    case kLoad: {
      const auto number = static_cast<uint32_t>(operation.words[0]);
      if (number == kTryCancel) {
        answer_request(operation.words);
#ifndef CUPYMLA_HOST_MACHINE
      } else if (number & kBetweenCtas) {
        copy_between(operation);
#endif
      } else {
        cupymla_emulate_dispatch(number & kCopyNumber, operation.words + 3);
      }
      break;
    }
    default: fail(kInternal, operation.site, operation.kind);
  }
  __threadfence();
  note_progress();
}

// The queue -----------------------------------------------------------------------------------------------------

__device__ __forceinline__ bool try_lock(Cta& home) {
  if (watched(home.lock) != 0 || atomicCAS(&home.lock, 0u, 1u) != 0) return false;
  __threadfence();
  return true;
}

__device__ __forceinline__ void unlock(Cta& home) {
  __threadfence();
  atomicExch(&home.lock, 0u);
}

__device__ __forceinline__ uint32_t state_of(const Operation& slot) { return watched(slot.state); }

__device__ __forceinline__ void set_state(Operation& slot, uint32_t state) {
  *const_cast<volatile uint32_t*>(&slot.state) = state;
}

// Gives back the entries at the head that have been executed. The caller holds the lock.
__device__ __forceinline__ void retire(Cta& home) {
  uint32_t head = watched(home.head);
  while (head != watched(home.tail) && state_of(home.queue[head % kQueue]) == kDone) {
    set_state(home.queue[head % kQueue], kFree);
    ++head;
  }
  *const_cast<volatile uint32_t*>(&home.head) = head;
}

// Copies by TMA are ordered with nothing.
__device__ __forceinline__ bool is_copy(const Operation& slot) { return slot.kind == kLoad || slot.kind == kTile; }

// Executes entry `last`, and before it what `thread` has given the Tensor Core, unless it is a copy. The caller holds
// the lock.
__device__ __noinline__ void run_to(Cta& home, uint32_t thread, uint32_t last) {
  const uint32_t first = is_copy(home.queue[last % kQueue]) ? last : watched(home.head);
  for (uint32_t at = first; static_cast<int32_t>(at - last) <= 0; ++at) {
    Operation& slot = home.queue[at % kQueue];
    if (state_of(slot) != kPending) continue;
    if (slot.kind == kStore || (is_copy(slot) && at != last)) continue;
    if (watched(slot.thread) != thread) continue;
    const Operation operation = slot;
    execute(home, operation);
    set_state(slot, kDone);
  }
  retire(home);
}

__device__ __forceinline__ void lock_and_help(Cta& home) {
  while (!try_lock(home)) {
    help(home);
    stop_if_asked();
    __nanosleep(32);
  }
}

// Puts an operation into this CTA's queue and returns its number.
__device__ __noinline__ uint32_t enqueue(uint32_t kind, uint32_t site, const uint64_t* words, uint32_t count) {
  Cta& home = own_cta();
  const uint32_t at = atomicAdd(&home.tail, 1u);
  const uint64_t start = hardware::global_nanoseconds();
  Operation& slot = home.queue[at % kQueue];
  while (at - watched(home.head) >= kQueue || state_of(slot) != kFree) {
    // Somebody has to make room: what is oldest has waited long enough.
    const uint32_t oldest = watched(home.head);
    if (try_lock(home)) {
      run_to(home, watched(home.queue[oldest % kQueue].thread), oldest);
      unlock(home);
    }
    stop_if_asked();
    if (out_of_patience(start)) fail(kQueueFull, site, kQueue);
  }
  slot.kind = kind;
  slot.thread = cluster_thread();
  slot.site = site;
  for (uint32_t i = 0; i < count; ++i) slot.words[i] = words[i];
  // In mode random half of what waits for somebody is late even for who needs it: others are not to count on that.
  const bool late = launch().mode == kRandom && launch().stalls && kind != kStore && chance(2);
  slot.not_before_ns = late ? hardware::global_nanoseconds() + draw_delay() : 0;
  __threadfence();
  set_state(slot, kPending);
  note_progress();
#ifdef CUPYMLA_HOST_MACHINE
  if (kind == kCommit) machine::note_issue(*machine::current, static_cast<uint32_t>(words[0]));
  if (kind == kLoad || kind == kTile) machine::note_issue(*machine::current, static_cast<uint32_t>(words[1]));
#endif
  return at;
}

// Issues an operation: in the queue until somebody needs it, or executed at once with all that this thread queued
// before it.
__device__ __noinline__ void issue(uint32_t kind, uint32_t site, const uint64_t* words, uint32_t count) {
  const bool later = deferred();
  const uint32_t at = enqueue(kind, site, words, count);
  if (later) return;
  Cta& home = own_cta();
  lock_and_help(home);
  run_to(home, cluster_thread(), at);
  unlock(home);
}

__device__ __forceinline__ bool signals(const Operation& slot, uint32_t barrier) {
  if (slot.kind == kTile) {
    const Operation operation = slot;
    return tile_signals(Tile(operation.words), barrier);
  }
  const bool copy = slot.kind == kLoad;
  if (!copy && slot.kind != kCommit) return false;
  const uint32_t target = static_cast<uint32_t>(watched(slot.words[copy ? 1 : 0]));
  const uint32_t mask = static_cast<uint32_t>(watched(slot.words[copy ? 2 : 1]));
  if (mask == 0) return target == barrier;
  return offset_of_address(target) == offset_of_address(barrier) && (mask >> rank_of_address(barrier) & 1);
}

// A thread waits for this barrier: executes what any CTA of the cluster has queued to complete it.
__device__ __noinline__ void serve(uint32_t barrier) {
  const uint32_t ranks = hardware::cluster_size(), own = hardware::cluster_rank();
  help(own_cta());
  if (launch().mode == kEager) return;
  for (uint32_t i = 0; i < ranks; ++i) {
    Cta& home = cta_of((own + i) % ranks);
    if (watched(home.head) == watched(home.tail) || !try_lock(home)) continue;
    const uint32_t tail = watched(home.tail);
    for (uint32_t at = watched(home.head); at != tail; ++at) {
      const Operation& slot = home.queue[at % kQueue];
      if (state_of(slot) != kPending || watched(slot.not_before_ns) > hardware::global_nanoseconds()) continue;
      if (signals(slot, barrier)) run_to(home, watched(slot.thread), at);
    }
    unlock(home);
  }
}

}  // namespace cupymla::emulate
