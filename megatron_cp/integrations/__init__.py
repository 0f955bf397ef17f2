"""Adapters for other people's frameworks, which are imported only where they are used. `docs/hosts.md` lists them."""
