"""The README's generated parts and its examples are true."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cupymla import config, driver, evidence
from cupymla_lab import gpu_tests

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_support_table_is_the_generated_one() -> None:
    """Regenerate it with `python -m cupymla list --markdown`."""
    begin, end = README.index(evidence.BEGIN), README.index(evidence.END) + len(evidence.END)
    assert README[begin:end] == evidence.support_markdown()


def test_every_evidence_file_belongs_to_a_kernel() -> None:
    """Evidence of a kernel that was renamed or removed would sit there unread. One file is of other tests."""
    rows = evidence.support_rows()
    known = {f"{row.operator}.{row.kernel}.{row.arch}{end}.json" for row in rows for end in ("", ".cpu")}
    assert {file.name for file in evidence.FOLDER.glob("*.json")} <= {*known, gpu_tests.FILE.name}


def test_environment_variables_are_the_ones_that_are_read() -> None:
    rows = dict(re.findall(r"^\| `(CUPYMLA_\w+)` \| (.+) \|$", README, flags=re.M))
    assert rows == config.VARIABLES


def examples() -> dict[str, str]:
    """The Python examples, by the heading they stand under."""
    return dict(re.findall(r"^### (\w+)$.*?^```python\n(.*?)^```$", README, flags=re.M | re.S))


def test_there_is_an_example_for_each_framework() -> None:
    found = examples()
    assert set(found) == {"CuPy", "JAX", "torch", "NumPy"}
    for name, code in found.items():
        assert len(code.splitlines()) <= 12, name


def run_example(name: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", examples()[name]], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("name", "package"), [("NumPy", "numpy"), ("JAX", "jax"), ("torch", "torch")])
def test_examples_run_on_the_cpu(name: str, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if name == "torch" and driver.available():
        pytest.skip("the example puts its tensors on the GPU when there is one")
    run_example(name)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "package"), [("CuPy", "cupy"), ("torch", "torch")])
def test_examples_run_on_the_gpu(name: str, package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    run_example(name)


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", README)
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []
