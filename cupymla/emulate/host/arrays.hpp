// The arrays of a call: what its kernels may use of global memory, and which bytes of them something has written.
#pragma once

#include <cstdint>
#include <vector>

namespace machine {

struct Thread;

// As machine.py gives them. `written`: of each byte whether something has written it; null where all are.
struct Array {
  uint64_t begin, bytes;
  unsigned char* written;
  const char* name;
  uint64_t writable;
};

class Arrays {
 public:
  Arrays(const Array* given, uint64_t count);

  // A thread is about to use these bytes: they lie in one of the arrays, or are no global memory of the call.
  void read(Thread& t, uint64_t address, uint64_t bytes);
  void write(Thread& t, uint64_t address, uint64_t bytes);

 private:
  const Array* holding(Thread& t, uint64_t address, uint64_t bytes, const char* does);
  [[noreturn]] void refuse(Thread& t, const char* does, uint64_t address, uint64_t bytes, const char* why);

  std::vector<Array> arrays_;  // by their addresses
  const Array* last_ = nullptr;
};

}  // namespace machine
