"""Where a name is defined in a source: `KVCache.append`, told without importing it."""

from __future__ import annotations

import ast

from minicache_course.errors import CourseError


def find_symbol(tree: ast.Module, name: str) -> ast.stmt:
    """The statement that defines a qualified name: a function, class, method or assigned name.

    Raises:
        CourseError: there is none; the message names the first part that is missing.
    """
    body, names = tree.body, name.split(".")
    for position, part in enumerate(names):
        found = next((node for node in body if part in _defined(node)), None)
        if found is None:
            raise CourseError(f"there is no {'.'.join(names[: position + 1])}")
        body = getattr(found, "body", [])
    assert found is not None
    return found


def _defined(node: ast.stmt) -> set[str]:
    """The names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {target.id for target in targets if isinstance(target, ast.Name)}
