// Matrix products of a warpgroup. A thread's registers that products use, accumulators and fragments of A, are an array
// of its own, so that a product that is carried out by whoever waits can fill those of all 128 threads. Until a thread
// has waited for it none of them may be used, and between wgmma.fence and the product neither: recompiled code says
// which ones straight-line code uses, and that is looked at while a product is unfinished or a fence was executed.
//
// Products are carried out when the last of the threads has issued them or when one waits for them, as the mode says.
// Each is exact (in double precision) and rounded once.
//
// Source: PTX ISA 9.0, "wgmma.mma_async", "wgmma.fence", "Matrix Descriptor Format", "Strides", "Register Fragments".
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "races.hpp"

namespace machine {

// Products of one thread.
struct Products {
  struct Issued {
    uint64_t number;
    const ProductSite* site;
  };
  uint32_t* registers = nullptr;
  bool fenced = false;
  std::vector<uint64_t> locked, touched;  // registers, as bits
  std::deque<Issued> unfinished;
  std::deque<uint64_t> groups;  // the last product of each group that was committed and not waited for
  uint64_t issued = 0;
};

// A product of a warpgroup.
struct Product {
  const ProductSite* site;
  uint64_t a, b;
  bool keeps;
  uint32_t arrived = 0;
  std::vector<std::shared_ptr<const Shown>> shown;  // what the threads knew, where races are looked for
};

struct Warpgroup {
  Thread* threads[kGroup] = {};
  std::deque<Product> products;  // that are not carried out
  uint64_t begun = 0, done = 0;  // so many were issued by all threads, and were carried out
  // Accumulators that are still to go to registers: those of this site, by rows.
  const ProductSite* held_by = nullptr;
  std::vector<float> held;
  std::vector<int32_t> held_integers;
  // Of the last product that was looked at for races.
  std::vector<std::shared_ptr<const Shown>> shown;
  std::shared_ptr<const View> view;
  // setmaxnreg: how many threads have come to it, for how many registers each, and how often all had.
  uint32_t come = 0, asked = 0;
  uint64_t granted = 0;
};

}  // namespace machine
