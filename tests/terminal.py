"""A stream that is a terminal, in tests of what a terminal shows."""

import io


class Terminal(io.StringIO):
    def isatty(self):
        return True
