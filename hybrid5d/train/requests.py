"""What signals ask of a run: to save, or to save and stop. Asked on any rank at any time, agreed on between steps."""

from __future__ import annotations

from enum import IntEnum

import torch

from hybrid5d.parallel.agree import world_axis
from hybrid5d.parallel.collectives import max_scalars


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

    def agree(self, device: torch.device, keep: bool = False) -> Request:
        """What any rank was asked; a stop stays, a save is asked once. Collective over the world (one maximum).

        `keep`: only look; a save is left for the next one to answer.
        """
        mine = self._asked
        agreed = Request(int(max_scalars([float(mine)], world_axis(), device)[0]))
        if not keep and self._asked is mine is Request.SAVE:
            self._asked = Request.NOTHING
        return agreed
