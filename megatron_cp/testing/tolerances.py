"""Limits of the difference between two results. No torch in here: the command line quotes them in its help."""

# Errors of outputs and gradients, relative to the largest. Sums that cancel, such as gradients of few parameters, lose
# most.
CODEC_TOLERANCES = {"fp8": 0.2, "fp8_e5m2": 0.4, "int8": 0.05}
