"""The project keeps its shape: imports point one way, device code stays in its folders, files stay readable."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from registry_kit import REGISTERED, missing_files

from cupymla.ops import registry

pytestmark = pytest.mark.xdist_group("layering")  # one worker parses all files

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "cupymla"
CUDA = ROOT / "cuda"
MAX_LINES = 600

LAB = ROOT / "cupymla_lab"
# Layer of each part of the package: a module imports from its own layer or a lower one. Siblings that must not know
# each other are kept apart by FORBIDDEN below.
LAYERS = {
    "errors": 0,
    "config": 0,
    "device": 0,
    "dlpack": 0,
    "arch": 1,
    "driver": 1,
    "tensor": 2,
    "tensormap": 2,
    "launch": 2,
    "build": 2,
    "ops": 3,
    "ops.registry": 4,
    "interop": 5,
    "raw": 5,
    "testing": 5,
    "bench": 6,
    "evidence": 6,
    "cli": 7,
    "__main__": 7,
}
FORBIDDEN = {"build": {"tensor", "tensormap", "launch"}}
FRAMEWORKS = {"torch", "jax", "cupy", "tensorflow"}
CUDA_FREE_PARTS = ("spec", "plan", "reference", "cases")
"""Last words of the names of modules, `blackwell_plan` among them."""
OPERATORS = {entry.folder for entry in registry.OPERATORS}


@dataclass(frozen=True)
class Module:
    """A module of the package or of the laboratory.

    Attributes:
        name: dotted, below its package; "" for the package's own __init__.
        package: "cupymla" or "cupymla_lab".
        path: its file.
        tree: the file, parsed.
        imports: absolute dotted names that it imports, wherever in the file the import stands.
    """

    name: str
    package: str
    path: Path
    tree: ast.Module
    imports: tuple[str, ...]

    @property
    def inner(self) -> list[str]:
        """What it imports of its own package, without the package's name."""
        return [n.removeprefix(f"{self.package}.") for n in self.imports if n.startswith(f"{self.package}.")]


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements below a node; of expressions, most of a file, there is nothing to look at."""
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        below = getattr(node, name, ())
        for child in below if isinstance(below, list) else ():
            yield child
            yield from statements(child)


def test_imports_are_found_in_every_block() -> None:
    """Of each kind of statement that has others in it."""
    blocks: tuple[str, ...] = ("if x:\n {}\nelse:\n {}", "for x in y:\n {}\nelse:\n {}", "while x:\n {}\nelse:\n {}")
    blocks += ("try:\n {}\nexcept E:\n {}\nelse:\n {}\nfinally:\n {}", "try:\n {}\nexcept* E:\n {}", "with x:\n {}")
    blocks += ("match x:\n case 1:\n  {}", "def f():\n {}", "async def f():\n {}", "class C:\n def f(self):\n  {}")
    for block in blocks:
        names = [f"m{number}" for number in range(block.count("{}"))]
        tree = ast.parse(block.format(*(f"import {name}" for name in names)))
        assert list(imports(["a", "b"], False, tree)) == names, block


def imports(dotted: list[str], is_package: bool, tree: ast.Module) -> Iterator[str]:
    package = dotted if is_package else dotted[:-1]
    for node in statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{stem}.{alias.name}" for alias in node.names)


@functools.cache
def modules(folder: Path) -> tuple[Module, ...]:
    found = []
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        if parts[0] == "_packed":
            continue
        dotted = [part for part in parts if part != "__init__"]
        tree = ast.parse(path.read_text(encoding="utf-8"))
        named = tuple(imports([folder.name, *dotted], path.name == "__init__.py", tree))
        found.append(Module(".".join(dotted), folder.name, path, tree, named))
    return tuple(found)


def part_of(name: str) -> str:
    """The row of LAYERS a dotted name below `cupymla` belongs to."""
    return name if name == "ops.registry" else name.split(".", maxsplit=1)[0]


def operator_of(name: str) -> str | None:
    """The operator whose folder a dotted name below `cupymla` lies in."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 and parts[0] == "ops" and parts[1] in OPERATORS else None


def product() -> list[Module]:
    return [module for module in modules(PACKAGE) if module.name]


def circles(graph: Mapping[str, Collection[str]]) -> list[list[str]]:
    """Groups of modules that import one another, directly or on the way (strongly connected components)."""
    order: list[str] = []
    seen: set[str] = set()

    def visit(name: str, edges: Mapping[str, Collection[str]], into: list[str]) -> None:
        stack = [(name, iter(edges[name]))]
        seen.add(name)
        while stack:
            at, rest = stack[-1]
            following = next((each for each in rest if each not in seen), None)
            if following is None:
                stack.pop()
                into.append(at)
            else:
                seen.add(following)
                stack.append((following, iter(edges[following])))

    for name in graph:
        if name not in seen:
            visit(name, graph, order)
    importers: dict[str, list[str]] = {name: [] for name in graph}
    for name, imported in graph.items():
        for each in imported:
            importers[each].append(name)
    seen.clear()
    groups = []
    for name in reversed(order):
        if name not in seen:
            group: list[str] = []
            visit(name, importers, group)
            groups.append(sorted(group))
    return [group for group in groups if len(group) > 1]


def test_circles_are_found() -> None:
    assert circles({"a": ["b"], "b": ["c"], "c": ["b"], "d": ["a"]}) == [["b", "c"]]


@pytest.mark.parametrize("folder", [PACKAGE, LAB], ids=lambda folder: folder.name)
def test_no_circles(folder: Path) -> None:
    """Imports inside functions and for type checkers alone count as well."""
    names = {module.name for module in modules(folder)}

    def target(name: str) -> str | None:
        stem = name.rpartition(".")[0]
        return name if name in names else stem if stem in names else None

    graph = {
        module.name: {found for name in module.inner if (found := target(name)) not in (None, module.name, "")}
        for module in modules(folder)
    }
    assert circles(graph) == []


def test_imports_point_down() -> None:
    assert {part_of(module.name) for module in product()} <= LAYERS.keys(), "say in LAYERS where a new part belongs"
    upward = [
        f"{module.name} imports {name}"
        for module in product()
        for name in module.inner
        if LAYERS.get(part_of(name), 0) > LAYERS[part_of(module.name)]
    ]
    assert upward == []


def test_operators_are_made_of_those_that_are_made_of_none() -> None:
    made = {entry.name: entry.made_of for entry in registry.OPERATORS}
    assert [name for names in made.values() for name in names if made[name]] == []


def test_siblings_do_not_import_each_other() -> None:
    """But for those that an operator is made of."""
    parts = {entry.folder: [registry.named(name).folder for name in entry.made_of] for entry in registry.OPERATORS}
    wrong = [
        f"{module.name} imports {name}"
        for module in product()
        for name in module.inner
        if part_of(name) in FORBIDDEN.get(part_of(module.name), set())
        or operator_of(name)
        not in (None, operator_of(module.name) or operator_of(name), *parts.get(operator_of(module.name) or "", ()))
    ]
    assert wrong == []


def test_the_package_does_not_know_the_laboratory() -> None:
    wrong = [m.name for m in modules(PACKAGE) if any(name.split(".")[0] == "cupymla_lab" for name in m.imports)]
    assert wrong == []


def test_pure_parts_import_no_cuda() -> None:
    """spec, plan, reference and cases are tested on any machine."""
    pure = [m for m in product() if operator_of(m.name) and (m.name.endswith(CUDA_FREE_PARTS) or ".paths" in m.name)]
    wanted = {f"ops.{operator}.{part}" for operator in OPERATORS for part in CUDA_FREE_PARTS}
    assert {module.name for module in pure} >= wanted
    outer = [(m.name, n) for m in pure for n in m.imports if n.split(".")[0] in FRAMEWORKS | {"cuda"}]
    inner = [(m.name, n) for m in pure for n in m.inner if part_of(n) in ("driver", "launch", "tensormap")]
    assert outer + inner == []


def test_one_importer_of_the_driver_and_one_reader_of_the_environment() -> None:
    drivers = {m.name for m in product() if any(n.startswith("cuda.bindings.driver") for n in m.imports)}
    assert drivers == {"driver"}
    readers = {m.name for m in product() if re.search(r"\bos\.(environ|getenv)\b", m.path.read_text())}
    assert readers == {"config"}


def test_no_framework_at_import_time() -> None:
    """Frameworks and CUDA are imported inside functions; only interop/<framework> may name its own on top."""
    wrong = []
    for module in product():
        top = [node for node in module.tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {alias.name.split(".")[0] for node in top if isinstance(node, ast.Import) for alias in node.names}
        absolute = [node.module for node in top if isinstance(node, ast.ImportFrom) and node.module and not node.level]
        names |= {name.split(".")[0] for name in absolute}
        allowed = {module.name.split(".")[1]} if module.name.startswith("interop.") else set()
        # Which is a library of torch's.
        allowed |= {"torch"} if "transformers" in allowed else set()
        wrong += [(module.name, name) for name in names & (FRAMEWORKS | {"matplotlib", "rich"}) - allowed]
    assert wrong == []


def device_files() -> list[Path]:
    """Our own CUDA sources."""
    third_party = CUDA / "third_party"
    files = [p for p in CUDA.rglob("*") if p.suffix in (".cu", ".cuh", ".h", ".hpp") and third_party not in p.parents]
    return sorted(files)


def quoted_includes(path: Path) -> list[Path]:
    """Our own files that a device file includes, resolved from its folder, then from cuda/."""
    found = []
    for name in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(encoding="utf-8"), flags=re.M):
        for base in (path.parent, CUDA):
            candidate = (base / name).resolve()
            if candidate.is_file() and CUDA in candidate.parents:
                found.append(candidate)
                break
    return found


def test_device_code_includes_its_own_folder_and_common() -> None:
    """An operator's kernel may use its operator's files and common; another operator's where it is made of it."""
    parts = {entry.folder: [registry.named(name).folder for name in entry.made_of] for entry in registry.OPERATORS}
    wrong = [
        f"{path.relative_to(CUDA)} includes {target.relative_to(CUDA)}"
        for path in device_files()
        for target in quoted_includes(path)
        if (folder := target.relative_to(CUDA).parts[0]) not in ("common", "third_party")
        and folder not in ((own := path.relative_to(CUDA).parts[0]), *parts.get(own, ()))
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
    files = [*PACKAGE.rglob("*.py"), *LAB.rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *device_files()]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def test_device_lines_fit_a_screen() -> None:
    lines = [(path, n, text) for path in device_files() for n, text in enumerate(path.read_text().splitlines(), 1)]
    assert [f"{path.relative_to(CUDA)}:{n}" for path, n, text in lines if len(text) > 120] == []


@pytest.mark.parametrize("entry", REGISTERED, ids=lambda entry: entry.name)
def test_every_row_of_the_registry_has_the_same_files(entry: registry.OperatorEntry) -> None:
    """A reader who knows one operator finds their way in every other."""
    missing = missing_files(entry)
    if missing:
        pytest.fail(f"{entry.name} is registered, but these files are missing: {', '.join(missing)}", pytrace=False)


def test_a_row_without_files_is_one_failure(tmp_path: Path) -> None:
    """And not a dozen files of tests that cannot be collected: a new operator, member of a family, translation unit."""
    (tmp_path / "one_more.py").write_text(
        "from dataclasses import replace\n"
        "from cupymla.ops import registry\n"
        "kernel = registry.KernelEntry('brand_new', 'sm_90a')\n"
        "registry.OPERATORS += (registry.OperatorEntry('brand_new', 'a new one', (kernel,)),)\n"
        "registry.MEMBERS += (registry._member('new_member', 'another'),)\n"
        "unit = replace(registry.OPERATORS[0].kernels[0], units=('sm90/new_unit',))\n"
        "first = replace(registry.OPERATORS[0], kernels=(unit,))\n"
        "registry.OPERATORS = (first, *registry.OPERATORS[1:])\n",
        encoding="utf-8",
    )
    # The others look into operators, members and units while they are collected.
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "one_more", "-p", "no:cacheprovider"]
    command += ["tests/ops/test_options.py", "tests/ops/test_kernels.py", "tests/emulate/test_early_loads.py"]
    command += ["tests/test_layering.py", "-k", "same_files"]
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert "errors during collection" not in done.stdout and "error" not in done.stdout.splitlines()[-1], done.stdout
    assert f"3 failed, {len(REGISTERED) - 1} passed" in done.stdout
    lacking = "is registered, but these files are missing: "
    assert f"brand_new {lacking}cupymla/ops/brand_new/__init__.py, " in done.stdout
    assert "cuda/brand_new/sm90/brand_new.cu" in done.stdout
    assert f"new_member {lacking}cupymla/ops/mla_cache/cases_of/new_member.py, " in done.stdout
    assert f"{REGISTERED[0].name} {lacking}cuda/{REGISTERED[0].folder}/sm90/new_unit.cu" in done.stdout
