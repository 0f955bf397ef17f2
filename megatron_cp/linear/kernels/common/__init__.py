"""Code that kernels of linear layers share: chunks of tokens, decays by feature, checks of installed packages."""
