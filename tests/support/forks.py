"""Forks while other threads are inside kda_core; prints, as JSON, how the children ended.

    python tests/support/forks.py calling CHILDREN      while three threads call
    python tests/support/forks.py loading               while a thread loads the backends

A child has only the thread that forked it, and every lock as it was then: locked, if another thread held it. A child
that does not end is killed. One thread computes here and in the children: OpenMP's threads do not survive a fork.
"""

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from importlib import metadata

import torch

import kda_core
from kda_core._plugins import registry
from kda_core.hookspecs import ENTRY_POINT_GROUP

PATIENCE = 15.0
"""Seconds that a child gets on a busy machine; its calls take milliseconds."""
BUSY_THREADS = 3

generator = torch.Generator().manual_seed(0)
q, k, v, g, beta = (torch.randn(1, 40, 2, 8, generator=generator) for _ in range(5))
ARGUMENTS = {"q": q, "k": k, "v": v, "g": -g.abs(), "beta": beta[..., 0].sigmoid(), "backend": "cpu"}
BOUNDS = torch.tensor([0, 20, 20, 23, 40])


def results():
    """Results of dense and of packed calls; one has a scale that no call had, so that its backend is chosen anew."""
    unseen = 0.5 + time.monotonic() % 1e-3
    o, _ = kda_core.chunk_kda(**ARGUMENTS, scale=unseen)
    calls = (kda_core.chunk_kda, kda_core.fused_recurrent_kda)
    return [o / unseen, *(call(**ARGUMENTS, scale=1.0, cu_seqlens=BOUNDS)[0] for call in calls)]


def ending(child):
    """Fork, call ``child`` there, and say how it ends: "well", "with status N" or "killed"."""
    pid = os.fork()
    if pid == 0:
        try:
            child()
            os._exit(0)
        finally:  # an exception must not go on as a second parent
            os._exit(1)
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return "well" if status == 0 else f"with status {os.waitstatus_to_exitcode(status)}"
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "killed"


def fork_while_threads_call(children):
    expected = results()

    def call_for_ever():
        while True:
            results()

    def child():
        assert all(torch.allclose(found, wanted, atol=1e-5) for found, wanted in zip(results(), expected, strict=True))

    for _ in range(BUSY_THREADS):
        threading.Thread(target=call_for_ever, daemon=True).start()
    endings = Counter()
    while endings.total() < children and not endings["killed"]:
        endings[ending(child)] += 1
    return endings


class SlowWheel:
    """An entry point whose import takes a while."""

    name, value, group, dist = "slow", "slow.plugin", ENTRY_POINT_GROUP, None

    def __init__(self):
        self.begun = threading.Event()

    def load(self):
        self.begun.set()
        time.sleep(0.5)
        raise ImportError("all that for nothing")


def fork_while_a_thread_loads():
    slow = SlowWheel()
    found = metadata.EntryPoints([slow])
    metadata.entry_points = lambda **selection: found
    slow.matches = lambda **selection: selection == {"group": ENTRY_POINT_GROUP}
    threading.Thread(target=registry.load, daemon=True).start()
    slow.begun.wait()

    def child():
        assert [e.name for e in kda_core.backends()] == ["reference", "slow"]

    return {ending(child): 1}


torch.set_num_threads(1)
endings = fork_while_threads_call(int(sys.argv[2])) if sys.argv[1] == "calling" else fork_while_a_thread_loads()
print(json.dumps(endings), flush=True)
# Threads that are still inside a call would be torn down in the middle of it.
os._exit(0)
