"""Correctness cases of sparse_mla_bwd_phase1; see `cupymla.ops.case`."""

from __future__ import annotations

from cupymla.ops.mla_cases import MlaCase

from . import mla

CASES: tuple[MlaCase, ...] = mla.COMMON
