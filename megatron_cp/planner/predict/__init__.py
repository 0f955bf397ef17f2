"""What a plan will take, from the plan alone: `memory` in bytes, `cost` in time on named hardware."""
