"""GroupStore: the store through which workers find the group in which they learn."""

from __future__ import annotations

import json
from typing import Any


class GroupStore:
    """Groups of workers and the run's global variables, in a store of torch.distributed.

    A group is announced once; each of its members adds itself, and the group is complete when all
    have. Members may join only the newest group.

    Args:
        address: (host, port) of the server. The port 0 starts a server in this process, on a free
            port.

    Attributes:
        address: (host, port) of the server.
    """

    def __init__(self, address: tuple[str, int]):
        from torch.distributed import TCPStore

        host, port = address
        self._store: Any = TCPStore(host, port, is_master=port == 0, wait_for_workers=False)
        self.address: tuple[str, int] = host, self._store.port

    def announce(self, group: str, members: list[int], state: bytes) -> None:
        """Make a group the newest one.

        Args:
            group: its name.
            members: the indices of its workers.
            state: what its members start from; see `learning_state`.
        """
        self._store.set(f"state/{group}", state)
        self._store.set(f"members/{group}", json.dumps(members))
        self._store.set("newest_group", group)

    def newest_group(self) -> str:
        """Return the name of the newest group; wait until one is announced."""
        name: str = self._store.get("newest_group").decode()
        return name

    def members(self, group: str) -> list[int]:
        """Return the indices of the workers of a group."""
        members: list[int] = json.loads(self._store.get(f"members/{group}"))
        return members

    def state(self, group: str) -> bytes:
        """Return the state that the members of a group start from."""
        state: bytes = self._store.get(f"state/{group}")
        return state

    def arrive(self, group: str) -> None:
        """Add the calling worker to a group; once per worker."""
        if self._store.add(f"arrived/{group}", 1) >= len(self.members(group)):
            self._store.set(f"complete/{group}", "")

    def is_complete(self, group: str) -> bool:
        """Return whether all members of a group have arrived."""
        return bool(self._store.check([f"complete/{group}"]))

    def forget(self, group: str) -> None:
        """Remove the entries of a group."""
        for entry in ("state", "members", "arrived", "complete"):
            self._store.delete_key(f"{entry}/{group}")

    def set_waiting(self, worker: int, restart_count: int, waits: bool) -> None:
        """Note whether a worker is in a part of a round in which members wait for each other.

        Args:
            worker: its index.
            restart_count: number of failed workers with this index before it.
            waits: whether it is.
        """
        key = f"waiting/{worker}/{restart_count}"
        if waits:
            self._store.set(key, "")
        else:
            self._store.delete_key(key)

    def is_waiting(self, worker: int, restart_count: int) -> bool:
        """Return the last value of `set_waiting`."""
        return bool(self._store.check([f"waiting/{worker}/{restart_count}"]))

    def rendezvous(self, group: str) -> Any:
        """Return a torch.distributed store of a group's own, for `ProcessGroup`."""
        from torch.distributed import PrefixStore

        return PrefixStore(group, self._store)

    def set_global_vars(self, global_vars: dict[str, Any]) -> None:
        """Write the global variables of the WorkerSet."""
        self._store.set("global_vars", json.dumps(global_vars))

    def global_vars(self) -> dict[str, Any]:
        """Return the global variables; wait until they are written."""
        global_vars: dict[str, Any] = json.loads(self._store.get("global_vars"))
        return global_vars
