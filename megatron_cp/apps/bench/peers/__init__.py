"""What ours is compared with: megatron-core's own functions and layers. Nothing else in `bench` imports Megatron."""
