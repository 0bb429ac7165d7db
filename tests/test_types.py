"""What editors and type checkers see of the package is what there is."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cupymla
from cupymla.ops import registry
from cupymla.ops.mla_cache.formats import SCALE_RULES
from cupymla.ops.mla_cache.latents import FORMATS
from cupymla.ops.nvfp4_gemv import formats, validation
from cupymla.ops.paged_indexer_topk.spec import POSITIONS
from cupymla.ops.topk.spec import ORDERS
from cupymla.ops.xl_paged_attention import checks, paging
from cupymla.ops.xl_paged_attention import spec as xl
from cupymla_lab import stubs

ROOT = Path(__file__).resolve().parent.parent
CALLS = ROOT / "tests" / "typing" / "calls.py"
FUNCTIONS = registry.public_functions()
BOTH = [pytest.mark.skipif(f"not __import__('importlib').util.find_spec({name!r})") for name in ("jax", "torch")]


# Names ---------------------------------------------------------------------------------------------------------------


def test_the_package_names_what_it_offers_and_nothing_else() -> None:
    assert cupymla.__all__ == sorted([*FUNCTIONS, *stubs.ERRORS, "raw_module"])
    assert dir(cupymla) == cupymla.__all__
    for name in cupymla.__all__:
        assert callable(getattr(cupymla, name))


def test_naming_does_not_clutter() -> None:
    """What a fresh interpreter completes, with everything named."""
    code = "import cupymla; before = set(vars(cupymla)); from cupymla import *; print(*dir(cupymla)); print(*before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    shown, held = (line.split() for line in done.stdout.splitlines())
    assert shown == cupymla.__all__
    assert {name for name in held if not name.startswith("_")} == set()


# Stubs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", ["cupymla", "cupymla.interop.jax", "cupymla.interop.torch"])
def test_stubs_are_those_of_the_functions(module: str) -> None:
    """Make them with `python -m cupymla_lab stubs`."""
    if module != "cupymla":
        pytest.importorskip(module.rpartition(".")[2])
    file = stubs.file(module)
    assert file.read_text(encoding="utf-8") == stubs.stubs()[file]()


WORDS: dict[str, tuple[str, ...]] = {
    "order": ORDERS,
    "lse_base": xl.LSE_BASES,
    "rel_extend": xl.EXTENSIONS,
    "kv_layout": paging.LAYOUTS,
    "kv_dtype": (*checks.FLOATS, *checks.FP8),
    "format": tuple(each.name for each in formats.FORMATS),
    "scale_layout": validation.SCALE_LAYOUTS,
    "normalize": ("l1",),
    "scale_rule": SCALE_RULES,
    "positions": POSITIONS,
    "cache_format": tuple(FORMATS),
    "dkv_dtype": ("float32",),
    "dk_dtype": ("float32",),
    "out_dtype": checks.FLOATS,
}
"""What the checks of options with words take. Those of the MLA operators are held to their `Options` elsewhere."""


@pytest.mark.parametrize("name", FUNCTIONS)
def test_words_are_those_that_are_taken(name: str) -> None:
    for option, parameter in inspect.signature(getattr(cupymla, name)).parameters.items():
        annotation = str(parameter.annotation)
        assert not re.match(r"str\b", annotation), f"{option}: say which words"
        if "Literal" in annotation:
            assert tuple(re.findall(r"'([^']*)'", annotation)) == WORDS[option], option


# Checkers ------------------------------------------------------------------------------------------------------------


def expected(checker: str) -> set[int]:
    """The lines of `CALLS` that are to be errors."""
    lines = CALLS.read_text(encoding="utf-8").splitlines()
    return {number for number, line in enumerate(lines, 1) if line.endswith(("# wrong", f"# wrong to {checker}"))}


def require(checker: str, found: dict[int, str]) -> None:
    wanted = expected(checker)
    assert len(wanted) > 20
    assert {number: text for number, text in found.items() if number not in wanted} == {}, "right calls are refused"
    assert wanted - set(found) == set(), "wrong calls pass"


def output(command: list[str]) -> str:
    environment = {**os.environ, "MYPYPATH": str(ROOT), "NO_COLOR": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment).stdout


def checked(found: Any) -> Any:
    for mark in reversed(BOTH):
        found = mark(found)
    return found


@checked
def test_mypy_tells_right_from_wrong_calls() -> None:
    pytest.importorskip("mypy")
    told = output([sys.executable, "-m", "mypy", "--no-pretty", str(CALLS)])
    assert "Found" in told, told
    rows = re.findall(r"^(.*?):(\d+): error: (.*)$", told, flags=re.M)
    assert {file for file, _, _ in rows} == {"tests/typing/calls.py"}, told
    require("mypy", {int(line): text for _, line, text in rows})


@checked
def test_pyright_tells_right_from_wrong_calls(tmp_path: Path) -> None:
    pytest.importorskip("basedpyright")
    (tmp_path / "pyrightconfig.json").write_text(
        json.dumps({"typeCheckingMode": "standard", "include": [str(CALLS)], "extraPaths": [str(ROOT)]}),
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--project", str(tmp_path)]
    told = json.loads(output([*command, "--pythonpath", sys.executable]))
    assert told["summary"]["filesAnalyzed"] == 1
    errors = [each for each in told["generalDiagnostics"] if each["severity"] == "error"]
    require("pyright", {each["range"]["start"]["line"] + 1: each["message"] for each in errors})


# Editors -------------------------------------------------------------------------------------------------------------


def test_editors_complete_functions_and_their_arguments() -> None:
    """With jedi, as editors and notebooks without a kernel do."""
    jedi: Any = pytest.importorskip("jedi")
    project = jedi.Project(ROOT)

    def script(code: str) -> Any:
        return jedi.Script(code, project=project)

    public = {each.name for each in script("import cupymla\ncupymla.").complete()}
    assert set(cupymla.__all__) <= public
    modules = {file.stem for file in (ROOT / "cupymla").iterdir()}
    assert {name for name in public - set(cupymla.__all__) - modules if not name.startswith("_")} == set()
    operator = {each.name for each in script("import cupymla\ncupymla.sparse_mla_bwd.").complete()}
    assert {"name", "prepare", "workspace_bytes"} <= operator
    for module, name in (("cupymla", "topk"), ("cupymla.interop.jax", "topk"), ("cupymla.interop.torch", "topk")):
        signatures = script(f"from {module} import {name}\n{name}(").get_signatures()
        shown = [parameter.name for parameter in signatures[0].params]
        assert shown[:2] == ["scores", "topk"] and "order" in shown
        assert ("stream" in shown) == (module == "cupymla")
    documented = script("import cupymla\ncupymla.sparse_mla_fwd.prepare(").get_signatures()
    assert "Do all of a call of `sparse_mla_fwd` but the launch" in documented[0].docstring()
