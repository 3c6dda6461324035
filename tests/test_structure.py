"""The project's shape: who imports whom, what is public, and pages that say what is."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from repo_service.api.errors import HTTP_CODES, STATUS
from repo_service.domain import errors
from repo_service.domain.errors import KvgraftError, error_types
from repo_service.settings import Settings

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PACKAGES = ("repo_service", "engine_adapter")

# Who may import what, by the longest prefix of the module's name that is here.
LAYERS = {
    "repo_service": {"repo_service.version"},
    "repo_service.version": set(),
    "repo_service.settings": {"repo_service.domain"},
    "repo_service.domain": {"repo_service.domain"},
    "repo_service.connections": set(),
    "repo_service.storage": {"repo_service.storage", "repo_service.connections", "repo_service.domain"},
    "repo_service.index": {"repo_service.index", "repo_service.domain", "repo_service.version"},
    "repo_service.services": {f"repo_service.{name}" for name in ("services", "storage", "index", "domain", "version")},
    "repo_service.api": {f"repo_service.{name}" for name in ("api", "services", "domain", "settings", "version")},
    "repo_service.client": {
        f"repo_service.{name}" for name in ("client", "services", "connections", "domain", "version")
    },
    "repo_service.cli": {
        f"repo_service.{name}" for name in ("cli", "api", "client", "services", "domain", "settings", "version")
    },
    "engine_adapter": {"engine_adapter", "repo_service.client", "repo_service.domain"},
    # The commands that need an engine are part of the CLI in all but their place.
    "engine_adapter.cli": {"engine_adapter", "repo_service.cli", "repo_service.client", "repo_service.domain"},
    "engine_adapter.demo": {"engine_adapter", "repo_service.cli", "repo_service.client", "repo_service.domain"},
    "migrations": {"repo_service.index"},
}

# Each library has a home.
HOMES = {
    "alembic": {"repo_service.index", "migrations"},
    "anyio": {"repo_service.api"},
    "charset_normalizer": {"engine_adapter.documents"},
    "fastapi": {"repo_service.api"},
    "numcodecs": {"repo_service.domain.frame"},
    "numpy": set(),
    "opentelemetry": {"repo_service.api"},
    "pathspec": {"engine_adapter.documents"},
    "prometheus_client": {"repo_service.api"},
    "pypdf": {"engine_adapter.documents"},
    "rich": {"repo_service.cli"},
    "sqlalchemy": {"repo_service.index", "migrations"},
    "starlette": {"repo_service.api"},
    "torch": {"engine_adapter"},
    "transformers": {"engine_adapter"},
    "typer": {"repo_service.cli", "engine_adapter.cli"},
    "urllib3": set(),
    "uvicorn": {"repo_service.api"},
    "zarr": {"repo_service.client"},
}

# What the domain may use: nothing that reads, writes, waits or knows the machine.
PURE = {
    "__future__", "abc", "array", "blake3", "collections", "contextlib", "dataclasses", "datetime", "enum", "fnmatch", "functools", "hashlib", "json",
    "math", "numcodecs", "pydantic", "re", "repo_service", "types", "typing", "typing_extensions",
}  # fmt: skip

LONGEST_FILE = 400


def sources(*folders: str) -> dict[str, Path]:
    """Python files by module name."""
    found = {}
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = sources(*PACKAGES, "migrations")


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, at any place in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} imports relatively"
            assert node.module is not None
            yield node.module
            yield from (name for alias in node.names if (name := f"{node.module}.{alias.name}") in MODULES)


def under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def layer(module: str) -> str:
    return max((name for name in LAYERS if under(module, name)), key=len)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_its_layer_may(module: str) -> None:
    # The package itself holds nothing but the version.
    names = [f"{name}.version" if name == "repo_service" else name for name in imports(MODULES[module])]
    own = [name for name in names if name.split(".")[0] in (*PACKAGES, "migrations")]
    allowed = LAYERS[layer(module)]
    beyond = sorted({name for name in own if not any(under(name, prefix) for prefix in allowed)})
    assert not beyond, f"{module} may import {sorted(allowed)} and imports {beyond}"


@pytest.mark.parametrize("module", MODULES)
def test_a_library_is_used_in_its_home_only(module: str) -> None:
    for name in imports(MODULES[module]):
        homes = HOMES.get(name.split(".")[0])
        assert homes is None or any(under(module, home) for home in homes), f"{module} imports {name}"


@pytest.mark.parametrize("module", [name for name in MODULES if under(name, "repo_service.domain")])
def test_the_domain_is_pure(module: str) -> None:
    assert {name.split(".")[0] for name in imports(MODULES[module])} <= PURE


_WITHOUT_AN_ENGINE = """
import importlib, sys

class NoEngine:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "transformers", "safetensors", "accelerate", "engine_adapter"}:
            raise ModuleNotFoundError(f"no module named {name}", name=name)

sys.meta_path.insert(0, NoEngine())
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def test_repo_service_needs_no_engine() -> None:
    names = [name for name in MODULES if under(name, "repo_service") and not name.endswith("__main__")]
    command = [sys.executable, "-W", "error", "-c", _WITHOUT_AN_ENGINE, *names]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stderr


# The public surface


def table(page: Path, first_column: str) -> list[list[str]]:
    """The rows of the page's tables whose first column has this heading, without code marks around cells."""
    rows: list[list[str]] = []
    inside = False
    for line in page.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            inside = False
        elif cells[0] == first_column:
            inside = True
        elif inside and not set(cells[0]) <= set("-: "):
            rows.append([cell.strip("`") for cell in cells])
    return rows


def exports(path: Path) -> list[str]:
    """``__all__`` of a package, by its source."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            names: list[str] = ast.literal_eval(node.value)
            return names
    return []


def test_what_packages_export_is_what_the_page_says() -> None:
    documented = {package: re.findall(r"[\w]+", names) for package, names in table(DOCS / "architecture.md", "package")}
    exported = {
        name: names for name, path in MODULES.items() if path.name == "__init__.py" and (names := exports(path))
    }
    assert {name: sorted(names) for name, names in documented.items()} == {
        name: sorted(names) for name, names in exported.items()
    }


@pytest.mark.parametrize("package", [name for name, path in MODULES.items() if path.name == "__init__.py"])
def test_every_exported_name_is_there(package: str) -> None:
    module = importlib.import_module(package)
    assert all(getattr(module, name) is not None for name in getattr(module, "__all__", ()))


# Pages against the tree


def test_the_page_maps_every_module_in_one_line() -> None:
    documented: list[str] = []
    folder = ""
    for line in (DOCS / "architecture.md").read_text().splitlines():
        if heading := re.match(r"### `([\w/]+)`", line):
            folder = heading[1]
        elif row := re.match(r"\| `(\w+\.py)` \| (.+) \|$", line):
            documented.append(f"{folder}/{row[1]}")
            assert 10 <= len(row[2]) <= 130, f"{folder}/{row[1]} is described in {len(row[2])} characters"
    assert len(set(documented)) == len(documented)
    tree = {str(path.relative_to(ROOT)) for path in MODULES.values() if path.name != "__init__.py" or defines(path)}
    assert sorted(tree - set(documented)) == [], "modules that docs/architecture.md leaves out"
    assert sorted(set(documented) - tree) == [], "modules that docs/architecture.md names and that are not there"


def defines(path: Path) -> bool:
    """Whether a package's own file holds more than names that it passes on."""
    return any(isinstance(node, (ast.FunctionDef, ast.ClassDef)) for node in ast.parse(path.read_text()).body)


def test_every_package_has_a_heading() -> None:
    headings = re.findall(r"^### `([\w/]+)`", (DOCS / "architecture.md").read_text(), re.MULTILINE)
    folders = {str(path.parent.relative_to(ROOT)) for path in MODULES.values()}
    assert sorted(headings) == sorted(folders)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_says_what_it_is_for(module: str) -> None:
    text = MODULES[module].read_text()
    assert not text or ast.get_docstring(ast.parse(text)), f"{module} has no docstring"


@pytest.mark.parametrize("module", MODULES)
def test_a_file_can_be_read_in_one_sitting(module: str) -> None:
    assert len(MODULES[module].read_text().splitlines()) <= LONGEST_FILE


def test_the_page_lists_every_error_code_with_its_status() -> None:
    own = {code: kind for code, kind in error_types().items() if kind.__module__.split(".")[0] in PACKAGES}
    rows = table(DOCS / "errors.md", "code")
    documented = {code: (name, int(status)) for code, name, status, meaning in rows if meaning}
    assert len(documented) == len(rows)
    assert documented == {code: (kind.__name__, STATUS[code]) for code, kind in own.items()}


def test_the_page_lists_the_codes_of_http_and_of_the_command() -> None:
    rows = table(DOCS / "errors.md", "HTTP code")
    assert {code: int(status) for code, status, meaning in rows if meaning} == {
        code: status for status, code in HTTP_CODES.items() if code not in error_types()
    }
    raised = {
        node.args[0].value
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", getattr(node.func, "id", None)) == "CommandFailed"
        and isinstance(node.args[0], ast.Constant)
    }
    documented = {code for code, meaning in table(DOCS / "errors.md", "command's code") if meaning}
    assert documented == raised - set(error_types()) | {"usage"}


def test_the_docstring_draws_the_error_tree() -> None:
    drawn: list[tuple[int, str]] = []
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r" {4}([│├└─ ]*)(\w+)", line):
            drawn.append((len(match[1]) // 4, match[2]))
    parents: dict[str, str | None] = {}
    above: list[str] = []
    for depth, name in drawn:
        del above[depth:]
        parents[name] = above[-1] if above else None
        above.append(name)
    own = [kind for kind in error_types().values() if kind.__module__ == errors.__name__]
    bases = {kind.__name__: None if kind is KvgraftError else kind.__bases__[0].__name__ for kind in own}
    assert parents == bases


def test_every_setting_is_documented_as_it_is() -> None:
    rows = table(DOCS / "settings.md", "setting")
    fields = Settings.model_fields
    assert [row[0] for row in rows] == [f"KVGRAFT_{name.upper()}" for name in fields]
    for (_, default, meaning), field in zip(rows, fields.values(), strict=True):
        assert default == (str(field.default).lower() if field.default != "" else "none")
        assert meaning == field.description


def test_every_environment_variable_is_documented() -> None:
    documented = {row[0] for first in ("setting", "variable") for row in table(DOCS / "settings.md", first)}
    read = {
        node.value
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"KVGRAFT(_[A-Z0-9]+)+", node.value)
    }
    own = {f"KVGRAFT_{name.upper()}" for name in Settings.model_fields}
    assert documented == read | own


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for page in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
            if "://" not in target and not (page.parent / target).exists():
                broken.append(f"{page.relative_to(ROOT)} -> {target}")
    assert broken == []


def test_decisions_are_numbered_and_listed() -> None:
    pages = sorted((DOCS / "decisions").glob("*.md"))
    assert [int(page.name[:4]) for page in pages] == list(range(1, len(pages) + 1))
    listing = (DOCS / "architecture.md").read_text()
    for page in pages:
        assert page.read_text().startswith(f"# {int(page.name[:4])}. ")
        assert f"(decisions/{page.name})" in listing


# LMCache 926

CODE = sources(*PACKAGES, "migrations", "benchmarks", "examples")
UNSAFE_MODULES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}


def unsafe_calls(tree: ast.AST) -> Iterator[str]:
    """Calls that run what is in the data they are given."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if name in {"eval", "exec", "pd.read_pickle", "pandas.read_pickle"}:
            yield name
        if name == "torch.load" and arguments.get("weights_only") != "True":
            yield name
        if arguments.get("allow_pickle", "False") != "False":
            yield name


@pytest.mark.parametrize("module", CODE)
def test_lmcache_926_nothing_is_pickled(module: str) -> None:
    tree = ast.parse(CODE[module].read_text())
    assert not {name.split(".")[0] for name in imports(CODE[module])} & UNSAFE_MODULES
    assert not list(unsafe_calls(tree))


def test_lmcache_926_the_scan_finds_what_it_looks_for() -> None:
    for text in ("torch.load(f)", "torch.load(f, weights_only=False)", "np.load(f, allow_pickle=True)", "eval(text)"):
        assert list(unsafe_calls(ast.parse(text)))
    for text in ("torch.load(f, weights_only=True)", "np.load(f)", "model.eval()"):
        assert not list(unsafe_calls(ast.parse(text)))


# What users of comparable systems reported

REPORTS = (
    "zarr-python #3411", "zarr-python #3682", "zarr-python #2056", "zarr-python #2357", "zarr-specs #130", "s3fs #903",
    "s3fs #624", "bazel-remote PR 759", "quay PR 6318", "huggingface_hub #3643", "starlette #1012", "fastapi #2578",
    "jentic-one PR 529", "transformers #25420", "transformers #37574", "llama-recipes #78", "LMCache #4991",
    "LMCache #1139, #2136", "LMCache #2757", "LMCache #926", "vLLM #44701", "vLLM #56311", "vLLM #49438", "vLLM PR 17045",
    "sglang #24758", "Mooncake #2475", "dynamo #15079", "llama.cpp #26676", "llama.cpp #27439", "safetensors #762",
)  # fmt: skip


def names_of_tests(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_")
    }


def test_every_report_has_a_test_or_a_later_issue() -> None:
    rows = table(DOCS / "reports.md", "report")
    assert [row[0] for row in rows] == list(REPORTS)
    for report, behaviour, where in rows:
        assert behaviour
        named = re.findall(r"(test_\w+)\.py::(test_\w+)", where)
        later = re.findall(r"issue ([3-9])\b", where)
        assert named or later, f"{report} has neither a test nor a later issue"
        for file, name in named:
            path = ROOT / "tests" / f"{file}.py"
            assert path.is_file(), f"{report}: there is no {path.name}"
            assert name in names_of_tests(path), f"{report}: {path.name} has no {name}"
