"""Checks the fields of a report, refuses unknown ones, and packs the numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_cp.errors import ArgumentError, as_number, checked_flag, checked_integer
from megatron_cp.page.columns import packed, packed_matrix, packed_times

STREAMS = ("compute", "send", "receive")
EVENT_KINDS = ("kernel", "product", "copy", "transfer", "wait")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_LARGEST = 2**53  # a browser holds whole numbers below it exactly
_RANKS = 2**16  # more than any page can show


def checked_report(report: Any) -> dict[str, Any]:
    """Returns the report with every field checked and every long list of numbers packed, ready for JSON.

    Args:
        report: as `page_of` describes it.

    Returns:
        The same parts, and `ranks`: their number, as far as the report says.

    Raises:
        ArgumentError: names the field, such as `report.candidates[2].cp`.
    """
    given = _fields("report", report, _PARTS)
    checked = {name: _PARTS[name](f"report.{name}", value) for name, value in given.items()}
    checked["ranks"] = _count_ranks(given)
    return checked


# -- values ------------------------------------------------------------------------------------------------------------


def _fields(where: str, value: Any, allowed: Iterable[str], required: Iterable[str] = ()) -> dict[str, Any]:
    names = list(allowed)
    if not isinstance(value, dict):
        raise ArgumentError(where, value, f"a dictionary with some of {', '.join(names)}")
    unknown = [name for name in value if name not in names]
    if unknown:
        raise ArgumentError(where, unknown[0], f"the fields {', '.join(names)}")
    present = {name: each for name, each in value.items() if each is not None}
    for name in required:
        if name not in present:
            raise ArgumentError(where, sorted(present), f"a dictionary with {name}", f"Give {where}.{name}.")
    return present


def _list(where: str, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple | np.ndarray):
        raise ArgumentError(where, value, "a list")
    return list(value)


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str | Real) or isinstance(value, bool):
        raise ArgumentError(where, value, "a text or a number")
    return str(value)


def _texts(where: str, value: Any) -> list[str]:
    return [_text(f"{where}[{index}]", each) for index, each in enumerate(_list(where, value))]


def _number(where: str, value: Any, most: float = math.inf) -> float:
    number = as_number(value)
    if not 0 <= number <= most or number == math.inf:
        raise ArgumentError(
            where, value, "a number of at least 0" if most == math.inf else f"a number from 0 to {most:g}"
        )
    return int(value) if isinstance(value, Integral) else number


def _numbers_by_name(where: str, value: Any) -> dict[str, float]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise ArgumentError(where, value, "a dictionary from names to numbers")
    return {name: _number(f"{where}[{name!r}]", each) for name, each in value.items() if each is not None}


def _array(where: str, value: Any, allowed: str, *, dims: int = 1, whole: bool = False) -> NDArray:
    """Returns numbers of at least 0, as an array of float64 or of int64."""
    try:
        array = np.asarray(value if isinstance(value, np.ndarray) else _list(where, value))
    except ValueError:  # rows of several lengths
        raise ArgumentError(where, value, allowed) from None
    if array.size == 0 and array.ndim == dims:
        return array.astype(np.int64)
    kinds = "iu" if whole else "iuf"
    if array.ndim != dims or array.dtype.kind not in kinds or not (np.isfinite(array) & (array >= 0)).all():
        raise ArgumentError(where, value, allowed)
    if whole and array.max() >= _LARGEST:
        raise ArgumentError(where, int(array.max()), f"{allowed}, below 2**53")
    return array.astype(np.int64 if whole else np.float64)


def _whole(where: str, value: Any) -> NDArray[np.int64]:
    return _array(where, value, "a list of whole numbers of at least 0", whole=True)


# -- parts -------------------------------------------------------------------------------------------------------------


def _facts(where: str, value: Any) -> list[list[str]]:
    facts = []
    for index, each in enumerate(_list(where, value)):
        here = f"{where}[{index}]"
        pair = _texts(here, each)
        if len(pair) != 2:
            raise ArgumentError(here, each, "a name and a text")
        facts.append(pair)
    return facts


_CANDIDATE: dict[str, Callable[[str, Any], Any]] = {
    "name": _text,
    "kind": _text,
    "cp": lambda where, value: checked_integer(where, value, 1, _RANKS),
    "flags": _text,
    "milliseconds": _numbers_by_name,
    "tokens_per_second_per_gpu": _number,
    "mfu": lambda where, value: _number(where, value, 1),
    "bytes": _numbers_by_name,
    "limit_bytes": _number,
    "chosen": checked_flag,
    "why_not": _text,
}


def _candidates(where: str, value: Any) -> list[dict[str, Any]]:
    """Returns the candidates: the chosen one first, then the fastest; those without a step time last."""
    candidates = []
    for index, each in enumerate(_list(where, value)):
        here = f"{where}[{index}]"
        fields = _fields(here, each, _CANDIDATE, ["name"])
        candidate = {name: _CANDIDATE[name](f"{here}.{name}", field) for name, field in fields.items()}
        candidate.setdefault("kind", _without_cp(candidate["name"]))
        candidates.append(candidate)
    chosen = [candidate["name"] for candidate in candidates if candidate.get("chosen")]
    if len(chosen) > 1:
        raise ArgumentError(f"{where}.chosen", chosen, "one chosen candidate, or none")
    return sorted(
        candidates, key=lambda each: (not each.get("chosen"), each.get("milliseconds", {}).get("step", math.inf))
    )


def _without_cp(name: str) -> str:
    """Removes the size from a candidate's name: "exact, headwise" of "cp 16, exact, headwise"."""
    return re.sub(r"\bcp[ =]?\d+\b[\s,;:]*", "", name).strip(" ,;:") or name


def _ownership(where: str, value: Any) -> dict[str, Any]:
    fields = _fields(where, value, _OWNERSHIP, _OWNERSHIP)
    lengths, starts, ends, ranks = (_whole(f"{where}.{name}", fields[name]) for name in _OWNERSHIP)
    if not len(starts) == len(ends) == len(ranks):
        counts = [len(starts), len(ends), len(ranks)]
        raise ArgumentError(where, counts, "starts, ends and ranks of the same length")
    if starts.size and ((starts > ends).any() or ends.max() > lengths.sum()):
        wrong = int(np.flatnonzero((starts > ends) | (ends > lengths.sum()))[0])
        given = (int(starts[wrong]), int(ends[wrong]))
        allowed = f"fragments within the {int(lengths.sum())} tokens of the documents, no end before its start"
        raise ArgumentError(f"{where}[{wrong}]", given, allowed)
    order = np.argsort(starts, kind="stable")
    order = order[starts[order] < ends[order]]
    starts, ends, ranks = starts[order], ends[order], ranks[order]
    if (starts[1:] < ends[:-1]).any():
        wrong = int(np.flatnonzero(starts[1:] < ends[:-1])[0])
        both = [(int(starts[at]), int(ends[at])) for at in (wrong, wrong + 1)]
        raise ArgumentError(where, both, "fragments that do not overlap")
    return {name: packed(each) for name, each in zip(_OWNERSHIP, (lengths, starts, ends, ranks), strict=True)}


_OWNERSHIP = ("lengths", "starts", "ends", "ranks")


def _tiles(where: str, value: Any) -> list[dict[str, Any]]:
    return [_tile_picture(f"{where}[{index}]", each) for index, each in enumerate(_list(where, value))]


def _tile_picture(where: str, value: Any) -> dict[str, Any]:
    """Checks the picture of one mask: the parts that each rank computes."""
    needed = ("name", "queries", "keys", "ranks", "shapes")
    fields = _fields(where, value, (*needed, "text", "group"), needed)
    sizes = {name: checked_integer(f"{where}.{name}", fields[name], 0, 2**32 - 1) for name in ("queries", "keys")}
    group = checked_integer(f"{where}.group", fields.get("group", 1), 1, _RANKS)
    ranks = _whole(f"{where}.ranks", fields["ranks"])
    allowed = "[n, 6] whole numbers: a range of queries, the keys of its first one and the keys of its last one"
    shapes = _array(f"{where}.shapes", _list(f"{where}.shapes", fields["shapes"]) or [[]], allowed, dims=2, whole=True)
    if shapes.shape != (len(ranks), 6) and (shapes.size or len(ranks)):
        raise ArgumentError(f"{where}.shapes", shapes.shape, f"{allowed}; one for each of {len(ranks)} ranks")
    starts, ends, *keys = shapes.reshape(-1, 6).T
    fits = (starts < ends) & (ends <= sizes["queries"]) & (keys[0] <= keys[1]) & (keys[2] <= keys[3])
    fits &= np.maximum(keys[1], keys[3]) <= sizes["keys"]
    if not fits.all():
        wrong = int(np.flatnonzero(~fits)[0])
        allowed = f"rising ranges within {sizes['queries']} queries and {sizes['keys']} keys"
        raise ArgumentError(f"{where}.shapes[{wrong}]", shapes[wrong].tolist(), allowed)
    texts = {name: _text(f"{where}.{name}", fields.get(name, "")) for name in ("name", "text")}
    return {**texts, **sizes, "group": group, "ranks": packed(ranks), "shapes": packed(shapes)}


def _work(where: str, value: Any) -> dict[str, Any]:
    fields = _fields(where, value, ["unit", "values"], ["values"]) if isinstance(value, dict) else {"values": value}
    values = _array(where, fields["values"], "a list of numbers of at least 0, one for each rank")
    return {"unit": _text(f"{where}.unit", fields.get("unit", "")), "values": packed(values)}


_EVENT = ("rank", "stream", "start", "end", "name", "kind")


def _timeline(where: str, value: Any) -> dict[str, Any]:
    """Returns events sorted by rank, stream and start, which is how they are drawn and looked up."""
    fields = _fields(where, value, ["unit", "layers", "events"], ["events"])
    unit = fields.get("unit", "us")
    if not isinstance(unit, str) or unit not in _SECONDS:
        raise ArgumentError(f"{where}.unit", unit, ", ".join(_SECONDS))
    events = _list(f"{where}.events", fields["events"])
    for index, event in enumerate(events):
        if not isinstance(event, dict) or not event.keys() >= set(_EVENT) or not event.keys() <= {*_EVENT, "peer"}:
            allowed = f"a dictionary with {', '.join(_EVENT)}, and peer where there is one"
            raise ArgumentError(f"{where}.events[{index}]", event, allowed)
    here = f"{where}.events"
    ranks = _column(here, "rank", [event["rank"] for event in events], whole=True)
    starts, ends = (_column(here, name, [event[name] for event in events]) for name in ("start", "end"))
    if (starts > ends).any():
        wrong = int(np.flatnonzero(starts > ends)[0])
        raise ArgumentError(f"{here}[{wrong}].end", float(ends[wrong]), f"at least its start, {starts[wrong]:g}")
    streams = _places(here, "stream", [event["stream"] for event in events], STREAMS)
    kinds = _places(here, "kind", [event["kind"] for event in events], EVENT_KINDS)
    texts = [_text(f"{here}[{index}].name", event["name"]) for index, event in enumerate(events)]
    names = {name: place for place, name in enumerate(dict.fromkeys(texts))}
    has_peer = [event.get("peer") is not None for event in events]
    peers = _column(
        here, "peer", [event["peer"] if has else 0 for event, has in zip(events, has_peer, strict=True)], whole=True
    )
    columns = {
        "rank": ranks,
        "stream": streams,
        "kind": kinds,
        "name": np.array([names[text] for text in texts], dtype=np.int64),
        "peer": np.where(has_peer, peers + 1, 0),  # 0: none
    }
    order = np.lexsort((starts, streams, ranks))
    return {
        "seconds": _SECONDS[unit],
        "layers": _texts(f"{where}.layers", fields.get("layers", [])),
        "streams": STREAMS,
        "kinds": EVENT_KINDS,
        "names": list(names),
        **{name: packed(column[order]) for name, column in columns.items()},
        **packed_times(starts[order], ends[order]),
    }


def _column(where: str, name: str, values: list[Any], *, whole: bool = False) -> NDArray:
    """Checks a field of all events: all at once, since timelines are long; one by one only to name the wrong one."""
    try:
        column = np.array(values, dtype=None if values else np.int64)
    except (ValueError, OverflowError):
        column = np.array([None])
    is_numbers = column.ndim == 1 and column.dtype.kind in ("iu" if whole else "iuf") and np.isfinite(column).all()
    has_flags = not {bool, np.bool_}.isdisjoint(map(type, values))  # numpy takes them as 0 and 1 among numbers
    if is_numbers and not has_flags and (not whole or ((column >= 0) & (column < _RANKS)).all()):
        return column.astype(np.int64 if whole else np.float64)
    for index, value in enumerate(values):
        here = f"{where}[{index}].{name}"
        if whole:
            checked_integer(here, value, 0, _RANKS - 1)
        elif not math.isfinite(as_number(value)):
            raise ArgumentError(here, value, "a number")
    raise ArgumentError(f"{where}.{name}", values, "numbers")


def _places(where: str, name: str, values: list[Any], allowed: tuple[str, ...]) -> NDArray:
    places = {each: place for place, each in enumerate(allowed)}
    for index, value in enumerate(values):
        if not isinstance(value, str) or value not in places:
            raise ArgumentError(f"{where}[{index}].{name}", value, ", ".join(allowed))
    return np.array([places[value] for value in values], dtype=np.int64)


def _traffic(where: str, value: Any) -> dict[str, Any]:
    fields = _fields(where, value, ["unit", "matrix"], ["matrix"])
    allowed = "a square matrix of numbers of at least 0: a row sends to a column"
    matrix = _array(f"{where}.matrix", fields["matrix"], allowed, dims=2)
    if matrix.shape[0] != matrix.shape[1]:
        raise ArgumentError(f"{where}.matrix", matrix.shape, allowed)
    return {"unit": _text(f"{where}.unit", fields.get("unit", "bytes")), **packed_matrix(matrix)}


def _hosts(where: str, value: Any) -> list[str]:
    names = _texts(where, value)
    return [f"host {name}" if isinstance(each, Integral) else name for each, name in zip(value, names, strict=True)]


def _verdict(where: str, value: Any) -> dict[str, Any]:
    fields = _fields(where, value, ["text", "ok"], ["text", "ok"])
    return {"text": _text(f"{where}.text", fields["text"]), "ok": checked_flag(f"{where}.ok", fields["ok"])}


_LINE = ("name", "x", "y", "smooth", "beside")
_MOST_POINTS = 4000  # of a line: more than a screen has columns


def _curves(where: str, value: Any) -> list[dict[str, Any]]:
    """Returns charts of lines over a common axis. A long line keeps the extremes of as many parts as a screen shows."""
    charts = []
    for index, each in enumerate(_list(where, value)):
        here = f"{where}[{index}]"
        fields = _fields(here, each, ["title", "x", "lines"], ["title", "lines"])
        lines = [
            _line(f"{here}.lines[{place}]", line) for place, line in enumerate(_list(f"{here}.lines", fields["lines"]))
        ]
        texts = {name: _text(f"{here}.{name}", fields.get(name, "step")) for name in ("title", "x")}
        charts.append({**texts, "lines": lines})
    return charts


def _line(where: str, value: Any) -> dict[str, Any]:
    fields = _fields(where, value, _LINE, _LINE[:3])
    found = {name: np.asarray(fields[name], np.float64) for name in _LINE[1:4] if name in fields}
    shapes = {name: list(array.shape) for name, array in found.items()}
    if found["x"].ndim != 1 or len({array.shape for array in found.values()}) > 1:
        raise ArgumentError(where, shapes, "lists of numbers of the same length")
    kept = _extremes(found["y"]) if found["y"].size > _MOST_POINTS else np.arange(found["y"].size)
    beside = checked_flag(f"{where}.beside", fields.get("beside", False))
    columns = {name: packed(each[kept]) for name, each in found.items()}
    return {"name": _text(f"{where}.name", fields["name"]), "beside": beside, **columns}


def _extremes(values: NDArray) -> NDArray[np.int64]:
    """Returns the places of the least and the largest value of each of many parts, in order."""
    parts = np.array_split(np.arange(values.size), _MOST_POINTS // 2)
    finite = np.where(np.isfinite(values), values, 0.0)
    return np.unique([part[choose(finite[part])] for part in parts for choose in (np.argmin, np.argmax)])


def _tables(where: str, value: Any) -> list[dict[str, Any]]:
    tables = []
    for index, each in enumerate(_list(where, value)):
        here = f"{where}[{index}]"
        fields = _fields(here, each, ["title", "text", "columns", "rows", "bad"], ["columns", "rows"])
        columns = _texts(f"{here}.columns", fields["columns"])
        rows = [_list(f"{here}.rows[{place}]", row) for place, row in enumerate(_list(f"{here}.rows", fields["rows"]))]
        for place, row in enumerate(rows):
            if len(row) != len(columns):
                raise ArgumentError(f"{here}.rows[{place}]", row, f"{len(columns)} cells, one for each column")
        cells = [[_cell(f"{here}.rows[{place}]", cell) for cell in row] for place, row in enumerate(rows)]
        bad = [[int(number) for number in pair] for pair in _list(f"{here}.bad", fields.get("bad", []))]
        texts = {name: _text(f"{here}.{name}", fields.get(name, "")) for name in ("title", "text")}
        tables.append({**texts, "columns": columns, "rows": cells, "bad": bad})
    return tables


def _cell(where: str, value: Any) -> Any:
    """Returns a cell as JSON can hold it: numbers as numbers, so that a column of them sorts."""
    if value is None or isinstance(value, str):
        return value
    number = as_number(value)
    if math.isnan(number):
        return "nan"
    return number if math.isfinite(number) else _text(where, value)


def _layers(where: str, value: Any) -> list[dict[str, Any]]:
    layers = []
    for index, each in enumerate(_list(where, value)):
        here = f"{where}[{index}]"
        fields = _fields(here, each, ["name", "text", "ownership", "work"], ["name", "ownership"])
        checks = {"name": _text, "text": _texts, "ownership": _ownership, "work": _work}
        layers.append({name: checks[name](f"{here}.{name}", field) for name, field in fields.items()})
    return layers


_PARTS: dict[str, Callable[[str, Any], Any]] = {
    "title": _text,
    "verdict": _verdict,
    "command": _text,
    "environment": _facts,
    "curves": _curves,
    "tables": _tables,
    "layers": _layers,
    "summary": _text,
    "facts": _facts,
    "candidates": _candidates,
    "ownership": _ownership,
    "tiles": _tiles,
    "work": _work,
    "timeline": _timeline,
    "traffic": _traffic,
    "hosts": _hosts,
    "notes": _texts,
}


def _count_ranks(given: dict[str, Any]) -> int:
    """Returns the number of ranks; refuses parts that have another number, or name a rank beyond it."""
    work = given.get("work", [])
    counts = {
        "hosts": len(given.get("hosts", [])),
        "work": len(work["values"] if isinstance(work, dict) else work),
        "traffic.matrix": len(given.get("traffic", {}).get("matrix", [])),
    }
    counts = {name: count for name, count in counts.items() if count}
    if len(set(counts.values())) > 1:
        raise ArgumentError("report", counts, "as many hosts as numbers of work and rows of traffic: one for each rank")
    events = given.get("timeline", {}).get("events", [])
    tiles = [(each.get("group") or 1, each["ranks"]) for each in given.get("tiles", [])]
    layers = [int(rank) for layer in given.get("layers", []) for rank in layer["ownership"]["ranks"]]
    named = {
        "layers.ranks": max(layers, default=-1),
        "ownership.ranks": max((int(rank) for rank in given.get("ownership", {}).get("ranks", [])), default=-1),
        "tiles.ranks": max((int(rank) + group - 1 for group, ranks in tiles for rank in ranks), default=-1),
        "timeline.events": max((max(event["rank"], event.get("peer") or 0) for event in events), default=-1),
    }
    most = max(counts.values(), default=max(named.values()) + 1)
    for name, rank in named.items():
        if rank >= most:
            raise ArgumentError(
                f"report.{name}", rank, f"ranks below {most}, which is how many {next(iter(counts))} has"
            )
    return most
