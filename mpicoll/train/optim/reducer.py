"""Buckets on their way: which one begins when, and in what order the collectives of all of them come."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from mpicoll.train.buckets import Buckets
from mpicoll.train.optim.exchange import Average, Compression, Exchange, Plain, scale

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mpicoll.comm.intracomm import Intracomm

__all__ = ["Reducer", "can_hide"]


class Reducer:
    """Combines the gradients of all ranks bucket by bucket.

    Collectives must begin in the same order on every rank, whatever is complete first on each: buckets begin
    in their own order, and the later stages of compressed ones only when all have begun.

    Parameters
    ----------
    gradients
        What is combined, in place.
    average
        Whether sums are divided by the number of ranks.
    predivide
        Divide by this before the sum, and the sum by the rest.
    compression
        None to send gradients as they are.
    overlap
        Whether a bucket begins as soon as it is complete.
    steps
        Tells how many steps the optimizer has taken: a program may set it at any time before a step.
    """

    def __init__(
        self,
        gradients: Buckets,
        *,
        average: bool,
        predivide: float,
        compression: Compression | None,
        overlap: bool,
        steps: Callable[[], int],
    ) -> None:
        comm = gradients.comm
        self.gradients, self.comm, self.overlap, self._steps = gradients, comm, overlap, steps
        if comm.size > 1 and compression is not None:
            make: Callable[..., Exchange] = compression.exchange
            predivide = comm.size if predivide == 1 else predivide
        else:
            make = Average if average and predivide == 1 else Plain
        self.exchanges = [make(bucket, comm) for bucket in gradients.buckets]
        scaled = average and make is not Average and comm.size > 1
        self._before, self._after = (1 / predivide, predivide / comm.size) if scaled else (1.0, 1.0)
        self._bucket_of = {name: k for k, bucket in enumerate(gradients.buckets) for name in bucket}
        self._runs: list[tuple[Iterator[Any], Any]] = []
        self.reset()

    def reset(self) -> None:
        """Begin anew: no gradient is complete."""
        self._missing = [len(bucket) for bucket in self.gradients.buckets]

    @property
    def begun(self) -> bool:
        """Whether buckets are on their way."""
        return bool(self._runs)

    def ready(self, name: str) -> None:
        """Say that a gradient is complete: it must not change any more."""
        self._missing[self._bucket_of[name]] -= 1
        if self.overlap:
            self._launch()

    def finish(self) -> None:
        """Combine whatever has not begun, and wait for all; collective."""
        if self.comm.size == 1:
            return
        with np.errstate(over="ignore", invalid="ignore"):  # infinities tell of it
            if self.overlap:
                self._missing = [0] * len(self._missing)
                self._launch()
                self._complete()
            else:
                for exchange in self.exchanges:
                    run, _ = self._begin(exchange, self._perform)
                    for _ in run:
                        pass
            if self._after != 1:
                for exchange in self.exchanges:
                    scale(exchange.flat, self._after)

    def _launch(self) -> None:
        while len(self._runs) < len(self.exchanges) and not self._missing[len(self._runs)]:
            with np.errstate(over="ignore", invalid="ignore"):
                self._runs.append(self._begin(self.exchanges[len(self._runs)], self._start))

    def _begin(self, exchange: Exchange, call: Callable[..., Any]) -> tuple[Iterator[Any], Any]:
        if self._before != 1:
            scale(exchange.flat, self._before)
        exchange.step = self._steps()
        run = exchange.run(call)
        return run, next(run)

    def _complete(self) -> None:
        """Wait for the buckets, stage by stage."""
        runs, self._runs = self._runs, []
        while runs:
            going = []
            for run, request in runs:
                request.Wait()
                following = next(run, None)
                if following is not None:
                    going.append((run, following))
            runs = going

    def _start(self, collective: str, *arguments: Any, **options: Any) -> Any:
        return getattr(self.comm, f"I{collective.lower()}")(*arguments, **options)

    def _perform(self, collective: str, *arguments: Any, **options: Any) -> None:
        getattr(self.comm, collective)(*arguments, **options)

    def state(self) -> dict[str, NDArray[Any]]:
        """Return this rank's memory of earlier steps, by bucket and name."""
        exchanges = enumerate(self.exchanges)
        return {f"{k}/{name}": array for k, each in exchanges for name, array in each.state().items()}

    @property
    def sent_share(self) -> float:
        """Bytes that a rank sends, as a share of what it would without compression."""
        plain = sum(Plain(bucket, self.comm).sent for bucket in self.gradients.buckets)
        return sum(exchange.sent for exchange in self.exchanges) / plain if plain else 1.0


def can_hide(comm: Intracomm) -> bool:
    """Whether anything can travel while all ranks compute: over a network, or by an idle core; collective."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    everybody = comm.allgather((MPI.Get_processor_name(), frozenset(cores)))
    hosts = {host for host, _ in everybody}
    return len(hosts) > 1 or len(frozenset().union(*(theirs for _, theirs in everybody))) > comm.size
