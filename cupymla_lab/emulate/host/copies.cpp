// Copies that others carry out: cp.async, bulk copies by tensor maps and without, reductions; see runtime.hpp.
#include <algorithm>

#include "state.hpp"

namespace machine {

// cp.async: carried out when issued, when its group is waited for, or behind an arrival that it brings about, as the
// mode says.
namespace {

void perform_async(AsyncCopy& copy) {
  if (copy.done) return;
  if (copy.read) std::memcpy(copy.to, copy.from, copy.read);
  std::memset(copy.to + copy.read, 0, copy.size - copy.read);
  copy.done = true;
}

// All copies of a thread before that number.
void perform_async_to(Thread& t, uint64_t number) {
  for (; t.async_first < number; ++t.async_first, t.async_copies.pop_front()) perform_async(t.async_copies.front());
}

void perform_arrival(Copy& copy) {
  perform_async_to(*copy.thread, copy.map);
  if (copy.cta->causality) copy.cta->causality->landed_async(*copy.thread, copy.barrier, copy.from);
  barrier_arrive(*copy.cta, copy.barrier);
}

bool is_late(Thread& t) { return the->mode == kLazy || (the->mode == kRandom && (draw(t) & 1)); }

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

void copy_async(Thread& t, uint32_t to, uint64_t from, uint32_t size, uint32_t read) {
  if (size != 4 && size != 8 && size != 16) broken("cp.async of %u bytes", size);
  if (read > size) broken("cp.async reads %u of %u bytes", read, size);
  AsyncCopy copy{shared(t, to, size), generic(from, size), size, read, false};
  if (read) use_bulk(from, read, kLoads);
  if (t.races) {
    t.cta->causality->write_by_async(t, to, size);
    read_global(t, from, read, false);
  }
  if (!is_late(t)) perform_async(copy);
  t.async_copies.push_back(copy);
}

void commit_async(Thread& t) {
  if (t.races) t.cta->causality->close_async(t);
  t.async_groups.push_back(t.async_first + t.async_copies.size());
}

void wait_async(Thread& t, uint32_t newest) {
  if (newest == UINT32_MAX) commit_async(t), newest = 0;
  for (; t.async_groups.size() > newest; t.async_groups.pop_front()) perform_async_to(t, t.async_groups.front());
  if (t.races) t.cta->causality->wait_async(t, newest);
}

void arrive_async(Thread& t, uint32_t barrier, bool counts) {
  if (counts) barrier_expect_arrival(*t.cta, barrier);
  auto copy = std::make_shared<Copy>();
  copy->thread = &t, copy->cta = t.cta, copy->barrier = barrier;
  copy->map = t.async_first + t.async_copies.size();
  if (t.races) copy->from = t.cta->causality->arrive_async(t, barrier);
  if (!is_late(t)) return perform_arrival(*copy);
  copy->perform = perform_arrival, copy->issued = the->switches;
  the->copies.push_back(copy);
}

uint64_t loose_copies(const Thread& t) {
  uint64_t behind = t.async_first;  // those before are followed by an arrival
  for (const auto& copy : the->copies) {
    if (copy->perform == perform_arrival && copy->thread == &t) behind = std::max(behind, copy->map);
  }
  return t.async_first + t.async_copies.size() - behind;
}

// Bulk copies ---------------------------------------------------------------------------------------------------------

namespace {

// What cupymla_lab/emulate/host/machine.py writes in place of a CUtensorMap.
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

uint32_t told(const Copy& copy, uint32_t rank) {
  return copy.mask ? rank << 24 | (copy.barrier & 0xffffffu) : copy.barrier;
}

// `from`: the CTA whose scope a wait has to reach, or kAnyone.
void count_bytes(Copy& copy, uint32_t rank, uint32_t bytes, int from = kAnyone) {
  if (copy.cta->causality) copy.cta->causality->landed(told(copy, rank), from);
  barrier_expect(*copy.cta, told(copy, rank), -static_cast<int32_t>(bytes));
}

template <typename Each>
void each_target(Copy& copy, const Each& each) {
  if (!copy.mask) return each(copy.shared >> 24);
  for (uint32_t rank = 0; rank < copy.cta->cluster_size; ++rank) {
    if (copy.mask >> rank & 1) each(rank);
  }
}

unsigned char* in_smem(Copy& copy, uint32_t rank, uint32_t offset, uint32_t bytes) {
  if (copy.cta->cluster[rank]->ended == copy.cta->threads) {
    broken("a copy uses shared memory of the CTA with rank %u, which has exited", rank);
  }
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
      if (from) use_bulk(from, bytes, kLoads), std::memcpy(to, reinterpret_cast<const void*>(from), bytes);
      if (!from) std::memset(to, map.nan ? 0xff : 0, bytes);
    });
    count_bytes(copy, rank, tile_bytes(map));
  });
}

void perform_bytes(Copy& copy) {
  each_target(copy, [&](uint32_t rank) {
    const uint32_t address = rank << 24 | (copy.shared & 0xffffffu);
    use_bulk(copy.global, copy.bytes, kLoads);
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
  const bool anyone = !copy.cta->causality || copy.cta->causality->as_hardware();
  count_bytes(copy, copy.shared >> 24, copy.bytes, anyone ? kAnyone : static_cast<int>(copy.cta->rank));
}

void perform_store(Copy& copy) {
  const TileMap& map = tile_map(copy.map);
  const uint32_t first = copy.shared & 0xffffffu, rank = copy.shared >> 24;
  const Reduction how{copy.reduction.operation, static_cast<Number>(map.number)};
  each_piece(map, copy.at, [&](uint64_t to, uint32_t offset, uint32_t bytes) {
    const unsigned char* from = in_smem(copy, rank, swizzled(first + offset, map.swizzle), bytes);
    if (to) use_bulk(to, bytes, how.operation == kReplace ? kStores : kLoads | kStores);
    if (to) reduce(reinterpret_cast<void*>(to), from, bytes, how);
  });
}

void perform_store_bytes(Copy& copy) {
  use_bulk(copy.global, copy.bytes, copy.reduction.operation == kReplace ? kStores : kLoads | kStores);
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

void require_same_cta(uint32_t to, uint32_t barrier, uint32_t mask) {
  if (!mask && to >> 24 != barrier >> 24) broken("a bulk copy to one CTA with an mbarrier of another");
}

void require_sixteens(uint64_t global, uint32_t shared, uint32_t bytes) {
  if (global % 16 == 0 && shared % 16 == 0 && bytes % 16 == 0) return;
  broken("misaligned bulk copy: %u bytes between %#llx and %#x", bytes, static_cast<unsigned long long>(global), shared);
}

// Looks for races of a tile's bytes: `each` is called with the offsets and lengths of its pieces.
template <typename Each>
void each_run(const TileMap& map, uint32_t first, const Each& each) {
  const uint32_t bytes = tile_bytes(map);
  for (uint32_t at = 0; at < bytes; at += 16) each(swizzled(first + at, map.swizzle), std::min(16u, bytes - at));
}

void announce_write(Thread& t, uint32_t to, uint32_t barrier, uint32_t mask, const TileMap* map, uint32_t bytes) {
  Copy copy;
  copy.cta = t.cta, copy.shared = to, copy.barrier = barrier, copy.mask = mask;
  Causality& causality = *t.cta->causality;
  each_target(copy, [&](uint32_t rank) {
    const auto write = [&](uint32_t offset, uint32_t size) {
      causality.write_later(t, rank << 24 | offset, size, told(copy, rank), false);
    };
    causality.require_initialised(t, told(copy, rank), true);
    causality.hold(t, told(copy, rank));
    if (map) return each_run(*map, to & 0xffffffu, write);
    write(to & 0xffffffu, bytes);
  });
}

}  // namespace

void announce(Thread& t, void (*issue)(uint32_t, const uint64_t*), uint32_t number, const uint64_t* operands) {
  if (!t.races) return;
  t.announcing = true;
  try {
    issue(number, operands);
  } catch (...) {
    t.announcing = false;
    throw;
  }
  t.announcing = false;
}

bool reads_constants(Thread& t, void (*issue)(uint32_t, const uint64_t*), uint32_t number, const uint64_t* operands) {
  t.looking = t.constant = true;
  issue(number, operands);
  t.looking = false;
  return t.constant;
}

void copy_tile(Thread& t, uint32_t to, uint64_t map, const int32_t* at, uint32_t rank, uint32_t barrier, uint32_t mask) {
  require_same_cta(to, barrier, mask);
  if (tile_map(map).rank != rank) broken("a copy of %u dimensions by a map of %u", rank, tile_map(map).rank);
  if (t.looking) {
    return each_piece(tile_map(map), at, [&](uint64_t from, uint32_t, uint32_t) {
      if (from && !the->regions.never_written(from)) t.constant = false;
    });
  }
  if (t.announcing) {
    each_piece(tile_map(map), at, [&](uint64_t from, uint32_t, uint32_t bytes) {
      if (from) read_global(t, from, bytes, true);
    });
    return announce_write(t, to, barrier, mask, &tile_map(map), 0);
  }
  auto copy = issue(t, perform_load);
  copy->map = map, copy->shared = to, copy->barrier = barrier, copy->mask = mask;
  std::copy(at, at + rank, copy->at);
}

void copy_bytes(Thread& t, uint32_t to, uint64_t from, uint32_t bytes, uint32_t barrier, uint32_t mask) {
  require_same_cta(to, barrier, mask);
  require_sixteens(from, to, bytes);
  if (t.looking) {
    t.constant = the->regions.never_written(from);
    return;
  }
  if (t.announcing) {
    read_global(t, from, bytes, true);
    return announce_write(t, to, barrier, mask, nullptr, bytes);
  }
  auto copy = issue(t, perform_bytes);
  copy->global = from, copy->shared = to, copy->barrier = barrier, copy->mask = mask, copy->bytes = bytes;
}

void copy_shared(Thread& t, uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier, Reduction reduction) {
  require_same_cta(to, barrier, 0);
  if (t.announcing) {
    t.cta->causality->read_later(t, from, bytes, barrier);
    return announce_write(t, to, barrier, 0, nullptr, bytes);
  }
  auto copy = issue(t, perform_shared);
  copy->from = from, copy->shared = to, copy->barrier = barrier, copy->bytes = bytes, copy->reduction = reduction;
}

void store_async(Thread& t, uint32_t to, const void* data, uint32_t bytes, uint32_t barrier, Reduction reduction) {
  if (to >> 24 != barrier >> 24) broken("st.async to one CTA with an mbarrier of another");
  if (t.races) {
    t.cta->causality->require_initialised(t, barrier, true);
    t.cta->causality->hold(t, barrier);
    t.cta->causality->write_later(t, to, bytes, barrier, true);
  }
  auto copy = issue(t, perform_async);
  copy->shared = to, copy->barrier = barrier, copy->bytes = bytes, copy->reduction = reduction;
  std::memcpy(copy->data, data, bytes);
}

void store_tile(Thread& t, uint64_t map, const int32_t* at, uint32_t rank, uint32_t from, Operation operation) {
  if (tile_map(map).rank != rank) broken("a copy of %u dimensions by a map of %u", rank, tile_map(map).rank);
  if (t.announcing) {
    each_piece(tile_map(map), at, [&](uint64_t to, uint32_t, uint32_t bytes) {
      if (to) write_global(t, to, bytes, operation != kReplace);
    });
    return each_run(tile_map(map), from & 0xffffffu, [&](uint32_t offset, uint32_t bytes) {
      t.cta->causality->read_by_store(t, (from & 0xff000000u) | offset, bytes);
    });
  }
  auto copy = issue(t, perform_store);
  copy->map = map, copy->shared = from, copy->reduction.operation = operation;
  std::copy(at, at + rank, copy->at);
  t.open_group.push_back(copy);
}

void store_bytes(Thread& t, uint64_t to, uint32_t from, uint32_t bytes, Reduction reduction) {
  require_sixteens(to, from, bytes);
  if (t.announcing) {
    write_global(t, to, bytes, reduction.operation != kReplace);
    return t.cta->causality->read_by_store(t, from, bytes);
  }
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

std::string left_behind(const Cta& cta) {
  const uint32_t* at = cta.position;
  char text[160] = "";
  if (cta.loose_copies) {
    std::snprintf(text, sizeof text, "CTA (%u, %u, %u) exits before %u cp.async to its shared memory were waited for",
                  at[0], at[1], at[2], cta.loose_copies);
  }
  for (const auto& copy : the->copies) {
    const bool here = copy->perform == perform_arrival ? copy->cta == &cta
                      : copy->cta->cluster == cta.cluster &&
                            (copy->mask ? copy->mask >> cta.rank & 1 : copy->shared >> 24 == cta.rank);
    if (here && !text[0]) {
      std::snprintf(text, sizeof text, "CTA (%u, %u, %u) exits while a copy still uses its shared memory", at[0], at[1],
                    at[2]);
    }
  }
  return text;
}

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

}  // namespace machine
