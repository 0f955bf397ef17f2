"""Colours of pictures and pages."""

from __future__ import annotations

# Okabe and Ito's colours, which colour-blind people tell apart, without the yellow that a white page hides.
DISTINCT = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a8fd6", "#7f7f7f")


def distinct_colours(count: int) -> list[str]:
    """Returns a colour for each of `count` things: `DISTINCT` first, darker and paler ones, then hues all around."""
    shades = [DISTINCT, *(tuple(_shaded(colour, weight) for colour in DISTINCT) for weight in (0.6, 1.5))]
    named = [colour for shade in shades for colour in shade]
    return [*named, *(f"hsl({360 * n / count:.2f}, 60%, 50%)" for n in range(count - len(named)))][:count]


def _shaded(colour: str, weight: float) -> str:
    """Returns a colour darker with a weight below 1, and paler with one above it."""
    parts = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
    mixed = [part * weight if weight < 1 else 255 - (255 - part) / weight for part in parts]
    return "#" + "".join(f"{round(part):02x}" for part in mixed)
