"""The code of the library that runs with CUDA alone, found in its source, and which of it has run.

A piece of code is a simple statement, or the head of another, that only a CUDA tensor, device or backend leads to:

- under a condition that says so, such as `x.is_cuda` or `device.type == "cuda"`, or after one that leaves otherwise;
- in a kernel for CUDA devices alone, or in a module of `WHOLE`;
- in a function or class that only such code uses.

Conditions that are kept in a variable first, loops and comprehensions with a condition, and `match` are not read.
"""

from __future__ import annotations

import ast
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType

LIBRARY = Path(__file__).resolve().parents[2] / "megatron_cp"
# Modules of which all but what is listed is for CUDA.
WHOLE = {
    "exchange/kernels/copies.py": {"runs_on", "_has_triton"}, "exchange/kernels/triton.py": set(),
    "executor/groups/symmetric_memory.py": set(),
}  # fmt: skip
# Classes that it takes more than their use to know.
MARKED = {"exchange/device.py": {"_Tables", "_Table"}}
# Interpreted and compiled: Python runs none of their lines.
TRITON = "exchange/kernels/triton_kernels.py"
KERNELS_OF_CUDA = {"SegmentedAttention"}  # and what inherits from it
ASKS = {"runs_on", "is_current_stream_capturing"}  # functions that are true for CUDA alone


@dataclass(frozen=True, order=True)
class Piece:
    """A piece of code.

    Attributes:
        file: within the library.
        where: the function, with its class.
        start, end: line and column.
    """

    file: str
    where: str
    start: tuple[int, int]
    end: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.file}:{self.start[0]}:{self.start[1]}"

    @property
    def note(self) -> str:
        """Returns the note for a piece that has run; it changes with the contents of the file."""
        return f"{self} {_digest(self.file)}"


def pieces(library: Path = LIBRARY) -> list[Piece]:
    """Returns all pieces, in order."""
    files = {str(path.relative_to(library)): ast.parse(path.read_text()) for path in sorted(library.rglob("*.py"))}
    marked: dict[str, set[ast.AST]] = {name: set() for name in files}
    for name, tree in files.items():
        _mark_conditions(name, tree, marked[name])
    for name, tree in files.items():
        while marked[name] and _mark_users(tree, marked[name]):
            pass
    found = [piece for name, tree in files.items() for piece in _pieces(name, tree, marked[name])]
    return sorted(set(found))


@cache
def _digest(file: str) -> str:
    return hashlib.sha256((LIBRARY / file).read_bytes()).hexdigest()[:12]


@cache
def file_pieces(file: str) -> tuple[Piece, ...]:
    """Returns the pieces of a file of the library."""
    return tuple(piece for piece in _all() if piece.file == file)


@cache
def _all() -> tuple[Piece, ...]:
    return tuple(pieces())


def offsets(code: CodeType, found: Iterable[Piece]) -> dict[int, Piece]:
    """Maps each instruction of a function, by its offset, to its innermost piece."""
    within: dict[int, Piece] = {}
    inner_first = sorted(found, key=lambda piece: (piece.end[0] - piece.start[0], piece.end[1] - piece.start[1]))
    for place, (line, _, column, _) in enumerate(code.co_positions()):
        if line is None or column is None:
            continue
        for piece in inner_first:
            if piece.start <= (line, column) < piece.end:
                within[2 * place] = piece
                break
    return within


# -- conditions --------------------------------------------------------------------------------------------------------


def _says(test: ast.expr) -> int:
    """Returns 1 if an expression is true for CUDA alone, -1 if it is false for CUDA alone, else 0."""
    match test:
        case ast.Attribute(attr="is_cuda") | ast.Name(id="on_cuda" | "cuda"):
            return 1
        case ast.Call(func=ast.Attribute(attr=name)) | ast.Call(func=ast.Name(id=name)) if name in ASKS:
            return 1
        case ast.Call() if ast.unparse(test) == "torch.cuda.is_available()":
            return 1
        case ast.Call(func=ast.Name(id="any" | "all"), args=[ast.GeneratorExp(elt=element)]):
            return _says(element)
        case ast.Compare(left=left, ops=[operator], comparators=[right]):
            words = {node.value for node in ast.walk(test) if isinstance(node, ast.Constant)}
            if not words & {"cpu", "cuda", "nccl", "cuda:gloo"} or not _asks_device(left, right):
                return 0
            is_equal = isinstance(operator, ast.Eq | ast.In | ast.Is)
            if not is_equal and not isinstance(operator, ast.NotEq | ast.NotIn):
                return 0
            return 1 if is_equal != ("cpu" in words) else -1
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return -_says(operand)
        case ast.BoolOp(op=operator, values=values):
            said = set(map(_says, values))
            if isinstance(operator, ast.Or):
                return -1 if -1 in said else 0
            # Of those that `... and not x.is_cuda` lets through, CUDA tensors are all that matters.
            return 1 if 1 in said else -1 if -1 in said and "is_cuda" in ast.unparse(test) else 0
    return 0


def _asks_device(*sides: ast.expr) -> bool:
    """Returns True if the name of a device or a backend is compared, and not a choice of the command line."""
    text = " ".join(ast.unparse(side) for side in sides)
    return any(word in text for word in (".type", "get_backend", ".device")) or text.startswith("device ")


def _mark_conditions(file: str, tree: ast.Module, marked: set[ast.AST]) -> None:
    """Finds the statements and expressions that only CUDA reaches."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp):
            side = _says(node.test)
            chosen = node.body if side > 0 else node.orelse if side < 0 else []
            marked.update(chosen if isinstance(chosen, list) else [chosen])
        if isinstance(node, ast.BoolOp):
            decides = 1 if isinstance(node.op, ast.And) else -1
            asked = [_says(value) == decides for value in node.values]
            if any(asked):  # what is asked of CUDA alone
                marked.update(node.values[asked.index(True) + 1 :])
        for block in _blocks(node):
            for place, statement in enumerate(block):
                if isinstance(statement, ast.If) and _leaves(statement.body) and _says(statement.test) < 0:
                    marked.update(block[place + 1 :])
        if isinstance(node, ast.ClassDef) and _is_kernel_of_cuda(node):
            marked.update(node.body)
    marked.update(node for node in tree.body if getattr(node, "name", "") in MARKED.get(file, ()))
    if file in WHOLE:
        marked.update(node for node in tree.body if getattr(node, "name", "") not in WHOLE[file])


def _blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(node, name, None)
        if isinstance(block, list):
            yield block


def _leaves(block: list[ast.stmt]) -> bool:
    return isinstance(block[-1], ast.Return | ast.Raise | ast.Continue)


def _is_kernel_of_cuda(node: ast.ClassDef) -> bool:
    is_told = any(isinstance(line, ast.Assign) and ast.unparse(line) == "devices = ('cuda',)" for line in node.body)
    return is_told or any(ast.unparse(base) in KERNELS_OF_CUDA for base in node.bases)


# -- functions that only such code uses ------------------------------------------------------------------------------


def _mark_users(tree: ast.Module, marked: set[ast.AST]) -> bool:
    """Marks private functions, classes and methods that a file names in marked code alone; True if there was one."""
    names: defaultdict[str, list[bool]] = defaultdict(list)  # in marked code?
    for node, is_marked in _walk(tree, marked):
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        if name.startswith("_"):
            names[name].append(is_marked)
    found = {
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node not in marked and not node.name.startswith("__")
        if names.get(node.name) and all(names[node.name])
    }
    marked |= found
    return bool(found)


def _walk(node: ast.AST, marked: set[ast.AST], inside: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    inside = inside or node in marked
    yield node, inside
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.expr) and _is_annotation(node, child)):
            yield from _walk(child, marked, inside)


def _is_annotation(node: ast.AST, child: ast.AST) -> bool:
    return child is getattr(node, "annotation", None) or child is getattr(node, "returns", None)


# -- pieces ------------------------------------------------------------------------------------------------------------


def _pieces(file: str, tree: ast.Module, marked: set[ast.AST]) -> Iterator[Piece]:
    yield from _pieces_in(file, tree, marked, "", inside=False, is_run=False)


def _pieces_in(
    file: str, node: ast.AST, marked: set[ast.AST], where: str, *, inside: bool, is_run: bool
) -> Iterator[Piece]:
    """Yields the pieces of a node.

    The node is `inside` marked code or not, and `is_run` if it is in a function, rather than run at import.
    """
    inside = inside or node in marked
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        where = f"{where}.{node.name}" if where else node.name
        is_run = isinstance(node, ast.FunctionDef)
    elif inside and is_run and isinstance(node, ast.stmt):
        yield from _piece_of_statement(file, node, where)
    elif is_run and isinstance(node, ast.expr) and node in marked:
        yield _piece(file, where, node)
    for child in ast.iter_child_nodes(node):
        yield from _pieces_in(file, child, marked, where, inside=inside, is_run=is_run)


def _piece_of_statement(file: str, node: ast.stmt, where: str) -> Iterator[Piece]:
    """A simple statement, or what a compound one begins with."""
    match node:
        case ast.Expr(value=ast.Constant()) | ast.Pass() | ast.Global() | ast.Import() | ast.ImportFrom():
            return
        case ast.AnnAssign(value=None):
            return
        case ast.If(test=head) | ast.While(test=head) | ast.For(iter=head) | ast.Match(subject=head):
            yield _piece(file, where, head)
        case ast.With(items=items):
            yield _piece(file, where, items[0].context_expr)
        case ast.Try():
            return
        case _:
            yield _piece(file, where, node)


def _piece(file: str, where: str, node: ast.stmt | ast.expr) -> Piece:
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return Piece(file, where, (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
