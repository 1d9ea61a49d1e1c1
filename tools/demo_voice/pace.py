"""Work that goes on over several calls: limited minutes a call, whole files, states to resume from."""

import contextlib
import multiprocessing
import os
import sys
import time

MORE = 3  # exit status: run the same command again
SAVE_S = 120


@contextlib.contextmanager
def whole(path):
    """A file to write that appears under its name only when it is whole."""
    new = f"{path}.{os.getpid()}.new"
    with open(new, "wb") as f:
        yield f
    os.replace(new, path)


def save(out, result, state):
    """A training's result so far, and beside it the state that the next call goes on from."""
    import torch  # workers that only read texts need none

    for value, path in ((result, out), (state, out + ".state")):
        with whole(path) as f:
            torch.save(value, f)


def result(task, end, pool):
    """What a worker returns; if the call's time is over before that, the program ends. What it
    was at is made again in the next call."""
    try:
        return task.get(max(0.0, end - time.monotonic()))
    except multiprocessing.TimeoutError:
        pool.terminate()
        print("the call's time is over: run the command again", flush=True)
        sys.exit(MORE)


class Pace:
    """How much of a training is done that takes `seconds` in all, in calls of at most `minutes`."""

    def __init__(self, seconds, minutes, clock=time.monotonic):
        self.seconds, self.minutes, self.clock = seconds, minutes, clock
        self.opened, self.before, self.began = clock(), 0.0, None

    def start(self, before):
        """Training begins; earlier calls trained for so many seconds."""
        self.before, self.began = before, self.clock()

    @property
    def trained(self):
        return self.before + self.clock() - self.began

    @property
    def fraction(self):
        return self.trained / self.seconds

    @property
    def call_is_over(self):
        return self.clock() - self.opened >= 60 * self.minutes

    def train(self, training, step):
        """Call `step(fraction)` until the training or the call is over, then end the program. `training`:
        `before` is what earlier calls trained, in seconds; `save` is called every two minutes and at the end."""
        self.start(training.before)
        saved = self.clock()
        while (fraction := self.fraction) < 1 and not self.call_is_over:
            step(fraction)
            if self.clock() - saved > SAVE_S:
                training.save(self.trained)
                saved = self.clock()
        fraction = self.fraction
        training.save(self.trained)
        self.leave(fraction)

    def leave(self, fraction):
        """End the program, with the status that says whether the training is complete."""
        print("complete" if fraction >= 1 else f"{fraction:.0%} done: run the command again", flush=True)
        sys.exit(0 if fraction >= 1 else MORE)
