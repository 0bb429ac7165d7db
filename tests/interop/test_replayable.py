"""A call that a compiled program may record uses no memory but its arrays and results: the rest is gone at a replay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from interop_kit import Problem, facts_of, operator_problems, related_problems

from cupymla import arch as arches
from cupymla.device import Device
from cupymla.interop.call import Call, Compiled
from cupymla.interop.declaration import Facts
from cupymla.interop.table import DECLARATIONS
from cupymla.ops import registry
from cupymla.ops.sparse_mla_bwd import plan
from cupymla.testing.operators import as_tuple
from cupymla_lab.emulated import emulated
from cupymla_lab.subjects import Subject

# Operators without a kernel for Hopper.
ELSEWHERE = {
    e.name
    for e in registry.OPERATORS
    if not any(arches.named(kernel.arch).capability < (10, 0) for kernel in e.kernels)
}


def cheapest() -> Iterator[Problem]:
    """One problem of each function with a kernel for Hopper."""
    seen = set(ELSEWHERE)
    for problem in (*operator_problems(1), *related_problems()):
        if problem.declaration.name not in seen:
            seen.add(problem.declaration.name)
            yield problem


PROBLEMS = {problem.declaration.name: problem for problem in cheapest()}


def test_every_function_is_tried() -> None:
    assert set(PROBLEMS) == {declaration.name for declaration in DECLARATIONS} - ELSEWHERE


@pytest.mark.compile
@pytest.mark.parametrize("name", PROBLEMS)
def test_what_is_recorded_needs_no_memory_of_its_own(name: str) -> None:
    """Whatever its kernels make: they are not run."""
    problem = PROBLEMS[name]
    with emulated() as machine:
        made: list[str] = []
        empty = machine.empty

        def counted(shape: tuple[int, ...], dtype: Any, argument: str = "allocated") -> Any:
            made.append(f"{dtype}{list(shape)}")
            return empty(shape, dtype, argument)

        inputs = {n: v for n, v in problem.inputs().items() if not n.startswith("return_attn")}
        updates = problem.declaration.updates
        given = machine.arguments(inputs, updates)
        if problem.declaration.has_workspace:
            chosen = {name: given.get(name, p.default) for name, p in problem.declaration.options.items()}
            call = Call.of(problem.declaration, facts_of(problem.declaration, inputs), chosen)
            facts = call.results.get("workspace")
            if facts is not None:
                given["workspace"] = machine.empty(facts.shape, np.dtype(facts.dtype))
        machine.empty = counted  # type: ignore[method-assign, assignment]
        machine.execute = lambda *_: None  # type: ignore[method-assign]
        results = as_tuple(machine.call(problem.declaration.function(), **given))
    fresh = 0 if updates else len([result for result in results if result is not None])
    if problem.declaration.replayable or problem.declaration.has_workspace:
        assert len(made) == fresh, made
    assert len(made) >= fresh


@pytest.mark.compile
def test_a_compiled_call_shares_rows_in_its_own_memory() -> None:
    """Few long rows are shared by clusters, through a workspace that is a result of the program's call."""
    subject = Subject("sparse_mla_decode")
    (case,) = subject.those(subject.cases.CASES, ["v32_d576_h16_b1_n2_k2048_shares"])
    inputs = subject.cases.inputs(case, 1)
    declaration = next(each for each in DECLARATIONS if each.name == "sparse_mla_decode")
    facts = facts_of(declaration, inputs)
    call = Call.of(declaration, facts, {n: inputs.get(n, p.default) for n, p in declaration.options.items()})
    assert [*call.results] == ["out", "lse", "workspace"]
    with emulated() as machine:
        machine.execute = lambda *_: None  # type: ignore[method-assign]
        arrays = [machine.array(inputs[name]) for name in facts]
        arrays += [machine.empty(one.shape, np.dtype(one.dtype)) for one in call.results.values()]
        addresses = [array.data.ptr for array in arrays]
        made = Compiled(call, Device("cuda", 0), addresses)
        assert 0 < made.binding.workspace_bytes <= call.results["workspace"].shape[0]
        made.at(addresses, 0)
        assert machine.launched == ["sparse_mla_decode", "sparse_mla_decode_merge"]
        # Recorded launches do not overlap.
        assert [(geometry.grid[1] > 1, geometry.pdl) for geometry in machine.launches] == [
            (True, False),
            (False, False),
        ]


@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("asked", [False, True])
def test_a_compiled_backward_has_room_for_all_that_it_is_asked_for(heads: int, asked: bool) -> None:
    """The attention distribution of packed queries takes memory too; on an H200 the call failed for want of it."""
    shape = (8, 1024, heads)
    arrays = {
        "dout": Facts((*shape, 512), "bfloat16"),
        "q": Facts((*shape, 576), "bfloat16"),
        "kv": Facts((8, 1024, 576), "bfloat16"),
        "out": Facts((*shape, 512), "bfloat16"),
        "lse": Facts(shape, "float32"),
        "indices": Facts((8, 1024, 64), "int32"),
    }
    declaration = next(each for each in DECLARATIONS if each.name == "sparse_mla_bwd")
    options = {n: p.default for n, p in declaration.options.items()} | {"return_attn_dist": asked}
    made = Call.of(declaration, arrays, options)
    results = made.results
    assert ("attn_dist" in results) is asked
    needed = [plan.plan(made.check(), arches.named("sm_90a"), n).workspace.bytes for n in (1, 78, 132)]
    assert made.check().has_attn_dist is asked
    assert max(needed) <= results["workspace"].shape[0]
