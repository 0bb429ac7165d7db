// The arrays of global memory that a launch may use: an access outside of them, a write to one that may not be written
// and a read of what nothing has written end it. Without arrays all of the process's memory is free.
#pragma once

#include "runtime.hpp"

namespace machine {

// As cupymla_lab/emulate/host/memory.py lays it out.
struct Region {
  uint64_t base, size;
  unsigned char* written;  // of each byte whether it was; nullptr: all of them
  uint32_t* launches;      // of each byte the launch that wrote it last, where that is noted
  const char* name;
  uint32_t writable, reserved;
};

// Who is told of each use of some memory, before it happens.
using Watcher = void (*)(uint64_t address, uint64_t bytes, uint32_t how);
struct Watched {
  uint64_t base, size;
};

class Regions {
 public:
  void watch(const Watched* watched, uint32_t count, Watcher watcher) {
    watched_ = watched, watched_count_ = count, watcher_ = watcher;
  }
  // `beside`: launches that may still run when this one, a dependent one, begins.
  void set(const Region* regions, uint32_t count, uint32_t launch, const uint32_t* beside, uint32_t beside_count);
  bool any() const { return count_ != 0; }
  // Whether that is of an array that no launch may write to.
  bool never_written(uint64_t address) const;
  void use(uint64_t address, uint64_t bytes, uint32_t how);
  void tell(uint64_t address, uint64_t bytes, uint32_t how) const { watcher_(address, bytes, how); }

 private:
  const Region* find(uint64_t address) const;
  [[noreturn]] void refuse(uint64_t address, uint64_t bytes, uint32_t how) const;

  const Region* regions_ = nullptr;
  const Region* last_ = nullptr;
  uint32_t count_ = 0, launch_ = 0, beside_count_ = 0;
  const uint32_t* beside_ = nullptr;
  const Watched* watched_ = nullptr;
  uint32_t watched_count_ = 0;
  Watcher watcher_ = nullptr;
};

}  // namespace machine
