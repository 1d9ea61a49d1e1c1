"""Threads without threads: one greenlet each, a clock that is pretended, and a seed that decides who goes on.

Modules get these in place of `threading`, `queue` and `time`. So all that several threads do to each other happens in
one, in an order that can be repeated. A thread is interrupted where it waits, where `Threads.breathe` is called, and
now and then between two statements of modules that are made `interruptible`.
"""

import ast
import functools
import inspect
import queue
import random
import threading
from collections import deque
from collections.abc import Callable
from types import CodeType, ModuleType, SimpleNamespace

import pytest
from greenlet import GreenletExit, getcurrent, greenlet


class Threads:
    """The threads of one program, seen from outside of them.

    Attributes:
        now: the clock, in seconds. It goes on when everybody waits.
        refused: so many of the next threads cannot start.
        broke: what threads have raised.
    """

    def __init__(self, seed: int, interrupts: float = 0.0):
        """`interrupts`: by what chance a thread is interrupted before a statement of an `interruptible` module."""
        self.interrupts = interrupts
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.refused = 0
        self.killed = False
        self.alive: list[Thread] = []
        self.broke: list[BaseException] = []
        self.outside = getcurrent()
        modules = {"Empty": queue.Empty, "TIMEOUT_MAX": threading.TIMEOUT_MAX, "sleep": self.sleep}
        for kind in (Thread, Queue, Event, Lock, Future):
            modules[kind.__name__] = lambda *args, kind=kind, **options: kind(self, *args, **options)
        self.module = SimpleNamespace(
            **modules,
            SimpleQueue=modules["Queue"],
            RLock=modules["Lock"],
            monotonic=lambda: self.now,
            current_thread=lambda: self.current or threading.main_thread(),
            enumerate=lambda: list(self.alive),
        )

    @property
    def current(self) -> "Thread | None":
        return next((thread for thread in self.alive if thread.greenlet is getcurrent()), None)

    def step(self) -> bool:
        """One thread goes on to where it waits next. False: nobody ever will."""
        ready = [thread for thread in self.alive if thread.ready]
        if not ready:
            times = [thread.until for thread in self.alive if thread.until is not None]
            if not times:
                return False
            self.now = max(self.now, min(times))
            return True
        thread = self.rng.choice(ready)
        self.now += 1e-6
        thread.greenlet.switch()
        if self.broke:
            raise self.broke[0]
        return True

    def run(self, over: Callable[[], object], seconds: float = 1000.0) -> None:
        """Until something is so. Raises AssertionError: it does not become so."""
        end = self.now + seconds
        while not over():
            assert self.step(), "everybody waits for ever"
            assert self.now < end, f"it did not come within {seconds:g} s"

    def wait(self, condition: Callable[[], object], seconds: float | None = None) -> bool:
        """A thread waits for something. Who is outside of all threads lets them go on meanwhile."""
        until = None if seconds is None else self.now + seconds
        if self.killed and self.current:
            raise GreenletExit
        if thread := self.current:
            thread.condition, thread.until = condition, until
            self.outside.switch()  # raises GreenletExit: see `kill`
            return bool(condition())
        while not condition() and (until is None or self.now < until):
            if not self.step():
                assert until is not None, "everybody waits for ever"
                self.now = until
        return bool(condition())

    def sleep(self, seconds: float) -> None:
        self.wait(lambda: False, seconds)

    def breathe(self) -> None:
        """Others may go on here."""
        if self.current:
            self.wait(lambda: True)

    def interrupt(self) -> None:
        """Between two statements."""
        if self.rng.random() < self.interrupts:
            self.breathe()

    def kill(self) -> None:
        """End them all, wherever they are. Nobody waits any more."""
        self.killed = True
        for thread in list(self.alive):
            thread.greenlet.throw()
        self.alive.clear()  # those that never began


class Thread:
    def __init__(
        self, threads: Threads, target: Callable[..., object], name: str = "", daemon: bool = False, args: tuple = ()
    ):
        self.threads, self.name = threads, name
        self._work: Callable[[], object] | None = lambda: target(*args)
        self.greenlet = greenlet(self._run)
        self.condition, self.until = (lambda: True), None

    def start(self) -> None:
        if self.threads.refused:
            self.threads.refused -= 1
            raise RuntimeError("can't start new thread")
        self.greenlet.parent = self.threads.outside
        self.threads.alive.append(self)
        self.threads.breathe()

    def _run(self) -> None:
        work, self._work = self._work, None
        try:
            work()
        except Exception as error:
            self.threads.broke.append(error)
        finally:
            self.threads.alive.remove(self)

    @property
    def ready(self) -> bool:
        return bool(self.condition()) or self.until is not None and self.until <= self.threads.now

    def is_alive(self) -> bool:
        return self in self.threads.alive

    def join(self, timeout: float | None = None) -> None:
        self.threads.wait(lambda: not self.is_alive(), timeout)


class Queue:
    def __init__(self, threads: Threads):
        self._threads, self._items = threads, deque()
        self.log = None  # a list: gets what is put

    def put(self, item: object) -> None:
        self._items.append(item)
        if self.log is not None:
            self.log.append(item)

    def get(self, timeout: float | None = None) -> object:
        if not self._items and not self._threads.wait(lambda: self._items, timeout):
            raise queue.Empty
        return self._items.popleft()

    def get_nowait(self) -> object:
        if not self._items:
            raise queue.Empty
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


class Event:
    def __init__(self, threads: Threads):
        self._threads, self._set = threads, False

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        return self._set or self._threads.wait(self.is_set, timeout)


class Lock:
    """Who holds it may take it again."""

    def __init__(self, threads: Threads):
        self._threads, self._owner, self._depth = threads, None, 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = getcurrent()
        free = lambda: self._owner in (None, me)  # noqa: E731
        if not free() and not (blocking and self._threads.wait(free, None if timeout < 0 else timeout)):
            return False
        self._owner, self._depth = me, self._depth + 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None

    def __enter__(self) -> "Lock":
        self.acquire()
        return self

    def __exit__(self, *_) -> None:
        self.release()


class Future:
    def __init__(self, threads: Threads):
        self._done, self._told = Event(threads), None

    def set_result(self, told: object) -> None:
        self._told = lambda: told
        self._done.set()

    def set_exception(self, error: BaseException) -> None:
        def fail():
            raise error

        self._told = fail
        self._done.set()

    def done(self) -> bool:
        return self._done.is_set()

    def result(self) -> object:
        self._done.wait()
        return self._told()


class _Interrupts(ast.NodeTransformer):
    """`_interrupt()` before every statement of a function."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.body = self._around(node.body)
        return node

    def _around(self, body: list[ast.stmt]) -> list[ast.stmt]:
        around = []
        for statement in body:
            for name in ("body", "orelse", "finalbody"):
                if getattr(statement, name, None):
                    setattr(statement, name, self._around(getattr(statement, name)))
            for handler in getattr(statement, "handlers", ()):
                handler.body = self._around(handler.body)
            call = ast.Expr(ast.Call(ast.Name("_interrupt", ast.Load()), [], []))
            around += [ast.copy_location(call, statement), statement]
        return around


@functools.cache
def _interrupted(module: ModuleType) -> dict[tuple[str, int], CodeType]:
    """The code of a module's functions with interrupts, by name and line."""
    tree = ast.fix_missing_locations(_Interrupts().visit(ast.parse(inspect.getsource(module))))
    codes, found = [compile(tree, module.__file__, "exec")], {}
    for code in codes:
        found[code.co_qualname, code.co_firstlineno] = code
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
    return found


def interruptible(patch: pytest.MonkeyPatch, modules: tuple[ModuleType, ...], threads: Threads) -> None:
    """Threads are interrupted in these modules' functions too."""
    for module in modules:
        patch.setattr(module, "_interrupt", threads.interrupt, raising=False)
        kinds = [kind for kind in vars(module).values() if getattr(kind, "__module__", "") == module.__name__]
        for thing in [*kinds, *(thing for kind in kinds if isinstance(kind, type) for thing in vars(kind).values())]:
            function = inspect.unwrap(getattr(thing, "fget", None) or getattr(thing, "__func__", thing))
            code = getattr(function, "__code__", None)
            if code and (new := _interrupted(module).get((code.co_qualname, code.co_firstlineno))):
                patch.setattr(function, "__code__", new)
