"""Colours of pictures and pages, which colour-blind people tell apart."""

from __future__ import annotations

from typing import Any

# Okabe and Ito's colours, without the yellow that a white page hides; `base.js` has the same.
DISTINCT = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a8fd6", "#7f7f7f")


def rank_colours(count: int) -> Any:
    """Returns `[count, 4]` a colour for each rank: distinct ones for few ranks, viridis for many.

    Neighbours among many ranks look alike; a picture of them has a colour bar instead of a legend.
    """
    import numpy as np
    from matplotlib import colormaps, colors

    if count <= len(DISTINCT):
        return np.array(colors.to_rgba_array(DISTINCT[:count])).reshape(count, 4)
    return colormaps["viridis"](np.linspace(0.06, 0.94, count))
