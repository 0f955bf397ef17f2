"""`Latent`: the latents from which multi-latent attention makes keys and values. Pure data; no torch in here."""

from __future__ import annotations

from typing import NamedTuple

LATENT_MODES = ("expand", "absorb", "heads")


class Latent(NamedTuple):
    """The latents of a layer.

    Attributes:
        shared, rank: features of the rotary key that all heads share, and of the latent of a token.
        made: features of a head that the up-projection makes of a latent: of its key, and of its value.
        mode: one of `LATENT_MODES`: latents are expanded to keys and values where they arrive; or queries absorb the
            up-projection, and meet latents; or latents are expanded to keys and values, which travel.
    """

    shared: int
    rank: int
    made: int
    mode: str

    @property
    def travels(self) -> bool:
        """True if shared keys and latents travel, in one group; False if keys and values do."""
        return self.mode != "heads"
