"""Services without computation for the supervisor's tests: real processes, real bus, lock, replica runtime and signals.

    fake_service.py SERVICE REPLICA RUN RUN_DIRECTORY PARENT BEHAVIOUR

Behaviour of any: ``exit N`` ends at once; ``hang`` does nothing more; ``deaf`` obeys neither Stop nor SIGTERM;
``spawn`` starts a child that never ends, ``leave`` one in a session and with an environment of its own, ``daemon`` one
whose parent ends; ``compute`` never gives the interpreter lock back. Of the coordinator: ``steps N`` finishes after N
steps, ``wait`` runs until SIGTERM. ``A|B`` is A in the service's first life and B in those that follow.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import uvloop

from common import bus, config_loading, processes
from common.log_lines import set_up_logging
from common.messages import (
    Evaluated,
    Hello,
    Lease,
    Manifest,
    Proof,
    Ready,
    Receipt,
    Rehello,
    Result,
    Stop,
    Welcome,
)
from common.records import ServiceStatus, Status, StepMetrics, Summary, append_line, write_whole
from common.replica import Replica
from common.run_files import RunDirectory, SharedDirectory
from common.run_lock import RunLock
from common.service import Assignment, Outbox
from common.service_main import answer_for_stacks
from tools.display import read_status
from tools.launch import planned_services


class Idle:
    """A service that is ready at once and has nothing to do."""

    def __init__(self, assignment: Assignment) -> None:
        print(f"{assignment.role} loaded", flush=True)

    def ready(self) -> tuple[Manifest, Proof] | None:
        return None

    def state(self) -> int:
        return 0

    def handle(self, lease: Lease, outbox: Outbox) -> Result:
        return Evaluated(tokens=0)

    def apply_weights(self, manifest: Manifest) -> Receipt:
        raise AssertionError("a supervisor test published weights: its scripted services have none")

    def cache_counts(self) -> tuple[int, int]:
        return 0, 0

    def close(self) -> None:
        return


class Coordinator:
    """Welcomes every replica, writes the records of a run, says Stop."""

    def __init__(self, run: str, files: RunDirectory, behaviour: str) -> None:
        self.shared = SharedDirectory.of_run(run)
        self.lock = RunLock.acquire(self.shared)
        before = read_status(self.shared)  # of the coordinator that is taken over from
        self.epoch, self.step = (before.epoch + 1, before.step) if before else (1, 0)
        self.files = files
        self.config = config_loading.load_config(str(files.config))
        self.expected = len(planned_services(self.config)) - 1
        self.behaviour = behaviour
        self.peers: dict[bytes, Hello] = {}
        self.ready: set[bytes] = set()

    async def run(self) -> int:
        self.router = bus.Router(self.shared.endpoint)
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        listening = asyncio.create_task(self.listen())
        working = asyncio.create_task(self.work())
        stopping = asyncio.create_task(stopped.wait())
        await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        for peer in self.peers:
            try:
                self.router.send(peer, Stop(epoch=self.epoch, reason="the run ends"))
            except bus.PeerGone:
                print(f"{self.peers[peer].role} is gone", flush=True)
        listening.cancel()
        self.router.close()
        self.lock.remove_directory()
        return 0

    async def listen(self) -> None:
        while True:
            peer, message = await self.router.receive()
            if isinstance(message, Hello) and peer not in self.peers:
                self.peers[peer] = message
                self.router.send(peer, self.welcome())
            elif isinstance(message, Ready):
                self.ready.add(peer)
            elif peer not in self.peers:
                self.router.send(peer, Rehello(epoch=self.epoch))

    def welcome(self) -> Welcome:
        return Welcome(
            epoch=self.epoch,
            run=self.config.run.name,
            cache_path="",
            run_directory=str(self.files.path),
            shm_directory=str(self.shared.path),
            config=config_loading.to_json(self.config),
        )

    async def work(self) -> None:
        while len(self.ready) < self.expected:
            await asyncio.sleep(0.02)
        self.write_status(self.step)
        word, _, number = self.behaviour.partition(" ")
        if word != "steps":
            await asyncio.Event().wait()
        print(f"steps follow, with {self.expected} replicas, in epoch {self.epoch}", flush=True)
        held_out = {"eval/accuracy": 0.5, "eval/reward": 0.5, "eval/rows": 40.0}
        append_line(self.files.metrics, StepMetrics(0, held_out, {"eval_s": 0.1}))
        for step in range(self.step + 1, int(number) + 1):
            values = {"reward": step / 10, "accuracy": step / 20, "kl": 0.01 * step}
            append_line(self.files.metrics, StepMetrics(step, values, {"step_s": 0.5, "samples_per_s": 12.5}))
            self.write_status(step)
            await asyncio.sleep(0.3)
        self.write_summary(int(number))

    def write_status(self, step: int) -> None:
        services = [ServiceStatus(hello.role, hello.replica, hello.pid, "idle", 0.0) for hello in self.peers.values()]
        status = Status(
            run=self.config.run.name,
            pid=os.getpid(),
            epoch=self.epoch,
            step=step,
            steps=self.config.run.steps,
            phase="GENERATE",
            started=time.time(),
            reward=None,
            accuracy=None,
            kl=None,
            samples_per_s=None,
            left_s=75.0,
            services=services,
            run_directory=str(self.files.path),
        )
        write_whole(self.shared.status, msgspec.json.encode(status))

    def write_summary(self, steps: int) -> None:
        summary = Summary(
            run=self.config.run.name,
            finished=True,
            steps=steps,
            samples=128 * steps,
            masked_samples=0,
            accuracy_first=0.5,
            accuracy_last=0.9,
            reward_first=0.45,
            reward_last=0.85,
            wall_s=12.0,
            phase_s={"GENERATE": 7.0},
            coordinator_overhead_ratio=0.01,
            cache_hit_ratio=0.99,
            config_digest=config_loading.config_digest(self.config),
            epoch=self.epoch,
        )
        write_whole(self.files.summary, msgspec.json.encode(summary))


class Computing(Idle):
    """A service that loads for ever and keeps everybody else in its process from running Python code."""

    def ready(self) -> None:
        print("computes", flush=True)
        print(sum(range(10**15)))


def this_life(directory: Path, name: str, behaviour: str) -> str:
    """The part of the behaviour that belongs to this one of the service's lives."""
    lives = behaviour.split("|")
    with (directory / f"{name}.lives").open("ab") as file:
        number = file.tell()
        file.write(b".")
    return lives[min(number, len(lives) - 1)]


def start_child(behaviour: str) -> int:
    sleep = ["sleep", "600"]
    match behaviour:
        case "spawn":
            return subprocess.Popen(sleep).pid
        case "leave":
            return subprocess.Popen(sleep, start_new_session=True, env={"PATH": os.environ["PATH"]}).pid
        case _:
            done = subprocess.run(
                ["setsid", "sh", "-c", "sleep 600 >/dev/null 2>&1 & echo $!"],
                capture_output=True,
                text=True,
                check=True,
            )
            return int(done.stdout)


def main() -> int:
    service, replica, run, run_directory, parent, behaviours = sys.argv[1:]
    name, directory = f"{service}-{replica}", Path(run_directory)
    threads = os.environ["OMP_NUM_THREADS"]
    leader = os.getsid(0) == os.getpid()
    print(f"{name} started, threads {threads}, session leader {leader}", flush=True)
    answer_for_stacks()
    set_up_logging(service, int(replica), "info")
    processes.die_with_parent(int(parent))
    behaviour = this_life(directory, name, behaviours)
    if behaviour.startswith("exit"):
        print(f"{service} gives up: a reason to find in its log", flush=True)
        return int(behaviour.split()[1])
    if behaviour in ("spawn", "leave", "daemon"):
        started = directory / f".{name}.{behaviour}"
        started.write_text(str(start_child(behaviour)))
        started.rename(directory / f"{name}.{behaviour}")
    if behaviour == "hang":
        write_whole(directory / f"{name}.hang", str(os.getpid()).encode())
        signal.pause()
    if behaviour == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (directory / "deaf").touch()
        while True:
            signal.pause()
    if service == "coordinator":
        return uvloop.run(Coordinator(run, RunDirectory(directory), behaviour).run())
    assert service in ("rollout", "reward", "critic", "trainer", "holder")
    factory = Computing if behaviour == "compute" else Idle
    return uvloop.run(Replica(service, int(replica), SharedDirectory.of_run(run).endpoint, factory).run())


if __name__ == "__main__":
    sys.exit(main())
