// The half-precision conversions that the model uses, where it is compiled for the host machine.
#pragma once

#include "../runtime.hpp"

using __half = _Float16;

inline __half __ushort_as_half(unsigned short word) { return machine::as<_Float16>(word); }
inline unsigned short __half_as_ushort(__half value) { return machine::as<unsigned short>(value); }
inline float __half2float(__half value) { return machine::from_half(__half_as_ushort(value)); }
inline __half __double2half(double value) { return static_cast<_Float16>(value); }
