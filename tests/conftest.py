"""What every test shares: GPU tests are skipped without a GPU and counted, and GPU runs leave evidence behind."""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib.metadata
import importlib.util
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import registry_kit
from hypothesis import settings

from cupymla import driver
from cupymla_lab.emulate.host import library, machine
from cupymla_lab.recorder import Recorder

NO_GPU = "needs a CUDA GPU"

# What tests can do without, by skipping: its name, whether it is here.
OPTIONAL: dict[str, Callable[[], bool]] = {
    "torch": lambda: importlib.util.find_spec("torch") is not None,
    "jax": lambda: importlib.util.find_spec("jax") is not None,
    "transformers": lambda: importlib.util.find_spec("transformers") is not None,
    "c++": machine.available,
}

# Options without which the tests marked like them are left out.
ASKED_FOR = {
    "--interpret-all": "run every small case of every kernel interpreted",
    "--compile-planned": "compile every variant that a plan can choose",
    "--compile-all": "compile every variant that any call may want",
}

FIRST = ("test_build_folder.py", "test_processes.py", "test_compile_all.py")
"""Files whose tests are ahead of all others; see `pytest_collection_modifyitems`."""

registry_kit.leave_out_incomplete()


@functools.cache
def gpu_present() -> bool:
    return driver.available()


# JAX would take most of each GPU's memory for this process, and programs that tests start want some.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# On a CPU tests compile many programs and run each once or twice, so LLVM's optimisations cost more than they save.
if not gpu_present():
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")
    # Twice as quick to compile. An XLA that does not know a flag ends its process, so it is for those that were tried.
    if OPTIONAL["jax"]() and importlib.metadata.version("jaxlib").startswith("0.10."):
        os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")

JAX_PROGRAMS = pytest.StashKey["tempfile.TemporaryDirectory[str]"]()
"""Of the process that starts all others: where they keep compiled programs for each other."""


def pytest_configure(config: pytest.Config) -> None:
    """Workers and programs that tests start compile the same small programs, and end before they gain by it."""
    if not gpu_present() and "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = config.stash[JAX_PROGRAMS] = tempfile.TemporaryDirectory(prefix="cupymla-jax-")
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder.name
        os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"


def pytest_unconfigure(config: pytest.Config) -> None:
    folder = config.stash.get(JAX_PROGRAMS, None)
    if folder is not None:
        del os.environ["JAX_COMPILATION_CACHE_DIR"], os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"]
        folder.cleanup()


# The same goes for kernels in the engine, of which a test runs each a few times.
library.OPTIMISATION = "-O0"

# What an emulated launch frees the next one asks for again: glibc keeps it until a file has ended (see
# `pytest_runtest_teardown`), and has one heap for the threads of all calls. Numbers: malloc.h.
_MALLOC_OPTIONS = {-1: -1, -3: 32 << 20, -8: 1}  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX
_mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
for _option, _value in _MALLOC_OPTIONS.items():
    if _mallopt is not None:
        _mallopt(_option, _value)

# A first compile inside an example takes seconds, and shared runners stall: a deadline would only make tests flaky.
settings.register_profile("cupymla", deadline=None, print_blob=True)
settings.load_profile("cupymla")


@pytest.fixture
def signals_heard() -> Iterator[None]:
    """Signals that end a program, as one in the foreground has them: `nohup` and a shell's `&` have them ignored."""
    before = {each: signal.signal(each, signal.SIG_DFL) for each in (signal.SIGTERM, signal.SIGHUP)}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    for option, meaning in ASKED_FOR.items():
        parser.addoption(option, action="store_true", help=meaning)
    parser.addoption("--require-all", action="store_true", help=f"fail where one of {', '.join(OPTIONAL)} is missing")
    parser.addoption("--random-problems", type=int, metavar="N", help="draw N problems for each MLA operator")


def markers_unasked(config: pytest.Config) -> set[str]:
    """Markers of the tests that are left out."""
    asked = {option for option in ASKED_FOR if config.getoption(option)}
    if "--compile-all" in asked:
        asked.add("--compile-planned")
    return {option.removeprefix("--").replace("-", "_") for option in ASKED_FOR.keys() - asked}


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parameters that nobody asks for become no tests: they would be twice as many as all others."""
    unasked = markers_unasked(metafunc.config)
    markers = metafunc.definition.own_markers
    for place, marker in enumerate(markers):
        if marker.name == "parametrize":
            names, given = marker.args
            values = list(given)
            kept = [value for value in values if unasked.isdisjoint(each.name for each in getattr(value, "marks", ()))]
            # Of none pytest makes a test that is skipped; below it leaves all of them out.
            markers[place] = pytest.mark.parametrize(names, kept or values, **marker.kwargs).mark


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """One worker takes all GPU tests, so that they neither compete for memory nor split the evidence. Tests that fork
    come first: a worker's heap grows past what a system lets it double. Then whole compilations: the engine's tests,
    which would compile to PTX alone, find them kept."""
    unasked = markers_unasked(config)
    named = [(item, {mark.name for mark in item.iter_markers()}) for item in items]
    items[:] = [item for item, names in named if unasked.isdisjoint(names)]
    config.hook.pytest_deselected(items=[item for item, names in named if not unasked.isdisjoint(names)])
    needing = [item for item, names in named if "gpu" in names and unasked.isdisjoint(names)]
    config.stash[COLLECTED] = {item.path for item in items}, {item.path for item in needing}
    if config.pluginmanager.hasplugin("xdist"):
        for item in needing:
            item.add_marker(pytest.mark.xdist_group("gpu"))
    yield
    if not gpu_present():
        config.stash[GPU_TESTS] = leave_one_of_each_gpu_test(items)
    items.sort(key=lambda item: FIRST.index(item.path.name) if item.path.name in FIRST else len(FIRST))
    if getattr(config.option, "loadgroup", False):
        for item in items:
            name_with_group(item)


def name_with_group(item: pytest.Item) -> None:
    """What `--dist loadgroup` goes by. xdist 3.8 writes it where pytest 9.2 does not look, and groups nothing."""
    groups = sorted({str(mark.args[0]) for mark in item.iter_markers("xdist_group")})
    if groups and "@" not in item.nodeid.rpartition("]")[2]:
        item._id = type(item.id).parse(f"{item.nodeid}@{'_'.join(groups)}")


COLLECTED = pytest.StashKey[tuple[set[Path], set[Path]]]()
"""Files whose tests were collected, asked for or not, and those of them with tests for a GPU."""

GPU_TESTS = pytest.StashKey[int]()
"""Of a machine without a GPU: how many tests need one, of those that were asked for."""


def leave_one_of_each_gpu_test(items: list[pytest.Item]) -> int:
    """Of a GPU test with its parameters one is skipped for all: thousands would take a while. How many there were."""
    count, kept, seen = 0, [], set()
    for item in items:
        if item.get_closest_marker("gpu"):
            count += 1
            function = item.nodeid.partition("[")[0]
            if function in seen:
                continue
            seen.add(function)
        kept.append(item)
    items[:] = kept
    return count


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """The garbage collector leaves alone what is there by now: it would look through all tests, a second each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        # Tests make many objects and few circles: looked for a tenth as often, they take a tenth of the time.
        gc.set_threshold(10_000, 10, 100)
        gc.enable()


GPU_LOST = pytest.StashKey[str]()
"""Of the session: the test after which this process can do nothing more with its GPU."""


def gpu_is_lost() -> bool:
    """Whether a kernel has faulted: every call of the driver then fails, whoever makes it."""
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return False
    try:
        cupy.cuda.Device(0).synchronize()
    except cupy.cuda.runtime.CUDARuntimeError:
        return True
    return False


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if not item.get_closest_marker("gpu"):
        return
    if not gpu_present():
        pytest.skip(NO_GPU)
    lost = item.session.stash.get(GPU_LOST, None)
    if lost is not None:
        pytest.fail(f"not run: {lost} left this process without a GPU", pytrace=False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.failed and item.get_closest_marker("gpu") and GPU_LOST not in item.session.stash and gpu_is_lost():
        item.session.stash[GPU_LOST] = item.nodeid
    return report


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Behind each file glibc gives back what is free: it keeps what emulated launches had, which grew to 12 GB."""
    if nextitem is None or nextitem.path != item.path:
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def missing() -> list[str]:
    """What of `OPTIONAL` is not here."""
    return [name for name, there in OPTIONAL.items() if not there()]


def pytest_sessionstart(session: pytest.Session) -> None:
    """Where things are required, to skip for want of them is a failure."""
    if session.config.getoption("--require-all") and missing():
        pytest.exit(f"required, and not here: {', '.join(missing())}", returncode=1)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker tells xdist how many GPU tests there are."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["gpu_tests"] = session.config.stash.get(GPU_TESTS, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """All workers have collected the same; one that died tells nothing."""
    told = getattr(node, "workeroutput", {}).get("gpu_tests", 0)
    node.config.stash[GPU_TESTS] = max(told, node.config.stash.get(GPU_TESTS, 0))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name in missing():
        terminalreporter.write_line(f"tests that need {name} were skipped: it is not installed")
    skipped = terminalreporter.config.stash.get(GPU_TESTS, 0)
    if skipped:
        terminalreporter.write_line(f"{skipped} GPU tests skipped: no CUDA GPU on this machine")


@pytest.fixture(scope="session")
def evidence() -> Iterator[Recorder]:
    """Collects what GPU tests found; writes an operator's evidence when all its cases ran and passed."""
    recorder = Recorder()
    yield recorder
    recorder.write()


HOST = pytest.mark.skipif(not machine.available(), reason="needs a C++ compiler on x86-64")


@pytest.fixture(params=[pytest.param("host", marks=HOST), pytest.param("gpu", marks=pytest.mark.gpu)])
def where(request: pytest.FixtureRequest) -> Literal["host", "gpu"]:
    """The machine that an emulated kernel runs on."""
    found: Literal["host", "gpu"] = request.param
    return found


@pytest.fixture
def cp() -> Any:
    """CuPy; a test without it is skipped."""
    return pytest.importorskip("cupy")


@pytest.fixture
def hopper() -> None:
    """Skips a test of a kernel for Hopper on any other GPU."""
    if driver.compute_capability(0) != (9, 0):
        pytest.skip("the kernel is for Hopper")
