"""A pickle that runs a command, for tests that it does not."""

import os


class Evil:
    """Who unpickles it makes a file."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)
