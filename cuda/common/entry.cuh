// What a compiled kernel says of itself. Python reads these numbers from the cubin's ELF image, so a size that
// C++ derives from its tiles is never written a second time in Python.
#pragma once

// Placed once in a translation unit, at namespace scope, after the kernel:
//
//   CUPYMLA_LAUNCH_FACTS(threads = Config::kThreads, cluster = Config::kCluster,
//                        smem_bytes = sizeof(SharedStorage), parameter_bytes = sizeof(Parameters))
//
// Each value is a constant expression, stored as 32 unsigned bits; a value may name facts to its left. The names
// reach Python as the macro's own text. `used` keeps both symbols although no kernel reads them, `extern "C"` keeps
// their names, and `constexpr` refuses a value that would have to be computed at run time.
#define CUPYMLA_LAUNCH_FACTS(...)                                                                     \
    struct CupymlaLaunchFacts {                                                                       \
        unsigned __VA_ARGS__;                                                                         \
    };                                                                                                \
    extern "C" __device__ __attribute__((used)) const char cupymla_fact_names[] = #__VA_ARGS__;       \
    extern "C" __device__ __attribute__((used)) constexpr CupymlaLaunchFacts cupymla_fact_values = {}; \
    static_assert(sizeof(CupymlaLaunchFacts) % sizeof(unsigned) == 0, "facts are read as an array of unsigned")
