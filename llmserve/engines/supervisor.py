"""`python -m llmserve.engines.supervisor COMMAND...`: run a command that ends with its parent, however that ended.

Whoever starts it holds the other end of its standard input and writes nothing. When that end is closed, which the
kernel does even for a process that was killed, the command and all of its process group get SIGTERM, and SIGKILL after
GRACE_S. SIGTERM and SIGINT are passed on to the command. When the command has ended by itself, what it has left of its
group ends in the same way. The exit status is the command's; 128 + N when signal N ended it; 127 when it cannot be run.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

GRACE_S = 5.0
STANDARD_INPUT = 0
PASSED_ON = (signal.SIGTERM, signal.SIGINT)


def main(command: list[str]) -> int:
    """Returns the exit status."""
    if os.getpgrp() != os.getpid():  # signals to our group must reach only the command, and those to others not us
        os.setpgid(0, 0)
    signals = _signal_pipe()
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    while child.poll() is None:
        ready, _, _ = select.select([STANDARD_INPUT, signals], [], [])
        if signals in ready:
            for number in os.read(signals, 512):
                if number in PASSED_ON:
                    child.send_signal(number)
        if STANDARD_INPUT in ready and not os.read(STANDARD_INPUT, 512):
            break
    _end_group(child)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _signal_pipe() -> int:
    """A descriptor that gives a byte, its number, for each signal that arrives; SIGCHLD among them ends the waiting."""
    readable, writable = os.pipe()
    for end in (readable, writable):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    for number in (*PASSED_ON, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    return readable


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """Whether the command has ended or not. The grace is also for those who tidy up shared memory after the others."""
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_IGN)
    os.killpg(os.getpgrp(), signal.SIGTERM)
    until_s = time.monotonic() + GRACE_S
    while (child.poll() is None or _others()) and time.monotonic() < until_s:
        time.sleep(0.02)
    if child.poll() is None:
        child.kill()
    while others := _others():  # again, for what they started meanwhile
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    child.wait()


def _others() -> list[int]:
    """The living of our group besides ourselves; none where there is no /proc (our parent's SIGKILL then ends them)."""
    ours, others = str(os.getpgrp()), []
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
            state, _, group = file.read().rpartition(")")[2].split()[:3]  # the command's name may hold anything
            if group == ours and state not in "ZX":
                others.append(int(name))
    return others


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
