// Which global memory a launch may use; see memory.hpp.
#include "memory.hpp"

#include <algorithm>

#include "state.hpp"

extern "C" __attribute__((weak)) const machine::Variable cupymla_variables[];
extern "C" __attribute__((weak)) const uint32_t cupymla_variable_count;

namespace machine {

void Regions::set(const Region* regions, uint32_t count, uint32_t launch, const uint32_t* beside,
                  uint32_t beside_count) {
  regions_ = regions, count_ = count, launch_ = launch, beside_ = beside, beside_count_ = beside_count;
  last_ = nullptr;
}

const Region* Regions::find(uint64_t address) const {
  const Region* after = std::upper_bound(regions_, regions_ + count_, address,
                                         [](uint64_t at, const Region& region) { return at < region.base; });
  return after == regions_ ? nullptr : after - 1;
}

bool Regions::never_written(uint64_t address) const {
  const Region* found = find(address);
  return found && address - found->base < found->size && !found->writable;
}

void Regions::refuse(uint64_t address, uint64_t bytes, uint32_t how) const {
  const auto at = static_cast<unsigned long long>(address), count = static_cast<unsigned long long>(bytes);
  const char* doing = how & kStores ? "write" : "read";
  const Region* near = find(address);
  const Region* next = near ? near + 1 : regions_;
  const bool behind = near && (next == regions_ + count_ || address - near->base - near->size < next->base - address);
  if (!behind) near = next;
  broken("global %s out of bounds: %llu bytes at %#llx, byte %lld of '%s' (%llu bytes)", doing, count, at,
         static_cast<long long>(address - near->base), near->name, static_cast<unsigned long long>(near->size));
}

void Regions::use(uint64_t address, uint64_t bytes, uint32_t how) {
  if (count_ == 0) return;
  for (uint32_t i = 0; i < watched_count_; ++i) {
    if (address < watched_[i].base + watched_[i].size && watched_[i].base < address + bytes) {
      ask(address, bytes, how);
      break;
    }
  }
  if (last_ == nullptr || address - last_->base >= last_->size || last_->size - (address - last_->base) < bytes) {
    const Region* found = find(address);
    const bool inside = found && address - found->base < found->size && found->size - (address - found->base) >= bytes;
    if (!inside) {
      for (uint32_t i = 0; &cupymla_variable_count && i < cupymla_variable_count; ++i) {
        const Variable& variable = cupymla_variables[i];
        const uint64_t offset = address - reinterpret_cast<uint64_t>(variable.place);
        if (offset < variable.bytes && variable.bytes - offset >= bytes) return;
      }
      refuse(address, bytes, how);
    }
    last_ = found;
  }
  const Region& region = *last_;
  const uint64_t first = address - region.base;
  if (how & kStores && !region.writable) {
    broken("write to read-only memory: %llu bytes at byte %llu of '%s'", static_cast<unsigned long long>(bytes),
           static_cast<unsigned long long>(first), region.name);
  }
  if (how & kConstants && region.launches) {
    for (uint64_t i = first; i < first + bytes; ++i) {
      if (region.launches[i] && std::find(beside_, beside_ + beside_count_, region.launches[i]) != beside_ + beside_count_) {
        broken("ld.global.nc of byte %llu of '%s', which the launch ahead writes", static_cast<unsigned long long>(i),
               region.name);
      }
    }
  }
  if (how & kLoads && region.written) {
    const void* hole = std::memchr(region.written + first, 0, bytes);
    if (hole) {
      broken("read of unwritten memory: byte %llu of '%s'",
             static_cast<unsigned long long>(static_cast<const unsigned char*>(hole) - region.written), region.name);
    }
  }
  if (!(how & kStores)) return;
  if (region.written) std::memset(region.written + first, 1, bytes);
  if (region.launches) std::fill(region.launches + first, region.launches + first + bytes, launch_);
}

void use_global(Thread& t, uint64_t address, uint32_t bytes, uint32_t how, const char* instruction) {
  if (is_private(t, address)) {
    if (how & kStores && in_parameters(t, address)) broken("write to a parameter");
    return;
  }
  if (!t.released && (how & kStores || !the->regions.never_written(address))) {
    require_released(t, address, instruction);
  }
  the->regions.use(address, bytes, how);
}

void use_bulk(uint64_t address, uint64_t bytes, uint32_t how) { the->regions.use(address, bytes, how); }

void let_in(Thread& t) {
  if (!t.released) the->lets_in_early = true;
}

}  // namespace machine
