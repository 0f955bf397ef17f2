"""A pickle that runs a command, for tests that it does not."""

import os


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)
