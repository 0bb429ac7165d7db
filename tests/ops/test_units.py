"""Translation units of calls that launch several kernels: what they take, and that evidence speaks for all."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping

import pytest
from plan_kit import CUDA

from cupymla.ops import registry
from cupymla.ops.indexer_bwd import plan as indexer_bwd
from cupymla.ops.indexer_loss_dense import plan as indexer_loss_dense
from cupymla.ops.units import Unit
from cupymla.testing import operators


@pytest.mark.parametrize("units", [indexer_bwd.UNITS, indexer_loss_dense.UNITS], ids=["indexer_bwd", "loss_dense"])
def test_units_take_the_definitions_that_they_name(units: Mapping[str, Unit]) -> None:
    """One more is a variant compiled twice; one that a file does not tell of is read as 0."""
    for unit in units.values():
        text = (CUDA / unit.operator / unit.folder / f"{unit.kernel}.cu").read_text()
        assert set(re.findall(r"CUPYMLA_(\w+): ", text)) == set(unit.takes), unit.kernel
        assert re.search(rf"\b{unit.kernel}\(", text)


@pytest.mark.parametrize("name", ["sparse_mla_fwd", "indexer_bwd", "indexer_loss_dense"])
def test_evidence_speaks_for_every_unit(name: str) -> None:
    """An edit of a unit that no kernel names would leave its evidence as it is."""
    entry = registry.named(name)
    plan = importlib.import_module(f"{entry.module}.plan")
    named = {unit.path for kernel in entry.kernels for unit in operators.units(entry, kernel)}
    own = {source.path for source in plan.sources() if source.path.startswith(f"{name}/")}
    assert named == own
