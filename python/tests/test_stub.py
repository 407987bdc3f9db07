"""The type stub agrees with the extension."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import peerway
import pytest
from peerway import _native

STUB = ast.parse((Path(peerway.__file__).parent / "_native.pyi").read_text())
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
FUNCTIONS = {node.name: node for node in STUB.body if isinstance(node, ast.FunctionDef)}
#: Members that have other names at run time.
SPECIAL = {"__init__", "__buffer__"}


def test_every_class_is_in_the_stub_and_the_other_way_round() -> None:
    native = {name for name in dir(_native) if inspect.isclass(getattr(_native, name))}
    assert native == set(CLASSES)
    assert set(peerway.__all__) <= set(dir(peerway))
    assert peerway.__version__ == _native.__version__


def test_every_function_is_in_the_stub_and_the_other_way_round() -> None:
    assert {name for name in dir(_native) if inspect.isbuiltin(getattr(_native, name))} == set(FUNCTIONS)
    for name, node in FUNCTIONS.items():
        found = getattr(_native, name)
        assert inspect.getdoc(found) == ast.get_docstring(node), name
        compare(inspect.signature(found), node)


@pytest.mark.parametrize("name", CLASSES)
def test_members(name: str) -> None:
    kind, stub = getattr(_native, name), CLASSES[name]
    assert inspect.getdoc(kind) == ast.get_docstring(stub)
    described = {node.name: node for node in stub.body if isinstance(node, ast.FunctionDef)}
    public = {member for member in vars(kind) if not member.startswith("_")}
    assert public == {member for member in described if not member.startswith("_")}
    for member, node in described.items():
        if member in SPECIAL or member.startswith("__"):
            continue
        found = getattr(kind, member)
        assert ast.get_docstring(node), f"{member} has no docstring"
        assert inspect.getdoc(found) == ast.get_docstring(node), member
        if any(isinstance(d, ast.Name) and d.id == "property" for d in node.decorator_list):
            assert inspect.isgetsetdescriptor(found), member
            continue
        compare(inspect.signature(found), node)
    if "__init__" in described:
        compare(inspect.signature(kind), described["__init__"], skip_self=True)


def compare(found: inspect.Signature, node: ast.FunctionDef, skip_self: bool = False) -> None:
    names = [arg.arg for arg in node.args.args][1 if skip_self else 0 :]
    positional = [p.name for p in found.parameters.values() if p.kind is not p.KEYWORD_ONLY]
    assert positional == names, node.name
    keywords = [p.name for p in found.parameters.values() if p.kind is p.KEYWORD_ONLY]
    assert keywords == [arg.arg for arg in node.args.kwonlyargs], node.name
    defaults = dict(zip(reversed(names), reversed(node.args.defaults), strict=False))
    defaults |= {arg.arg: d for arg, d in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if d}
    for parameter in found.parameters.values():
        wanted = defaults.get(parameter.name)
        if wanted is None:
            assert parameter.default is parameter.empty, (node.name, parameter.name)
        else:
            assert parameter.default == ast.literal_eval(wanted), (node.name, parameter.name)
