"""The peers of comparisons: megatron-core's own functions and layers. Nothing else in `bench` imports Megatron."""
