"""The rules of the architecture, checked in the syntax trees: allowed imports, and the place for each kind of code."""

from __future__ import annotations

import ast
import graphlib
import importlib
import inspect
import re
import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kdist
from tests.helpers.layers import (
    ALL_IMPORTS,
    BACKENDS,
    FILES,
    MODULES,
    ORDER,
    ROOT,
    edges,
    imports_of,
    package_of,
    package_of_module,
)

FRAMEWORKS = ("tensorflow", "jax", "jaxlib", "torch")

# Files that only one or two backends have, because their frameworks work differently.
EXTRA_FILES = {
    "tensorflow": {
        "iteration.py",  # TensorFlow compiles loops over datasets; the other backends run them in Python
        "effects.py",  # TensorFlow has its own parameter servers; kdist records how functions change variables
        "per_worker.py",  # TensorFlow's workers read datasets without Python
        "scheduled.py",  # they run compiled programs
        "served.py",  # the variables are on TensorFlow's parameter servers
        "tasks.py",  # each task runs a TensorFlow server
        "collectives.py",  # a graph calls the sums in shared memory, in its own order
        "xla.py",  # TensorFlow's collectives must stay outside of XLA's programs
    },
    "jax": {
        "watch.py",  # JAX terminates the process from C++ when a worker is lost
        "dispatched.py",  # JAX returns before a program has run; reading its arrays waits for other workers
        "fused_sums.py",  # gloo sends the tensors of an XLA program one after another
        "row_rules.py",  # so kdist divides the program instead of XLA
        "moments.py",  # XLA runs four collectives for one BatchNormalization
        "programs.py",  # JAX compiles pure functions, but Keras code has state
        "scopes.py",  # Keras code sees its state in these scopes during a trace
        "collectives.py",  # one program contains the collectives of all replicas
        "storage.py",  # JAX has its own arrays over a mesh
        "uneven_run.py",  # they need equal shapes on all devices
        "tables.py",  # only TensorFlow's coordinator looks up rows on its servers
    },
    "torch": {
        "storage.py",  # PyTorch can shard tensors, but not the variables of Keras
        "copies.py",  # PyTorch's replicas of a process need tensors of their own
        "divided.py",  # Keras's layers on PyTorch need whole tensors
        "seeds.py",  # reading a seed from a GPU waits for all work on the GPU
        "moments.py",  # one collective instead of three for few replicas
        "modules.py",  # PyTorch modules inside a Keras model read their parameters directly
        "tables.py",  # only TensorFlow's coordinator looks up rows on its servers
        "recorded_steps.py",  # Keras does not compile steps on PyTorch, so kdist records a step,
        "recording.py",  # operation by operation,
        "replay.py",  # and runs it again,
        "schedule.py",  # with exchanges that overlap with computation
    },
}
# Modules for datasets of a framework.
SOURCES = {"tf_data.py": "tensorflow", "torch_loader.py": "torch"}
# Private names of other libraries that have no public alternative.
LIBRARIES = ("_getframe", "_current_frames", "_exit", "_SubParsersAction", "_iterator_resource", "_inputs")
MOST_LINES = 400
MOST_IMPORT_MS = 100


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def test_every_package_is_in_the_order():
    assert {package_of(path) for path in FILES} == set(ORDER)


@pytest.mark.kills("layers_lazy_import_upwards")
def test_imports_point_down():
    level = {package: number for number, package in enumerate(ORDER)}
    broken = [
        str(one)
        for here, there, one in edges()
        if level[package_of_module(there)] > level[package_of_module(here)]
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.kills("layers_circle_for_types")
def test_no_files_import_each_other_in_a_circle():
    imported: dict[str, set[str]] = {module: set() for module in MODULES}
    for here, there, _ in edges():
        imported[here].add(there)
    try:
        graphlib.TopologicalSorter(imported).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" <- ".join(error.args[1]))


def test_launch_sees_only_cluster_and_errors():
    allowed = ("kdist.launch", "kdist.cluster", "kdist.errors")
    broken = [
        str(found)
        for found in ALL_IMPORTS
        if package_of(found.path) == "launch"
        and is_in(found.module, "kdist")
        and not any(is_in(found.module, package) for package in allowed)
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    "package",
    [
        "cluster",
        "control",
        "tracing",
        "launch",
        "errors",
        "whole_files",
        "named",
        "context",
        "handlers",
        "contents",
    ],
)
def test_light_packages_need_only_the_standard_library(package):
    broken = [
        str(found)
        for found in ALL_IMPORTS
        if package_of(found.path) == package
        and found.module.split(".")[0] not in {*sys.stdlib_module_names, "kdist"}
        and found.module
        not in ("cloudpickle", "ray", "yaml")  # imported lazily, and only if they are necessary
    ]
    assert not broken, "\n".join(broken)


def test_frameworks_only_in_their_own_backend():
    broken = []
    for found in ALL_IMPORTS:
        framework = found.module.split(".")[0].replace("jaxlib", "jax")
        if framework not in FRAMEWORKS:
            continue
        parts = found.path.relative_to(ROOT / "kdist").parts
        own = parts[:2] == ("backends", framework)
        # Code without kdist, with which kdist bench compares.
        own |= parts == ("measuring", "native", f"{framework}.py")
        # A dataset can belong to a framework that is not the backend.
        source = parts[:2] == ("data", "sources") and SOURCES.get(parts[-1]) == framework
        assert not source or found.lazy, f"{found}: only when such a dataset is there"
        if not own and not source:
            broken.append(str(found))
    assert not broken, "\n".join(broken)


def test_backends_do_not_see_each_other():
    broken = []
    for found in ALL_IMPORTS:
        parts = found.path.relative_to(ROOT / "kdist").parts
        target = found.module.split(".")
        if target[:2] == ["kdist", "backends"] and len(target) > 2 and target[2] in BACKENDS:
            own = parts[0] == "backends" and len(parts) > 2 and parts[1] == target[2]
            if not own:
                broken.append(str(found))
    assert not broken, "\n".join(broken)


def test_only_the_dispatch_names_a_backend_in_a_condition():
    """There must not be an `if backend == …` outside of the dispatch and the backends."""
    broken = []
    for path in FILES:
        if package_of(path) in ("backends", "testing"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Compare):
                constants = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
                if set(constants) & set(BACKENDS):
                    broken.append(f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}")
    assert not broken, "\n".join(broken)


def test_keras_src_only_in_the_hooks():
    broken = [
        str(f) for f in ALL_IMPORTS if is_in(f.module, "keras.src") and package_of(f.path) != "keras_hooks"
    ]
    for path in FILES:  # also attributes: keras.src.x does not need a separate import
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Attribute)
                and ast.unparse(node) == "keras.src"
                and package_of(path) != "keras_hooks"
            ):
                broken.append(f"{path.relative_to(ROOT)}:{node.lineno} keras.src")
    assert not broken, "\n".join(broken)


def privates(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Yields the attributes whose names begin with one underscore, and their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match("_[^_]", node.attr):
            yield node.attr, node.lineno


def own_privates() -> set[str]:
    """Returns the names that kdist's classes and modules define."""
    own: set[str] = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
                own.add(node.attr)
    return own


def test_privates_of_keras_only_in_the_hooks():
    own = own_privates() | {*LIBRARIES}
    found = [
        (path, name, line)
        for path in FILES
        for name, line in privates(ast.parse(path.read_text(encoding="utf-8")))
        if name not in own
    ]
    of_keras = {name for path, name, _ in found if package_of(path) == "keras_hooks"}
    assert {"_initializer", "_flatten_layers"} <= of_keras
    broken = [
        f"{path.relative_to(ROOT)}:{line} {name}"
        for path, name, line in found
        if package_of(path)
        not in ("keras_hooks", "engines")  # engines also use private names of their frameworks
        or (package_of(path) == "engines" and name in of_keras)
    ]
    assert not broken, "\n".join(broken)


def test_the_environment_only_in_cluster_and_launch():
    names = {"os.environ", "os.environb", "os.getenv", "os.putenv", "os.unsetenv"}
    broken = []
    for path in FILES:
        if package_of(path) in ("cluster", "launch", "testing"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in names:
                broken.append(f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}")
        broken += [str(f) for f in imports_of(path) if f.module in names]
    assert not broken, "\n".join(broken)


def test_library_code_does_not_use_the_test_tools():
    broken = [
        str(f) for f in ALL_IMPORTS if is_in(f.module, "kdist.testing") and package_of(f.path) != "testing"
    ]
    assert not broken, "\n".join(broken)


def test_backend_folders_have_equal_files():
    folders = {name: {p.name for p in (ROOT / "kdist" / "backends" / name).glob("*.py")} for name in BACKENDS}
    core = {name: files - EXTRA_FILES[name] for name, files in folders.items()}
    assert core["tensorflow"] == core["jax"] == core["torch"]
    for name, extra in EXTRA_FILES.items():
        assert extra <= folders[name]


def test_no_file_is_too_long():
    tracked = [ROOT / name for name in tracked_files() if name.endswith((".py", ".sh"))]
    counts = {
        str(p.relative_to(ROOT)): len(p.read_text(encoding="utf-8").splitlines())
        for p in tracked
        if p.exists()
    }
    assert {name: n for name, n in counts.items() if n > MOST_LINES} == {}


def tracked_files() -> list[str]:
    """Returns the files that git tracks; without git, all files of the package and its tests."""
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
    )
    if listed.returncode:
        return [
            str(p.relative_to(ROOT)) for folder in ("kdist", "tests") for p in (ROOT / folder).rglob("*.py")
        ]
    return listed.stdout.splitlines()


def test_no_path_of_a_machine_in_tracked_files():
    # Split into parts, so that this file does not contain the paths.
    foreign = re.compile(
        "|".join(rf"(?<![\w.]){re.escape('/' + name)}" for name in ("work/", "root/", "tmp/venv"))
    )
    broken = []
    for name in tracked_files():
        path = ROOT / name
        if not path.is_file() or path == Path(__file__).resolve():
            continue
        for number, line in enumerate(
            path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1
        ):
            if foreign.search(line):
                broken.append(f"{name}:{number}: {line.strip()[:100]}")
    assert not broken, "\n".join(broken)


def test_public_names_load_and_are_documented():
    for name in kdist.__all__:
        value = getattr(kdist, name)
        if name != "__version__":
            assert inspect.getdoc(value), name
    for module in ("experimental", "cluster_resolver"):
        contents = importlib.import_module(f"kdist.{module}")
        for name in contents.__all__:
            assert inspect.getdoc(getattr(contents, name)), name
    assert set(dir(kdist)) == set(kdist.__all__)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'MirorredStrategy'"):
        kdist.MirorredStrategy  # noqa: B018


def python(code: str) -> float:
    """Runs code in a new Python process; returns its CPU seconds, which hardly depend on other load."""
    start = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    return end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime


def test_import_is_light():
    code = f"""
import sys
import kdist, kdist.launch, kdist.cluster_resolver, kdist.errors
for name in kdist.__all__:
    getattr(kdist, name)
kdist.get_strategy()
loaded = sorted({{'keras', 'numpy', 'cloudpickle', *{FRAMEWORKS!r}}} & set(sys.modules))
assert not loaded, loaded
"""
    python(code)


def test_import_is_fast(capsys):
    extra = [(python("import kdist") - python("pass")) * 1000 for _ in range(7)]
    median = statistics.median(extra)
    with capsys.disabled():
        print(
            f"\n`import kdist` takes {median:.0f} ms more than `python -c pass`: {[round(e) for e in extra]}"
        )
    assert median < MOST_IMPORT_MS
