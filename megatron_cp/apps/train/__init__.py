"""The training loop of `megatron-cp train`, around Megatron's model, optimizer and checkpoints.

The package has a run's options and folder, which import no torch; the set-up of its model; the loop; and checkpoints,
with their digests and the pickles in them. A job of Megatron's own needs none of it.
"""
