"""Draws the pictures of docs/concepts.md from real layouts, masks and plans, as SVG.

    PYTHONPATH=. python tools/drawings.py

Each picture has a card behind it, which is dark where the reader prefers dark, and ranks have numbers beside colours.
"""

from pathlib import Path

import megatron_cp as cp
from megatron_cp.layout.bands import area, cut
from megatron_cp.planner.picture import outlines_of, shapes_by_rank, shapes_of

FOLDER = Path(__file__).parents[1] / "docs" / "images"
COLOURS = ["#56b4e9", "#e69f00", "#009e73", "#cc79a7"]  # of Okabe and Ito, told apart by colour-blind people
RANKS, PACKING = 4, cp.Packing([13, 3, 20, 12])
STYLE = """<style>
.card{fill:#fff} text{fill:#222;font:13px sans-serif} .small{font-size:11px} .in{fill:#000;text-anchor:middle}
.line{stroke:#222;fill:none} .faint{stroke:#888;fill:none;stroke-dasharray:3 3} .pad{fill:url(#pad)}
.other{fill:#888;fill-opacity:.25}
@media (prefers-color-scheme:dark){.card{fill:#1d2126} text{fill:#e4e4e4} .in{fill:#000} .line{stroke:#e4e4e4}}
</style><defs><marker id="tip" markerWidth="8" markerHeight="8" refX="7" refY="4" orient="auto">
<path d="M0,0L8,4L0,8z" fill="#888"/></marker><pattern id="pad" width="6" height="6" patternUnits="userSpaceOnUse">
<path d="M0,6L6,0" stroke="#888"/></pattern></defs>"""


class Drawing:
    """An SVG picture under construction."""

    def __init__(self, name, title, width, height):
        self.path, self.parts = FOLDER / f"{name}.svg", [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" width="{width}">',
            f"<title>{title}</title>", STYLE, f'<rect class="card" width="{width}" height="{height}" rx="8"/>',
        ]  # fmt: skip

    def text(self, x, y, words, style=""):
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{style}">{words}</text>')

    def box(self, x, y, width, height, rank=None, label="", style="other"):
        fill = f'fill="{COLOURS[rank]}"' if rank is not None else f'class="{style}"'
        self.parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" {fill} rx="1"/>')
        if label != "":
            self.text(x + width / 2, y + height / 2 + 4, label, "in small")

    def line(self, x, y, to_x, to_y, style="line", arrow=False):
        tip = ' marker-end="url(#tip)"' if arrow else ""
        self.parts.append(f'<path d="M{x:g},{y:g}L{to_x:g},{to_y:g}" class="{style}"{tip}/>')

    def shapes(self, x, y, scale, shapes, ranks=None):
        for number, corners in enumerate(outlines_of(shapes)):
            points = " ".join(f"{x + scale * key:g},{y + scale * query:g}" for key, query in corners)
            fill = f'fill="{COLOURS[0 if ranks is None else ranks[number]]}"'
            self.parts.append(f'<polygon points="{points}" {fill}/>')

    def save(self):
        self.path.write_text("\n".join([*self.parts, "</svg>"]) + "\n")


def layouts():
    """Draws who has which tokens of four documents, and the same with padding."""
    drawing, left, scale = Drawing("layouts", "Four documents over four ranks, in four layouts", 760, 226), 120, 12.8
    rows = {"contiguous": cp.Layout.contiguous, "zigzag": cp.Layout.zigzag, "balanced": cp.Layout.balanced}
    drawing.text(12, 36, "documents")
    for number, (start, end) in enumerate(PACKING.spans()):
        drawing.box(left + scale * start, 20, scale * (end - start) - 1.5, 24, label=end - start)
        if number:
            drawing.line(left + scale * start - 0.5, 16, left + scale * start - 0.5, 166, "faint")
    for number, (name, make) in enumerate(rows.items()):
        y, layout = 58 + 40 * number, make(PACKING, RANKS)
        drawing.text(12, y + 17, name)
        for rank in range(RANKS):
            for fragment in layout.fragments_of(rank):
                width = scale * (fragment.end - fragment.start)
                drawing.box(left + scale * fragment.start, y, width - 1, 24, rank, rank)
    y, at, padded, narrow = 58 + 40 * 3, left, 0, 0.75 * scale
    drawing.text(12, y + 17, "padded zigzag")
    for length in PACKING.lengths.tolist():  # each document in 2 * cp equal chunks, its last ones filled up
        chunk = -(-length // (2 * RANKS))
        for number in range(2 * RANKS):
            real, rank = min(chunk, max(0, length - number * chunk)), min(number, 2 * RANKS - 1 - number)
            if real:
                drawing.box(at, y, narrow * real - 1, 24, rank, rank)
            drawing.box(at + narrow * real, y, narrow * (chunk - real), 24, style="pad")
            at, padded = at + narrow * chunk, padded + chunk - real
    drawing.text(left, y + 42, f"hatched: {padded} pad tokens for {PACKING.total} real ones, drawn narrower", "small")
    drawing.save()


def ulysses():
    """Draws the head exchange."""
    drawing, cell = Drawing("ulysses", "One all-to-all gives each rank all tokens of its heads", 760, 216), 36
    for x, name, of in ((40, "before: own tokens, all heads", 0), (480, "inside: all tokens, own heads", 1)):
        drawing.text(x, 28, name)
        for places in ((row, column) for row in range(RANKS) for column in range(RANKS)):
            drawing.box(x + 20 + cell * places[1], 40 + cell * places[0], cell - 2, cell - 2, places[of], places[of])
        drawing.text(x + 20, 56 + cell * RANKS, "heads &#8594;", "small")
        drawing.text(x - 26, 56 + cell * RANKS / 2, "tokens", "small")
    drawing.line(260, 90, 420, 90, arrow=True)
    drawing.text(270, 80, "all-to-all of q, k, v")
    drawing.line(420, 140, 260, 140, arrow=True)
    drawing.text(282, 160, "all-to-all of out")
    drawing.save()


def keys():
    """Draws the keys that one rank receives, of all ranks and by `exact`."""
    drawing, scale, rank = Drawing("keys", "Which keys rank 2 receives in two kinds of schemes", 760, 262), 3.6, 2
    layout, mask = cp.Layout.contiguous(PACKING, RANKS), cp.Mask.causal(PACKING)
    plan = cp.plan_attention(PACKING, layout, heads=1, kv_heads=1, head_dim=8, mask=mask, scheme="exact", head_chunks=1)
    (stage,) = [stage for stage in plan.attend.stages if stage.keys is not None]
    (own,), needed = layout.fragments_of(rank), stage.keys.split_counts.counts[:, rank].tolist()
    needed[rank] = 0  # they are here
    panels = ((30, "ring, all-gather: every rank's keys", False), (420, "exact: the keys that it sees", True))
    for x, name, exact in panels:
        drawing.text(x, 26, name)
        for other in range(RANKS):
            (piece,) = layout.fragments_of(other)
            count = needed[other] if exact and other != rank else piece.end - piece.start
            begin = piece.end - count  # of a causal mask over contiguous ranges: the last ones
            drawing.box(x + scale * begin, 36, scale * count - 1, 18, other, other) if count else None
        drawing.shapes(x, 62, scale, shapes_of(mask.bands), [rank] * len(mask.bands))
        drawing.box(x, 62, scale * 48, scale * own.start)
        drawing.box(x, 62 + scale * own.end, scale * 48, scale * (48 - own.end))
        drawing.line(x, 62, x, 62 + scale * 48)
        drawing.line(x, 62, x + scale * 48, 62)
        drawing.text(x + scale * 48 + 8, 48, "keys here", "small")
        drawing.text(x + scale * 48 + 8, 62 + scale * (own.start + own.end) / 2, f"queries of rank {rank}", "small")
        drawing.text(x, 252, f"{sum(needed) if exact else 48 - own.end + own.start} keys arrive", "small")
    drawing.save()


def states():
    """Draws the state that passes along a document."""
    drawing = Drawing("states", "A state passes from rank to rank along a document", 760, 150)
    for rank in range(RANKS):
        x = 30 + 180 * rank
        drawing.box(x, 50, 150, 34, rank, f"rank {rank}: own tokens")
        if rank:
            drawing.line(x - 28, 67, x - 2, 67, arrow=True)
            drawing.text(x - 22, 44, "S")
    drawing.text(30, 26, "one document, cut over four ranks: S = M S + E, with M and E of a rank's own tokens")
    drawing.text(
        30, 112, "Each rank computes M and E of its segment at once. One small exchange brings them to the later"
    )
    drawing.text(30, 130, "ranks, which fold them in document order. A new document starts from zero: nothing arrives.")
    drawing.save()


def masks():
    """Draws five masks."""
    drawing, scale = Drawing("masks", "Five masks over two packed documents", 760, 196), 2.6
    packing = cp.Packing([32, 16])
    tree = cp.Mask.shared_question(packing, [[10, 12, 10], [5, 6, 5]])
    named = {"causal": "causal", "window": "window:7,0", "prefix": "prefix:8", "strided": "strided"}
    found = {name: cp.Mask.named(packing, spelling) for name, spelling in named.items()}
    for number, (name, mask) in enumerate({**found, "shared question": tree}.items()):
        x = 14 + 148 * number
        drawing.text(x, 26, name)
        drawing.box(x, 38, scale * 48, scale * 48)
        drawing.shapes(x, 38, scale, shapes_of(mask.bands))
    drawing.text(
        14, 184, "queries from top to bottom, keys from left to right, the second document below the first", "small"
    )
    drawing.save()


def tiles():
    """Draws the tiles of a mask by the rank that computes them."""
    drawing, scale = Drawing("tiles", "Tiles of a mask, each computed by one rank", 760, 250), 2.1
    packing = cp.Packing([96])
    layout, mask = cp.Layout.contiguous(packing, RANKS), cp.Mask.named(packing, "global_local")
    sizes = {"heads": 1, "kv_heads": 1, "head_dim": 8}
    plan = cp.plan_attention(packing, layout, **sizes, mask=mask, scheme="tiled")
    tiled, (starts, ends) = plan.attend.tiled.forward, (layout.starts, layout.ends)  # contiguous: in order of ranks
    own, owners = cut(mask.bands, starts, ends, queries=True)
    for x, name in ((30, "queries stay: keys travel"), (420, "tiles: queries travel too")):
        drawing.text(x, 26, name)
        drawing.box(x, 36, scale * 96, scale * 96)
        ranks, found = (owners, shapes_of(own)) if x < 400 else shapes_by_rank(tiled)[1::-1]
        drawing.shapes(x, 36, scale, found, ranks)
        for rank in range(RANKS):
            drawing.box(x - 14, 36 + scale * starts[rank], 10, scale * (ends[rank] - starts[rank]) - 1, rank)
            y = 60 + 22 * rank
            drawing.box(x + scale * 96 + 14, y, 18, 18, rank, rank)
            pairs = area(own[owners == rank] if x < 400 else tiled.rank_bands(rank))
            drawing.text(x + scale * 96 + 38, y + 14, f"{pairs} pairs", "small")
    drawing.save()


def main():
    """Draws all pictures."""
    for draw in (layouts, ulysses, keys, states, masks, tiles):
        draw()


if __name__ == "__main__":
    main()
