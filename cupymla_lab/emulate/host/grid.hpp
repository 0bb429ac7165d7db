// Accesses to global memory that nothing orders: who wrote last, of what the launch writes. The rules are those of
// cupymla_lab/interpret/grid_shadow.py: a later access by another thread has to know that it lies behind (races.hpp),
// unless both are strong, as atomic operations are. Between clusters knowledge passes through strong operations, with
// release and acquire or with fences around relaxed ones (PTX ISA 9.0, "Memory Consistency Model": "Release and
// Acquire Patterns"). What a bulk store wrote is there once its thread has waited for it, and not for its reads alone.
// Writes to what another thread may still read are not looked at, and of strong writes only the last.
#pragma once

#include <unordered_map>

#include "races.hpp"

namespace machine {

class GridShadow {
 public:
  explicit GridShadow(uint32_t unit) : unit_(unit) {}

  // `strong`: relaxed or more, or atomic; `constant`: by ld.global.nc; `bulk`: by what TMA does.
  void read(Thread& t, uint64_t address, uint64_t bytes, bool strong, bool constant, bool bulk);
  void write(Thread& t, uint64_t address, uint64_t bytes, bool strong, bool bulk);
  // A thread reads with a strong operation, what such operations handed on; it writes with one. `adds`: it did read in
  // the same operation, so that what was handed on there stays.
  void take(Thread& t, uint64_t address, bool acquires);
  void give(Thread& t, uint64_t address, bool releases, bool adds);

 private:
  struct Write {
    uint32_t cluster = 0;       // its number, from 1
    uint32_t by = 0, when = 0;  // thread, and moment or group of bulk stores
    uint32_t line = 0;
  };
  // Of each unit of some memory the last ordinary write and the last strong one since, where there was any.
  struct Page {
    std::unique_ptr<Write[]> plain, strong;
  };
  static constexpr uint64_t kPage = 4096;

  Page* page(uint64_t number, bool make);
  template <typename Look>
  void each_page(uint64_t address, uint64_t bytes, bool make, const Look& look);
  bool knows(Thread& t, Plane plane, const Write& write) const;
  template <typename Look>
  void each_write(const Write* writes, uint64_t first, uint64_t end, const Look& look) const;
  void require_over(Thread& t, const Write* writes, uint64_t first, uint64_t end);
  [[noreturn]] void refuse(Thread& t, const Write& write, uint64_t address, const char* does, const char* missing);

  uint32_t unit_;
  std::unordered_map<uint64_t, Page> pages_;
  uint64_t last_number_ = ~0ull;
  Page* last_page_ = nullptr;
  std::unordered_map<uint64_t, Gift> handed_;
};

}  // namespace machine
