"""The import law, read from the source: nothing imports upward, heavy packages are imported late."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import picture
from support.rooms import BELOW, MODULES, PACKAGE, imports, part

from fedvlp.core.method import Method
from fedvlp.methods import METHODS

TESTS = Path(__file__).parent

ONLY = {  # a third-party package, and the parts that may import it
    "nvflare": {"flare"},
    "pydicom": {"data"},
    "tesserocr": {"data"},
    "PIL": {"data"},
    "cv2": {"data"},
    "monai": {"data", "evaluation", "models"},
    "timm": {"models"},
    "transformers": {"models"},
    "onnxruntime": {"models"},
    "open_clip": {"models"},
    "opacus": {"flare", "run"},
    "tenseal": {"flare"},
    "private_set_intersection": {"flare"},
    "typer": {"cli"},
    "rich": {"cli"},
    "matplotlib": {"evaluation", "report"},
    "gradio": {"report"},
    "fastapi": {"report"},
    "uvicorn": {"report"},
}

TORCH_ALONE = {
    "torch",
    "numpy",
    "safetensors",
}  # what core, training, federation and methods may import beside the standard library


def test_every_part_of_the_package_has_a_layer() -> None:
    assert {part(name) for name in MODULES} - {""} <= BELOW.keys()


def offenders(wrong: Callable[[str, str, bool], bool]) -> list[str]:
    """Every import of the package for which ``wrong(module, imported name, lazy)`` holds, one line each."""
    return [
        f"{module}, line {line}: imports {name}"
        for module, path in MODULES.items()
        for name, line, lazy in imports(path)
        if wrong(module, name, lazy)
    ]


def test_nothing_imports_upward() -> None:
    """Not even inside a function: a lazy import is an import."""

    def upward(module: str, name: str, lazy: bool) -> bool:
        if module == "fedvlp":  # the front door: it finds everything else when it is asked
            return name not in ("typing", "fedvlp.core", "fedvlp.core.names")
        if name.partition(".")[0] == "studies":
            return True
        return name.partition(".")[0] == "fedvlp" and part(name) not in BELOW[part(module)] | {""}

    assert offenders(upward) == []


def test_who_may_import_what() -> None:
    everybody = BELOW.keys() | {""}
    assert offenders(lambda module, name, _: part(module) not in ONLY.get(name.partition(".")[0], everybody)) == []


def test_algorithms_are_pure_torch() -> None:
    pure = ("core", "training", "federation", "methods")
    allowed = TORCH_ALONE | {"fedvlp"} | set(sys.stdlib_module_names)
    assert offenders(lambda module, name, _: part(module) in pure and name.partition(".")[0] not in allowed) == []


def circles(arrows: dict[str, set[str]]) -> list[set[str]]:
    """The sets of modules that import one another, by Kosaraju's two passes."""
    order: list[str] = []
    seen: set[str] = set()

    def visit(module: str, graph: dict[str, set[str]], out: list[str]) -> None:
        seen.add(module)
        for name in sorted(graph.get(module, set()) - seen):
            if name not in seen:
                visit(name, graph, out)
        out.append(module)

    for module in arrows:
        if module not in seen:
            visit(module, arrows, order)
    back: dict[str, set[str]] = {}
    for module, names in arrows.items():
        for name in names:
            back.setdefault(name, set()).add(module)
    seen.clear()
    found = []
    for module in reversed(order):
        if module not in seen:
            together: list[str] = []
            visit(module, back, together)
            found.append(set(together))
    return [group for group in found if len(group) > 1]


def test_no_modules_import_one_another() -> None:
    """Circles are for type annotations alone. A package's own ``__init__`` gathers what its files define."""
    modules = {name: path for name, path in MODULES.items() if path.name != "__init__.py"}
    arrows = {name: {to for to, _, _ in imports(path) if to in modules} for name, path in modules.items()}
    assert circles(arrows) == []
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]


def test_the_picture_is_of_this_code() -> None:
    """``PYTHONPATH=tests python -m support.picture`` draws it anew, and so does ``make docs``."""
    found = picture.arrows()
    assert ("cli", "run") in found
    assert picture.PICTURE.read_text(encoding="utf-8") == picture.drawn(found)


def test_no_arrow_of_the_picture_points_upward() -> None:
    assert picture.not_downward(picture.arrows()) == []
    planted = {("core", "cli"), ("data", "models"), ("run", "core")}
    assert picture.not_downward(planted) == [("core", "cli"), ("data", "models")]


def test_pale_arrows_are_those_that_a_longer_way_implies() -> None:
    assert picture.implied({("c", "b"), ("b", "a"), ("c", "a"), ("d", "a")}) == {("c", "a")}


def test_no_module_lies_outside_of_the_rooms() -> None:
    assert [path.name for path in PACKAGE.glob("*.py")] == ["__init__.py"]


HEAVY = {
    "timm",
    "transformers",
    "monai",
    "pydicom",
    "matplotlib",
    "torchvision",
    "tensorboard",
    "tesserocr",
    "PIL",
    "cv2",
    "rich",
    "opacus",
    "tenseal",
    "onnxruntime",
    "open_clip",
    "gradio",
    "fastapi",
    "uvicorn",
}


def test_heavy_packages_are_imported_by_the_function_that_needs_them() -> None:
    assert offenders(lambda _, name, lazy: not lazy and name.partition(".")[0] in HEAVY) == []


def test_no_test_file_imports_a_heavy_package_when_it_is_collected() -> None:
    """Each worker pays for it at every `make test`, whichever tests it runs."""
    heavy = HEAVY - {"PIL", "cv2", "rich"} | {"ot", "scipy", "sklearn"}
    early = [
        f"{path.relative_to(TESTS)}, line {line}: imports {name}"
        for path in sorted(TESTS.rglob("*.py"))
        for name, line, lazy in imports(path)
        if not lazy and name.partition(".")[0] in heavy
    ]
    assert early == []
    asked = re.compile(r"^(?:\w+ = )?pytest\.importorskip\(\"(\w+)", re.MULTILINE)  # imports it too
    found = {path.name: set(asked.findall(path.read_text(encoding="utf-8"))) & heavy for path in TESTS.rglob("*.py")}
    assert {name: packages for name, packages in found.items() if packages} == {}, "ask find_spec in a skipif"


EFFECTS = {
    "manual_seed", "seed", "set_num_threads", "set_num_interop_threads", "set_default_device", "set_default_dtype",
    "use_deterministic_algorithms", "setdefault", "putenv", "chdir", "mkdir", "makedirs", "basicConfig", "setlocale",
    "set_start_method", "filterwarnings", "simplefilter", "is_available", "cwd", "getcwd", "expanduser",
}  # fmt: skip
"""Names of functions that change the process, or look at the machine, when they are called."""


def at_import_time(node: ast.AST) -> Iterator[ast.AST]:
    """Every node that runs when the module is imported: not the bodies of functions."""
    for child in ast.iter_child_nodes(node):
        yield child
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            for always in (*getattr(child, "decorator_list", []), child.args):
                yield from at_import_time(always)
        else:
            yield from at_import_time(child)


def effects(source: str) -> list[str]:
    """What running this module's top level would do to the process."""
    found = []
    for node in at_import_time(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in EFFECTS or name == "device":
                found.append(f"line {node.lineno} calls {name}")
        targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.Delete)):
            found += [f"line {node.lineno} writes {ast.unparse(t)}" for t in targets
                      if isinstance(t, (ast.Attribute, ast.Subscript)) and outside(t)]  # fmt: skip
    return found


def outside(target: ast.expr) -> bool:
    """Whether the target of an assignment belongs to something imported, e.g. os.environ or torch.backends."""
    text = ast.unparse(target)
    return text.startswith(("os.", "sys.", "torch.", "warnings.", "logging."))


def test_importing_does_nothing_but_define() -> None:
    found = {module: effects(path.read_text(encoding="utf-8")) for module, path in MODULES.items()}
    assert {module: lines for module, lines in found.items() if lines} == {}


EFFECTFUL = [
        "import torch\ntorch.manual_seed(0)", "import os\nos.environ['X'] = '1'",
        "import torch\ntorch.set_num_threads(1)",
        "import os\nos.environ.setdefault('X', '1')", "import numpy as np\nif True:\n    np.random.seed(0)",
        "import torch\nDEVICE = torch.device('cuda')", "class A:\n    import torch\n    torch.manual_seed(0)",
        "import torch\ntorch.backends.cudnn.deterministic = True", "def f(x=__import__('torch').manual_seed(0)): ...",
]  # fmt: skip


def test_the_test_above_sees_every_kind_of_effect() -> None:
    assert [source for source in EFFECTFUL if not effects(source)] == []


def test_inside_a_function_all_is_allowed() -> None:
    assert effects("import torch\ndef f():\n    torch.manual_seed(0)\nx = lambda: torch.manual_seed(0)") == []


TOWERS = {"timm", "transformers", "monai", "pydicom", "torchvision", "PIL", "nvflare", "tensorboard", "matplotlib"}


def test_a_process_pays_only_for_what_it_uses() -> None:
    """One module after the other in one interpreter: what the last lacks, those before it lack too."""
    light = {"torch", "numpy"} | TOWERS
    absent = {"fedvlp": light, "fedvlp.cli": light, "fedvlp.federation.loop": TOWERS, "fedvlp.run.simulate": TOWERS}
    code = f"""
import importlib, sys
for module, absent in {absent!r}.items():
    importlib.import_module(module)
    print(module, sorted(absent & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == [f"{module} []" for module in absent], done.stderr[-2000:]


def test_importing_everything_changes_no_global_state() -> None:
    """Environment, threads, default dtype, generators and working folder are as before."""
    names = [name for name in MODULES if part(name) not in ("flare", "cli")]
    code = f"""
import importlib, os, random, torch, numpy as np
def state():
    return (dict(os.environ), os.getcwd(), torch.get_num_threads(), torch.get_default_dtype(), random.getstate(),
            torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), torch.backends.cudnn.deterministic)
before = state()
for name in {names!r}: importlib.import_module(name)
print(state() == before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "True", done.stderr[-2000:]


FORBIDDEN = {"pickle", "dill", "cloudpickle", "shelve", "marshal"}


def asks_which_method(source: str, methods: set[str]) -> list[int]:
    """Lines that ask whether something is an instance, or a subclass, of one of the classes ``methods``."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("isinstance", "issubclass")
            and len(node.args) == 2
        ):
            named = {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
            if named & methods:
                lines.append(node.lineno)
    return lines


def test_nobody_asks_which_method_it_is() -> None:
    """What differs between methods is a hook or a class variable of theirs; the registry and presets name them."""
    bases = {base.__name__ for kind in METHODS.values() for base in kind.__mro__ if issubclass(base, Method)}
    methods = bases - {"Method"}
    assert {"FedDRA", "SoftPull", "PublicEnsemble", "RobustWeights"} <= methods
    sources = {name: path.read_text() for name, path in MODULES.items() if name != "fedvlp.run.presets"}
    assert {name: lines for name, text in sources.items() if (lines := asks_which_method(text, methods))} == {}
    assert asks_which_method("isinstance(x, (int, FedDRA)); isinstance(x, Method)", methods) == [1]


def unpickling(source: str) -> Iterator[int]:
    """The lines that load an array or a tensor in a way that may run what the file says."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "np.load", "numpy.load"):
            keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
            if keywords.get("weights_only") != "True" and keywords.get("allow_pickle") != "False":
                yield node.lineno


def test_nothing_is_unpickled() -> None:
    reads = ("fedvlp.deploy.installed", "marshal")  # compares compiled code with its source, and runs none
    wrong = offenders(lambda module, name, _: name.partition(".")[0] in FORBIDDEN and (module, name) != reads)
    assert wrong == []
    loads = [f"{m}, line {line}" for m, path in MODULES.items() for line in unpickling(path.read_text("utf-8"))]
    assert loads == []


def test_the_rules_above_see_an_offender(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of core that breaks each of them."""
    bad = tmp_path / "bad.py"
    bad.write_text("import pickle, timm, torch\nfrom fedvlp.flare import wire\ntorch.load('x')\nnp.load('y')\n")
    monkeypatch.setitem(MODULES, "fedvlp.core.bad", bad)
    monkeypatch.setitem(globals(), "TESTS", tmp_path)
    for rule in (
        test_nothing_imports_upward, test_who_may_import_what, test_algorithms_are_pure_torch,
        test_nothing_is_unpickled,
        test_heavy_packages_are_imported_by_the_function_that_needs_them,
        test_no_test_file_imports_a_heavy_package_when_it_is_collected,
    ):  # fmt: skip
        with pytest.raises(AssertionError, match=r"line [123]"):
            rule()
    assert list(unpickling(bad.read_text())) == [3, 4]
