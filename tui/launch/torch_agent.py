"""The processes of this host under PyTorch's elastic agent, as torchrun starts them."""

from __future__ import annotations

import logging
import math
import os
import sys
from typing import Any

from evener.errors import DeviceError, RequestError

from ..signals import restored_signals
from .ending import Ending
from .job import HostJob

FORCE_SECONDS = 25  # a process that ends later than the first one was ended by the agent


def run_agent(job: HostJob, max_restarts: int) -> Ending:
    """Start the processes and wait for their end; on several hosts the agents start them again by themselves."""
    more = {"TORCHELASTIC_RESTART_COUNT": str(job.attempt)} if job.attempt else {}
    environment = job.environment([more] * len(job.processes))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # it has pages about a host that isn't there
    try:
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import RendezvousError
        from torch.distributed.launcher import LaunchConfig, elastic_launch
    except ImportError as error:
        raise RequestError(
            f"PyTorch can't be imported ({error}).", 'Install it: pip install "evener[torch]".'
        ) from None
    logging.disable(logging.CRITICAL)  # the agent's own words about what is said here in a sentence
    if "TORCH_CPP_LOG_LEVEL" not in environment:
        del os.environ["TORCH_CPP_LOG_LEVEL"]
    # A store for each start: the agent's own still has the addresses of processes that were ended before a restart.
    os.environ.update({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **environment})
    with restored_signals():
        config = LaunchConfig(
            nproc_per_node=len(job.processes),
            max_restarts=max_restarts,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=str(job.folder)),
            **_meet(job),
        )
        try:
            elastic_launch(config, sys.executable)("-m", "evener.training.start_rank", *job.command)
        except ChildFailedError as error:
            first = min(failure.timestamp for failure in error.failures.values())
            ended = {
                rank: each.exitcode for rank, each in error.failures.items() if each.timestamp < first + FORCE_SECONDS
            }
            own = range(len(job.processes)) if len(job.hosts) == 1 else ()
            return Ending(failures=ended, left=tuple(rank for rank in own if rank not in error.failures))
        except SignalException as error:
            return Ending(error.sigval)
        except RendezvousError:
            host, port = job.meeting
            raise DeviceError(
                f"The hosts {', '.join(job.hosts)} didn't meet at {host}:{port} within {job.wait_seconds:g} s.",
                "Run the line for each other host there, see that the port is open, or wait longer (--wait 10m).",
            ) from None
    return Ending()


def _meet(job: HostJob) -> dict[str, Any]:
    """The address where the agents of all hosts find each other; alone, at any free port."""
    if len(job.hosts) == 1:
        place: dict[str, Any] = {"rdzv_endpoint": "localhost:0", "local_addr": "127.0.0.1", "run_id": job.identity}
    else:
        host, port = job.meeting
        seconds = math.ceil(job.wait_seconds)
        times = {"timeout": seconds, "join_timeout": seconds, "read_timeout": seconds}
        place = {
            "rdzv_endpoint": f"{host}:{port}",
            "run_id": job.identity,
            "local_addr": job.host,
            "rdzv_configs": {**times, "is_host": host == job.host},
        }
    return {"rdzv_backend": "c10d", "min_nodes": len(job.hosts), "max_nodes": len(job.hosts), **place}
