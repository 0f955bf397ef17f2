"""Finds the remedies of the package's refusals in its source, and those that are code or a flag."""

import ast
import re
from functools import cache
from pathlib import Path

import megatron_cp

HOUSE = Path(megatron_cp.__file__).parent
# A call, a keyword, a flag, a setting of an object, or what stands between backticks.
CODE = re.compile(
    r"\w\(|\b[a-z_]\w*=|(?<![\w-])--[a-z{]|`|\b[A-Za-z]+_[A-Za-z_]+\b|\b[A-Za-z_]{2,}\.(?!(?:md|py|json|txt)\b)[a-z_]{3,}\b"
)


def is_code(text):
    """Returns True for a sentence with code in it; a single word is a value that another sentence quotes."""
    return bool(CODE.search(text)) and bool(re.search(r"[ (]", text))


@cache
def tree_of(path):
    return ast.parse(path.read_text())


@cache
def texts_of(path):
    """Returns the expressions that the names in a module have been given, at any depth."""
    found = {}
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=False))
                for name, value in pairs:
                    if isinstance(name, ast.Name):
                        found.setdefault(name.id, []).append(value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "append":
            if isinstance(node.func.value, ast.Name):
                found.setdefault(node.func.value.id, []).extend(node.args)
        elif isinstance(node, ast.FunctionDef) and "remedy" in (node.name + (ast.get_docstring(node) or "")):
            values = [each.value for each in ast.walk(node) if isinstance(each, ast.Return) and each.value is not None]
            found.setdefault(node.name, []).extend(values)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron_cp."):
            source = HOUSE.joinpath(*node.module.split(".")[1:]).with_suffix(".py")
            if source.exists() and source != path:
                for alias in node.names:
                    if alias.name in texts_of(source):
                        found.setdefault(alias.asname or alias.name, []).append((source, alias.name))
    return found


def templates(path, node, seen=frozenset()):
    """Returns the texts that an expression can be, with {} where something is filled in.

    Args:
        path: its module.
        node: the expression.
        seen: names that are being looked up.
    """
    match node:
        case ast.Constant(value=str(text)):
            return {text}
        case ast.JoinedStr(values=parts):
            text = "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in parts)
            inner = [part.value for part in parts if isinstance(part, ast.FormattedValue)]
            return {text}.union(*(templates(path, each, seen) for each in inner))
        case ast.Name(id=name):
            return of_name(path, name) if not seen else of_name.__wrapped__(path, name, seen)
        case ast.BinOp(left=one, right=other) | ast.IfExp(body=one, orelse=other):
            inner = [one, other]
        case ast.BoolOp(values=inner) | ast.Tuple(elts=inner) | ast.List(elts=inner) | ast.Dict(values=inner):
            pass
        case ast.Subscript(value=one) | ast.Starred(value=one) | ast.ListComp(elt=one) | ast.GeneratorExp(elt=one):
            inner = [one]
        case ast.Call(func=ast.Name() as function):
            inner = [function]
        case ast.Call(func=ast.Attribute(value=one, attr="join" | "get" | "format"), args=args):
            inner = [one, *args]
        case _:
            inner = []
    return set().union(*(templates(path, each, seen) for each in inner))


@cache
def of_name(path, name, seen=frozenset()):
    """Returns the texts that a name of a module can be."""
    found = set()
    for value in texts_of(path).get(name, []) if (path, name) not in seen else []:
        place, node = (path, value) if isinstance(value, ast.AST) else (value[0], ast.Name(id=value[1]))
        found |= templates(place, node, seen | {(path, name)})
    return found


@cache
def defined_in(path):
    return {node.name for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef)}


@cache
def takers(path=None):
    """Returns the functions with an argument `remedy`, and its place among the positional ones; of a module, or all."""
    found = {"ArgumentError": 3}
    for each in HOUSE.rglob("*.py") if path is None else [path]:
        for node in ast.walk(tree_of(each)):
            if isinstance(node, ast.FunctionDef):
                names = [each.arg for each in node.args.args if each.arg != "self"]
                if "remedy" in [*names, *(each.arg for each in node.args.kwonlyargs)]:
                    found[node.name] = names.index("remedy") if "remedy" in names else None
    return found


def remedies(is_wanted=lambda path: True, house=HOUSE):
    """Returns the remedies in the package that are code, with {} where something is filled in, by their modules.

    Args:
        is_wanted: says of a module's path whether its remedies are.
        house: the folder of the package.
    """
    found = {}
    for path in sorted(house.rglob("*.py")):
        if not is_wanted(path.relative_to(house)):
            continue
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name == "Capability" and isinstance(node.args[2], ast.Constant) and node.args[2].value is False:
                for text in templates(path, node.args[3]):
                    if is_code(text):
                        found.setdefault(text, path.relative_to(house).as_posix())
            if name not in takers() or (name in defined_in(path) and name not in takers(path)):
                continue
            given = [each.value for each in node.keywords if each.arg == "remedy"]
            place = takers()[name]
            if place is not None:
                given += node.args[place : place + 1]
            for each in given:
                for text in templates(path, each):
                    if is_code(text):
                        found.setdefault(text, path.relative_to(house).as_posix())
    return found
