"""The house keeps its shape: imports point one way, device code stays in its rooms, files stay readable."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from cupymla.ops import registry

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "cupymla"
CUDA = ROOT / "cuda"
MAX_LINES = 600

# Layer of each part of the package: a module imports from its own layer or a lower one. Siblings that must not know
# each other are kept apart by FORBIDDEN below.
LAYERS = {
    "errors": 0,
    "config": 0,
    "device": 0,
    "dlpack": 0,
    "arch": 1,
    "driver": 1,
    "ptx": 1,
    "tensor": 2,
    "tensormap": 2,
    "launch": 2,
    "build": 2,
    "emulate": 3,
    "interpret": 3,
    "ops": 3,
    "ops.registry": 4,
    "interop": 5,
    "raw": 5,
    "testing": 5,
    "cli": 5,
    "__main__": 5,
}
FORBIDDEN = {
    "build": {"tensor", "tensormap", "launch"},
    "ops": {"emulate", "interpret"},
    "emulate": {"interpret", "ops"},
    "interpret": {"emulate", "ops"},
}
FRAMEWORKS = {"torch", "jax", "cupy", "tensorflow"}
CUDA_FREE_ROOMS = ("spec", "plan", "reference", "cases")
"""Last words of the names of modules, `blackwell_plan` among them."""
OPERATORS = {entry.name for entry in registry.OPERATORS}


def modules() -> Iterator[tuple[str, Path]]:
    """Dotted name below `cupymla` and file of every module but the package's own __init__."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] == "_packed" or parts == ("__init__",):
            continue
        yield ".".join(p for p in parts if p != "__init__"), path


def imports(module: str, path: Path) -> Iterator[str]:
    """Absolute dotted names that a module imports, wherever in the file the import stands."""
    package = ["cupymla", *module.split(".")]
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{stem}.{alias.name}" for alias in node.names)


def part_of(name: str) -> str:
    """The row of LAYERS a dotted name below `cupymla` belongs to."""
    if name == "ops.registry":
        return name
    return name.split(".", maxsplit=1)[0]


def operator_of(name: str) -> str | None:
    """The operator whose folder a dotted name below `cupymla` lies in."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "ops" and parts[1] in OPERATORS else None


MODULES = list(modules())
IDS = [name for name, _ in MODULES]
OF_OPERATORS = [row for row in MODULES if operator_of(row[0]) is not None]
CUDA_FREE = [row for row in OF_OPERATORS if row[0].rsplit(".", maxsplit=1)[-1].endswith(CUDA_FREE_ROOMS)]


def inner_imports(module: str, path: Path) -> list[str]:
    return [name.removeprefix("cupymla.") for name in imports(module, path) if name.startswith("cupymla.")]


@pytest.mark.parametrize(("module", "path"), MODULES, ids=IDS)
def test_imports_point_down(module: str, path: Path) -> None:
    assert part_of(module) in LAYERS, f"say in LAYERS where {module} belongs"
    upward = [n for n in inner_imports(module, path) if LAYERS.get(part_of(n), 0) > LAYERS[part_of(module)]]
    assert upward == []


@pytest.mark.parametrize(("module", "path"), OF_OPERATORS, ids=[name for name, _ in OF_OPERATORS])
def test_operators_do_not_import_operators(module: str, path: Path) -> None:
    others = [n for n in inner_imports(module, path) if operator_of(n) not in (None, operator_of(module))]
    assert others == []


@pytest.mark.parametrize(("module", "path"), MODULES, ids=IDS)
def test_siblings_do_not_import_each_other(module: str, path: Path) -> None:
    forbidden = FORBIDDEN.get(part_of(module), set())
    assert [n for n in inner_imports(module, path) if part_of(n) in forbidden] == []


def test_no_operator_is_passed_over() -> None:
    """The two tests that follow have modules of every operator."""
    assert {operator_of(name) for name, _ in OF_OPERATORS} == OPERATORS
    assert {name.removeprefix("ops.") for name, _ in CUDA_FREE} >= {
        f"{operator}.{room}" for operator in OPERATORS for room in CUDA_FREE_ROOMS
    }


@pytest.mark.parametrize(("module", "path"), CUDA_FREE, ids=[name for name, _ in CUDA_FREE])
def test_pure_rooms_import_no_cuda(module: str, path: Path) -> None:
    """spec, plan, reference and cases are tested on any machine."""
    outer = [n for n in imports(module, path) if n.split(".")[0] in FRAMEWORKS | {"cuda"}]
    inner = [n for n in inner_imports(module, path) if part_of(n) in ("driver", "launch", "tensormap")]
    assert outer + inner == []


@pytest.mark.parametrize(("module", "path"), MODULES, ids=IDS)
def test_one_importer_of_the_driver_and_one_reader_of_the_environment(module: str, path: Path) -> None:
    if module != "driver":
        assert not [n for n in imports(module, path) if n.startswith("cuda.bindings.driver")]
    if module != "config":
        assert not [n for n in imports(module, path) if n in ("os.environ", "os.getenv")]
        assert not re.search(r"\bos\.(environ|getenv)\b", path.read_text())


@pytest.mark.parametrize(("module", "path"), MODULES, ids=IDS)
def test_no_framework_at_import_time(module: str, path: Path) -> None:
    """Frameworks and CUDA are imported inside functions; only interop/<framework> may name its own on top."""
    top = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {alias.name.split(".")[0] for node in top if isinstance(node, ast.Import) for alias in node.names}
    absolute = [node.module for node in top if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    names |= {name.split(".")[0] for name in absolute}
    allowed = {module.split(".")[1]} if module.startswith("interop.") else set()
    assert names & (FRAMEWORKS | {"matplotlib", "rich"}) <= allowed


def device_files() -> list[Path]:
    """Our own CUDA sources."""
    third_party = CUDA / "third_party"
    files = [p for p in CUDA.rglob("*") if p.suffix in (".cu", ".cuh", ".h", ".hpp") and third_party not in p.parents]
    return sorted(files)


def quoted_includes(path: Path) -> list[Path]:
    """Our own files that a device file includes, resolved from its folder, then from cuda/."""
    found = []
    for name in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), flags=re.M):
        for base in (path.parent, CUDA):
            candidate = (base / name).resolve()
            if candidate.is_file() and CUDA in candidate.parents:
                found.append(candidate)
                break
    return found


def test_device_code_includes_its_own_folder_and_common() -> None:
    """An operator's kernel may use its operator's files and common, never another operator's."""
    wrong = [
        f"{path.relative_to(CUDA)} includes {target.relative_to(CUDA)}"
        for path in device_files()
        for target in quoted_includes(path)
        if (room := target.relative_to(CUDA).parts[0]) not in ("common", "third_party")
        and room != path.relative_to(CUDA).parts[0]
    ]
    assert wrong == []


def test_architectures_do_not_include_each_other() -> None:
    """sm90 and sm100 folders share through common alone. What lies in sm80 serves every GPU, so all may include it."""

    def arch_folder(path: Path) -> str | None:
        return next((part for part in path.relative_to(CUDA).parts[:-1] if re.fullmatch(r"sm\d+", part)), None)

    wrong = [
        f"{path.relative_to(CUDA)} includes {target.relative_to(CUDA)}"
        for path in device_files()
        for target in quoted_includes(path)
        if arch_folder(target) not in (None, "sm80", arch_folder(path))
    ]
    assert wrong == []


def test_assembly_lives_in_common() -> None:
    wrong = [
        str(path.relative_to(CUDA))
        for path in device_files()
        if path.relative_to(CUDA).parts[0] != "common" and re.search(r"\basm\b", path.read_text())
    ]
    assert wrong == []


def test_no_printf_in_device_code() -> None:
    assert [str(p.relative_to(CUDA)) for p in device_files() if re.search(r"\bprintf\s*\(", p.read_text())] == []


def test_files_stay_readable() -> None:
    """A file over the limit holds two subjects."""
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *device_files()]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def test_device_lines_fit_a_screen() -> None:
    lines = [(path, n, text) for path in device_files() for n, text in enumerate(path.read_text().splitlines(), 1)]
    assert [f"{path.relative_to(CUDA)}:{n}" for path, n, text in lines if len(text) > 120] == []


@pytest.mark.parametrize("entry", registry.OPERATORS, ids=lambda entry: entry.name)
def test_every_operator_has_the_same_rooms(entry: registry.OperatorEntry) -> None:
    """A reader who knows one operator finds their way in every other."""
    folder = PACKAGE / "ops" / entry.name
    rooms = ("__init__", "spec", "plan", "run", "reference", "cases")
    assert [room for room in rooms if not (folder / f"{room}.py").is_file()] == []
    for kernel in entry.kernels:
        assert (CUDA / entry.name / kernel.folder / f"{kernel.name}.cu").is_file()
