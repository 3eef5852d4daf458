"""Imports point downwards only (docs/architecture.md), and the light parts stay light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "trainsession"

CONTRACT = {"types", "errors", "limits", "wire", "_version"}
ENGINE_VALUES = {"engine.api", "engine.checkpoint", "engine.loss_inputs"}
"""What the service knows of an engine: its interface, checkpoint files, loss signatures. No torch."""
ALLOWED = {
    **dict.fromkeys(CONTRACT, CONTRACT),
    "tokenization": CONTRACT,
    "transport": CONTRACT,
    "client": CONTRACT | {"tokenization", "transport", "engine.loss_inputs"},
    "store": CONTRACT,
    "engine": CONTRACT | {"tokenization"},
    "service": CONTRACT | {"store"} | ENGINE_VALUES,
    "server": CONTRACT | {"service", "engine.api", "tokenization"},
    "server.doors": CONTRACT | {"service", "server", "tokenization"},
    "__init__": CONTRACT | {"client", "tokenization"},
}
"""Layer to what its modules may import of trainsession, beside itself."""
COMPOSITION_ROOTS = ("transport.embedded", "transport.serving", "transport.foreground", "runtime", "cli")
"""Modules that put the parts together, and may import any of them."""
MAY_IMPORT_TORCH_LAZILY = {"client.custom_loss", "types.data"}
SERVER_PACKAGES = {"fastapi", "starlette", "uvicorn", "sqlalchemy", "alembic"}


@dataclass(frozen=True)
class Import:
    module: str
    """The importing module, without ``trainsession.``."""
    target: str
    lazy: bool
    """Inside a function."""
    line: int

    def __str__(self) -> str:
        return f"{self.module} (line {self.line}) imports {self.target}"


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def run_time_imports(path: Path) -> Iterator[Import]:
    """Every import that can run: those under ``if TYPE_CHECKING`` cannot."""
    module = module_name(path)
    package = module.split(".") if path.name == "__init__.py" and module != "__init__" else module.split(".")[:-1]

    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and ast.unparse(child.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
                continue
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield Import(module, alias.name, lazy, child.lineno)
            elif isinstance(child, ast.ImportFrom):
                base = child.module or ""
                if child.level:
                    parents = package[: len(package) - (child.level - 1)]
                    base = ".".join(["trainsession", *parents, *([base] if base else [])])
                if base == "trainsession" or (SOURCE / "/".join(base.split(".")[1:])).is_dir():
                    for alias in child.names:  # `from . import x`: x may be a module
                        yield Import(module, f"{base}.{alias.name}", lazy, child.lineno)
                else:
                    yield Import(module, base, lazy, child.lineno)
            yield from walk(child, lazy or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)))

    yield from walk(ast.parse(path.read_text()), False)


def all_imports() -> list[Import]:
    return [found for path in sorted(SOURCE.rglob("*.py")) for found in run_time_imports(path)]


def is_within(module: str, layer: str) -> bool:
    return module == layer or module.startswith(layer + ".")


def layer_of(module: str) -> str:
    return max((layer for layer in ALLOWED if is_within(module, layer)), key=len, default="")


def test_every_module_belongs_to_a_layer() -> None:
    modules = [module_name(path) for path in SOURCE.rglob("*.py")]
    assert len(modules) > 50
    strays = [m for m in modules if not layer_of(m) and not any(is_within(m, root) for root in COMPOSITION_ROOTS)]
    assert strays == []


def test_imports_point_downwards() -> None:
    wrong = []
    for found in all_imports():
        if any(is_within(found.module, root) for root in COMPOSITION_ROOTS):
            continue
        target = found.target.removeprefix("trainsession").removeprefix(".")
        if not is_within(found.target, "trainsession") or not target:
            continue
        layer = layer_of(found.module)
        inside = is_within(target, layer) and not (layer == "server" and is_within(target, "server.doors"))
        application = found.module == "server.app" and is_within(target, "server.doors")
        public_version = target == "__version__"
        if not (inside or application or public_version or any(is_within(target, may) for may in ALLOWED[layer])):
            wrong.append(str(found))
    assert wrong == []


@pytest.mark.parametrize("library", ["torch", "transformers", "peft", "gguf", "safetensors"])
def test_only_the_engine_imports_model_libraries(library: str) -> None:
    wrong = [
        str(found)
        for found in all_imports()
        if is_within(found.target, library)
        and not is_within(found.module, "engine")
        and not is_within(found.module, "runtime")
        and not (library == "torch" and found.lazy and found.module in MAY_IMPORT_TORCH_LAZILY)
    ]
    assert wrong == []


def test_the_client_side_never_imports_a_server_library() -> None:
    light = ("types", "errors", "limits", "wire", "client", "tokenization", "transport.http", "__init__")
    wrong = [
        str(found)
        for found in all_imports()
        if any(is_within(found.module, part) for part in light) and found.target.split(".")[0] in SERVER_PACKAGES
    ]
    assert wrong == []


def test_recipes_use_public_names_only() -> None:
    for path in sorted((ROOT / "cookbook").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            private = [name for name in names if name.startswith("trainsession.")]
            assert not private, f"{path.name} (line {getattr(node, 'lineno', 0)}) imports {private[0]}"


def modules_after(statement: str) -> set[str]:
    """Top-level packages that a fresh interpreter holds after a statement."""
    script = f"{statement}\nimport sys\nprint(' '.join({{m.split('.')[0] for m in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.split())


def test_importing_the_sdk_loads_nothing_heavy() -> None:
    loaded = modules_after("import trainsession")
    assert "trainsession" in loaded
    assert loaded & {"torch", "transformers", "tokenizers", *SERVER_PACKAGES} == set()


def test_service_and_engine_contract_need_no_torch() -> None:
    names = ", ".join(f"trainsession.{name}" for name in sorted(ENGINE_VALUES))
    loaded = modules_after(f"import {names}, trainsession.service.service, trainsession.server.app")
    assert "fastapi" in loaded
    assert loaded & {"torch", "transformers"} == set()


def test_the_service_runs_where_torch_is_not_installed() -> None:
    blocked = "import sys\nsys.modules['torch'] = None\nimport trainsession.service.service, trainsession.server.app"
    assert "trainsession" in modules_after(blocked)
