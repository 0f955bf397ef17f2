"""From a packed batch to a step of training, in plain PyTorch: all that a loop needs besides its model.

`shard` gives each rank its rows of a pack, with the plans of every layer; `loss` is the mean over the tokens of all
ranks, with each rank's own share of its gradient; `gradients` sums parameters' gradients over ranks; `pack` is a pack
on the host. No framework but torch in here: adapters such as `megatron` wrap this room.
"""
