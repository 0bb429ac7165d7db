// See runtime.hpp.
#include "runtime.hpp"

#include <algorithm>
#include <csetjmp>
#include <csignal>
#include <cstdarg>

namespace machine {

namespace {

constexpr size_t kStackBytes = 128 * 1024;
constexpr uint64_t kLongestRest = 64;  // rounds of all threads

struct Machine {
  std::vector<std::unique_ptr<Thread>> threads;
  std::deque<std::shared_ptr<Copy>> copies;
  uint64_t switches = 0, turns = 0, random = 1, limit = 0, alive = 0, worked = 0;
  void* scheduler = nullptr;
  void (*entry)(Thread&) = nullptr;
  std::string failure;
  bool in_thread = false;  // else the scheduler runs
  sigjmp_buf outside;
};

Machine* the;

}  // namespace

Thread* current;

namespace {

extern "C" void cupymla_switch(void** save, void* next);
asm(R"(
.text
.globl cupymla_switch
.type cupymla_switch, @function
cupymla_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");

uint64_t shuffle_bits(uint64_t& state) {
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return state;
}

void fiber() {
  Thread& t = *current;
  try {
    the->entry(t);
  } catch (const Ended&) {
  } catch (const Broken& error) {
    if (the->failure.empty()) the->failure = error.what;
  }
  t.ended = true;
  t.warp->ended |= 1u << t.lane;
  for (Thread* other : t.warp->lanes) {
    if (other) other->resting = false;
  }
  ++t.cta->ended;
  ++*t.cta->cluster_ended;
  void* unused;
  cupymla_switch(&unused, the->scheduler);
}

void prepare(Thread& t) {
  t.stack.reset(new unsigned char[kStackBytes]);
  auto top = reinterpret_cast<uint64_t>(t.stack.get() + kStackBytes) & ~63ull;
  auto* slots = reinterpret_cast<uint64_t*>(top);
  // A return address for `ret`, below it six saved registers; the fiber starts with its stack misaligned by a call.
  slots[-2] = reinterpret_cast<uint64_t>(&fiber);
  for (int i = 3; i <= 8; ++i) slots[-i] = 0;
  t.stack_pointer = slots - 8;
}

}  // namespace

void broken(const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  throw Broken{text};
}

uint64_t last_work() { return the->worked * kNanosecondsPerSwitch; }
uint64_t now() { return the->switches * kNanosecondsPerSwitch; }
uint64_t draw(Thread& t) { return shuffle_bits(t.random); }

void yield(Thread& t) {
  void* const mine = the->scheduler;
  cupymla_switch(&t.stack_pointer, mine);
  if (!the->failure.empty()) throw Ended{};
}

void rest(Thread& t, const Rest& until) {
  t.rest = until;
  t.resting = true;
  yield(t);
}

void rest_until(Thread& t, const uint64_t* word, uint64_t mask, uint64_t value, uint64_t rounds) {
  Rest until;
  until.word = word, until.mask = mask, until.value = value;
  until.until = the->switches + rounds * the->alive;
  rest(t, until);
}

void rest_at_barrier(Thread& t) {
  Rest until;
  until.word = t.barrier_word, until.mask = ~0ull, until.value = t.barrier_seen;
  until.events = t.issued, until.seen = t.issued_seen;
  until.until = the->switches + t.patience * the->alive;
  t.patience = std::min<uint64_t>(2 * t.patience, kLongestRest);
  rest(t, until);
}

void sleep(Thread& t, uint32_t nanoseconds) {
  Rest until;
  until.until = the->switches + nanoseconds / kNanosecondsPerSwitch + 1;
  rest(t, until);
}

void end_thread(Thread&) { throw Ended{}; }

uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t choice = selector >> (4 * i) & 15;
    uint32_t byte = both >> (8 * (choice & 7)) & 0xff;
    if (choice & 8) byte = byte & 0x80 ? 0xff : 0;
    result |= byte << (8 * i);
  }
  return result;
}

namespace {

// A float with that many exponent and mantissa bits, from a magnitude; `largest` is the greatest encoding.
uint32_t small_float(float value, int mantissa_bits, int bias, uint32_t largest) {
  const double magnitude = std::fabs(static_cast<double>(value));
  if (magnitude == 0) return 0;
  if (std::isinf(magnitude)) return largest;
  const int exponent = std::max(std::ilogb(magnitude), 1 - bias);
  const double steps = std::nearbyint(std::ldexp(magnitude, mantissa_bits - exponent));
  const double code = std::ldexp(exponent + bias - 1, mantissa_bits) + steps;
  return code > largest ? largest : static_cast<uint32_t>(code);
}

}  // namespace

uint32_t to_e4m3(float value, bool relu) {
  if (value != value) return 0x7f;
  if (relu && !(value > 0)) return 0;
  return (std::signbit(value) ? 0x80u : 0u) | small_float(value, 3, 7, 0x7e);
}

uint32_t to_e5m2(float value, bool relu) {
  if (value != value) return 0x7f;
  if (relu && !(value > 0)) return 0;
  return (std::signbit(value) ? 0x80u : 0u) | small_float(value, 2, 15, 0x7b);
}

uint32_t to_tf32(float value, bool away, bool relu) {
  if (value != value) return 0x7fffffffu;
  if (relu && !(value > 0)) return 0;
  const uint32_t bits = as<uint32_t>(value);
  if ((bits & 0x7f800000u) == 0x7f800000u) return bits;
  return (bits + (away ? 0x1000u : 0xfffu + (bits >> 13 & 1))) & 0xffffe000u;
}

// Warps and CTAs --------------------------------------------------------------------------------------------------

namespace {

uint64_t met(Together what, const Meeting& meeting, uint32_t mask, uint32_t lane) {
  uint32_t any = 0;
  for (uint32_t other = 0; other < 32; ++other) {
    if (!(mask >> other & 1)) continue;
    if (what == kMatchAny) any |= (meeting.values[other] == meeting.values[lane]) << other;
    if (what == kVoteAny || what == kVoteAll || what == kBallot) any |= (meeting.values[other] != 0) << other;
  }
  if (what == kVoteAny) return any != 0;
  if (what == kVoteAll) return any == mask;
  return any;
}

}  // namespace

uint64_t together(Thread& t, Together what, uint32_t mask, uint64_t value, uint32_t operand) {
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
      the->worked = the->switches;
      break;
    }
    Rest until;
    until.word = &meeting.generation, until.mask = ~0ull, until.value = generation, until.until = ~0ull;
    rest(t, until);
  }
  switch (what) {
    case kShuffleIndex: return meeting.results[operand & 31];
    case kShuffleUp: return meeting.results[t.lane >= operand ? t.lane - operand : t.lane];
    case kShuffleDown: return meeting.results[t.lane + operand < 32 ? t.lane + operand : t.lane];
    case kShuffleXor: return meeting.results[(t.lane ^ operand) & 31];
    default: return meeting.results[t.lane];
  }
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

// Each lane names a row of 8 elements of 16 bits: lanes 0-7 those of the first matrix, and so on. A lane holds two
// neighbours of row lane / 4, or transposed, of column lane / 4.
void load_matrices(Thread& t, uint32_t* out, uint32_t address, uint32_t count, bool transposed) {
  for (uint32_t matrix = 0; matrix < count; ++matrix) {
    uint32_t word = 0;
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t row = transposed ? t.lane % 4 * 2 + half : t.lane / 4;
      const uint32_t column = transposed ? t.lane / 4 : t.lane % 4 * 2 + half;
      const auto at = static_cast<uint32_t>(together(t, kShuffleIndex, 0xffffffffu, address, 8 * matrix + row));
      word |= static_cast<uint32_t>(load<uint16_t>(shared(t, at, 16) + 2 * column)) << (16 * half);
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
      store(shared(t, at, 16) + 2 * column, static_cast<uint16_t>(in[matrix] >> (16 * half)));
    }
  }
  together(t, kSync, 0xffffffffu, 0, 0);
}

// mma.sync: all lanes show their fragments, then each adds up its own four sums. Lanes may be one product apart, so
// fragments of two are kept.
void multiply_16x8x16(Thread& t, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], bool bfloat) {
  auto& shown = t.warp->fragments[t.products++ % 2];
  for (int i = 0; i < 12; ++i) {
    const uint32_t word = i < 8 ? a[i / 2] : b[i / 2 - 4];
    const auto bits = static_cast<uint16_t>(word >> (i % 2 * 16));
    shown[t.lane][i] = bfloat ? from_bfloat(bits) : from_half(bits);
  }
  together(t, kSync, 0xffffffffu, 0, 0);
  const uint32_t row = t.lane / 4, column = t.lane % 4 * 2;
  for (uint32_t i = 0; i < 4; ++i) {
    double sum = d[i];
    for (uint32_t lane = 0; lane < 4; ++lane) {
      const float* x = shown[row * 4 + lane] + i / 2 * 2;
      const float* y = shown[(column + i % 2) * 4 + lane] + 8;
      sum += static_cast<double>(x[0]) * y[0] + static_cast<double>(x[1]) * y[1];
      sum += static_cast<double>(x[4]) * y[2] + static_cast<double>(x[5]) * y[3];
    }
    d[i] = static_cast<float>(sum);
  }
}

// cp.async: carried out when issued or when its group is waited for, by chance.
namespace {
void perform_async(const AsyncCopy& copy) {
  if (copy.read) std::memcpy(copy.to, copy.from, copy.read);
  std::memset(copy.to + copy.read, 0, copy.size - copy.read);
}
}  // namespace

void copy_async(Thread& t, uint32_t to, uint64_t from, uint32_t size, uint32_t read) {
  if (size != 4 && size != 8 && size != 16) broken("cp.async of %u bytes", size);
  if (read > size) broken("cp.async reads %u of %u bytes", read, size);
  const AsyncCopy copy{shared(t, to, size), generic(from, size), size, read};
  if (draw(t) & 1) return perform_async(copy);
  t.open_async.push_back(copy);
}

void commit_async(Thread& t) {
  t.async_groups.push_back(std::move(t.open_async));
  t.open_async.clear();
}

void wait_async(Thread& t, uint32_t newest) {
  if (newest == UINT32_MAX) commit_async(t), newest = 0;
  while (t.async_groups.size() > newest) {
    for (const AsyncCopy& copy : t.async_groups.front()) perform_async(copy);
    t.async_groups.pop_front();
  }
}

// mbarriers: phase in bit 63, bytes in 40-62 (signed), arrivals that a phase takes in 20-39, that are missing in 0-19.
namespace {

struct State {
  uint64_t phase;
  int64_t bytes;
  uint64_t count, missing;
  explicit State(uint64_t word)
      : phase(word >> 63), bytes(static_cast<int64_t>(word << 1) >> 41), count(word >> 20 & 0xfffff),
        missing(word & 0xfffff) {}
  uint64_t word() {
    if (missing == 0 && bytes == 0) phase ^= 1, missing = count;
    return phase << 63 | (static_cast<uint64_t>(bytes) & 0x7fffffull) << 40 | count << 20 | missing;
  }
};

unsigned char* place(const Cta& one, uint32_t barrier) {
  unsigned char* found = shared(one, barrier, 8);
  if (State(load<uint64_t>(found)).count == 0xfffff) broken("mbarrier %#x was not initialised", barrier);
  return found;
}

}  // namespace

void barrier_init(Thread& t, uint32_t barrier, uint32_t count) {
  store<uint64_t>(shared(t, barrier, 8), static_cast<uint64_t>(count) << 20 | count);
}

uint64_t barrier_arrive(Thread& t, uint32_t barrier, uint32_t count, uint32_t expected_bytes) {
  unsigned char* where = place(*t.cta, barrier);
  const uint64_t before = load<uint64_t>(where);
  State state(before);
  if (state.missing < count) broken("mbarrier %#x has more arrivals than it takes", barrier);
  state.missing -= count;
  state.bytes += expected_bytes;
  store<uint64_t>(where, state.word());
  return before;
}

void barrier_expect(const Cta& one, uint32_t barrier, int32_t bytes) {
  unsigned char* where = place(one, barrier);
  State state(load<uint64_t>(where));
  state.bytes += bytes;
  store<uint64_t>(where, state.word());
}

bool barrier_test(Thread& t, uint32_t barrier, uint32_t parity) {
  const unsigned char* where = place(*t.cta, barrier);
  const uint64_t word = load<uint64_t>(where);
  const bool done = State(word).phase != (parity & 1);
  t.polling = !done;
  if (done) {
    t.patience = 1;
  } else {
    t.barrier_word = reinterpret_cast<const uint64_t*>(where), t.barrier_seen = word;
    t.issued = &issued_for(*t.cta, barrier), t.issued_seen = *t.issued;
  }
  return done;
}

// Bulk copies ---------------------------------------------------------------------------------------------------------

namespace {

// What cupymla/emulate/host/machine.py writes in place of a CUtensorMap.
struct TileMap {
  uint64_t magic, pointer, shape[5], strides[4];
  uint32_t rank, element_bits, swizzle, box[5];
  uint16_t nan, number;
};
static_assert(sizeof(TileMap) <= 128);
constexpr uint64_t kMagic = 0x70614d656c69546dull;

const TileMap& tile_map(uint64_t address) {
  const auto& map = *reinterpret_cast<const TileMap*>(address);
  if (map.magic != kMagic) broken("no tensor map at %#llx", static_cast<unsigned long long>(address));
  return map;
}

uint32_t swizzled(uint32_t address, uint32_t span) {
  const uint32_t rows = span / 16;
  return span <= 16 ? address : address ^ (((address >> 7) & (rows - 1)) << 4);
}

uint32_t tile_bytes(const TileMap& map) {
  uint32_t bits = map.element_bits;
  for (uint32_t i = 0; i < map.rank; ++i) bits *= map.box[i];
  return bits / 8;
}

// Calls `visit(global address or 0, offset in the tile, bytes)` for pieces of 16 bytes or one element.
template <typename Visit>
void each_piece(const TileMap& map, const int32_t* at, const Visit& visit) {
  uint32_t rows = 1;
  for (uint32_t i = 1; i < map.rank; ++i) rows *= map.box[i];
  const uint32_t row_bytes = map.box[0] * map.element_bits / 8, size = std::max(map.element_bits / 8, 1u);
  const int64_t first = static_cast<int64_t>(at[0]) * map.element_bits / 8;
  const int64_t end = static_cast<int64_t>(map.shape[0]) * map.element_bits / 8;
  for (uint32_t row = 0; row < rows; ++row) {
    bool inside = true;
    uint64_t base = map.pointer;
    for (uint32_t i = 1, rest = row; i < map.rank; ++i) {
      const int64_t index = at[i] + static_cast<int64_t>(rest % map.box[i]);
      rest /= map.box[i];
      inside = inside && index >= 0 && index < static_cast<int64_t>(map.shape[i]);
      base += index * map.strides[i - 1];
    }
    for (uint32_t x = 0; x < row_bytes;) {
      const bool whole = x % 16 == 0 && x + 16 <= row_bytes &&
                         (!inside || (first + x >= 0 && first + x + 16 <= end) || first + x >= end);
      const uint32_t bytes = whole ? 16 : size;
      const int64_t column = first + x;
      visit(inside && column >= 0 && column < end ? base + column : 0, row * row_bytes + x, bytes);
      x += bytes;
    }
  }
}

void count_bytes(Copy& copy, uint32_t rank, uint32_t bytes) {
  const uint32_t offset = copy.barrier & 0xffffffu;
  barrier_expect(*copy.cta, copy.mask ? rank << 24 | offset : copy.barrier, -static_cast<int32_t>(bytes));
}

template <typename Each>
void each_target(Copy& copy, const Each& each) {
  if (!copy.mask) return each(copy.shared >> 24);
  for (uint32_t rank = 0; rank < copy.cta->cluster_size; ++rank) {
    if (copy.mask >> rank & 1) each(rank);
  }
}

unsigned char* in_smem(Copy& copy, uint32_t rank, uint32_t offset, uint32_t bytes) {
  return shared(*copy.cta, rank << 24 | offset, bytes);
}

// A run of bytes whose ends lie in shared memory and whose start is a multiple of 16.
unsigned char* run_in_smem(Copy& copy, uint32_t address, uint32_t bytes) {
  if (bytes % 16 || bytes == 0) broken("a bulk copy of %u bytes, no multiple of 16", bytes);
  shared(*copy.cta, address + bytes - 16, 16);
  return shared(*copy.cta, address, 16);
}

void perform_load(Copy& copy) {
  const TileMap& map = tile_map(copy.map);
  const uint32_t first = copy.shared & 0xffffffu;
  if (first % 128) broken("a tile is loaded to shared offset %#x, no multiple of 128", first);
  each_target(copy, [&](uint32_t rank) {
    each_piece(map, copy.at, [&](uint64_t from, uint32_t offset, uint32_t bytes) {
      unsigned char* to = in_smem(copy, rank, swizzled(first + offset, map.swizzle), bytes);
      if (from) std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
      if (!from) std::memset(to, map.nan ? 0xff : 0, bytes);
    });
    count_bytes(copy, rank, tile_bytes(map));
  });
}

void perform_bytes(Copy& copy) {
  each_target(copy, [&](uint32_t rank) {
    const uint32_t address = rank << 24 | (copy.shared & 0xffffffu);
    std::memcpy(run_in_smem(copy, address, copy.bytes), reinterpret_cast<const void*>(copy.global), copy.bytes);
    count_bytes(copy, rank, copy.bytes);
  });
}

void perform_shared(Copy& copy) {
  unsigned char* to = run_in_smem(copy, copy.shared, copy.bytes);
  reduce(to, run_in_smem(copy, copy.from, copy.bytes), copy.bytes, copy.reduction);
  count_bytes(copy, copy.shared >> 24, copy.bytes);
}

void perform_async(Copy& copy) {
  reduce(shared(*copy.cta, copy.shared, copy.bytes), copy.data, copy.bytes, copy.reduction);
  count_bytes(copy, copy.shared >> 24, copy.bytes);
}

void perform_store(Copy& copy) {
  const TileMap& map = tile_map(copy.map);
  const uint32_t first = copy.shared & 0xffffffu, rank = copy.shared >> 24;
  const Reduction how{copy.reduction.operation, static_cast<Number>(map.number)};
  each_piece(map, copy.at, [&](uint64_t to, uint32_t offset, uint32_t bytes) {
    const unsigned char* from = in_smem(copy, rank, swizzled(first + offset, map.swizzle), bytes);
    if (to) reduce(reinterpret_cast<void*>(to), from, bytes, how);
  });
}

void perform_store_bytes(Copy& copy) {
  reduce(reinterpret_cast<void*>(copy.global), run_in_smem(copy, copy.shared, copy.bytes), copy.bytes, copy.reduction);
}

template <typename T>
T combined(T a, T b, Operation how) {
  switch (how) {
    case kAdd: return static_cast<T>(a + b);
    case kMin: return b < a ? b : a;
    case kMax: return a < b ? b : a;
    default: break;
  }
  if constexpr (std::is_integral_v<T>) {
    switch (how) {
      case kInc: return a >= b ? 0 : a + 1;
      case kDec: return a == 0 || a > b ? b : a - 1;
      case kAnd: return a & b;
      case kOr: return a | b;
      case kXor: return a ^ b;
      default: break;
    }
  }
  broken("a reduction that these numbers do not have");
}

template <typename T>
void reduce_as(unsigned char* to, const unsigned char* from, uint32_t bytes, Operation how) {
  for (uint32_t i = 0; i < bytes; i += sizeof(T)) store(to + i, combined(load<T>(to + i), load<T>(from + i), how));
}

template <float (*kWide)(uint16_t), uint16_t (*kNarrow)(float)>
void reduce_halves(unsigned char* to, const unsigned char* from, uint32_t bytes, Operation how) {
  for (uint32_t i = 0; i < bytes; i += 2) {
    store(to + i, kNarrow(combined(kWide(load<uint16_t>(to + i)), kWide(load<uint16_t>(from + i)), how)));
  }
}

uint16_t half_of(float value) { return to_half(static_cast<double>(value)); }

}  // namespace

void reduce(void* to, const void* from, uint32_t bytes, Reduction how) {
  if (how.operation == kReplace) {
    std::memcpy(to, from, bytes);
    return;
  }
  auto* target = static_cast<unsigned char*>(to);
  const auto* source = static_cast<const unsigned char*>(from);
  switch (how.number) {
    case kU32: return reduce_as<uint32_t>(target, source, bytes, how.operation);
    case kS32: return reduce_as<int32_t>(target, source, bytes, how.operation);
    case kU64: return reduce_as<uint64_t>(target, source, bytes, how.operation);
    case kS64: return reduce_as<int64_t>(target, source, bytes, how.operation);
    case kF32: return reduce_as<float>(target, source, bytes, how.operation);
    case kF64: return reduce_as<double>(target, source, bytes, how.operation);
    case kF16: return reduce_halves<from_half, half_of>(target, source, bytes, how.operation);
    case kBf16: return reduce_halves<from_bfloat, to_bfloat>(target, source, bytes, how.operation);
  }
}

namespace {

std::shared_ptr<Copy> issue(Thread& t, void (*perform)(Copy&)) {
  auto copy = std::make_shared<Copy>();
  copy->perform = perform;
  copy->thread = &t;
  copy->cta = t.cta;
  copy->issued = the->switches;
  the->copies.push_back(copy);
  return copy;
}

}  // namespace

void copy_tile(Thread& t, uint32_t to, uint64_t map, const int32_t* at, uint32_t rank, uint32_t barrier, uint32_t mask) {
  if (tile_map(map).rank != rank) broken("a copy of %u dimensions by a map of %u", rank, tile_map(map).rank);
  auto copy = issue(t, perform_load);
  copy->map = map, copy->shared = to, copy->barrier = barrier, copy->mask = mask;
  std::copy(at, at + rank, copy->at);
}

void copy_bytes(Thread& t, uint32_t to, uint64_t from, uint32_t bytes, uint32_t barrier, uint32_t mask) {
  auto copy = issue(t, perform_bytes);
  copy->global = from, copy->shared = to, copy->barrier = barrier, copy->mask = mask, copy->bytes = bytes;
}

void copy_shared(Thread& t, uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier, Reduction reduction) {
  auto copy = issue(t, perform_shared);
  copy->from = from, copy->shared = to, copy->barrier = barrier, copy->bytes = bytes, copy->reduction = reduction;
}

void store_async(Thread& t, uint32_t to, const void* data, uint32_t bytes, uint32_t barrier, Reduction reduction) {
  auto copy = issue(t, perform_async);
  copy->shared = to, copy->barrier = barrier, copy->bytes = bytes, copy->reduction = reduction;
  std::memcpy(copy->data, data, bytes);
}

void store_tile(Thread& t, uint64_t map, const int32_t* at, uint32_t rank, uint32_t from, Operation operation) {
  if (tile_map(map).rank != rank) broken("a copy of %u dimensions by a map of %u", rank, tile_map(map).rank);
  auto copy = issue(t, perform_store);
  copy->map = map, copy->shared = from, copy->reduction.operation = operation;
  std::copy(at, at + rank, copy->at);
  t.open_group.push_back(copy);
}

void store_bytes(Thread& t, uint64_t to, uint32_t from, uint32_t bytes, Reduction reduction) {
  auto copy = issue(t, perform_store_bytes);
  copy->global = to, copy->shared = from, copy->bytes = bytes, copy->reduction = reduction;
  t.open_group.push_back(copy);
}

void commit_group(Thread& t) {
  t.groups.push_back(std::move(t.open_group));
  t.open_group.clear();
}

void wait_group(Thread& t, uint32_t newest) {
  const auto done = [](const std::vector<std::shared_ptr<Copy>>& group) {
    return std::all_of(group.begin(), group.end(), [](const std::shared_ptr<Copy>& copy) { return copy->done; });
  };
  while (t.groups.size() > newest) {
    while (!done(t.groups.front())) yield(t);
    t.groups.pop_front();
  }
}

// Running -------------------------------------------------------------------------------------------------------------

namespace {

// Copies begin in any order, a random while after they were issued.
void run_copies() {
  for (auto it = the->copies.begin(); it != the->copies.end();) {
    const uint64_t age = the->switches - (*it)->issued;
    if (age > 16 * the->alive || shuffle_bits(the->random) % 4 == 0) {
      (*it)->perform(**it);
      (*it)->done = true;
      it = the->copies.erase(it);
    } else {
      ++it;
    }
  }
}

// An address that is nobody's ends the thread that used it, not the process. It is left where it stands.
void on_fault(int, siginfo_t* info, void*) {
  char text[160];
  const auto address = static_cast<unsigned long long>(reinterpret_cast<uint64_t>(info->si_addr));
  if (!the->in_thread) {
    std::snprintf(text, sizeof text, "a bulk copy uses global address %#llx, where nothing is", address);
    the->failure = text;
    siglongjmp(the->outside, 1);
  }
  Thread& t = *current;
  const uint32_t* at = t.cta->position;
  const char* format = "thread %u of CTA (%u, %u, %u) uses address %#llx, where nothing is";
  std::snprintf(text, sizeof text, format, t.index, at[0], at[1], at[2], address);
  if (the->failure.empty()) the->failure = text;
  t.ended = true;
  void* unused;
  cupymla_switch(&unused, the->scheduler);
}

// While it lives, faults go to `on_fault`.
class Faults {
 public:
  Faults() {
    stack_t stack = {};
    stack.ss_sp = memory_, stack.ss_size = sizeof memory_;
    sigaltstack(&stack, &stack_);
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(SIGSEGV, &action, &segv_);
    sigaction(SIGBUS, &action, &bus_);
  }
  ~Faults() {
    sigaction(SIGSEGV, &segv_, nullptr);
    sigaction(SIGBUS, &bus_, nullptr);
    sigaltstack(&stack_, nullptr);
  }

 private:
  unsigned char memory_[65536];
  stack_t stack_ = {};
  struct sigaction segv_ = {}, bus_ = {};
};

void schedule() {
  std::vector<Thread*> alive, ready;
  for (auto& t : the->threads) alive.push_back(t.get());
  while (!alive.empty()) {
    the->alive = alive.size();
    ready.clear();
    const bool failed = !the->failure.empty();
    for (Thread* t : alive) {
      if (!t->resting || failed || t->rest.over(the->switches)) ready.push_back(t);
    }
    the->switches += alive.size() - ready.size();
    for (size_t i = ready.size(); i > 1; --i) {
      std::swap(ready[i - 1], ready[(shuffle_bits(the->random) >> 32) * i >> 32]);
    }
    for (Thread* t : ready) {
      t->resting = false;
      current = t;
      ++the->switches, ++the->turns;
      the->in_thread = true;
      cupymla_switch(&the->scheduler, t->stack_pointer);
      the->in_thread = false;
      if (!t->resting && !t->polling) the->worked = the->switches;
    }
    if (!the->copies.empty()) run_copies();
    if (the->limit && the->turns > the->limit && the->failure.empty()) the->failure = "the grid does not end";
    alive.erase(std::remove_if(alive.begin(), alive.end(), [](Thread* t) { return t->ended; }), alive.end());
  }
  if (the->failure.empty() && !the->copies.empty()) run_copies();
}

}  // namespace

}  // namespace machine

// Called from Python.

struct LaunchRequest {
  uint32_t grid[3], block, cluster[3], static_bytes, dynamic_bytes;
  uint64_t seed, limit;
};

extern "C" int cupymla_run(void (*entry)(machine::Thread&), const LaunchRequest* request, const unsigned char* parameters,
                           char* message, uint64_t message_bytes) {
  using namespace machine;
  Machine machine;
  the = &machine;
  machine.entry = entry;
  machine.random = request->seed * 0x9e3779b97f4a7c15ull + 0x2545f4914f6cdd1dull;
  machine.limit = request->limit;
  const uint32_t* grid = request->grid;
  const uint32_t* extent = request->cluster;
  const uint32_t ctas = grid[0] * grid[1] * grid[2], size = extent[0] * extent[1] * extent[2];
  std::vector<Cta> all(ctas);
  std::vector<std::vector<Cta*>> clusters(ctas / size, std::vector<Cta*>(size));
  std::vector<uint32_t> ended(clusters.size());
  std::vector<uint64_t> issued(clusters.size() * kIssueSlots);
  const uint32_t bytes = kSystemBytes + request->static_bytes + request->dynamic_bytes;
  std::vector<std::unique_ptr<unsigned char, void (*)(void*)>> memory;
  for (uint32_t i = 0; i < ctas; ++i) {
    Cta& cta = all[i];
    const uint32_t position[3] = {i % grid[0], i / grid[0] % grid[1], i / (grid[0] * grid[1])};
    uint32_t cluster_index = 0, scale = 1, rank = 0, rank_scale = 1;
    for (int d = 0; d < 3; ++d) {
      cta.position[d] = position[d];
      cta.in_cluster[d] = position[d] % extent[d];
      cta.cluster_extent[d] = extent[d];
      cluster_index += position[d] / extent[d] * scale, scale *= grid[d] / extent[d];
      rank += cta.in_cluster[d] * rank_scale, rank_scale *= extent[d];
    }
    cta.rank = rank, cta.cluster_size = size, cta.cluster = clusters[cluster_index].data();
    cta.cluster_ended = &ended[cluster_index], cta.cluster_issued = &issued[cluster_index * kIssueSlots];
    clusters[cluster_index][rank] = &cta;
    cta.smem_bytes = bytes, cta.dynamic_bytes = request->dynamic_bytes, cta.threads = request->block;
    auto* block = static_cast<unsigned char*>(std::aligned_alloc(1024, (bytes + 1023) / 1024 * 1024));
    std::memset(block, 0xff, bytes);
    memory.emplace_back(block, std::free);
    cta.smem = block;
    cta.warps.resize((request->block + 31) / 32);
    for (uint32_t w = 0; w < cta.warps.size(); ++w) {
      const uint32_t lanes = std::min(32u, request->block - 32 * w);
      cta.warps[w].ended = lanes == 32 ? 0 : ~((1u << lanes) - 1u);
    }
  }
  for (uint32_t i = 0; i < ctas; ++i) {
    for (uint32_t n = 0; n < request->block; ++n) {
      auto t = std::make_unique<Thread>();
      t->id[0] = t->index = n, t->lane = n % 32, t->cta = &all[i], t->warp = &all[i].warps[n / 32];
      for (int d = 0; d < 3; ++d) t->grid[d] = grid[d], t->block[d] = d ? 1 : request->block;
      t->parameters = parameters;
      t->random = (i * 1024ull + n + 1) * 0x9e3779b97f4a7c15ull + request->seed;
      prepare(*t);
      t->warp->lanes[t->lane] = t.get();
      machine.threads.push_back(std::move(t));
    }
  }
  const auto faults = std::make_unique<Faults>();
  try {
    if (sigsetjmp(machine.outside, 1) == 0) schedule();
  } catch (const Broken& error) {
    machine.failure = error.what;
  }
  std::snprintf(message, message_bytes, "%s", machine.failure.c_str());
  the = nullptr;
  return machine.failure.empty() ? 0 : 1;
}
