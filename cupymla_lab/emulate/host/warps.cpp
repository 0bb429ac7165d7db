// What lanes do together, and barriers; see runtime.hpp.
#include <algorithm>

#include "state.hpp"

namespace machine {

namespace {

uint64_t met(Together what, const Meeting& meeting, uint32_t mask, uint32_t lane) {
  uint32_t any = 0;
  for (uint32_t other = 0; other < 32; ++other) {
    if (!(mask >> other & 1)) continue;
    if (what == kMatchAny) any |= (meeting.values[other] == meeting.values[lane]) << other;
    if (what == kVoteAny || what == kVoteAll || what == kBallot) any |= (meeting.values[other] != 0) << other;
  }
  if (what == kElect) return mask;
  if (what == kVoteAny) return any != 0;
  if (what == kVoteAll) return any == mask;
  return any;
}

}  // namespace

uint64_t together(Thread& t, Together what, uint32_t mask, uint64_t value, uint32_t operand) {
  if (!(mask >> t.lane & 1)) broken("a thread executes an instruction whose membermask %#x leaves it out", mask);
  Meeting& meeting = t.warp->meetings[static_cast<uint64_t>(what) << 32 | mask];
  const uint64_t generation = meeting.generation;
  meeting.values[t.lane] = value;
  meeting.arrived |= 1u << t.lane;
  while (meeting.generation == generation) {
    const uint32_t expected = mask & ~t.warp->ended;
    if ((meeting.arrived & expected) == expected) {
      for (uint32_t lane = 0; lane < 32; ++lane) meeting.results[lane] = meeting.values[lane];
      if (what >= kMatchAny) {
        for (uint32_t lane = 0; lane < 32; ++lane) {
          if (expected >> lane & 1) meeting.results[lane] = met(what, meeting, expected, lane);
        }
      }
      meeting.arrived = 0;
      ++meeting.generation;
      if (t.races && what != kWarpBarrier) t.cta->causality->gather(t, expected);
      the->worked = the->switches;
      break;
    }
    stand(t, meeting.generation, "an instruction of a warp, to which not all lanes that its mask names come");
  }
  return meeting.results[what >= kShuffleIndex && what <= kShuffleXor ? operand & 31 : t.lane];
}

uint32_t shuffle(Thread& t, Together what, uint32_t mask, uint32_t value, uint32_t by, uint32_t limit, bool& inside) {
  const uint32_t segment = limit >> 8 & 31, clamp = limit & 31, lane = t.lane;
  const uint32_t low = lane & segment, high = low | (clamp & ~segment);
  by &= 31;
  uint32_t source = lane + by;
  if (what == kShuffleUp) source = lane - by;
  if (what == kShuffleXor) source = lane ^ by;
  if (what == kShuffleIndex) source = low | (by & ~segment);
  inside = what == kShuffleUp ? static_cast<int32_t>(source) >= static_cast<int32_t>(high) : source <= high;
  if (!inside) source = lane;
  if (!((mask & ~t.warp->ended) >> source & 1)) broken("shfl reads lane %u, which does not take part", source);
  return static_cast<uint32_t>(together(t, what, mask, value, source));
}

// Any lane, but the same one each time (PTX ISA, "elect.sync").
uint32_t elect(Thread& t, uint32_t mask) {
  auto left = static_cast<uint32_t>(together(t, kElect, mask, 0, 0));  // the lanes that came
  for (uint32_t skipped = the->leader % __builtin_popcount(left); skipped; --skipped) left &= left - 1;
  return static_cast<uint32_t>(__builtin_ctz(left));
}

void look_at_barrier(Thread& t, uint32_t id, uint64_t generation, uint32_t expected, bool reduces) {
  if (id >= 16) broken("there is no named barrier %u", id);
  if (expected % 32 && expected != t.cta->threads) {
    broken("a named barrier of %u threads, which are no whole warps", expected);
  }
  NamedBarrier& barrier = t.cta->named[id];
  if (barrier.generation == generation) {
    if (barrier.expected != expected) {
      broken("named barrier %u: threads expect %u and %u participants", id, barrier.expected, expected);
    }
    if (barrier.reduces != reduces) broken("named barrier %u: some threads came to reduce, others to wait", id);
  }
  barrier.generation = generation, barrier.expected = expected, barrier.reduces = reduces;
}

void look_at_cluster_barrier(Thread& t, bool arrives) {
  if (arrives && t.at_cluster_barrier) broken("barrier.cluster.arrive twice without a wait");
  if (!arrives && !t.at_cluster_barrier) broken("barrier.cluster.wait before an arrive");
  t.at_cluster_barrier = arrives;
}

void warp_barrier(Thread& t, uint32_t mask) {
  if (!t.races) {
    together(t, kWarpBarrier, mask, 0, 0);
    return;
  }
  const Meeting& counted = t.warp->meetings[static_cast<uint64_t>(kWarpBarrier) << 32 | mask];
  auto& meeting = t.cta->causality->meeting(&counted);
  const auto generation = static_cast<uint32_t>(counted.generation);
  t.cta->causality->meet(t, meeting, generation, false);
  together(t, kWarpBarrier, mask, 0, 0);
  t.cta->causality->part(t, meeting, generation);
}

void barrier_sync(Thread& t, uint32_t id, uint32_t count, bool waits) {
  Barrier& barrier = t.cta->barriers[id & 15];
  const uint64_t generation = barrier.generation;
  ++barrier.arrived;
  while (barrier.generation == generation) {
    const uint32_t absent = count ? 0 : t.cta->ended, expected = count ? count : t.cta->threads;
    if (barrier.arrived + absent >= expected) {
      barrier.arrived = 0;
      ++barrier.generation;
      return;
    }
    if (!waits) return;
    yield(t);
  }
}

uint32_t reduce_lanes(Thread& t, uint32_t mask, uint32_t value, uint32_t operation, bool is_signed) {
  uint32_t result = 0;
  bool first = true;
  for (uint32_t lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    const auto other = static_cast<uint32_t>(together(t, kShuffleIndex, mask, value, lane));
    const bool less = is_signed ? static_cast<int32_t>(other) < static_cast<int32_t>(result) : other < result;
    const uint32_t both[] = {result + other,
                             less ? other : result,
                             less ? result : other,
                             result & other,
                             result | other,
                             result ^ other};
    result = first ? other : both[operation];
    first = false;
  }
  return result;
}

namespace {

struct SmallFloats {
  float e4m3[256], e5m2[256];
  SmallFloats() {
    for (uint32_t code = 0; code < 256; ++code) {
      e4m3[code] = from_half(half_of_e4m3(code));
      e5m2[code] = from_half(static_cast<uint16_t>(code << 8));
    }
  }
};
const SmallFloats kSmall;

}  // namespace

void numbers(Element element, const void* place, uint32_t count, float* out) {
  const auto* from = static_cast<const unsigned char*>(place);
  for (uint32_t i = 0; i < count; ++i) {
    switch (element) {
      case kHalf: out[i] = from_half(load<uint16_t>(from + 2 * i)); break;
      case kBfloat: out[i] = from_bfloat(load<uint16_t>(from + 2 * i)); break;
      case kTf32: out[i] = as<float>(load<uint32_t>(from + 4 * i) & 0xffffe000u); break;
      case kE4m3: out[i] = kSmall.e4m3[from[i]]; break;
      case kE5m2: out[i] = kSmall.e5m2[from[i]]; break;
      case kSigned8: out[i] = static_cast<float>(static_cast<int8_t>(from[i])); break;
      case kUnsigned8: out[i] = static_cast<float>(from[i]); break;
    }
  }
}

// Each lane names a row of 8 elements of 16 bits: lanes 0-7 those of the first matrix, and so on. A lane holds two
// neighbours of row lane / 4, or transposed, of column lane / 4.
void load_matrices(Thread& t, uint32_t* out, uint32_t address, uint32_t count, bool transposed) {
  for (uint32_t matrix = 0; matrix < count; ++matrix) {
    uint32_t word = 0;
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t row = transposed ? t.lane % 4 * 2 + half : t.lane / 4;
      const uint32_t column = transposed ? t.lane / 4 : t.lane % 4 * 2 + half;
      const auto at = static_cast<uint32_t>(together(t, kShuffleIndex, 0xffffffffu, address, 8 * matrix + row));
      const unsigned char* from = shared(t, at, 16) + 2 * column;
      touched(t, from, 2, kReadTogether);
      word |= static_cast<uint32_t>(load<uint16_t>(from)) << (16 * half);
    }
    out[matrix] = word;
  }
  together(t, kSync, 0xffffffffu, 0, 0);
}

void store_matrices(Thread& t, const uint32_t* in, uint32_t address, uint32_t count, bool transposed) {
  for (uint32_t matrix = 0; matrix < count; ++matrix) {
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t row = transposed ? t.lane % 4 * 2 + half : t.lane / 4;
      const uint32_t column = transposed ? t.lane / 4 : t.lane % 4 * 2 + half;
      const auto at = static_cast<uint32_t>(together(t, kShuffleIndex, 0xffffffffu, address, 8 * matrix + row));
      unsigned char* to = shared(t, at, 16) + 2 * column;
      touched(t, to, 2, kWrite);
      store(to, static_cast<uint16_t>(in[matrix] >> (16 * half)));
    }
  }
  together(t, kSync, 0xffffffffu, 0, 0);
}

// mma.sync: all lanes show their fragments, then each adds up its own four sums. Lanes may be one product apart, so
// fragments of two are kept.
void multiply_16x8(Thread& t, double (&sums)[4], const uint32_t* a, const uint32_t* b, uint32_t count, Element of_a,
                   Element of_b) {
  auto& shown = t.warp->fragments[t.products++ % 2];
  const uint32_t per = 4 / element_bytes(of_a), behind_a = count * per;
  numbers(of_a, a, count * per, shown[t.lane]);
  numbers(of_b, b, count / 2 * per, shown[t.lane] + behind_a);
  together(t, kSync, 0xffffffffu, 0, 0);
  const uint32_t row = t.lane / 4, column = t.lane % 4 * 2;
  for (uint32_t i = 0; i < 4; ++i) {
    double sum = 0;
    for (uint32_t lane = 0; lane < 4; ++lane) {
      const float* x = shown[row * 4 + lane] + i / 2 * per;
      const float* y = shown[(column + i % 2) * 4 + lane] + behind_a;
      for (uint32_t j = 0; j < count / 2; ++j) {
        for (uint32_t k = 0; k < per; ++k) sum += static_cast<double>(x[j * 2 * per + k]) * y[j * per + k];
      }
    }
    sums[i] = sum;
  }
}

// movmatrix: a lane holds two neighbours of row lane / 4, and gets two of column lane / 4.
uint32_t transpose_matrix(Thread& t, uint32_t word) {
  uint32_t made = 0;
  for (uint32_t half = 0; half < 2; ++half) {
    const uint32_t row = t.lane % 4 * 2 + half, column = t.lane / 4;
    const auto found = static_cast<uint32_t>(together(t, kShuffleIndex, 0xffffffffu, word, row * 4 + column / 2));
    made |= (found >> column % 2 * 16 & 0xffffu) << half * 16;
  }
  return made;
}

// mbarriers: phase in bit 63, bytes in 40-62 (signed), arrivals that a phase takes in 20-39, that are missing in 0-19.
namespace {

constexpr int64_t kMost = (1 << 20) - 1;  // arrivals, and bytes either way, that a phase can count

struct State {
  uint64_t phase;
  int64_t bytes;
  uint64_t count, missing;
  explicit State(uint64_t word)
      : phase(word >> 63), bytes(static_cast<int64_t>(word << 1) >> 41), count(word >> 20 & 0xfffff),
        missing(word & 0xfffff) {}
  uint64_t word() {
    if (bytes > kMost || bytes < -kMost) {
      broken("an mbarrier expects %lld bytes, where it can count %lld", static_cast<long long>(bytes),
             static_cast<long long>(kMost));
    }
    if (missing == 0 && bytes == 0) phase ^= 1, missing = count;
    return phase << 63 | (static_cast<uint64_t>(bytes) & 0x7fffffull) << 40 | count << 20 | missing;
  }
};

unsigned char* place(const Cta& one, uint32_t barrier) {
  unsigned char* found = shared(one, barrier, 8);
  if (State(load<uint64_t>(found)).count == 0xfffff) broken("mbarrier %#x was not initialised", barrier);
  return found;
}

// Puts a barrier's new word into memory.
void update(const Cta& one, uint32_t barrier, unsigned char* where, State& state) {
  const uint64_t phase = state.phase, word = state.word();
  store<uint64_t>(where, word);
  if (one.causality && state.phase != phase) one.causality->complete(barrier >> 24, barrier & 0xffffffu);
}

}  // namespace

void barrier_init(Thread& t, uint32_t barrier, uint32_t count) {
  if (count < 1 || count > kMost) broken("mbarrier.init with a count of %u", count);
  if (t.races) t.cta->causality->require_data(t, barrier, 8);
  store<uint64_t>(shared(t, barrier, 8), static_cast<uint64_t>(count) << 20 | count);
  if (t.races) t.cta->causality->initialise(t, barrier);
}

void barrier_end(Thread& t, uint32_t barrier) {
  place(*t.cta, barrier);
  if (t.races) t.cta->causality->end(t, barrier);
}

namespace {

uint64_t arrive(const Cta& one, uint32_t barrier, uint32_t count, uint32_t expected_bytes) {
  unsigned char* where = place(one, barrier);
  const uint64_t before = load<uint64_t>(where);
  State state(before);
  if (count < 1) broken("0 arrivals on an mbarrier at once");
  if (state.missing < count) broken("mbarrier %#x has more arrivals than it takes", barrier);
  state.missing -= count;
  state.bytes += expected_bytes;
  update(one, barrier, where, state);
  return before;
}

}  // namespace

uint64_t barrier_arrive(Thread& t, uint32_t barrier, uint32_t count, uint32_t expected_bytes) {
  return arrive(*t.cta, barrier, count, expected_bytes);
}

void barrier_arrive(const Cta& one, uint32_t barrier) { arrive(one, barrier, 1, 0); }

void barrier_expect_arrival(const Cta& one, uint32_t barrier) {
  unsigned char* where = place(one, barrier);
  const auto word = load<uint64_t>(where);
  if ((word & 0xfffff) == 0xfffff) broken("an mbarrier expects more arrivals than it can count");
  store<uint64_t>(where, word + 1);
}

uint64_t barrier_arrive(Thread& t, uint32_t barrier, uint32_t count, uint32_t expected_bytes, uint32_t order) {
  if (t.races) t.cta->causality->arrive(t, barrier, order);
  return barrier_arrive(t, barrier, count, expected_bytes);
}

uint64_t barrier_drop(Thread& t, uint32_t barrier, uint32_t count, uint32_t expected_bytes, uint32_t order) {
  unsigned char* where = place(*t.cta, barrier);
  State state(load<uint64_t>(where));
  if (state.missing < count) broken("mbarrier %#x has more arrivals than it takes", barrier);
  // Whoever arrives is counted in this phase and in none after it. A phase that is over has been reset already.
  state.count -= count;
  store<uint64_t>(where, state.phase << 63 | (static_cast<uint64_t>(state.bytes) & 0x7fffffull) << 40 |
                             state.count << 20 | state.missing);
  return barrier_arrive(t, barrier, count, expected_bytes, order);
}

void barrier_expect(const Cta& one, uint32_t barrier, int32_t bytes) {
  unsigned char* where = place(one, barrier);
  State state(load<uint64_t>(where));
  state.bytes += bytes;
  update(one, barrier, where, state);
}

void barrier_count(Thread& t, uint32_t barrier, int32_t bytes) {
  if (t.races) t.cta->causality->hold(t, barrier);
  barrier_expect(t, barrier, bytes);
}

bool barrier_test(Thread& t, uint32_t barrier, uint32_t parity, uint32_t order) {
  const unsigned char* where = place(*t.cta, barrier);
  const uint64_t word = load<uint64_t>(where);
  const bool done = State(word).phase != (parity & 1);
  t.polling = !done;
  if (done) {
    t.patience = 1;
    if (t.races) t.cta->causality->wait(t, barrier, order);
  } else {
    if (t.races) t.cta->causality->test(t, barrier);
    t.barrier_word = reinterpret_cast<const uint64_t*>(where), t.barrier_seen = word;
    t.issued = &issued_for(*t.cta, barrier), t.issued_seen = *t.issued;
  }
  return done;
}

}  // namespace machine
