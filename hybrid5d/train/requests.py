"""What signals ask of a run: to save, or to save and stop. Asked on any rank at any time, agreed on between steps.

Without torch: a rank answers signals before it imports it.
"""

from __future__ import annotations

from enum import IntEnum


class Request(IntEnum):
    """The largest that any rank was asked counts."""

    NOTHING = 0
    SAVE = 1
    STOP = 2  # save and end: as asked
    LEAVE = 3  # save and end: what started the run is gone; no success


class Requests:
    """This rank's.

    Attributes:
        answered: somebody looks at them; before that (start-up, evaluation on its own) there is nothing to save.
    """

    def __init__(self) -> None:
        self._asked = Request.NOTHING
        self.answered = False

    @property
    def asked(self) -> Request:
        """Of this rank."""
        return self._asked

    def ask(self, request: Request) -> None:
        """Called from another thread than the one that answers."""
        self._asked = max(self._asked, request)

    def take(self, seen: Request) -> None:
        """A save is answered once; a stop stays, and so does what was asked after `seen` was read."""
        if self._asked is seen is Request.SAVE:
            self._asked = Request.NOTHING
