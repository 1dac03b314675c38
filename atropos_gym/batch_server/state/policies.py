"""The newest version of the policy, who published it, and who still uses which versions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from atropos_gym.batch_server.state.refusals import Conflict
from atropos_gym.wire import Policy, PolicyUpdate

__all__ = ["PolicyBoard"]


class PolicyBoard:
    """What ``/policy`` shows.

    Attributes:
        fingerprint: of the tokenizer that the ids belong to; the first one that was published.
    """

    def __init__(self) -> None:
        self._policy = Policy()
        self._held: dict[int | None, tuple[frozenset[int], float]] = {}
        self.fingerprint: str | None = None

    @property
    def version(self) -> int | None:
        """The newest version; None before the first."""
        return self._policy.version

    @property
    def finished(self) -> bool:
        """Whether the current run has ended."""
        return self._policy.finished

    @property
    def superseded(self) -> bool:
        """Whether the newest version is of a trainer that another one has replaced."""
        return self._policy.superseded

    def begin(self, *, anew: bool) -> None:
        """A trainer has come: the run that ended before it is nobody's end any more.

        Args:
            anew: it is another one than who published so far: that is not what it wants to be played.
        """
        superseded = self.version is not None and (anew or self.finished or self.superseded)
        self._policy = self._policy.model_copy(update={"finished": False, "superseded": superseded})

    def publish(self, update: PolicyUpdate, now: float, *, force: bool = False) -> bool:
        """Takes a learner's newest version, or the end of its run.

        Args:
            update: what the learner says.
            now: Unix seconds.
            force: take a tokenizer that differs from the first one's.

        Returns:
            Whether anything is new; the same post twice is no mistake.

        Raises:
            Conflict: the version does not grow, another run goes on, or the tokenizer differs.
        """
        current = self._policy
        if update.finished:
            return self._finish(update)
        assert update.version is not None, "PolicyUpdate holds this"
        if self.fingerprint and update.tokenizer_fingerprint not in (None, self.fingerprint) and not force:
            raise Conflict(
                f"tokenizer_fingerprint {update.tokenizer_fingerprint} differs from the first one, "
                f"{self.fingerprint}: use the same tokenizer, or ?force=true"
            )
        if current.version is not None and update.version <= current.version:
            if self._same(update):
                self._policy = current.model_copy(update={"published_at": now, "superseded": False})
                return False
            raise Conflict(
                f"version {update.version} of run {update.run!r} does not follow version {current.version} "
                f"of run {current.run!r}: publish {current.version + 1} or above"
            )
        self.fingerprint = update.tokenizer_fingerprint or self.fingerprint
        self._policy = Policy(**update.model_dump(), published_at=now)
        return True

    def _finish(self, update: PolicyUpdate) -> bool:
        current = self._policy
        if current.version is not None and update.run != current.run:
            raise Conflict(f"run {update.run!r} is not the current one, {current.run!r}")
        changed = not current.finished
        self._policy = current.model_copy(update={"run": update.run, "finished": True, "superseded": False})
        return changed

    def _same(self, update: PolicyUpdate) -> bool:
        """Whether this very update was the last one."""
        known = self._policy.model_dump(exclude={"published_at", "held", "finished", "superseded"})
        return update.model_dump(exclude={"finished"}) == known

    def hold(self, env_id: int | None, versions: Iterable[int], now: float) -> None:
        """Notes which versions a service still uses; this replaces what it said before."""
        self._held[env_id] = (frozenset(versions), now)

    def state(self) -> dict[str, Any]:
        """What is to be saved."""
        return {
            "policy": self._policy.model_dump(),
            "fingerprint": self.fingerprint,
            "held": [[env_id, sorted(held), at] for env_id, (held, at) in self._held.items()],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from what :meth:`state` said."""
        self._policy = Policy.model_validate(state["policy"])
        self.fingerprint = state["fingerprint"]
        self._held = {env_id: (frozenset(held), at) for env_id, held, at in state["held"]}

    def show(self, now: float, holding_seconds: float) -> Policy:
        """Returns the policy with all versions that services said they use within that time."""
        self._held = {
            env_id: (versions, said_at)
            for env_id, (versions, said_at) in self._held.items()
            if now - said_at <= holding_seconds
        }
        held = sorted(frozenset().union(*(versions for versions, _ in self._held.values())))
        return self._policy.model_copy(update={"held": held})
