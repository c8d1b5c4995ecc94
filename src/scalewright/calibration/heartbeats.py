"""Ranks that watch each other: who fails is named to all, and nobody waits for one that is gone.

A thread in each process says every moment that the process lives, in the store of the process group, and looks at what
the others say. A rank is lost when its process has ended, which is seen at once on the same machine, or when nothing
was heard of it for a while. Main threads wait for each other by looking at a collective now and then, never inside it,
so that they can stop. This file knows nothing of what ranks do together.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from scalewright.errors import RankError

SILENT_SECONDS = 30.0
"""After which a rank is lost of which nothing is heard; half of the time-out if that is shorter."""
TIMEOUT_SECONDS = 1800.0
"""How long ranks wait for one that lives and does not come."""
_LONGEST_PAUSE = 0.005


@dataclass
class _Word:
    """What a rank says of itself."""

    beat: int = 0
    meetings: int = 0
    """How often its main thread has come to where ranks wait for each other."""
    failure: str | None = None
    """Why it stops, beginning with the rank that is to blame."""
    has_left: bool = False
    """Whether it has done all that it has to do with others."""
    node: str = ""
    pid: int = 0
    born: float = 0.0


class Watch:
    """One rank's watch over all of them, from `start` to `stop`."""

    def __init__(self, store: Any, rank: int, count: int, *, timeout: float) -> None:
        self.timeout = timeout
        self.silence = min(SILENT_SECONDS, timeout / 2)
        self.lost: set[int] = set()
        """Ranks that are gone, so that they say nothing any more."""
        self.is_ending = False
        """Whether the main thread is about to stop by an error."""
        self._store = store
        self._rank, self._count = rank, count
        self._word = _Word(node=_node(), pid=os.getpid(), born=psutil.Process().create_time())
        self._words: dict[int, _Word] = {}
        self._heard: dict[int, float] = {}
        self._failure: str | None = None
        self._round = time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scalewright ranks", daemon=True)

    def start(self) -> None:
        """Begin to tell and to look."""
        self._heard = dict.fromkeys((each for each in range(self._count) if each != self._rank), time.monotonic())
        self._thread.start()

    def stop(self) -> None:
        """Say and look no more. The thread may be stuck in a store that does not answer; it dies with the process."""
        self._stopped.set()
        self._thread.join(self._interval)
        if self._failure is None and not self._thread.is_alive():
            self._word.has_left = True
            with suppress(Exception):  # whoever keeps the store may have left, too
                self._say()

    def reason(self) -> str | None:
        """Which other rank is why all must stop, if one is; it may take a moment until that is known."""
        deadline = time.monotonic() + 3 * self._interval
        while self._failure is None and time.monotonic() < deadline:
            time.sleep(self._interval / 10)
        is_own = self._failure is not None and self._failure.startswith(f"rank {self._rank}:")
        return None if is_own else self._failure

    def wait(self, work: dist.Work) -> None:
        """Wait until a collective of all ranks is done; RankError if one is lost, has failed or does not come."""
        self._word.meetings += 1
        began, pause = time.monotonic(), 1e-4
        while not work.is_completed():
            self._check(began)
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE)
        try:
            work.wait()
        except RuntimeError as error:
            raise self.blamed(error) from None

    def blamed(self, error: Exception) -> RankError:
        """The error that names who has broken a connection: soon it will be known."""
        deadline = time.monotonic() + self.silence + 2 * self._interval
        while self._failure is None and time.monotonic() < deadline:
            time.sleep(self._interval / 10)
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        return RankError(self._failure or f"the ranks cannot reach each other any more ({first}).")

    def tell(self, failure: str) -> None:
        """Let all others know why this rank stops, and wait a moment until they have heard it."""
        self._failure, self.is_ending = self._failure or failure, True
        deadline = time.monotonic() + 3 * self._interval
        while time.monotonic() < deadline and not self._stopped.is_set():
            others = [self._words.get(rank) for rank in self._heard if rank not in self.lost]
            have_heard = all(word is not None and word.failure is not None for word in others)
            if self._word.failure is not None and have_heard:
                return
            time.sleep(self._interval / 10)

    # ---- inside ------------------------------------------------------------------------------------------------------

    @property
    def _interval(self) -> float:
        return min(1.0, self.silence / 10)

    def _check(self, began: float) -> None:
        now = time.monotonic()
        if self._failure is None and now > self._round + self.silence + 2 * self._interval:
            self._failure = _STORE_IS_LOST.format(f"has not answered for {self.silence:g} s")
            self.lost.add(0)
        if self._failure is None and now > began + self.timeout:
            # Others may wait for one that waits for the last one.
            words = dict(self._words)  # the other thread adds to them
            last = min(words, key=lambda rank: words[rank].meetings, default=0)
            self._failure = (
                f"rank {last}: has not come to where the others wait within {self.timeout:g} s. Look what it does "
                "there, or give it more time with rank_timeout."
            )
        if self._failure is not None:
            raise RankError(self._failure)

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self._say()
                self._listen()
                if self._ended():
                    self._listen()  # to its last word
            except Exception as error:
                if self._stopped.is_set():
                    return
                self._look_at_processes()
                if self._failure is None:
                    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
                    self._failure = _STORE_IS_LOST.format(f"cannot be reached any more ({first})")
                    self.lost.add(0)
                return
            self._look_at_processes()
            self._round = time.monotonic()
            self._stopped.wait(self._interval)

    def _say(self) -> None:
        self._word.beat += 1
        self._word.failure = self._failure
        self._store.set(f"{self._rank}", json.dumps(asdict(self._word)))

    def _listen(self) -> None:
        now = time.monotonic()
        for rank, word in self._everybody().items():
            before = self._words.get(rank)
            if before is None or before.beat != word.beat:
                self._heard[rank] = now
            self._words[rank] = word
            if self._failure is None and word.failure is not None:
                self._failure = word.failure
        gone = {rank for rank, word in self._words.items() if word.has_left}
        silent = [rank for rank, heard in self._heard.items() if now > heard + self.silence and rank not in gone]
        if silent and now < self._round + self.silence / 2:  # or it was we who slept
            self._lose(silent[0], f"nothing was heard of it for {self.silence:g} s. It hangs, or its machine is lost")

    def _everybody(self) -> Mapping[int, _Word]:
        ranks = [each for each in self._heard if each in self._words or self._store.check([f"{each}"])]
        texts = self._store.multi_get([f"{each}" for each in ranks]) if ranks else []
        return {rank: _Word(**json.loads(text)) for rank, text in zip(ranks, texts, strict=True)}

    def _ended(self) -> list[int]:
        """Ranks on this machine whose processes have ended, and have not said why."""
        return [
            rank
            for rank, word in self._words.items()
            if word.node == self._word.node and not (word.has_left or word.failure is not None) and not _is_alive(word)
        ]

    def _look_at_processes(self) -> None:
        for rank in self._ended():
            self._lose(rank, "its process has ended")

    def _lose(self, rank: int, why: str) -> None:
        self.lost.add(rank)
        if self._failure is None:
            self._failure = f"rank {rank}: {why}."


_STORE_IS_LOST = "rank 0: the store of the process group, which it or torchrun beside it keeps, {}."


def new_watch(store: Any, token: int, rank: int, count: int, *, timeout: float) -> Watch:
    """A watch with a connection of its own; `token` tells this run from others in the same store."""
    with_own_connection = store.clone() if hasattr(store, "clone") else store
    return Watch(PrefixStore(f"scalewright/{token}", with_own_connection), rank, count, timeout=timeout)


def _node() -> str:
    """What processes share that can see each other's numbers; something of its own where that is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return uuid.uuid4().hex


def _is_alive(word: _Word) -> bool:
    try:
        process = psutil.Process(word.pid)
        is_same = abs(process.create_time() - word.born) < 1
        return is_same and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True
