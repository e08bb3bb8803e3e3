"""Rules of the house that a machine can check: where format names may stand, and what is never called."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvant.kv.names import known_names

SOURCE = Path(__file__).parent.parent / "src" / "kvant"
FILES = sorted(SOURCE.rglob("*.py"))

# Words that are also torch's names of dtypes or plain English.
_AMBIGUOUS = {
    "auto",
    "model",
    "float32",
    "float16",
    "bfloat16",
    "float",
    "half",
    "fp32",
    "fp16",
    "bf16",
}
_EDGE = {
    "kv/dtype.py",  # where formats have their names
    "weights/format.py",  # the same for weights
    "cli/demo.py",  # a command line of its own
    "cli/foreign_flags.py",  # the formats of another program's flags
    "cli/llama_flags.py",  # the formats of another program's flags
    "plan/refused.py",  # a way out, as arguments
    "models/activations.py",  # a way out, as arguments
    "models/quantization.py",  # values of --quantization
    "models/stored.py",  # names of weight recipes in configs
    "models/geometry/weight_methods.py",  # names of weight recipes in configs
    "models/geometry/weight_recipe.py",  # the same
}
# Dialects of checkpoints have words of their own for formats: reading them is an edge too.
_EDGE_ROOMS = ("kv/checkpoint/",)


def strings(tree: ast.AST) -> Iterator[ast.Constant]:
    """String constants that are not docstrings."""
    docs = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node


def relative(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_no_format_name_is_a_string_past_the_edge(path: Path) -> None:
    name = relative(path)
    if name in _EDGE or name.startswith(_EDGE_ROOMS):
        return
    formats = set(known_names()) - _AMBIGUOUS
    found = [
        f"{name}:{s.lineno} {s.value!r}"
        for s in strings(ast.parse(path.read_text()))
        if s.value in formats
    ]
    assert not found


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_nothing_is_unpickled_or_evaluated(path: Path) -> None:
    forbidden = {
        "eval",
        "exec",
        "pickle",
        "cloudpickle",
        "recv_pyobj",
        "send_pyobj",
        "shelve",
        "marshal",
    }
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not forbidden & {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in forbidden
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("eval", "exec", "torch.load"), f"{path}:{node.lineno}"
            assert called.rpartition(".")[2] not in ("recv_pyobj", "send_pyobj")


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_formats_are_not_told_apart_by_spelling(path: Path) -> None:
    """`name.startswith("fp8")` is how engines came to read int4 bytes as fp8."""
    starts = {name[:3] for name in set(known_names()) - _AMBIGUOUS}
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr in ("startswith", "endswith"):
            words = [a.value for a in ast.walk(node) if isinstance(a, ast.Constant)]
            spelled = [w for w in words if isinstance(w, str) and w[:3] in starts]
            assert not spelled, f"{path}:{node.lineno} {spelled}"


def public_functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef, bool, str]]:
    """Name, definition, whether it belongs to a Protocol, and its class's docstring."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name, node, False, ""
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            is_protocol = any("Protocol" in ast.unparse(base) for base in node.bases)
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_"):
                    of_class = ast.get_docstring(node) or ""
                    yield f"{node.name}.{inner.name}", inner, is_protocol, of_class


def has_tensors(function: ast.FunctionDef) -> bool:
    given = function.args
    annotations = [one.annotation for one in (*given.args, *given.kwonlyargs)]
    return any(
        isinstance(part, ast.Name) and part.id == "Tensor"
        for annotation in (*annotations, function.returns)
        if annotation is not None
        for part in ast.walk(annotation)
    )


def test_public_functions_of_tensors_say_their_shapes() -> None:
    """With "[", or by the function that they refer to, or in the protocol that they implement."""
    found = [(path, *one) for path in FILES for one in public_functions(path)]
    documented = {
        name.partition(".")[2]
        for _, name, function, is_protocol, _ in found
        if is_protocol and "[" in (ast.get_docstring(function) or "")
    }
    lacking = []
    for path, name, function, _, of_class in found:
        said = ast.get_docstring(function) or ""
        implements = not said and name.partition(".")[2] in documented
        in_class = "." in name and "[" in of_class
        if has_tensors(function) and not (set("[`") & set(said) or implements or in_class):
            lacking.append(f"{relative(path)}:{function.lineno} {name}")
    assert not lacking
