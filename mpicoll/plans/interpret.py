"""Interpret the plans of all ranks in one process, on symbolic values.

Sends are rendezvous sends: a round of a rank ends when every one of its messages has met its counterpart.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from math import lcm

from .algorithms import REDUCTIONS
from .algorithms.registry import in_words
from .plan import IN, LEFT, OUT, RIGHT, TMP, Buffer, Copy, Plan, Recv, Reduce, Round, Send, pieces
from .trace import Landing, Message, PlanError, State, Trace, Value, place, ranks_in_words, snapshot, words

ENDLESS = 100_000  # rounds of one rank after which its plan is taken to be endless
ENDLESS_TRACED = 10_000  # where every one of them is kept


class Running:
    """A rank's round in flight."""

    def __init__(self, ops: Round, heard: int, time: int) -> None:
        self.ops = ops
        self.values: list[list[Value]] = [[] for _ in ops]
        self.waiting = {i: op for i, op in enumerate(ops) if not isinstance(op, Copy)}
        self.said = self.heard = heard  # whom this rank knows to have begun: before the round, and after
        self.end = time


class Machine:
    """All ranks of a collective: what they hold, and what it has cost so far.

    Parameters
    ----------
    collective, size, root
        What is performed, by how many ranks.
    plan
        Returns the plan of a rank.
    weights
        The lengths of the chunks.
    trace
        Where to keep every step; None: nowhere.
    """

    def __init__(
        self,
        collective: str,
        size: int,
        root: int,
        plan: Callable[[int], Plan],
        weights: Sequence[Fraction],
        trace: Trace | None = None,
    ) -> None:
        self.collective, self.size, self.root = collective, size, root
        self.plan, self.trace = plan, trace
        self.chunks = len(weights)
        self.unit = lcm(*(w.denominator for w in weights))  # weights as whole numbers add up faster
        self.lengths = [int(w * self.unit) for w in weights] or [0]
        self._equal = len(set(self.lengths)) == 1
        self.state: list[State] = [self._start(rank) for rank in range(size)]
        self.clock, self.rounds, self.sent = [0] * size, [0] * size, [0] * size
        self.volumes = [0] * size
        self.everyone = (1 << size) - 1  # a bit for every rank
        self.heard = [1 << rank for rank in range(size)]
        self.messages = self.fanout = self.staged = 0
        self.pieces = 1
        self.alike = True
        self.disorder: tuple[int, int, int] | None = None
        self._expressions: dict[tuple[int, ...], int] = {}
        self._running: list[Running | None] = [None] * size
        # For each (source, target): the posted sends, and the posted receives, that wait to meet.
        self._posted: dict[tuple[int, int], tuple[deque[int], deque[int]]] = defaultdict(
            lambda: (deque(), deque())
        )

    def _start(self, rank: int) -> State:
        """Return what a rank holds before its first round."""
        state: State = {IN: {}, OUT: {}, TMP: {}}
        if self.collective in REDUCTIONS:
            state[OUT] = {c: Value(c, 1 << rank, (rank, rank + 1), rank) for c in range(self.chunks)}
        elif self.collective == "allgather":
            state[OUT] = {c: Value(c) for c in self.owned(rank)}
        elif self.collective == "bcast" and rank == self.root:
            state[OUT] = {c: Value(c) for c in range(self.chunks)}
        elif self.collective == "alltoall":
            state[IN] = {d: Value(rank * self.size + d) for d in range(self.chunks)}
        return state

    def owned(self, rank: int) -> range:
        """Return the chunks that belong to a rank in allgather and reduce-scatter."""
        each = self.chunks // self.size
        return range(rank * each, rank * each + each)

    def run(self) -> None:
        """Run every plan to its end, or raise `PlanError`."""
        most = ENDLESS if self.trace is None else ENDLESS_TRACED
        plans = [self._begun(rank) for rank in range(self.size)]
        ready = deque(range(self.size))  # first come, first served: the earliest fault shows first
        while ready:
            rank = ready.popleft()
            self._land(rank)
            try:
                ops = next(plans[rank])
            except StopIteration:
                continue
            except Exception as error:
                raise self._raised(rank, error) from error
            self.rounds[rank] += 1
            if self.rounds[rank] > most:
                raise PlanError(f"the plan does not end: it has more than {most} rounds", rank)
            ready += self._begin(rank, ops)
        if any(self._running):
            raise self._stuck()

    def _begun(self, rank: int) -> Plan:
        try:
            plan = self.plan(rank)
        except Exception as error:
            raise self._raised(rank, error) from error
        if not isinstance(plan, Iterable):
            raise PlanError(f"the function returns {plan!r}, but a plan yields rounds", rank)
        return iter(plan)

    def _raised(self, rank: int, error: Exception) -> PlanError:
        return PlanError(f"the plan raises {in_words(error)}", rank, self.rounds[rank] + 1)

    def _begin(self, rank: int, ops: Round) -> Iterator[int]:
        """Begin a round: read what it sends, meet what waits; yield the ranks whose rounds are over."""
        self._examine(rank, ops)
        running = self._running[rank] = Running(ops, self.heard[rank], self.clock[rank])
        sends = 0
        for i, op in enumerate(ops):
            if isinstance(op, Send):
                running.values[i] = self._read(rank, op.buf, op.chunks)
                self.sent[rank] += len(op.chunks)
                self.volumes[rank] += self._length(op.chunks)
                sends += 1
            elif isinstance(op, Copy):
                running.values[i] = self._read(rank, *op.src)
        self.messages += sends
        self.fanout = max(self.fanout, sends)
        if not running.waiting:
            yield rank
        for i, op in list(running.waiting.items()):
            pair = (rank, op.peer) if isinstance(op, Send) else (op.peer, rank)
            sent, received = self._posted[pair]
            (sent if isinstance(op, Send) else received).append(i)
            if sent and received:
                yield from self._match(*pair, sent.popleft(), received.popleft())

    def _length(self, chunks: Sequence[int]) -> int:
        if self._equal:
            return len(chunks) * self.lengths[0]
        return sum(self.lengths[c % self.chunks] for c in chunks)

    def _match(self, source: int, target: int, i: int, j: int) -> Iterator[int]:
        """Hand the values of a send over to the receive that it meets."""
        sender, receiver = self._running[source], self._running[target]
        assert sender is not None and receiver is not None
        send, recv = sender.waiting.pop(i), receiver.waiting.pop(j)
        assert isinstance(send, Send) and isinstance(recv, Recv)
        if len(send.chunks) != len(recv.chunks):
            what = f"{words(recv)}, but rank {source} in round {self.rounds[source]} {words(send)}"
            raise PlanError(what, target, self.rounds[target], min(recv.chunks + send.chunks))
        if len(send.chunks) > 1:
            runs = [len(run) for run in pieces(send.chunks)]
            self.alike &= runs == [len(run) for run in pieces(recv.chunks)]
            self.pieces = max(self.pieces, len(runs))
        receiver.values[j] = sender.values[i]
        receiver.heard |= sender.said
        end = 1 + max(self.clock[source], self.clock[target])
        if self.trace is not None:
            self.trace.messages.append(Message(end, source, target, send, recv))
        for rank, running in (source, sender), (target, receiver):
            running.end = max(running.end, end)
            if not running.waiting:
                yield rank

    def _land(self, rank: int) -> None:
        """End a round: store and reduce what it brought, in list order."""
        running, self._running[rank] = self._running[rank], None
        if running is None:
            return
        self.clock[rank], self.heard[rank] = running.end, running.heard
        read = {(op.buf, c) for op in running.ops if isinstance(op, Send) for c in op.chunks}
        read |= {(op.src[0], c) for op in running.ops if isinstance(op, Copy) for c in op.src[1]}
        written: set[tuple[Buffer, int]] = set()
        for op, values in zip(running.ops, running.values, strict=True):
            if isinstance(op, Send):
                continue
            buf, chunks = op.dst if isinstance(op, Copy) else (op.buf, op.chunks)
            for c, value in zip(chunks, values, strict=True):
                if not op.reduce and (buf, c) in written:
                    raise PlanError(f"two writes to {place(buf, c)} in one round", rank, self.rounds[rank], c)
                self.staged += not op.reduce and (buf, c) in read
                written.add((buf, c))
                self._store(rank, buf, c, value, op.reduce)
        if self.trace is not None:
            self.trace.landings.append(Landing(running.end, rank, snapshot(self.state[rank]), running.heard))

    def _read(self, rank: int, buf: Buffer, chunks: Sequence[int]) -> list[Value]:
        held = self.state[rank][buf]
        try:
            return [held[c] for c in chunks]
        except KeyError as missing:
            c = missing.args[0]
            what = f"reads {place(buf, c)}, which is not set yet"
            raise PlanError(what, rank, self.rounds[rank], c) from None

    def _store(self, rank: int, buf: Buffer, c: int, value: Value, reduce: Reduce) -> None:
        """Store a value, or reduce it into what is there."""
        held, at = self.state[rank][buf], (rank, self.rounds[rank], c)
        if self.collective != "alltoall" and value.key != c % self.chunks:
            # The chunks of a vector differ in length; only those of an all-to-all are all the same.
            raise PlanError(f"chunk {value.key} arrives in {place(buf, c)}, the place of another", *at)
        if not reduce:
            held[c] = value
            return
        if c not in held or self.collective not in REDUCTIONS:
            raise PlanError(f"reduces into {place(buf, c)}, which holds no operand", *at)
        old = held[c]
        if old.ranks & value.ranks:
            twice = ranks_in_words(old.ranks & value.ranks)
            raise PlanError(f"counts the contribution of {twice} twice", *at)
        a, b = (value, old) if reduce == LEFT else (old, value)
        span = None
        if reduce in (LEFT, RIGHT) and a.span and b.span and a.span[1] == b.span[0]:
            span = (a.span[0], b.span[1])
        elif self.disorder is None:
            self.disorder = at
        known = (value.key, *sorted((a.expr, b.expr)))
        expr = self._expressions.setdefault(known, self.size + len(self._expressions))
        held[c] = Value(value.key, old.ranks | value.ranks, span, expr)

    def _examine(self, rank: int, ops: Round) -> None:
        """Refuse what is not a round of well-formed operations."""
        at = (rank, self.rounds[rank])
        if type(ops) is not list and not isinstance(ops, Sequence):
            raise PlanError(f"yields {ops!r}, but a round is a list of operations", *at)
        for op in ops:
            if not isinstance(op, (Send, Recv, Copy)):
                raise PlanError(f"{op!r} is no Send, Recv or Copy", *at)
            ends = [op.src, op.dst] if isinstance(op, Copy) else [(op.buf, op.chunks)]
            if isinstance(op, Copy):
                if len(op.src[1]) != len(op.dst[1]):
                    raise PlanError(f"{op!r} copies between unequal numbers of chunks", *at)
            elif not _whole(op.peer):
                raise PlanError(f"{op!r}: {op.peer!r} is no rank", *at)
            elif op.peer == rank or not 0 <= op.peer < self.size:
                raise PlanError(
                    f"{words(op)}: no other rank of {self.size}", *at, min(op.chunks, default=None)
                )
            if not isinstance(op, Send):
                if ends[-1][0] == IN:
                    raise PlanError(f"{op!r} writes to the send buffer", *at)
                if op.reduce not in (False, True, LEFT, RIGHT):
                    raise PlanError(f"{op!r} reduces in an unknown way", *at)
            for buf, chunks in ends:
                for c in chunks:
                    if not _whole(c):
                        raise PlanError(f"{op!r}: {c!r} is no chunk", *at)
                    if c < 0 or buf not in (IN, OUT, TMP) or (buf != TMP and c >= self.chunks):
                        raise PlanError(f"there is no {place(buf, c)}, the vector has {self.chunks}", *at, c)

    def _stuck(self) -> PlanError:
        """Say who waits for whom: for a rank that has ended its plan, or in a circle."""
        waiting = {rank: run.waiting for rank, run in enumerate(self._running) if run is not None}
        for rank in sorted(waiting, key=lambda rank: self.rounds[rank]):
            for op in waiting[rank].values():
                if op.peer not in waiting:
                    what = f"unmatched message: {words(op)}, which has ended its plan"
                    return PlanError(what, rank, self.rounds[rank], min(op.chunks, default=None))
        first = {rank: next(iter(ops.values())) for rank, ops in waiting.items()}
        chain = [min(first)]
        while chain[-1] not in chain[:-1]:
            chain.append(first[chain[-1]].peer)
        circle = chain[chain.index(chain[-1]) : -1]
        waits = "; ".join(f"rank {r} in round {self.rounds[r]} {words(first[r])}" for r in circle)
        chunk = min(first[circle[0]].chunks, default=None)
        return PlanError(f"deadlock in a circle: {waits}", circle[0], self.rounds[circle[0]], chunk)

    def words(self, value: Value) -> str:
        """Say what a value is."""
        if self.collective == "alltoall":
            return f"the chunk from rank {value.key // self.size} to rank {value.key % self.size}"
        return f"chunk {value.key}"


def _whole(number: object) -> bool:
    """Whether something is a whole number, Python's or numpy's."""
    return type(number) is int or hasattr(number, "__index__")
