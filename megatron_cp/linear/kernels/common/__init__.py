"""What kernels of linear layers have in common: chunks of tokens, decays by feature, what is installed."""
