"""What `megatron-cp train` runs on each rank: a small training loop around Megatron's model, optimizer and checkpoints.

Owns a run's options and folder, which import no torch; the set-up of its model; the loop; and its checkpoints, from
their digests to the pickles in them. A job of Megatron's own needs none of it.
"""
