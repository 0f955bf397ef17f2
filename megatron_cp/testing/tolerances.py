"""How far two results may be apart. No torch in here: the command line quotes it in its help."""

# Of outputs and gradients, over the largest: sums that cancel, as the gradients of few parameters, lose most.
CODEC_TOLERANCES = {"fp8": 0.2, "fp8_e5m2": 0.4, "int8": 0.05}
