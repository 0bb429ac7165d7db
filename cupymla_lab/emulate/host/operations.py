"""What each PTX instruction does, as C++ text. `find` gives the writer for an opcode."""

from __future__ import annotations

from collections.abc import Callable

from ...ptx.syntax import Constant, Name, Operand, Pair, Vector
from . import copies, matrices, numbers, races, sm80, wgmma
from .writer import CPP, Writer

BYTES = {"8": 1, "16": 2, "32": 4, "64": 8, "128": 16}

Lower = Callable[[Writer], str]


def _type(parts: tuple[str, ...]) -> str:
    return parts[-1]


def _bytes(kind: str) -> int:
    return BYTES[kind.lstrip("bfus")]


def _binary(symbol: str) -> Lower:
    def lower(w: Writer) -> str:
        kind = _type(w.parts)
        a, b = (w.read(operand, kind) for operand in w.operands[1:3])
        if kind.startswith("s"):
            # Signed arithmetic wraps around on the device and must not overflow here.
            kind = "u" + kind[1:]
            a, b = (w.read(operand, kind) for operand in w.operands[1:3])
        return w.write(w.operands[0], f"static_cast<{CPP[kind]}>({a} {symbol} {b})", kind)

    return lower


def _logic(symbol: str) -> Lower:
    def lower(w: Writer) -> str:
        kind = _type(w.parts)
        a, b = (w.read(operand, kind) for operand in w.operands[1:3])
        if kind == "pred":
            doubled = {"&": "&&", "|": "||", "^": "!="}[symbol]
            return w.write(w.operands[0], f"{a} {doubled} {b}", kind)
        return w.write(w.operands[0], f"static_cast<{CPP[kind]}>({a} {symbol} {b})", kind)

    return lower


def _not(w: Writer) -> str:
    kind = _type(w.parts)
    value = w.read(w.operands[1], kind)
    return w.write(w.operands[0], f"!{value}" if kind == "pred" else f"static_cast<{CPP[kind]}>(~{value})", kind)


def _negate(w: Writer) -> str:
    kind = _type(w.parts)
    value = w.read(w.operands[1], kind if kind[0] == "f" else "u" + kind[1:])
    return w.write(w.operands[0], f"static_cast<{CPP[kind]}>(-{value})", kind)


def _absolute(w: Writer) -> str:
    kind = _type(w.parts)
    value = w.read(w.operands[1], kind)
    return w.write(w.operands[0], f"std::abs({value})" if kind[0] == "s" else f"std::fabs({value})", kind)


def _divide(w: Writer) -> str:
    kind = _type(w.parts)
    a, b = (w.read(operand, kind) for operand in w.operands[1:3])
    if kind[0] == "f":
        return w.write(w.operands[0], f"{a} / {b}", kind)
    function = "quotient" if w.parts[0] == "div" else "remainder_of"
    return w.write(w.operands[0], f"{function}<{CPP[kind]}>({a}, {b})", kind)


def _extreme(w: Writer) -> str:
    kind = _type(w.parts)
    a, b = (w.read(operand, kind) for operand in w.operands[1:3])
    if kind[0] == "f":
        chosen = f"extreme<{CPP[kind]}>({a}, {b}, {int(w.parts[0] == 'max')}, {int('NaN' in w.parts)})"
        return w.write(w.operands[0], chosen, kind)
    symbol = ">" if w.parts[0] == "max" else "<"
    return w.write(w.operands[0], f"({a} {symbol} {b} ? {a} : {b})", kind)


# Types that hold the whole product of two.
_TWICE = {
    **{"s16": "int32_t", "u16": "uint32_t", "s32": "int64_t", "u32": "uint64_t"},
    **{"s64": "__int128", "u64": "unsigned __int128"},
}


def _multiply(w: Writer) -> str:
    kind, wide = _type(w.parts), {"16": "32", "32": "64"}
    if "wide" in w.parts:
        to = kind[0] + wide[kind[1:]]
        a, b = (w.read(operand, kind) for operand in w.operands[1:3])
        product = f"static_cast<{CPP[to]}>({a}) * static_cast<{CPP[to]}>({b})"
        if w.parts[0] == "mad":
            product = f"static_cast<{CPP['u' + to[1:]]}>({product}) + {w.read(w.operands[3], 'u' + to[1:])}"
        return w.write(w.operands[0], product, to)
    if "hi" in w.parts:
        a, b = (w.read(operand, kind) for operand in w.operands[1:3])
        twice = _TWICE[kind]
        high = f"static_cast<{CPP[kind]}>((static_cast<{twice}>({a}) * static_cast<{twice}>({b})) >> {kind[1:]})"
        if w.parts[0] == "mad":
            high = f"{high} + {w.read(w.operands[3], kind)}"
        return w.write(w.operands[0], high, kind)
    if kind[0] != "f":
        kind = "u" + kind[1:]
    a, b = (w.read(operand, kind) for operand in w.operands[1:3])
    product = f"{a} * {b}"
    if w.parts[0] == "mad":
        product = f"{product} + {w.read(w.operands[3], kind)}"
    return w.write(w.operands[0], f"static_cast<{CPP[kind]}>({product})", kind)


def _fused(w: Writer) -> str:
    kind = _type(w.parts)
    listed = ", ".join(w.read(operand, kind) for operand in w.operands[1:4])
    return w.write(w.operands[0], f"std::fma({listed})", kind)


def _exponential(w: Writer) -> str:
    value = w.read(w.operands[1], "f32")
    if "ftz" in w.parts:
        return w.write(w.operands[0], f"flushed(approximate_exp2(flushed({value})))", "f32")
    return w.write(w.operands[0], f"approximate_exp2({value})", "f32")


def _reciprocal(w: Writer) -> str:
    kind = _type(w.parts)
    return w.write(w.operands[0], f"{CPP[kind]}(1) / {w.read(w.operands[1], kind)}", kind)


def _shift(w: Writer) -> str:
    kind = _type(w.parts)
    value, by = w.read(w.operands[1], kind), w.read(w.operands[2], "u32")
    width = 8 * _bytes(kind)
    if w.parts[0] == "shl":
        result = f"({by} >= {width} ? 0 : static_cast<{CPP[kind]}>({value} << ({by} & {width - 1})))"
    elif kind[0] == "s":
        result = f"static_cast<{CPP[kind]}>({value} >> ({by} >= {width} ? {width - 1} : {by}))"
    else:
        result = f"({by} >= {width} ? 0 : static_cast<{CPP[kind]}>({value} >> ({by} & {width - 1})))"
    return w.write(w.operands[0], result, kind)


def _funnel(w: Writer) -> str:
    low, high, by = (w.read(operand, "u32") for operand in w.operands[1:4])
    both = f"(static_cast<uint64_t>({high}) << 32 | {low})"
    count = f"({by} & 31)" if "wrap" in w.parts else f"({by} > 32 ? 32 : {by})"
    if w.parts[1] == "l":
        return w.write(w.operands[0], f"static_cast<uint32_t>({both} << {count} >> 32)", "u32")
    return w.write(w.operands[0], f"static_cast<uint32_t>({both} >> {count})", "u32")


_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">"}
_COMPARE |= {"hs": ">="}


def _condition(name: str, a: str, b: str, floating: bool) -> str:
    if name in ("nan", "num"):
        found = f"({a} != {a} || {b} != {b})"
        return found if name == "nan" else f"!{found}"
    if floating and name.endswith("u"):
        return f"({a} != {a} || {b} != {b} || {a} {_COMPARE[name[:-1]]} {b})"
    if floating and name == "ne":
        return f"({a} < {b} || {a} > {b})"
    return f"({a} {_COMPARE[name]} {b})"


def _compare(w: Writer) -> str:
    kind = _type(w.parts)
    a, b = (w.read(operand, kind) for operand in w.operands[1:3])
    found = _condition(w.parts[1], a, b, kind[0] == "f")
    combined, opposite = found, f"!{found}"
    for name, symbol in (("and", "&&"), ("or", "||"), ("xor", "!=")):
        if name in w.parts[2:-1]:
            other = w.read(w.operands[3], "pred")
            combined, opposite = f"({found} {symbol} {other})", f"(!{found} {symbol} {other})"
    target = w.operands[0]
    if isinstance(target, Pair):
        return (
            f"{{ const bool first = {combined}, second = {opposite}; "
            f"{w.write(target.first, 'first', 'pred')} {w.write(target.second, 'second', 'pred')} }}"
        )
    return w.write(target, combined, "pred")


def _select(w: Writer) -> str:
    kind = _type(w.parts)
    a, b = (w.read(operand, kind) for operand in w.operands[1:3])
    return w.write(w.operands[0], f"({w.read(w.operands[3], 'pred')} ? {a} : {b})", kind)


def _move(w: Writer) -> str:
    kind = _type(w.parts)
    target, source = w.operands
    if isinstance(target, Vector):
        whole = w.read(source, "u32" if _bytes(kind) == 4 else kind)
        lines, shift = [f"{{ const uint128_t whole = {whole};"], 0
        for item in target.items:
            size = _bytes(kind) // len(target.items)
            lines.append(w.write(item, f"static_cast<uint{8 * size}_t>(whole >> {shift})", f"u{8 * size}"))
            shift += 8 * size
        return " ".join([*lines, "}"])
    if isinstance(source, Vector):
        size = _bytes(kind) // len(source.items)
        pieces = [
            f"static_cast<uint128_t>({w.read(item, f'u{8 * size}')}) << {8 * size * index}"
            for index, item in enumerate(source.items)
        ]
        return w.write(target, " | ".join(pieces), kind)
    return w.write(target, w.read(source, kind), kind)


# Memory --------------------------------------------------------------------------------------------------------------

_SPACES = (
    "global",
    "local",
    "param",
    "const",
    "shared",
    "shared::cta",
    "shared::cluster",
    "param::entry",
    "param::func",
)


def _space(parts: tuple[str, ...]) -> str:
    return next((part for part in parts if part in _SPACES), "")


def _vector(operand: Operand) -> tuple[Operand, ...]:
    return operand.items if isinstance(operand, Vector) else (operand,)


def _pointer(w: Writer, operand: Operand, bytes_: int, how: str) -> str:
    space = _space(w.parts)
    if space.startswith("param"):
        return w.parameter(operand)
    return w.place(operand, space, bytes_, how)


def _load(w: Writer) -> str:
    kind = _type(w.parts)
    items = _vector(w.operands[0])
    size = _bytes(kind)
    how = "kLoads | kConstants" if "nc" in w.parts else "kLoads"
    pointer = _pointer(w, w.operands[1], size * len(items), how)
    lines = ["{", "breathe(t);" if "volatile" in w.parts or "acquire" in w.parts else ""]
    lines.append(f"const unsigned char* from = {pointer};")
    lines.append(races.touched(w.parts, "from", w.used_bytes or size * len(items), "kRead"))
    lines.append(f"{CPP[kind]} loaded[{len(items)}]; std::memcpy(loaded, from, sizeof loaded);")
    for index, item in enumerate(items):
        if isinstance(item, Name) and item.text == "_":
            continue
        lines.append(w.write(item, f"loaded[{index}]", kind))
    return " ".join([*lines, "}"])


def _store(w: Writer) -> str:
    kind = _type(w.parts)
    items = _vector(w.operands[1])
    size = _bytes(kind)
    pointer = _pointer(w, w.operands[0], size * len(items), "kStores")
    values = ", ".join(w.read(item, kind) for item in items)
    checked = races.touched(w.parts, "to", size * len(items), "kWrite")
    return (
        f"{{ const {CPP[kind]} stored[{len(items)}] = {{{values}}}; void* to = {pointer}; {checked} "
        f"std::memcpy(to, stored, sizeof stored); }}"
    )


def _atomic(w: Writer) -> str:
    kind = _type(w.parts)
    returns = w.parts[0] == "atom"
    operands = list(w.operands) if returns else [Name("_"), *w.operands]
    pointer = w.place(operands[1], _space(w.parts), _bytes(kind), "kLoads | kStores")
    value = w.read(operands[2], kind)
    after = {
        "add": f"static_cast<{CPP[kind]}>(before + {value})",
        "exch": value,
        "and": f"before & {value}",
        "or": f"before | {value}",
        "xor": f"before ^ {value}",
        "max": f"before > {value} ? before : {value}",
        "min": f"before < {value} ? before : {value}",
        "inc": f"before >= {value} ? 0 : before + 1",
    }
    operation = next(part for part in w.parts if part in (*after, "cas"))
    new = f"before == {value} ? {w.read(operands[3], kind)} : before" if operation == "cas" else after[operation]
    return (
        f"{{ breathe(t); unsigned char* at = {pointer}; {races.touched(w.parts, 'at', _bytes(kind), 'kAtomic')} "
        f"const auto before = load<{CPP[kind]}>(at); "
        f"store<{CPP[kind]}>(at, {new}); {w.write(operands[0], 'before', kind)} }}"
    )


# Conversions ---------------------------------------------------------------------------------------------------------

_ROUND = {"rni": "std::nearbyint", "rzi": "std::trunc", "rmi": "std::floor", "rpi": "std::ceil"}


def _convert_pair(w: Writer) -> str:
    """The first source goes to the upper half."""
    name = "to_half" if w.parts[-2] == "f16x2" else "to_bfloat"
    high, low = (f"static_cast<uint32_t>({name}({w.read(operand, 'f32')}))" for operand in w.operands[1:3])
    return w.write(w.operands[0], f"{high} << 16 | {low}", "u32")


def _convert(w: Writer) -> str:
    to, from_ = w.parts[-2], w.parts[-1]
    if to in ("f16x2", "bf16x2") and from_ == "f32" and "rn" in w.parts and len(w.operands) == 3:
        return _convert_pair(w)
    value = w.read(w.operands[1], from_)
    if from_ == "f16":
        value, from_ = f"from_half({value})", "f32"
    elif from_ == "bf16":
        value, from_ = f"from_bfloat({value})", "f32"
    rounding = next((part for part in w.parts if part in _ROUND), None)
    if rounding:
        value = f"{_ROUND[rounding]}({value})"
    if to in ("f16", "bf16"):
        name = "to_half" if to == "f16" else "to_bfloat"
        return w.write(w.operands[0], f"{name}({value})", "u16")
    if from_[0] == "f" and to[0] != "f":
        return w.write(w.operands[0], f"to_integer<{CPP[to]}>({value})", to)
    result = f"static_cast<{CPP[to]}>({value})"
    if "sat" in w.parts and to[0] == "f":
        result = f"std::fmin(std::fmax({result}, {CPP[to]}(0)), {CPP[to]}(1))"
    return w.write(w.operands[0], result, to)


def _space_conversion(w: Writer) -> str:
    target, source = w.operands
    to = "to" in w.parts
    if not any(part.startswith("shared") for part in w.parts):
        return w.write(target, w.read(source, "u64"), "u64")
    if to:
        return w.write(target, f"to_shared(t, {w.read(source, 'u64')})", "u64")
    return w.write(target, f"from_shared(t, static_cast<uint32_t>({w.read(source, 'u64')}))", "u64")


def _is_space(w: Writer) -> str:
    value = w.read(w.operands[1], "u64")
    found = f"to_shared(t, {value}) != 0" if "shared::cluster" in w.parts else f"in_own_shared(t, {value})"
    return w.write(w.operands[0], found, "pred")


def _map(w: Writer) -> str:
    rank = w.read(w.operands[2], "u32")
    if "shared::cluster" not in w.parts:
        found = f"from_shared(t, map_to_rank(t, to_shared(t, {w.read(w.operands[1], 'u64')}), {rank}))"
        return w.write(w.operands[0], found, "u64")
    return w.write(w.operands[0], f"map_to_rank(t, {w.read(w.operands[1], 'u32')}, {rank})", "u32")


def _rank(w: Writer) -> str:
    if "shared::cluster" not in w.parts:
        return w.write(w.operands[0], f"to_shared(t, {w.read(w.operands[1], 'u64')}) >> 24", "u32")
    return w.write(w.operands[0], f"{w.read(w.operands[1], 'u32')} >> 24", "u32")


# Bits ----------------------------------------------------------------------------------------------------------------


def _permute(w: Writer) -> str:
    return w.write(w.operands[0], f"permute({', '.join(w.read(o, 'u32') for o in w.operands[1:4])})", "u32")


def _count(w: Writer) -> str:
    kind = _type(w.parts)
    value, long = w.read(w.operands[1], "u" + kind[1:]), kind == "b64"
    if w.parts[0] == "popc":
        return w.write(w.operands[0], f"__builtin_popcount{'ll' if long else ''}({value})", "u32")
    width = 64 if long else 32
    builtin = "__builtin_clzll" if long else "__builtin_clz"
    return w.write(w.operands[0], f"({value} ? {builtin}({value}) : {width})", "u32")


def _reverse(w: Writer) -> str:
    value = w.read(w.operands[1], "u32")
    loop = f"for (int i = 0; i < 32; ++i) r |= ({value} >> i & 1u) << (31 - i);"
    return f"{{ uint32_t r = 0; {loop} {w.write(w.operands[0], 'r', 'u32')} }}"


def _insert(w: Writer) -> str:
    kind = "u" + _type(w.parts)[1:]
    a, b = (w.read(operand, kind) for operand in w.operands[1:3])
    at, count = (w.read(operand, "u32") for operand in w.operands[3:5])
    return w.write(w.operands[0], f"insert_bits<{CPP[kind]}>({a}, {b}, {at}, {count})", kind)


def _extract(w: Writer) -> str:
    kind = _type(w.parts)
    value = w.read(w.operands[1], kind)
    at, count = (w.read(operand, "u32") for operand in w.operands[2:4])
    return w.write(w.operands[0], f"extract_bits<{CPP[kind]}>({value}, {at}, {count})", kind)


def _lookup(w: Writer) -> str:
    a, b, c = (w.read(operand, "u32") for operand in w.operands[1:4])
    table = w.operands[4]
    assert isinstance(table, Constant)
    number = int(table.text, 0)
    terms = [
        "(" + " & ".join(f"{'' if index >> bit & 1 else '~'}{value}" for value, bit in ((a, 2), (b, 1), (c, 0))) + ")"
        for index in range(8)
        if number >> index & 1
    ]
    return w.write(w.operands[0], " | ".join(terms) or "0", "u32")


# Control, warps, barriers --------------------------------------------------------------------------------------------


def _branch(w: Writer) -> str:
    return f"step(t); goto {w.label(w.operands[0])};"


def _table_branch(w: Writer) -> str:
    cases = " ".join(f"case {i}: goto {label};" for i, label in enumerate(w.targets(w.operands[1])))
    return f"step(t); switch ({w.read(w.operands[0], 'u32')}) {{ {cases} }}"


def _call(w: Writer) -> str:
    return w.call()


def _together(name: str, w: Writer, mask: str, value: str, operand: str = "0") -> str:
    return f"together(t, {name}, {mask}, {value}, {operand})"


def _shuffle(w: Writer) -> str:
    names = {"idx": "kShuffleIndex", "up": "kShuffleUp", "down": "kShuffleDown", "bfly": "kShuffleXor"}
    value, by, limit, mask = (w.read(operand, "u32") for operand in w.operands[1:5])
    target = w.operands[0]
    first = target.first if isinstance(target, Pair) else target
    lines = [
        "{ bool inside;",
        w.write(first, f"shuffle(t, {names[w.parts[2]]}, {mask}, {value}, {by}, {limit}, inside)", "u32"),
    ]
    if isinstance(target, Pair):
        lines.append(w.write(target.second, "inside", "pred"))
    return " ".join([*lines, "}"])


def _match(w: Writer) -> str:
    kind = "u" + _type(w.parts)[1:]
    return w.write(
        w.operands[0], _together("kMatchAny", w, w.read(w.operands[2], "u32"), w.read(w.operands[1], kind)), "u32"
    )


def _vote(w: Writer) -> str:
    name = {"any": "kVoteAny", "all": "kVoteAll", "ballot": "kBallot"}[w.parts[2]]
    kind = "u32" if name == "kBallot" else "pred"
    return w.write(w.operands[0], _together(name, w, w.read(w.operands[2], "u32"), w.read(w.operands[1], "pred")), kind)


def _elect(w: Writer) -> str:
    target, mask = w.operands[0], w.read(w.operands[1], "u32")
    assert isinstance(target, Pair)
    return (
        f"{{ const uint32_t leader = elect(t, {mask}); "
        f"{w.write(target.first, 'leader', 'u32')} {w.write(target.second, 't.lane == leader', 'pred')} }}"
    )


def _active(w: Writer) -> str:
    return w.write(w.operands[0], "1u << t.lane", "u32")


def _named_barrier(w: Writer) -> str:
    if w.parts[1] == "warp":
        return f"warp_barrier(t, {w.read(w.operands[0], 'u32')});"
    count = w.read(w.operands[1], "u32") if len(w.operands) > 1 else "0"
    waits = "false" if "arrive" in w.parts else "true"
    return f"barrier_sync(t, {w.read(w.operands[0], 'u32')}, {count}, {waits});"


def _mbarrier(w: Writer) -> str:
    action = w.parts[1]
    if action == "init":
        return f"barrier_init(t, {matrices.address_in_shared(w, w.operands[0])}, {w.read(w.operands[1], 'u32')});"
    if action == "inval":
        return f"barrier_end(t, {matrices.address_in_shared(w, w.operands[0])});"
    if action in ("expect_tx", "complete_tx"):
        sign = "" if action == "expect_tx" else "-"
        amount = f"{sign}static_cast<int32_t>({w.read(w.operands[1], 'u32')})"
        return f"barrier_count(t, {matrices.address_in_shared(w, w.operands[0])}, {amount});"
    if action == "pending_count":
        return w.write(w.operands[0], f"static_cast<uint32_t>({w.read(w.operands[1], 'u64')} & 0xfffffu)", "u32")
    if action in ("arrive", "arrive_drop"):
        function = "barrier_arrive" if action == "arrive" else "barrier_drop"
        bytes_ = w.read(w.operands[2], "u32") if "expect_tx" in w.parts else "0"
        count = "1" if "expect_tx" in w.parts or len(w.operands) < 3 else w.read(w.operands[2], "u32")
        return w.write(
            w.operands[0],
            f"{function}(t, {matrices.address_in_shared(w, w.operands[1])}, {count}, {bytes_}, {races.order(w.parts)})",
            "u64",
        )
    if action not in ("try_wait", "test_wait"):
        raise ValueError(f"there is no mbarrier.{action} here")
    phase = w.read(w.operands[2], "u32")
    if "parity" not in w.parts:
        phase = f"static_cast<uint32_t>({w.read(w.operands[2], 'u64')} >> 63)"
    return w.write(
        w.operands[0],
        f"barrier_test(t, {matrices.address_in_shared(w, w.operands[1])}, {phase}, {races.order(w.parts)})",
        "pred",
    )


def _sleep(w: Writer) -> str:
    return f"sleep(t, {w.read(w.operands[0], 'u32')});"


def _grid_dependency(w: Writer) -> str:
    return "t.released = true;" if "wait" in w.parts else "let_in(t);"


def _prefetch(w: Writer) -> str:
    return ";" if "tensormap" in w.parts else w.names_global(w.operands[0])


def _fence(w: Writer) -> str:
    return races.fence(w.parts)


def _nothing(w: Writer) -> str:
    return ";"


_TABLE: dict[str, Lower] = {
    **{"add": _binary("+"), "sub": _binary("-"), "mul": _multiply, "mad": _multiply, "fma": _fused},
    **{"ex2": _exponential, "rcp": _reciprocal},
    **{"and": _logic("&"), "or": _logic("|"), "xor": _logic("^"), "not": _not, "neg": _negate, "abs": _absolute},
    **{"div": _divide, "rem": _divide, "min": _extreme, "max": _extreme, "shl": _shift, "shr": _shift, "shf": _funnel},
    **{"setp": _compare, "selp": _select, "mov": _move, "ld": _load, "ldu": _load, "st": _store},
    **{"atom": _atomic, "red": _atomic, "cvt": _convert, "cvta": _space_conversion, "isspacep": _is_space},
    **{"mapa": _map, "getctarank": _rank, "prmt": _permute, "popc": _count, "clz": _count, "brev": _reverse},
    **{"bfi": _insert, "bfe": _extract, "lop3": _lookup, "bra": _branch, "brx": _table_branch, "call": _call},
    **{"shfl": _shuffle, "match": _match, "vote": _vote, "elect": _elect, "activemask": _active},
    **{"bar": _named_barrier, "barrier": _named_barrier, "mbarrier": _mbarrier},
    "ret": lambda w: "return;",
    "exit": lambda w: "end_thread(t);",
    "trap": lambda w: 'broken("trap");',
    "brkpt": lambda w: 'broken("brkpt");',
    "nanosleep": _sleep,
    **{"griddepcontrol": _grid_dependency, "prefetch": _prefetch, "prefetchu": _prefetch},
    **{"discard": _prefetch, "applypriority": _prefetch},
    **dict.fromkeys(("membar", "fence"), _fence),
    **dict.fromkeys(("pmevent", "createpolicy"), _nothing),
}


def find(parts: tuple[str, ...]) -> Lower | None:
    """What writes an instruction, by its opcode cut at the dots; None when it is not known."""
    for other in (sm80, copies, matrices, numbers, wgmma):
        if other.knows(parts):
            lower: Lower = other.lower
            return lower
    return _TABLE.get(parts[0])
