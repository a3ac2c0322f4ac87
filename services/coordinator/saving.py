"""Has trainer and critic save their states, and takes note of what is on disk."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from common.config import Config
from common.config_values import snapshots
from common.messages import Role, SaveState, StateSaved, StateStaged
from services.coordinator.dispatch import Dispatcher
from services.coordinator.leases import LeaseLost, result_of
from services.coordinator.member import Member
from services.coordinator.states import SavedStates

log = logging.getLogger("saving")


class StateSaving:
    """One task for each part that is being saved; nobody waits for it but the end of the run, and a way back."""

    def __init__(self, config: Config, dispatcher: Dispatcher, states: SavedStates, roles: Sequence[Role]) -> None:
        self.config = config
        self.dispatcher = dispatcher
        self.states = states
        self.roles = roles
        self.snapshots = snapshots(config)
        self.timings: dict[str, float] = {}
        """What saving and restoring took since it was last asked."""
        self._saving: set[asyncio.Task[None]] = set()
        self._unsaved: dict[tuple[Role, int], asyncio.Future[StateSaved]] = {}
        """Parts that were asked for and are not on the disk yet."""

    def save(self, step: int, last: bool) -> None:
        """Has the state of a step that all learners hold saved, if it is due; does not wait for it.

        Of a step all parts are saved or none. Told again of a step that is being saved, it asks for what is missing.
        """
        if not self.snapshots.due(step, last, writing=any(other != step for _, other in self._unsaved)):
            return
        for role in self.roles:
            if self.states.has(role, step) or (role, step) in self._unsaved:
                continue  # the step's publish is repeated
            self._unsaved[role, step] = asyncio.get_running_loop().create_future()
            task = asyncio.create_task(self._save(role, step))
            self._saving.add(task)
            task.add_done_callback(self._saving.discard)

    async def _save(self, role: Role, step: int) -> None:
        """One learner's part. One that is not saved costs a longer way back, and not the run."""
        limit, wanted = self.config.timeouts.checkpoint, self._unsaved[role, step]
        task = SaveState(step=step, path=str(self.states.path(step)))
        try:
            done = await self.dispatcher.submit(role, "CHECKPOINT", step, task, limit)
            self.count("checkpoint_stall_s", result_of(done, StateStaged).stall_s)
            async with asyncio.timeout(limit):
                saved = await wanted
        except LeaseLost as lost:
            log.warning("the %s's state after step %d is not saved: %s", role, step, lost)
            return
        except TimeoutError:
            log.warning(
                "the %s has not saved its state after step %d in %.0f s (timeouts.checkpoint)", role, step, limit
            )
            return
        finally:
            self._unsaved.pop((role, step), None)
        if saved.error:
            log.warning("the %s's state after step %d is not saved: %s", role, step, saved.error)
            return
        self.count("checkpoint_write_s", saved.seconds)
        self.count("checkpoint_gib", saved.nbytes / 2**30)
        self.states.part_saved(role, step, saved.digest)

    def saved(self, member: Member, message: StateSaved) -> None:
        """What a learner tells of its background writing."""
        wanted = self._unsaved.get((member.role, message.step))
        if wanted is not None and not wanted.done():
            wanted.set_result(message)
        elif not message.error:
            self.states.part_saved(member.role, message.step, message.digest)  # asked for by an earlier coordinator

    async def until_saved(self, timeout: float) -> None:
        """Waits for what is being saved, until the disk has all of it."""
        ends = time.monotonic() + timeout
        if self._saving:
            await asyncio.wait(self._saving, timeout=timeout)
        await self.states.until_written(max(0.0, ends - time.monotonic()))

    def member_died(self, member: Member) -> None:
        """What it had not written when it died it never will."""
        for (role, step), saved in list(self._unsaved.items()):
            if role == member.role and not saved.done():
                saved.set_result(StateSaved(epoch=0, step=step, nbytes=0, seconds=0.0, error=f"{member.name} died"))

    def count(self, name: str, value: float) -> None:
        self.timings[name] = self.timings.get(name, 0.0) + value

    def take_timings(self) -> dict[str, float]:
        taken, self.timings = self.timings, {}
        return taken

    def close(self) -> None:
        for task in self._saving:
            task.cancel()
        self.states.close()
