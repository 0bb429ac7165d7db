"""The command line does what it says, in words and in JSON, and its exit status can be relied on."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from build_kit import python

import cupymla
from cupymla import config, driver, evidence
from cupymla.bench import timing
from cupymla.build import KernelSource, source
from cupymla.build import precompile as ahead
from cupymla.build.precompile import Outcome
from cupymla.cli import commands, main, terminal
from cupymla.cli import doctor as examination
from cupymla.cli.doctor import Check
from cupymla.ops import registry

ROOT = Path(__file__).resolve().parent.parent


def printed(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> str:
    assert main(words) == status
    return capsys.readouterr().out


def json_of(capsys: pytest.CaptureFixture[str], *words: str, status: int = 0) -> Any:
    return json.loads(printed(capsys, *words, "--json", status=status))


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("CUPYMLA_CACHE_DIR", str(folder))
    return folder


def test_doctor_reports_every_part(capsys: pytest.CaptureFixture[str], cache_folder: Path) -> None:
    healthy = examination.healthy(examination.examine())
    found = json_of(capsys, "doctor", status=0 if healthy else 1)
    names = {check["name"] for check in found["checks"]}
    assert {"Python", "GPU", "driver", "CUTLASS", "CuPy", "cache"} <= names
    assert names & {"NVRTC", "nvcc"}
    for check in found["checks"]:
        assert check["state"] in ("ok", "missing", "optional")
        assert check["state"] == "ok" or check["advice"], f"{check['name']}: say what to do"
    assert found["variables"]["CUPYMLA_CACHE_DIR"]["value"] == str(cache_folder)
    assert found["variables"].keys() == config.VARIABLES.keys()


def test_doctor_prints_a_table(capsys: pytest.CaptureFixture[str], cache_folder: Path) -> None:
    main(["doctor"])
    shown = capsys.readouterr().out
    assert "CUTLASS" in shown
    assert f"CUPYMLA_CACHE_DIR={cache_folder}" in shown
    for line in shown.splitlines():
        # A path stays whole, alone in its line.
        assert len(line) <= 80 or (os.sep in line and len(line.split()) <= 3), line


BASE = ("packages", "settings", "GPU", "driver", "NVRTC", "CUTLASS", "CuPy", "cache")
EXTRAS = ("jax", "torch", "rich", "matplotlib")


def test_doctor_is_content_with_a_base_installation(tmp_path: Path) -> None:
    """Without any extra, as `pip install cupymla` leaves it, and without headers, as in a checkout."""
    hidden = ("cupy", "cupy-cuda12x", "cupy-cuda13x", "jax", "torch", "rich", "matplotlib", "nvidia-cutlass")
    code = (
        f"import sys; from importlib import metadata; hidden, version = {hidden!r}, metadata.version\n"
        "def asked(name):\n"
        "    if name in hidden: raise metadata.PackageNotFoundError(name)\n"
        "    return version(name)\n"
        "metadata.version = asked\n"
        "sys.modules.update(dict.fromkeys(('cupy', 'jax', 'torch', 'rich', 'matplotlib', 'cutlass_library')))\n"
        "from cupymla.cli import main; sys.exit(main(['doctor', *sys.argv[1:]]))"
    )
    settings = dict.fromkeys(config.VARIABLES, "") | {"CUPYMLA_CACHE_DIR": str(tmp_path / "cache")}
    done = python(code, "--json", **settings)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert tuple(found) == ("Python", *BASE, *EXTRAS)
    for name, extra in (("NVRTC", "cuda12"), ("CuPy", "cuda12"), ("jax", "jax"), ("torch", "torch"), ("rich", "cli")):
        assert (found[name]["state"], found[name]["found"]) == ("optional", "not installed")
        assert f"cupymla[{extra}]" in found[name]["advice"]
    told = python(code, **settings)
    assert told.returncode == 0
    assert "Works here: arrays on the CPU, by the NumPy references.\n" in told.stdout


def test_doctor_wants_headers_where_there_is_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "find_cutlass", lambda: None)
    for state, wanted in (("ok", ("missing", True)), ("optional", ("optional", False))):
        compiler: Any = Check("NVRTC", state, "")  # type: ignore[arg-type]
        monkeypatch.setattr(examination, "_compiler", lambda compiler=compiler: compiler)
        check = examination._cutlass()
        assert (check.state, check.needed) == wanted


def test_doctor_says_what_works() -> None:
    def told(*there: str, broken: tuple[str, ...] = ()) -> str:
        checks = [Check(name, "ok", "") for name in there]
        return examination.summary([*checks, *(Check(name, "missing", "", "x", needed=True) for name in broken)])

    cpu = "Works here: arrays on the CPU, by the NumPy references"
    assert told("CuPy", "GPU") == f"{cpu}."
    assert told("NVRTC", "CUTLASS") == f"{cpu}; compiling kernels."
    assert told("nvcc", "CUTLASS", "GPU", "CuPy") == f"{cpu}; compiling kernels; arrays on the GPU."
    assert told("NVRTC", broken=("cache", "CuPy")) == "To be mended: cache, CuPy."


def test_a_wrong_setting_is_told_once_by_the_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYMLA_COMPILER", "cc")
    found = {check.name: check for check in examination.examine()}
    assert "'CUPYMLA_COMPILER'" in found["settings"].found
    assert (found["compiler"].found, found["compiler"].state) == ("see settings", "missing")


def test_doctor_names_variables_that_nothing_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUPYMLA_CACHE", "/misspelt")
    monkeypatch.setenv("CUPYMLA_QUIET", "1")
    (settings,) = (check for check in examination.examine() if check.name == "settings")
    assert (settings.state, settings.advice) == ("ok", "nothing reads CUPYMLA_CACHE")


def test_doctor_fails_when_something_needed_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without a GPU is healthy; one that cannot compile is not."""
    no_gpu = Check("GPU", "missing", "none", "x")
    monkeypatch.setattr(examination, "examine", lambda: [no_gpu])
    json_of(capsys, "doctor", status=0)
    monkeypatch.setattr(examination, "examine", lambda: [no_gpu, Check("CuPy", "missing", "", "x", needed=True)])
    json_of(capsys, "doctor", status=1)


def test_doctor_names_missing_packages(tmp_path: Path) -> None:
    """On the machine that needs the doctor most, the packages it asks about are not there."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('cuda', 'cuda.bindings', 'cuda.pathfinder', 'cupy')))\n"
        "from cupymla.cli import main; sys.exit(main(['doctor', '--json']))"
    )
    done = python(code, CUPYMLA_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 1, done.stderr
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert found["NVRTC"]["state"] == "missing"
    assert "cuda-pathfinder" in found["NVRTC"]["found"]
    assert found["NVRTC"]["advice"]


def test_doctor_reports_checks_that_break(
    capsys: pytest.CaptureFixture[str], cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> Check:
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr(examination, "_gpu", broken)
    found = {check["name"]: check for check in json_of(capsys, "doctor", status=1)["checks"]}
    assert "ZeroDivisionError: by nothing" in found["GPU"]["found"]
    assert found["GPU"]["state"] == "missing"


UNUSABLE = {
    "CUPYMLA_CACHE_DIR": "~nobody-of-that-name/cache",
    "CUPYMLA_READONLY_CACHE": "~nobody-of-that-name/cache",
    "CUPYMLA_CUTLASS": "~nobody-of-that-name/cutlass",
    "CUPYMLA_COMPILER": "cc",
    "CUPYMLA_FAIL_ON_SPILL": "yes",
    "CUPYMLA_QUIET": "2",
    "CUPYMLA_CUTLASS ": "/nowhere",
}
"""For each variable something that nothing can be done with. Any nvcc may be one that is not there."""


@pytest.mark.parametrize("name", UNUSABLE)
def test_an_unusable_setting_is_said_before_anything_is_compiled(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert {name.strip() for name in UNUSABLE} == config.VARIABLES.keys() - {"CUPYMLA_NVCC"}
    value, name = UNUSABLE[name], name.strip()
    monkeypatch.setenv(name, value)
    found = json_of(capsys, "doctor", status=1)
    assert [name in check["found"] for check in found["checks"]].count(True) == 1
    monkeypatch.setattr(ahead, "precompile", lambda *_: pytest.fail("compiled"))
    for words in (["precompile", "nvfp4_gemv", "--arch", "sm_90"], ["demo"], ["bench"]):
        assert main(words) == 2
        told = capsys.readouterr()
        assert (told.out, told.err.count("\n")) == ("", 1)
        assert name in told.err


def test_list_has_the_agreed_keys(capsys: pytest.CaptureFixture[str]) -> None:
    rows = json_of(capsys, "list")
    assert {row["operator"] for row in rows} == {entry.name for entry in registry.subjects()}
    for row in rows:
        assert list(row) == ["operator", "kernel", "arch", "status", "detail", "evidence"]
        assert row["status"] in ("verified", "emulated", "not run", "none")
        assert isinstance(row["detail"], str)
        # All figures that the words hold.
        for run in row["evidence"]:
            figures = (str(run["cases"]), run["gpu"] or "CPU", run["compiler"], run["date"])
            assert all(figure in row["detail"] for figure in figures)
            assert run["of"] >= run["cases"] > 0
            assert run["current"] in (True, False)
    assert any(row["evidence"] for row in rows)


def test_list_without_cutlass_says_that_it_cannot_tell(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {(row["kernel"], row["arch"]): row for row in json_of(capsys, "list")}
    monkeypatch.setattr(source, "find_cutlass", lambda: None)
    assert main(["list", "--json"]) == 0
    told = capsys.readouterr()
    assert told.err.startswith("cannot tell") and "CUTLASS's headers were not found" in told.err
    assert told.err.count("\n") == 1
    rows = json.loads(told.out)
    for row in rows:
        known = before[row["kernel"], row["arch"]]["evidence"]
        # Kernels that include nothing of CUTLASS can be told all the same.
        if row["status"] == "unknown":
            assert [(run["cases"], run["date"]) for run in row["evidence"]][: len(known)] == [
                (run["cases"], run["date"]) for run in known
            ]
            assert {run["current"] for run in row["evidence"]} == {None}
            assert "cannot be told" in row["detail"] and "edited since" not in row["detail"]
    assert any(row["status"] == "unknown" for row in rows)


def test_list_prints_a_table_and_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    assert "sparse_mla_fwd" in printed(capsys, "list")
    assert printed(capsys, "list", "--markdown").strip() == evidence.support_markdown()


def test_cache_commands(capsys: pytest.CaptureFixture[str], cache_folder: Path) -> None:
    assert json_of(capsys, "cache", "path") == {"path": str(cache_folder)}
    assert printed(capsys, "cache", "path").strip() == str(cache_folder)
    assert json_of(capsys, "cache", "ls") == []
    assert "0 compiled kernels" in printed(capsys, "cache", "ls")
    assert json_of(capsys, "cache", "clear") == {"freed_bytes": 0}
    assert "0.0 MiB" in printed(capsys, "cache", "clear")


def test_precompile_for_a_target_is_all_that_its_gpus_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU of sm_90a runs kernels for sm_90 too: left out, they would be compiled at their first call after all."""
    asked: list[KernelSource] = []

    def note(sources: list[KernelSource], *others: object) -> list[Outcome]:
        asked.extend(sources)
        return []

    monkeypatch.setattr(ahead, "precompile", note)
    hopper_alone = {"indexer_logits", "indexer_loss", "indexer_bwd", "indexer_topk", "paged_indexer_topk"}
    hopper_alone |= {"indexer_loss_dense", "sparse_mla_decode"}
    for target, lacking in (("sm_90a", {"sparse_mla_bwd_phase1"}), ("sm_100f", hopper_alone)):
        asked.clear()
        said = printed(capsys, "precompile", "--arch", target)
        assert ("nvfp4_gemv: sm_90, which is what runs there" in said) == (target == "sm_90a")
        by_operator: dict[str, set[str]] = {}
        for each in asked:
            by_operator.setdefault(each.path.partition("/")[0], set()).add(each.arch)
        assert by_operator.keys() == {entry.folder for entry in registry.OPERATORS} - lacking
        assert by_operator["nvfp4_gemv"] == {"sm_90" if target == "sm_90a" else target}
        assert by_operator["sparse_mla_fwd"] == {target}


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> str:
    """Nothing can be compiled; the value is how that is said."""
    monkeypatch.setenv("CUPYMLA_COMPILER", "nvcc")
    monkeypatch.setenv("CUPYMLA_NVCC", "/nowhere/nvcc")
    return "/nowhere/nvcc does not run"


def test_precompile_says_once_that_there_is_no_compiler(
    capsys: pytest.CaptureFixture[str], cache_folder: Path, no_compiler: str
) -> None:
    """Each of several hundred kernels would say it."""
    assert main(["precompile", "attn_dist", "--arch", "sm_90a"]) == 1
    said = capsys.readouterr()
    assert said.err.count(no_compiler) == 1
    assert "FAILED" not in said.out + said.err


@pytest.mark.parametrize("words", ["-m cupymla list --markdown", "-m cupymla --help", "-m cupymla bench --json"])
def test_nobody_complains_when_the_reader_has_seen_enough(words: str) -> None:
    """As in `... | head -1`. Whoever reads ends first here, always."""
    reading, writing = os.pipe()
    os.close(reading)
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, *words.split()]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    os.close(writing)
    assert done.returncode == 1
    assert "BrokenPipe" not in done.stderr and "Traceback" not in done.stderr


def test_precompile_of_an_operator_without_kernels_is_no_error(
    capsys: pytest.CaptureFixture[str], cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = replace(registry.OPERATORS[0], kernels=())
    monkeypatch.setattr(registry, "OPERATORS", (bare, *registry.OPERATORS[1:]))
    assert json_of(capsys, "precompile", bare.name) == []
    assert "no kernel" in printed(capsys, "precompile", bare.name)


@pytest.mark.parametrize(
    "words",
    [
        ("precompile", "no_such_operator"),
        ("precompile", "--arch", "sm_1"),
        ("precompile", "--arch", "sm_90a", "no_such_operator"),
        ("precompile", "--jobs", "0"),
        ("bench", "no_such_operator"),
    ],
)
def test_bad_arguments_are_status_2_with_one_line(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    told = json_of(capsys, *words, status=2)
    assert f"error: {told['error']}\n" == captured.err


@pytest.mark.parametrize(("name", "word"), [("CUPYMLA_COMPILER", "gcc"), ("CUPYMLA_FAIL_ON_SPILL", "perhaps")])
def test_precompile_refuses_an_unusable_setting_once(
    name: str, word: str, capsys: pytest.CaptureFixture[str], cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, word)
    assert main(["precompile", "--arch", "sm_100f"]) == 2
    told = capsys.readouterr()
    assert name in told.err
    assert (told.out, told.err.count("\n")) == ("", 1)


@pytest.mark.parametrize("words", [(), ("--help",)])
def test_the_command_alone_prints_help(words: tuple[str, ...]) -> None:
    """As the installed command, by its entry point."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    module, _, function = project["scripts"]["cupymla"].partition(":")
    done = python(f"import sys; sys.argv[0] = 'bin/cupymla'; from {module} import {function}; {function}()", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: cupymla ")
    assert all(name in done.stdout for name in commands.COMMANDS)


def test_the_module_is_named_as_it_was_called() -> None:
    command = [sys.executable, "-m", "cupymla"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.startswith("usage: python -m cupymla ")


def test_unknown_command_is_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["dance"])
    assert stopped.value.code == 2
    assert "doctor" in capsys.readouterr().err


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"cupymla {cupymla.__version__}\n"


@pytest.mark.skipif(driver.available(), reason="this machine has a GPU")
@pytest.mark.parametrize("words", [("bench",), ("bench", "sparse_mla_fwd")])
def test_bench_without_a_gpu_says_so(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    assert "no CUDA GPU" in json_of(capsys, *words, status=2)["error"]
    assert main(words) == 2
    assert "no CUDA GPU" in capsys.readouterr().err


@pytest.mark.parametrize("option", [(), ("--host",)])
def test_bench_refuses_an_unusable_folder_before_it_measures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, option: tuple[str, ...]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(commands, "with_kernels", lambda names: [])
    monkeypatch.setattr(timing, "ceilings", lambda timer: pytest.fail("measured"))
    monkeypatch.setattr(driver, "device_name", lambda index: pytest.fail("measured"))
    found = json_of(capsys, "bench", "--out", str(tmp_path / "file"), *option, status=2)
    assert "--out" in found["error"]


def test_kernels_that_fail_are_announced_as_failed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(sources: list[KernelSource], jobs: int | None, progress: Callable[[Outcome], None]) -> list[Outcome]:
        outcomes = [Outcome(source, error="no compiler") for source in sources]
        for outcome in outcomes:
            progress(outcome)
        return outcomes

    monkeypatch.setattr(terminal, "have_rich", lambda: False)
    monkeypatch.setattr(ahead, "precompile", fail)
    entry, kernel = next((entry, kernel) for entry in registry.OPERATORS for kernel in entry.kernels)
    assert main(["precompile", "--arch", kernel.arch, entry.name]) == 1
    said = capsys.readouterr().err
    assert said
    assert all(line.endswith(" FAILED") for line in said.splitlines())
    assert "compiled" not in said


def test_precompile_can_share_what_it_compiles(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "precompile", lambda sources, *_: [Outcome(each, kept=True) for each in sources])
    words = ("precompile", "sparse_mla_bwd_phase1", "--arch", "sm_100f")
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        folder = Path(name) / "cache"
        monkeypatch.setenv("CUPYMLA_CACHE_DIR", str(folder))
        printed(capsys, *words)
        assert folder.stat().st_mode & 0o777 == 0o700
        assert f"CUPYMLA_READONLY_CACHE={folder}" in printed(capsys, *words, "--shared")
        assert folder.stat().st_mode & 0o777 == 0o755
    monkeypatch.delenv("CUPYMLA_CACHE_DIR")
    assert "CUPYMLA_CACHE_DIR" in json_of(capsys, *words, "--shared", status=2)["error"]


def test_what_went_wrong_for_many_kernels_is_said_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(sources: list[KernelSource], *_: object) -> list[Outcome]:
        return [Outcome(each, error="no room" if number else "another") for number, each in enumerate(sources)]

    monkeypatch.setattr(ahead, "precompile", fail)
    words = ("precompile", "sparse_mla_bwd_phase1", "--arch", "sm_100f")
    shown = printed(capsys, *words, status=1)
    assert (shown.count("no room"), shown.count("another")) == (1, 1)
    assert "for sm_100f and 2 more: no room" in shown
    assert [row["error"] for row in json_of(capsys, *words, status=1)].count("no room") == 3


@pytest.mark.parametrize("kept", [True, False])
def test_kernels_that_are_not_kept_are_not_compiled_ahead(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """On a full disk each is compiled, and the cache has none of them."""
    monkeypatch.setattr(ahead, "precompile", lambda sources, *_: [Outcome(source, kept=kept) for source in sources])
    words = ("precompile", "--arch", "sm_90a", "sparse_mla_fwd")
    assert ("not kept" in printed(capsys, *words, status=not kept)) == (not kept)
    assert {row["kept"] for row in json_of(capsys, *words, status=not kept)} == {kept}


def test_plain_tables_and_progress_need_no_rich(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "have_rich", lambda: False)
    shown = printed(capsys, "list")
    assert re.search(r"operator +kernel +target", shown)
    with terminal.Terminal(False).progress("done", 2) as step:
        step("first")
        step("second")
    assert capsys.readouterr().err.splitlines() == ["done 1/2: first", "done 2/2: second"]


def test_rich_tables_show_brackets_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """rich takes [word] for markup unless told otherwise."""
    terminal.Terminal(False).table("t", ("a",), [["pip install 'cupymla[cuda12]'"]])
    assert "cupymla[cuda12]" in capsys.readouterr().out


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes of the captured output a terminal of that many columns, for rich."""
    pytest.importorskip("rich")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    return lambda columns: monkeypatch.setenv("COLUMNS", str(columns))


def test_names_are_whole_on_an_ordinary_terminal(
    capsys: pytest.CaptureFixture[str], narrow: Callable[[int], None]
) -> None:
    """`sparse_mla_b...` would be two operators."""
    narrow(80)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", printed(capsys, "list"))
    assert max(map(len, shown.splitlines())) == 80
    for row in evidence.support_rows():
        assert re.search(rf"│ {row.operator} +│ {row.kernel} +│ {row.arch} ", shown)


@pytest.mark.parametrize("columns", [30, 80])
def test_tables_lose_nothing_on_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], narrow: Callable[[int], None], columns: int
) -> None:
    narrow(columns)
    file = "/some/where/sm_90a/" + "0123456789abcdef" * 4
    terminal.Terminal(False).table("t", ("name", "text", "file"), [["sparse_mla_bwd_phase1", "a few words", file]])
    shown = capsys.readouterr().out
    cells = [line.split("│")[1:-1] for line in shown.splitlines() if line.startswith("│")]
    name, text, path = ("".join(cell.strip() for cell in column) for column in zip(*cells, strict=True))
    assert (name, text.replace(" ", ""), path) == ("sparse_mla_bwd_phase1", "afewwords", file)


@pytest.mark.parametrize(("begins", "count"), [(False, "2/257"), (True, "1/257")])
def test_progress_shows_its_count_beside_a_long_name(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    narrow: Callable[[int], None],
    begins: bool,
    count: str,
) -> None:
    narrow(80)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    # What is thrown ends the bar as it stands.
    with pytest.raises(LookupError), terminal.Terminal(False).progress("kernels", 257, begins=begins) as step:
        step("first")
        step("sparse_mla_fwd CUPYMLA_D_QK=576 CUPYMLA_HEADS=16 CUPYMLA_FP16=0 CUPYMLA_ANY_SCALE=0 for sm_90a 2.8 s")
        raise LookupError
    shown = capsys.readouterr().err
    assert count in shown
    assert "sparse_mla_fwd CUPYMLA_D_QK=576" in shown


def test_what_is_printed_beside_a_bar_goes_to_standard_output(tmp_path: Path) -> None:
    """Of a command whose output is kept in a file, and whose progress is watched."""
    pytest.importorskip("rich")
    text = (
        "from cupymla.cli.terminal import Terminal\n"
        "with Terminal(False).progress('timed', 1) as step:\n"
        "    step('one')\n"
        "    Terminal(False).line('a line')\n"
        "    Terminal(False).table('a table', ('column',), [['cell']])\n"
    )
    watched, bar = pty.openpty()
    with (tmp_path / "kept").open("w") as kept:
        environment = {**os.environ, "TERM": "xterm"}
        subprocess.run([sys.executable, "-c", text], stdout=kept, stderr=bar, check=True, env=environment, timeout=60)
    os.close(bar)
    assert b"1/1" in os.read(watched, 1 << 16)
    os.close(watched)
    shown = (tmp_path / "kept").read_text()
    assert all(part in shown for part in ("a line", "a table", "column", "cell"))


def test_an_interrupted_command_says_so_and_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        terminal.exit_with(interrupted)
    assert ended.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.slow
@pytest.mark.compile
def test_precompile_and_what_becomes_of_the_cache(capsys: pytest.CaptureFixture[str], cache_folder: Path) -> None:
    """Kernels are shown with their resources, found the next time, listed, and cleared."""
    words = ("precompile", "sparse_mla_bwd_phase1", "--arch", "sm_100f", "--define", "CUPYMLA_D_QK=512", "--jobs", "2")
    rows = json_of(capsys, *words)
    assert len(rows) == 2
    for row in rows:
        assert (row["kernel"], row["arch"], row["error"]) == ("sparse_mla_bwd_phase1", "sm_100f", "")
        assert not row["cached"] and row["registers"] > 0
        assert row["spill_store_bytes"] == row["spill_load_bytes"] == 0
    assert f"{len(rows)} compiled, none failed, none with spills" in printed(capsys, *words)
    assert all(row["cached"] for row in json_of(capsys, *words))
    assert len(json_of(capsys, "cache", "ls")) == len(rows)
    assert "sparse_mla_bwd_phase1" in printed(capsys, *words)
    assert json_of(capsys, "cache", "clear")["freed_bytes"] > 0
    assert json_of(capsys, "cache", "ls") == []
