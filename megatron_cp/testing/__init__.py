"""Proofs that run anywhere: parity, oracles, poisoned buffers, counters. Shipped, because users verify their clusters."""
