"""The dependency direction, as data; and the public names."""

import ast
import subprocess
import sys
from pathlib import Path

import autobatch

PACKAGE = Path(autobatch.__file__).parent

ONLY_IN = {
    "torch": ("devices/", "checkpointing.py", "workloads/", "training.py"),
    "optuna": ("search.py", "cli/tune.py"),  # the command sets Optuna's log level
    "tabulate": ("report.py",),
    "click": ("cli/",),
    "rich": ("cli/",),
    "pynvml": ("devices/nvml.py",),
}
"""A third-party package, and the places that may import it (outside `if TYPE_CHECKING`)."""

NEVER = {
    "records.py": ("autobatch.",),
    "errors.py": ("autobatch.",),
    "plan.py": ("autobatch.devices", "autobatch.ceiling", "autobatch.search", "autobatch.pipeline"),
    "profiles.py": ("autobatch.devices", "autobatch.ceiling", "autobatch.search", "autobatch.pipeline"),
    "report.py": ("autobatch.devices", "autobatch.ceiling", "autobatch.search", "autobatch.pipeline"),
    "emit/": ("autobatch.devices", "autobatch.ceiling", "autobatch.search", "autobatch.pipeline"),
    "ceiling.py": ("autobatch.search", "autobatch.pipeline", "autobatch.plan"),
    "search.py": ("autobatch.pipeline", "autobatch.plan"),
    "devices/": ("autobatch.ceiling", "autobatch.search", "autobatch.pipeline", "autobatch.plan"),
}
"""A place, and the prefixes of what it must not import."""


def imports(path):
    """What a module imports when it runs: names under `if TYPE_CHECKING` do not count."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and getattr(branch.test, "id", "") == "TYPE_CHECKING"
        for node in ast.walk(branch)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def modules():
    return [(path.relative_to(PACKAGE).as_posix(), path) for path in sorted(PACKAGE.rglob("*.py"))]


def test_third_party_packages_are_imported_only_where_they_belong():
    strays = [
        (name, imported)
        for name, path in modules()
        for imported in imports(path)
        if not name.startswith(ONLY_IN.get(imported.split(".")[0], ("",)))
    ]
    assert strays == []


def test_no_module_imports_against_the_direction():
    strays = [
        (name, imported)
        for name, path in modules()
        for place, forbidden in NEVER.items()
        if name.startswith(place)
        for imported in imports(path)
        if imported.startswith(forbidden)
    ]
    assert strays == []


def test_public_names_are_sorted_and_there():
    assert autobatch.__all__ == sorted(autobatch.__all__)
    assert all(hasattr(autobatch, name) for name in autobatch.__all__)


def test_importing_autobatch_does_not_import_torch():
    code = (
        "import sys, autobatch, autobatch.report, autobatch.emit, autobatch.profiles; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
