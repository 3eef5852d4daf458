"""The SDK's page and the notebooks, run as they stand, with a tiny model in place of the named one."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import nbclient
import nbformat
import pytest

from trainsession.transport.embedded import open_embedded

ROOT = Path(__file__).parents[2]
NAMED = "HuggingFaceTB/SmolLM2-135M-Instruct"


def run_page(name: str, models: Path, least: int) -> str:
    """Everything that a page's Python blocks print, run one after another; it has ``least`` of them or more."""
    from trainsession.runtime.host import LocalHost

    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / name).read_text(), re.DOTALL)
    assert len(blocks) >= least
    names: dict[str, object] = {}
    service = open_embedded(models / "data", open_host=LocalHost)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for block in blocks:
            exec(compile(block.replace(NAMED, "tiny-llama"), f"docs/{name}", "exec"), names)  # noqa: S102
    service.close()
    return printed.getvalue()


def test_the_sdk_page_runs(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed = run_page("sdk.md", models, 9)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    assert "{'row': 4}" in printed
    assert "nan" not in printed


def test_the_page_of_the_openai_door_runs(models: Path) -> None:
    printed = run_page("openai.md", models, 5)
    assert "CompletionUsage(completion_tokens=6" in printed
    assert "temperature invalid_request req_" in printed


def test_the_page_of_reinforcement_learning_runs(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed = run_page("rl.md", models, 4)
    assert re.findall(r"^(\d) (\d) [\d.]+$", printed, re.MULTILINE) == [("0", "0"), ("1", "1"), ("2", "1")]
    assert "'failed': 0.0" in printed
    assert "number 3" in (tmp_path / "trajectories.html").read_text()


@pytest.mark.parametrize("name", ["quickstart", "custom_loss"])
def test_the_notebooks_run(models: Path, name: str) -> None:
    """In a kernel of its own, where a loop is running already; its service is a process of its own."""
    notebook = nbformat.read(ROOT / "examples" / f"{name}.ipynb", as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace(NAMED, "tiny-llama")
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.text for output in outputs if output.get("name") == "stdout")
    if name == "quickstart":
        (losses,) = re.findall(r"^[\d.]+(?: [\d.]+){9}$", printed, re.MULTILINE)
        first, *_, last = map(float, losses.split())
        assert last < first
        tables = [output.data.get("text/html", "") for output in outputs if "data" in output]
        assert any("idle" in table for table in tables), "usage is a table"
    else:
        losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed)]
        assert losses[0] == pytest.approx(2.773, abs=2e-3)
        assert losses[-1] < losses[0]
        assert "RuntimeError('the reward model is down')" in printed
        assert "IncompleteGradients" in printed


def test_notebooks_are_committed_without_outputs() -> None:
    for path in (ROOT / "examples").glob("*.ipynb"):
        notebook = nbformat.read(path, as_version=4)
        assert all(not cell.outputs for cell in notebook.cells if cell.cell_type == "code"), path.name
