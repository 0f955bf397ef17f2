"""Chooses what the ranks do for a layer on a batch, and says why. Numpy and integers only: no torch in here."""
