#include "arrays.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>

#include "state.hpp"

namespace machine {

namespace {

bool lies_in(uint64_t address, const void* begin, uint64_t bytes) {
  return address - reinterpret_cast<uint64_t>(begin) < bytes;
}

// Local memory, parameters, and variables of the kernel's module, which a generic address may name as well.
bool is_of_the_thread(Thread& t, uint64_t address) {
  Dl_info module, own;
  return lies_in(address, t.stack.get(), kStackBytes) || lies_in(address, t.parameters, the->parameter_bytes) ||
         (dladdr(reinterpret_cast<void*>(address), &module) && dladdr(reinterpret_cast<void*>(&is_of_the_thread), &own) &&
          module.dli_fbase == own.dli_fbase);
}

}  // namespace

Arrays::Arrays(const Array* given, uint64_t count) : arrays_(given, given + count) {
  std::sort(arrays_.begin(), arrays_.end(), [](const Array& a, const Array& b) { return a.begin < b.begin; });
}

void Arrays::refuse(Thread& t, const char* does, uint64_t address, uint64_t bytes, const char* why) {
  // The array that begins last before these bytes' end, else the first of all.
  const Array* nearest = &arrays_.front();
  for (const Array& each : arrays_) {
    if (each.begin < address + bytes) nearest = &each;
  }
  broken("thread %u of CTA %u, PTX line %u, %s %llu bytes of global memory at byte %lld of '%s' (%llu bytes), %s", t.index,
         t.cta->position[0], t.line, does, static_cast<unsigned long long>(bytes),
         static_cast<long long>(address - nearest->begin), nearest->name, static_cast<unsigned long long>(nearest->bytes),
         why);
}

const Array* Arrays::holding(Thread& t, uint64_t address, uint64_t bytes, const char* does) {
  const auto holds = [&](const Array& each) {
    return each.begin <= address && address - each.begin <= each.bytes && bytes <= each.bytes - (address - each.begin);
  };
  if (arrays_.empty() || bytes == 0) return nullptr;
  if (last_ && holds(*last_)) return last_;
  auto behind = std::upper_bound(arrays_.begin(), arrays_.end(), address,
                                 [](uint64_t wanted, const Array& each) { return wanted < each.begin; });
  while (behind != arrays_.begin()) {
    if (holds(*--behind)) return last_ = &*behind;
    // Arrays may overlap only where they are views of one another, which begin at the same byte.
    if (behind->begin != address) break;
  }
  if (is_of_the_thread(t, address)) return nullptr;
  refuse(t, does, address, bytes, "outside of every array");
}

void Arrays::read(Thread& t, uint64_t address, uint64_t bytes) {
  const Array* array = holding(t, address, bytes, "reads");
  if (!array || !array->written) return;
  if (std::memchr(array->written + (address - array->begin), 0, bytes)) {
    refuse(t, "reads", address, bytes, "which nothing has written");
  }
}

void Arrays::write(Thread& t, uint64_t address, uint64_t bytes) {
  const Array* array = holding(t, address, bytes, "writes");
  if (!array) return;
  if (!array->writable) refuse(t, "writes", address, bytes, "which is there to be read");
  if (array->written) std::memset(array->written + (address - array->begin), 1, bytes);
}

}  // namespace machine
