"""The peers of comparisons: megatron-core's own functions and layers. Nothing else in `benchmarks` imports Megatron."""
