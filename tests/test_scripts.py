"""The commands in scripts/ set themselves up and say what is wrong when they cannot."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SETUP = ROOT / "scripts" / "lib" / "setup.sh"
COMMANDS = ("demo", "test", "bench", "gpu_check", "docs")
TOOLS = ("bash", "dirname", "cksum", "cat", "mktemp", "rm", "sed", "head", "flock", "env")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of nothing but what the set-up reads."""
    (tmp_path / "scripts" / "lib").mkdir(parents=True)
    shutil.copy(SETUP, tmp_path / "scripts" / "lib" / "setup.sh")
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    return tmp_path


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A PATH with the tools that the set-up needs and no Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    provide(folder, *filter(shutil.which, TOOLS))
    return folder


def provide(folder: Path, *tools: str) -> None:
    """Programs of this machine on that PATH."""
    for tool in tools:
        found = shutil.which(tool)
        assert found
        (folder / tool).symlink_to(found)


def fake(folder: Path, name: str, body: str) -> None:
    """A program on that PATH."""
    file = folder / name
    file.write_text(f"#!{shutil.which('bash')}\n{body}\n")
    file.chmod(0o755)


def run(checkout: Path, programs: Path, program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a line of bash with the set-up sourced, as the commands do."""
    script = f"set -euo pipefail; source {checkout}/scripts/lib/setup.sh; {program}"
    environment = {"PATH": str(programs), "HOME": str(checkout), **variables}
    bash = shutil.which("bash")
    assert bash
    return subprocess.run([bash, "-c", script], capture_output=True, text=True, env=environment, check=False)


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_are_executable_bash_that_stops_on_errors(name: str) -> None:
    file = ROOT / "scripts" / name
    assert file.stat().st_mode & stat.S_IXUSR
    assert "set -euo pipefail" in file.read_text()
    assert subprocess.run(["bash", "-n", str(file)], check=False).returncode == 0


def test_ci_runs_the_test_command() -> None:
    assert "exec scripts/test" in (ROOT / ".ci" / "run").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_workflow_runs_the_commands() -> None:
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    assert re.findall(r"- run: (.+)", workflow) == ["scripts/test --quick", "scripts/test", "scripts/docs"]


def own_session(folder: Path, tests: str, *words: str, gpu: bool) -> str:
    """What pytest says of tests that are run with the project's conftest, on a machine with a GPU or without."""
    (folder / "conftest.py").write_text(
        f"from cupymla import driver\ndriver.available = lambda: {gpu}\n"
        f"exec(compile(open({str(ROOT / 'tests' / 'conftest.py')!r}).read(), 'conftest', 'exec'))\n"
    )
    (folder / "test_it.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", *words, str(folder)]
    path = os.pathsep.join((str(folder), str(ROOT), str(ROOT / "tests")))
    # What is installed beside pytest takes longer to load than the tests run.
    environment = {**os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False).stdout


def test_a_group_has_one_worker(tmp_path: Path) -> None:
    """Else each would make the fixtures of a group for itself, and GPU tests would meet on the GPU."""
    told = own_session(
        tmp_path,
        "import os, pytest\n"
        "@pytest.mark.gpu\n@pytest.mark.parametrize('k', range(4))\ndef test_many(k): print('by', os.getpid())\n"
        "@pytest.mark.parametrize('k', range(4))\ndef test_others(k): pass\n",
        *("-p", "xdist", "-n", "2", "--dist", "loadgroup"),
        gpu=True,
    )
    assert "8 passed" in told and len(set(re.findall(r"by \d+", told))) == 1, told


@pytest.mark.parametrize("words", [(), ("-p", "xdist", "-n", "1", "--dist", "loadgroup")], ids=["alone", "workers"])
def test_gpu_tests_that_are_skipped_are_counted_on_one_line(tmp_path: Path, words: tuple[str, ...]) -> None:
    """With all their parameters, of which one is shown for all; what is not asked for does not count."""
    told = own_session(
        tmp_path,
        "import pytest\n"
        "@pytest.mark.gpu\n@pytest.mark.parametrize('k', range(5))\ndef test_many(k): pass\n"
        "@pytest.mark.gpu\ndef test_one(): pass\n"
        "@pytest.mark.parametrize('k', [0, pytest.param(1, marks=pytest.mark.gpu)])\ndef test_some(k): pass\n"
        "@pytest.mark.gpu\n@pytest.mark.slow\ndef test_slow(): pass\n",
        *("-m", "not slow", *words),
        gpu=False,
    )
    said = [line for line in told.splitlines() if "GPU tests skipped" in line]
    assert said == ["7 GPU tests skipped: no CUDA GPU on this machine"], told
    assert "1 passed, 3 skipped" in told, told


@pytest.mark.parametrize(
    ("output", "extra"),
    [
        ("| NVIDIA-SMI 580.159.04   Driver Version: 580.159.04   CUDA Version: 13.0 |", "cuda13"),
        ("| NVIDIA-SMI 595.10   Driver Version: 595.10   CUDA UMD Version: 13.2 |", "cuda13"),
        ("| NVIDIA-SMI 535.54   Driver Version: 535.54   CUDA Version: 12.2 |", "cuda12"),
        ("NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver.", "cuda12"),
    ],
)
def test_cuda_extra_follows_the_driver(checkout: Path, programs: Path, output: str, extra: str) -> None:
    fake(programs, "nvidia-smi", f"echo '{output}'")
    assert run(checkout, programs, "cuda_extra").stdout.strip() == extra


def test_cuda_extra_without_a_driver(checkout: Path, programs: Path) -> None:
    assert run(checkout, programs, "cuda_extra").stdout.strip() == "cuda12"


def test_no_python_is_said_clearly(checkout: Path, programs: Path) -> None:
    done = run(checkout, programs, "prepare_environment cuda12,cli numpy")
    assert done.returncode != 0
    assert "no Python 3.11 or newer" in done.stderr


def test_missing_venv_module_is_said_clearly(checkout: Path, programs: Path) -> None:
    # Answers that it is new enough, and fails to import ensurepip, venv and whatever is asked for.
    fake(programs, "python3", '[ "${2:-}" = "import sys; sys.exit(sys.version_info < (3, 11))" ]')
    done = run(checkout, programs, "prepare_environment cuda12,cli numpy")
    assert done.returncode != 0
    assert "python3-venv" in done.stderr


def test_prepared_machine_without_an_index_is_used_as_it_is(checkout: Path, programs: Path) -> None:
    """pip reaches nothing, but the interpreter has everything: it is used, and that is said."""
    fake(
        programs,
        "python3",
        f"""case "$*" in
            "-m venv --clear "*) mkdir -p "$4/bin"; cp "{programs}/python3" "$4/bin/python" ;;
            *"pip download"*) exit 1 ;;
            *) exit 0 ;;
        esac""",
    )
    provide(programs, "mkdir", "cp")
    words = 'prepare_environment cuda12,dev numpy pytest; echo "$PYTHON $PYTHONPATH"'
    done = run(checkout, programs, words, PYTHONPATH="/before")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [f"{programs}/python3", f"{checkout}:/before"]
    assert "pip reaches no package index" in done.stderr


def test_ready_environment_is_used_until_pyproject_changes(checkout: Path, programs: Path) -> None:
    """The second run installs nothing; an edit of pyproject.toml makes it install again."""
    log = checkout / "log"
    fake(
        programs,
        "python3",
        f"""echo "$*" >>{log}
        case "$*" in
            "-m venv --clear "*) mkdir -p "$4/bin"; cp "{programs}/python3" "$4/bin/python" ;;
        esac""",
    )
    provide(programs, "mkdir", "cp")

    def installs() -> int:
        done = run(checkout, programs, 'prepare_environment cuda12,cli numpy; echo "$PYTHON"')
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == f"{checkout}/.venv/bin/python"
        return sum("pip install" in line for line in log.read_text().splitlines())

    assert installs() == 1
    assert installs() == 1
    (checkout / "pyproject.toml").write_text("[project]\nname = 'y'\n")
    assert installs() == 2


def test_one_worker_for_each_core_whatever_openmp_is_told(checkout: Path, programs: Path) -> None:
    """The command itself sets OMP_NUM_THREADS=1, which nproc would repeat as the number of cores."""
    shutil.copy(ROOT / "scripts" / "test", checkout / "scripts")
    fake(programs, "nproc", "echo ${OMP_NUM_THREADS:-6}")
    fake(programs, "python", f'echo "$*" >>{checkout}/log')
    with (checkout / "scripts" / "lib" / "setup.sh").open("a") as file:
        file.write(f"prepare_environment() {{ PYTHON={programs}/python; }}\n")
    environment = {"PATH": str(programs), "OMP_NUM_THREADS": "1"}
    subprocess.run([checkout / "scripts" / "test"], env=environment, check=True, capture_output=True)
    assert (
        "-m pytest --durations 20 --durations-min 1 -n 6 --dist loadgroup --max-worker-restart 0"
        in (checkout / "log").read_text().splitlines()
    )


def test_what_runs_beside_the_tests_is_told_behind_them_and_fails_the_command(checkout: Path, programs: Path) -> None:
    shutil.copy(ROOT / "scripts" / "test", checkout / "scripts")
    fake(programs, "nproc", "echo 1")
    fake(programs, "python", 'echo "said by $2"; [ "$2" != mypy ]')
    with (checkout / "scripts" / "lib" / "setup.sh").open("a") as file:
        file.write(f"prepare_environment() {{ PYTHON={programs}/python; }}\nhas_modules() {{ true; }}\n")
    command = [str(checkout / "scripts" / "test"), "--quick"]
    done = subprocess.run(command, env={"PATH": str(programs)}, check=False, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == "said by pytest\n"
    told = ["-- pytest", "-- ruff check .", "said by ruff", "-- ruff format --check .", "said by ruff", "-- mypy"]
    assert done.stderr.splitlines() == [*told, "said by mypy", "error: failed: mypy; "]


def test_torch_is_only_ever_asked_for_as_a_cpu_build() -> None:
    """A plain `torch` on Linux brings several GB of CUDA packages along."""
    text = SETUP.read_text()
    assert 'torch==2.13.0+cpu"' in text
    assert "[torch" not in text
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in ("test", "dev", "cli"):
        assert not [requirement for requirement in extras[extra] if "torch" in requirement]


@pytest.mark.parametrize("has_compiler", [False, True])
def test_a_compiler_comes_from_a_wheel_where_there_is_none(checkout: Path, programs: Path, has_compiler: bool) -> None:
    fake(programs, "python", f'echo "$*" >>{checkout}/log; [ "$1" != - ]')
    if has_compiler:
        fake(programs, "c++", "")
    assert run(checkout, programs, f"offer_compiler {programs}/python").returncode == 0
    asked = (checkout / "log").read_text() if (checkout / "log").exists() else ""
    assert ("pip install" in asked and "ziglang" in asked) != has_compiler


def test_tests_after_a_fault_are_not_blamed_for_it(tmp_path: Path) -> None:
    """A kernel's fault ends all that a process can do with its GPU: one test says so, the others which one it was."""
    (tmp_path / "cupy.py").write_text(
        "class cuda:\n"
        "    class runtime:\n"
        "        class CUDARuntimeError(RuntimeError): pass\n"
        "    class Device:\n"
        "        faulted = False\n"
        "        def __init__(self, number): pass\n"
        "        def synchronize(self):\n"
        "            if self.faulted: raise cuda.runtime.CUDARuntimeError('an illegal memory access')\n"
    )
    told = own_session(
        tmp_path,
        "import cupy, pytest\n"
        "@pytest.mark.gpu\ndef test_wrong(): assert False, 'wrong numbers'\n"
        "@pytest.mark.gpu\ndef test_right(): cupy.cuda.Device(0).synchronize()\n"
        "@pytest.mark.gpu\ndef test_faults():\n"
        "    cupy.cuda.Device.faulted = True\n    cupy.cuda.Device(0).synchronize()\n"
        "@pytest.mark.gpu\ndef test_after(): raise SystemError('never comes here')\n"
        "def test_without_gpu(): pass\n",
        gpu=True,
    )
    assert "2 passed" in told and "2 failed" in told and "1 error" in told, told
    assert "not run: test_it.py::test_faults left this process without a GPU" in told
    assert "never comes here" not in told
