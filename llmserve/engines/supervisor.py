"""`python -m llmserve.engines.supervisor COMMAND...`: run a command that ends together with the supervisor's parent.

The parent keeps the supervisor's standard input open as a pipe and writes nothing. The kernel closes the pipe when the
parent ends, even when the parent is killed. Then the command and its process group get SIGTERM, and SIGKILL after
GRACE_S. When the command ends by itself, the rest of its group gets the same signals. SIGTERM and SIGINT are forwarded
to the command. Exit status: the command's; 128 + N when signal N ended the command; 127 when the command cannot be run.
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
FORWARDED = (signal.SIGTERM, signal.SIGINT)


def main(command: list[str]) -> int:
    """Run the command and return the exit status."""
    if os.getpgrp() != os.getpid():  # a separate group: signals of this group and of the parent's group do not mix
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
                if number in FORWARDED:
                    child.send_signal(number)
        if STANDARD_INPUT in ready and not os.read(STANDARD_INPUT, 512):
            break
    _end_group(child)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _signal_pipe() -> int:
    """Return a descriptor that yields one byte, the signal's number, per signal. SIGCHLD wakes the main loop."""
    readable, writable = os.pipe()
    for end in (readable, writable):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
    for number in (*FORWARDED, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    return readable


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """End the command and its group. Within GRACE_S, processes may also clean up shared memory of other processes."""
    for number in FORWARDED:
        signal.signal(number, signal.SIG_IGN)
    os.killpg(os.getpgrp(), signal.SIGTERM)
    until_s = time.monotonic() + GRACE_S
    while (child.poll() is None or _group_members()) and time.monotonic() < until_s:
        time.sleep(0.02)
    if child.poll() is None:
        child.kill()
    while pids := _group_members():  # repeat: a member may have started another process meanwhile
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    child.wait()


def _group_members() -> list[int]:
    """Return the living processes of this group except this process; [] without /proc (the parent then kills them)."""
    own_group, members = str(os.getpgrp()), []
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if not name.isdigit() or int(name) == os.getpid():
            continue
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
            state, _, group = file.read().rpartition(")")[2].split()[:3]  # the command's name may hold anything
            if group == own_group and state not in "ZX":
                members.append(int(name))
    return members


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
