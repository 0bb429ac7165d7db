"""Translated kernels on the processor of any x86-64 machine: PTX recompiled to C++."""
