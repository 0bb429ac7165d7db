"""What the MLA operators refuse: every argument in every wrong form, named in the error, with nothing written.

All four operators are held to one table, because all four take these arguments from the same code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from option_kit import MLA as DECLARED
from option_kit import bad

import cupymla
from cupymla import tensor
from cupymla.errors import InputError
from cupymla.ops.arguments import Check, Flag
from cupymla.ops.sparse_mla_bwd import sparse_mla_bwd, spec
from cupymla.ops.sparse_mla_fwd import sparse_mla_fwd
from cupymla.tensor import Device, View

Array = npt.NDArray[Any]
BF16 = ml_dtypes.bfloat16
S_Q, S_KV, H_Q, TOPK = 3, 7, 4, 5

INPUTS = {name: declared.inputs[: declared.required] for name, declared in DECLARED.items()}
OPTIONAL = {name: declared.inputs[declared.required :] for name, declared in DECLARED.items()}
OUTPUTS = {name: (*declared.written, *declared.results) for name, declared in DECLARED.items()}
ROWS = {"q", "kv", "out", "dout", "dq", "dkv"}
OPERATORS = tuple(INPUTS)
EVERY_INPUT = [(name, argument) for name in OPERATORS for argument in (*INPUTS[name], *OPTIONAL[name])]
EVERY_OUTPUT = [(name, argument) for name in OPERATORS for argument in OUTPUTS[name]]


def aligned(shape: tuple[int, ...], dtype: Any) -> Array:
    """Zeros at a 64-byte address, so that tests of alignment start from a known one."""
    item = np.dtype(dtype).itemsize
    memory = np.zeros(int(np.prod(shape)) * item + 64, np.uint8)
    start = -memory.ctypes.data % 64
    array: Array = memory[start : start + int(np.prod(shape)) * item].view(dtype).reshape(shape)
    return array


def array_for(argument: str) -> Array:
    """A good array for any array argument."""
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {
        "q": ((S_Q, H_Q, 576), BF16),
        "kv": ((S_KV, 576), BF16),
        "out": ((S_Q, H_Q, 512), BF16),
        "dout": ((S_Q, H_Q, 512), BF16),
        "lse": ((S_Q, H_Q), np.float32),
        "max_logits": ((S_Q, H_Q), np.float32),
        "delta": ((S_Q, H_Q), np.float32),
        "indices": ((S_Q, TOPK), np.int32),
        "topk_length": ((S_Q,), np.int32),
        "attn_sink": ((H_Q,), np.float32),
        "lists": ((S_KV + 1 + S_Q * TOPK,), np.int32),
        "d_sink": ((H_Q,), np.float32),
        "attn_dist": ((S_Q, TOPK), np.float32),
        "dist": ((S_Q, TOPK), np.float32),
        "p": ((S_Q, H_Q, TOPK), np.float32),
        "dq": ((S_Q, H_Q, 576), BF16),
        "dkv": ((S_KV, 576), BF16),
    }
    shape, dtype = shapes[argument]
    return aligned(shape, dtype)


def workspace(size: int, offset_bytes: int = 0) -> Array:
    """Bytes at a distance from an address that a workspace may have."""
    memory = np.zeros(size + 512, np.uint8)
    start = -memory.ctypes.data % 256 + offset_bytes
    return memory[start : start + size]


def good(operator: str, outputs: bool = True) -> dict[str, Any]:
    """A complete call that passes, every optional array and output in it."""
    names = INPUTS[operator] + OPTIONAL[operator] + (OUTPUTS[operator] if outputs else ())
    arguments = {name: array_for(name) for name in names}
    if "lists" in names:
        arguments["lists"][S_KV + 1 :] = -1  # topk_length is zeros
    if outputs:
        for name in OUTPUTS[operator]:
            arguments[name][...] = 7
    return arguments


def refused(operator: str, argument: str, arguments: dict[str, Any]) -> InputError:
    """Call, expect an InputError that names operator and argument, and see that no output was touched."""
    with pytest.raises(InputError) as caught:
        getattr(cupymla, operator)(**arguments)
    error = caught.value
    assert (error.operator, error.argument) == (operator, argument)
    assert error.expected and error.got and f"argument '{argument}'" in str(error)
    for name in OUTPUTS[operator]:
        if isinstance(arguments.get(name), np.ndarray) and name != argument:
            assert (arguments[name] == 7).all(), f"{name} was written"
    with pytest.raises(InputError):
        getattr(cupymla, operator).prepare(**arguments)
    return error


def padded(array: Array, elements: int) -> Array:
    """The same values with rows `elements` further apart."""
    memory = aligned((*array.shape[:-1], array.shape[-1] + elements), array.dtype)
    view: Array = memory[..., : array.shape[-1]]
    view[...] = array
    return view


def shifted(array: Array, offset_bytes: int) -> Array:
    """The same shape, contiguous, `offset_bytes` past a 64-byte boundary."""
    memory = aligned((array.nbytes + 64,), np.uint8)
    view: Array = np.ndarray(array.shape, array.dtype, buffer=memory.data, offset=offset_bytes)
    view[...] = array
    return view


@pytest.mark.parametrize("operator", OPERATORS)
def test_good_call_passes(operator: str) -> None:
    """Without this, the refusals below could have any cause."""
    getattr(cupymla, operator)(**good(operator))
    getattr(cupymla, operator)(**good(operator, outputs=False))


@pytest.mark.parametrize(("operator", "argument"), EVERY_INPUT + EVERY_OUTPUT)
@pytest.mark.parametrize("change", [lambda a: a[..., None, None], lambda a: a.reshape(-1)[0]], ids=["more", "scalar"])
def test_wrong_rank(operator: str, argument: str, change: Callable[[Array], Any]) -> None:
    arguments = good(operator)
    arguments[argument] = np.asarray(change(arguments[argument]))
    refused(operator, argument, arguments)


@pytest.mark.parametrize(("operator", "argument"), EVERY_INPUT + EVERY_OUTPUT)
def test_wrong_shape(operator: str, argument: str) -> None:
    """One element too few along each axis in turn (for q and indices: along those that define no size)."""
    free = {"q": (0, 1), "kv": (0,), "indices": (1,)}
    for axis in range(array_for(argument).ndim):
        if axis in free.get(argument, ()):
            continue
        arguments = good(operator)
        arguments[argument] = np.delete(arguments[argument], 0, axis=axis)
        assert "shape" in refused(operator, argument, arguments).expected


@pytest.mark.parametrize(("operator", "argument"), EVERY_INPUT + EVERY_OUTPUT)
@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.float16, np.uint8, bool])
def test_wrong_dtype(operator: str, argument: str, dtype: Any) -> None:
    """float16 is right for q alone, and then wrong for kv, which has to match it."""
    arguments = good(operator)
    arguments[argument] = arguments[argument].astype(dtype)
    expected = "kv" if (argument, dtype) == ("q", np.float16) else argument
    assert "dtype" in refused(operator, expected, arguments).expected


@pytest.mark.parametrize(("operator", "argument"), EVERY_INPUT + EVERY_OUTPUT)
def test_last_axis_not_contiguous(operator: str, argument: str) -> None:
    """Refused, never copied. Per-head and per-query float32 and int32 arrays may have any strides."""
    arguments = good(operator)
    memory = np.zeros((*array_for(argument).shape[:-1], 2 * array_for(argument).shape[-1]), array_for(argument).dtype)
    arguments[argument] = memory[..., ::2]
    memory[...] = 7 if argument in OUTPUTS[operator] else 0
    if argument in ROWS or argument in ("indices", "lists", "p", "dist", "attn_dist"):
        assert "contiguous" in refused(operator, argument, arguments).expected
    else:
        getattr(cupymla, operator)(**arguments)


@pytest.mark.parametrize(("operator", "argument"), EVERY_INPUT + EVERY_OUTPUT)
def test_strides_of_rows_are_multiples_of_16_bytes(operator: str, argument: str) -> None:
    arguments = good(operator)
    arguments[argument] = padded(arguments[argument], 4)
    if argument in ROWS:
        assert "16 bytes" in refused(operator, argument, arguments).expected
    else:
        getattr(cupymla, operator)(**arguments)
    arguments[argument] = padded(array_for(argument), 8)
    getattr(cupymla, operator)(**arguments)


@pytest.mark.parametrize(("operator", "argument"), EVERY_INPUT + EVERY_OUTPUT)
def test_negative_strides(operator: str, argument: str) -> None:
    """Kernels address upwards."""
    arguments = good(operator)
    arguments[argument] = arguments[argument][::-1]
    # Arrays of one axis that has to be contiguous are told that.
    assert ("contiguous" if argument == "lists" else "negative") in refused(operator, argument, arguments).expected


@pytest.mark.parametrize(("operator", "argument"), EVERY_INPUT + EVERY_OUTPUT)
def test_misaligned_address(operator: str, argument: str) -> None:
    arguments = good(operator)
    arguments[argument] = shifted(arguments[argument], 8 if argument in ROWS else 2)
    assert "multiple of" in refused(operator, argument, arguments).expected


def test_alignment_is_checked_on_every_call() -> None:
    """Argument validation remembers shapes and strides it has seen; the address is not one of them."""
    arguments = good("sparse_mla_fwd")
    sparse_mla_fwd(**arguments)
    refused("sparse_mla_fwd", "kv", good("sparse_mla_fwd") | {"kv": shifted(arguments["kv"], 8)})


@pytest.mark.parametrize(("operator", "argument"), EVERY_OUTPUT)
def test_read_only_output(operator: str, argument: str) -> None:
    arguments = good(operator)
    arguments[argument].flags.writeable = False
    refused(operator, argument, arguments)


@pytest.mark.parametrize("operator", OPERATORS)
def test_read_only_inputs_are_fine(operator: str) -> None:
    arguments = good(operator)
    for name in (*INPUTS[operator], *OPTIONAL[operator]):
        arguments[name].flags.writeable = False
    getattr(cupymla, operator)(**arguments)


@pytest.mark.parametrize(
    ("operator", "argument", "other"),
    [
        (name, output, argument)
        for name in OPERATORS
        for output in OUTPUTS[name]
        for argument in (*INPUTS[name], *OPTIONAL[name], *OUTPUTS[name])
        if argument != output and (argument not in OUTPUTS[name] or argument < output)
    ],
)
def test_output_that_shares_memory(operator: str, argument: str, other: str) -> None:
    """Each output with each input and each other output, the last bytes of one being the first of the other."""
    arguments = good(operator)
    first, second = arguments[argument], arguments[other]
    distance = (first.nbytes - 4) // 16 * 16
    memory = aligned((first.nbytes + second.nbytes,), np.uint8)
    arguments[argument] = np.ndarray(first.shape, first.dtype, buffer=memory.data, offset=0)
    arguments[other] = np.ndarray(second.shape, second.dtype, buffer=memory.data, offset=distance)
    arguments[other][...] = 0
    with pytest.raises(InputError, match="overlaps argument") as caught:
        getattr(cupymla, operator)(**arguments)
    assert caught.value.argument in (argument, other)
    assert caught.value.operator == operator


@pytest.mark.parametrize(("operator", "argument"), EVERY_OUTPUT)
def test_output_that_shares_memory_with_itself(operator: str, argument: str) -> None:
    """A broadcast output would be written twice."""
    arguments = good(operator)
    whole = arguments[argument]
    if whole.ndim == 1:
        broadcast = np.lib.stride_tricks.as_strided(whole, whole.shape, (0,))
    else:
        broadcast = np.lib.stride_tricks.as_strided(whole, whole.shape, (0, *whole.strides[1:]))
    arguments[argument] = broadcast
    assert "memory of their own" in refused(operator, argument, arguments).expected


@pytest.mark.parametrize(("operator", "argument"), EVERY_INPUT + EVERY_OUTPUT)
def test_not_an_array(operator: str, argument: str) -> None:
    arguments = good(operator)
    for value in ([[1]], "q", object(), 3):
        arguments[argument] = value
        refused(operator, argument, arguments)


@pytest.mark.parametrize(("operator", "argument"), EVERY_INPUT + EVERY_OUTPUT)
def test_mixed_devices(operator: str, argument: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One array said to lie on a GPU among arrays on the CPU; q decides where the call runs."""
    arguments = good(operator)
    moved = arguments[argument]

    def elsewhere(look: Callable[[Any, str], View]) -> Callable[[Any, str], View]:
        def view(array: Any, name: str) -> View:
            seen = look(array, name)
            if array is not moved:
                return seen
            facts = (seen.ptr, seen.shape, seen.strides, seen.dtype, Device("cuda", 1))
            return View(*facts, seen.readonly, seen.framework, seen.owner)

        return view

    monkeypatch.setattr(tensor, "view_output", elsewhere(tensor.view_output))
    monkeypatch.setattr(tensor, "view", elsewhere(tensor.view))
    error = refused(operator, "kv" if argument == "q" else argument, arguments)
    assert "cuda:1" in str(error) and "cpu:0" in str(error)


CHECKS: dict[str, Check] = {"check_indices": Flag()} | {
    name: check for declared in DECLARED.values() for name, check in zip(declared.options, declared.checks, strict=True)
}


def has(operator: str, option: str) -> bool:
    return option in (*DECLARED[operator].options, "check_indices")


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("option", CHECKS)
def test_bad_option(operator: str, option: str) -> None:
    """A right call first: options that compare equal to good ones (1 and True) must not pass by being remembered."""
    values = bad(CHECKS[option])
    if not has(operator, option):
        with pytest.raises(TypeError, match=option):
            getattr(cupymla, operator)(**good(operator), **{option: next(iter(values))})
        return
    getattr(cupymla, operator)(**good(operator), **({option: True} if option == "causal" else {}))
    for value in values:
        refused(operator, option, good(operator) | {option: value})


@pytest.mark.parametrize("operator", OPERATORS)
def test_numpy_scalars_are_good_options(operator: str) -> None:
    options: dict[str, Any] = {"causal": np.True_, "q_start": np.int64(2), "k_stride": np.int32(1)}
    if has(operator, "sm_scale"):
        options |= {"sm_scale": np.float32(0.5), "lse_base": np.str_("e")}
    getattr(cupymla, operator)(**good(operator), **options)


@pytest.mark.parametrize("operator", OPERATORS)
def test_indices_are_looked_at_on_the_stream_of_the_call(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another one, they might not be there yet."""
    streams: list[object] = []

    def fetched(view: View, stream: object) -> Array:
        streams.append(stream)
        return tensor.to_numpy(view)

    monkeypatch.setattr(tensor, "fetched", fetched)
    getattr(cupymla, operator)(**good(operator), check_indices=True, stream=7)
    assert streams == [7, 7] + [7] * 3 * (operator == "sparse_mla_bwd")


def test_lists_of_other_indices_are_refused_where_values_are_looked_at() -> None:
    given = good("sparse_mla_bwd", outputs=False)
    given["topk_length"][...] = TOPK
    given["lists"][...] = cupymla.invert_indices(given["indices"], S_KV)
    sparse_mla_bwd(**given, check_indices=True)
    given["indices"][1, 2] = 3
    sparse_mla_bwd(**given)
    with pytest.raises(InputError, match=r"'lists': expected what invert_indices returns .* at \[1\], got "):
        sparse_mla_bwd(**given, check_indices=True)


def test_lists_count_in_31_bits() -> None:
    """Kernels count what the lists of a batch entry hold in 32 bits with a sign."""
    names = ("q", "out", "dout", "lse")
    wide = {name: np.broadcast_to(array_for(name)[:1], (2048, *array_for(name).shape[1:])) for name in names}
    indices = np.broadcast_to(np.zeros((1, 1 << 20), np.int32), (2048, 1 << 20))
    given: dict[str, Any] = {**wide, "kv": array_for("kv"), "indices": indices}
    with pytest.raises(InputError, match="'lists': expected None with more than 2147482624 numbers"):
        spec.read(**given, lists=np.zeros(3, np.int32))


def test_d_sink_and_attn_dist_sink_need_attn_sink() -> None:
    arguments = good("sparse_mla_bwd")
    del arguments["attn_sink"]
    refused("sparse_mla_bwd", "d_sink", arguments)
    del arguments["d_sink"]
    refused("sparse_mla_bwd", "attn_dist_sink", arguments | {"attn_dist_sink": True})


def test_dkv_has_the_dtype_that_was_asked_for() -> None:
    arguments = good("sparse_mla_bwd")
    refused("sparse_mla_bwd", "dkv", arguments | {"dkv_dtype": "float32"})
    wide = aligned((S_KV, 576), np.float32)
    assert sparse_mla_bwd(**(arguments | {"dkv_dtype": "float32", "dkv": wide}))[1] is wide
    refused("sparse_mla_bwd", "dkv", good("sparse_mla_bwd") | {"dkv": wide})


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("argument", ["kv", "indices"])
def test_batch_axis_is_on_all_or_none(operator: str, argument: str) -> None:
    """q decides; an array without the axis, or with another extent, is named."""
    arguments = {name: np.stack([a, a]) if name != "attn_sink" else a for name, a in good(operator, False).items()}
    getattr(cupymla, operator)(**arguments)
    error = refused(operator, argument, arguments | {argument: arguments[argument][0]})
    assert "[batch = 2, " in error.expected
    refused(operator, argument, arguments | {argument: np.concatenate([arguments[argument]] * 2)})


@pytest.mark.parametrize("operator", OPERATORS)
def test_d_qk_and_heads(operator: str) -> None:
    arguments = good(operator, outputs=False)
    assert "576 or 512" in refused(operator, "q", arguments | {"q": np.zeros((S_Q, H_Q, 320), BF16)}).expected
    for lead in ((), (2,)):
        error = refused(operator, "q", arguments | {"q": np.zeros((*lead, S_Q, 0, 576), BF16)})
        assert "h_q >= 1" in error.expected and "h_q = 0" in error.got
    refused(operator, "kv", arguments | {"kv": np.zeros((S_KV, 512), BF16)})
    refused(operator, "indices", arguments | {"indices": np.zeros((S_Q, 0), np.int32)})


@pytest.mark.parametrize(
    "array",
    [workspace(64, 8), workspace(64).reshape(8, 8), workspace(64)[::2], workspace(64).view(np.int8), [0] * 64],
    ids=["misaligned", "two axes", "strided", "dtype", "list"],
)
def test_workspace_is_looked_at(array: Any) -> None:
    refused("sparse_mla_bwd", "workspace", good("sparse_mla_bwd") | {"workspace": array})


def test_workspace_of_its_own() -> None:
    arguments = good("sparse_mla_bwd")
    memory = workspace(arguments["dq"].nbytes)
    arguments["dq"] = memory.view(BF16).reshape(arguments["dq"].shape)
    arguments["dq"][...] = 7
    refused("sparse_mla_bwd", "workspace", arguments | {"workspace": memory})


def test_the_cpu_needs_no_workspace() -> None:
    arguments = good("sparse_mla_bwd", outputs=False)
    assert sparse_mla_bwd.workspace_bytes(**arguments) == 0
    sparse_mla_bwd(**arguments, workspace=workspace(0))
    with pytest.raises(TypeError, match=r"sparse_mla_bwd\.workspace_bytes"):
        sparse_mla_bwd.workspace_bytes(**arguments, nonsense=1)  # type: ignore[call-arg]
