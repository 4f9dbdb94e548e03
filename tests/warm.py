"""Programs without the second in which Python, NumPy and Numba start: a process that has imported
what a program imports waits, and each call is a fork of it.

    python tests/warm.py wait NAME PROGRAM MODULE...       that process; NAME is that of its socket
    python -I -S tests/warm.py call NAME ARGS...           PROGRAM ARGS..., in a fork of it

The fork has the arguments, directory, environment and files of who calls, runs PROGRAM as __main__
and ends as Python ends; no thread of Numba's is there before.  Who calls takes over how it ended,
by an exit code or by a signal, and passes Ctrl-C and SIGTERM on to it; if it is killed, so is the
fork.  Two things a fork has of the process that waits: hashes of texts, and what its imports read
of the environment.  Who tests these, or how a program starts, starts one of its own.
"""
import contextlib
import json
import os
import select
import signal
import socket
import sys


# ---- who tests
WAITING = {}                 # (program, modules) -> (environment, socket's name, process)
LATER = {"PYTEST_CURRENT_TEST", "FAULT"}     # no import reads these: they may change
PASSED_ON = {signal.SIGINT, signal.SIGTERM}


def command(program, *args, modules, env=None):
    """What starts a program in this environment, or in that of now: warm, where these modules, its
    own imports, were imported in the same one.  Not so on another system than Linux."""
    env = {name: value for name, value in (env or os.environ).items() if name not in LATER}
    if sys.platform == "linux" and (program, modules) not in WAITING:
        WAITING[program, modules] = env, *start(program, modules, env)
    before, name, _ = WAITING.get((program, modules), (None, None, None))
    if before != env:
        return [sys.executable, program, *args]
    return [sys.executable, "-I", "-S", __file__, "call", name, *args]


def start(program, modules, env):
    """(the name of its socket, the process), which waits until this one ends"""
    import subprocess
    name = f"nanoeuler-{os.getpid()}-{len(WAITING)}"
    theirs, _ = os.pipe()                    # the other end is open as long as this process is
    process = subprocess.Popen([sys.executable, __file__, "wait", name, program, *modules],
                               stdin=theirs, stdout=subprocess.PIPE, env=env)
    os.close(theirs)
    with process.stdout:
        assert process.stdout.readline() == b"ready\n"
    return name, process


# ---- who calls
def call(name, *args):
    """Ends as the program does."""
    at = socket.socket(socket.AF_UNIX)
    at.connect(f"\0{name}")
    ignored = [number for number in PASSED_ON if signal.getsignal(number) == signal.SIG_IGN]
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)  # until it is known to whom
    text = json.dumps([os.getcwd(), dict(os.environ), ignored, args]).encode()
    socket.send_fds(at, [len(text).to_bytes(4, "little")], [0, 1, 2])
    at.sendall(text)
    fork = read_number(at)
    for number in PASSED_ON - {*ignored}:
        signal.signal(number, lambda number, _: os.kill(fork, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    for fd in 0, 1, 2:                       # they end where the fork's end
        os.close(fd)
    code = os.waitstatus_to_exitcode(read_number(at))
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def read_exactly(at, n):
    data = b""
    while len(data) < n:
        more = at.recv(n - len(data))
        if not more:
            raise EOFError("the other side is gone")
        data += more
    return data


def read_number(at):
    return int.from_bytes(read_exactly(at, 4), "little")


# ---- who waits
def wait(name, program, *modules):
    """Returns in each fork, with the code that it is to run."""
    import gc
    import importlib
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for module in modules:
        importlib.import_module(module)
    if "NANOEULER_CONDITIONS" in os.environ and "bpe" in sys.modules:    # see conditions.py
        sys.path.append(os.path.dirname(os.path.abspath(__file__)))
        import conditions
        conditions.watch(sys.modules["bpe"].UserError)
        sys.path.pop()
    from numba.core.registry import cpu_target
    cpu_target.target_context.refresh()      # as the first kernel would: a fifth of a second
    sys.path[0] = os.path.dirname(program)   # as Python sets it for a script
    with open(program, "rb") as f:
        code = compile(f.read(), program, "exec")
    signal.signal(signal.SIGCHLD, reap)
    signal.signal(signal.SIGINT, signal.SIG_IGN)         # nor is a call ended by that of another
    gc.collect()
    gc.freeze()                              # what no fork needs to look through, and to copy
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"\0{name}")
        listening.listen(100)
        print("ready", flush=True)
        while True:
            ready, _, _ = select.select([listening, 0], [], [])
            if 0 in ready:                   # who has started this is gone
                os._exit(0)
            at, _ = listening.accept()
            if os.fork() == 0:
                break
            at.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    keep(at, program)
    return code


def reap(*_):
    """Waits for those that kept a call: this process then has their CPU time (cpu_times.py)."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def keep(at, program):
    """Returns in a fork that is to be the program; its parent waits for its end, and says it."""
    number, files, _, _ = socket.recv_fds(at, 4, 3)
    said = json.loads(read_exactly(at, int.from_bytes(number, "little")))
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    fork = os.fork()
    if fork == 0:
        at.close()
        become(program, files, *said)
        return
    for fd in files:
        os.close(fd)
    with contextlib.suppress(OSError):
        at.sendall(fork.to_bytes(4, "little"))
    ready, _, _ = select.select([at, ended := os.pidfd_open(fork)], [], [])
    if ended not in ready:                   # who calls was killed
        os.kill(fork, signal.SIGKILL)
    _, status = os.waitpid(fork, 0)
    with contextlib.suppress(OSError):
        at.sendall(status.to_bytes(4, "little"))
    os._exit(0)


def become(program, files, folder, env, ignored, args):
    """What Python does before it runs a script, once more."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    for number, handler in ((signal.SIGINT, signal.default_int_handler),
                            (signal.SIGTERM, signal.SIG_DFL)):
        signal.signal(number, signal.SIG_IGN if number in ignored else handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    for fd, (name, given) in enumerate(zip(("stdin", "stdout", "stderr"), files)):
        os.dup2(given, fd)
        os.close(given)
        before = getattr(sys, name)
        stream = open(fd, "w" if fd else "r", -1 if fd < 2 and not os.isatty(fd) else 1,
                      before.encoding, before.errors, closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.argv = [program, *args]


def main(how, *args):
    if how == "call":
        call(*args)
    code, module = wait(*args), type(sys)("__main__")
    module.__file__, module.__builtins__ = sys.argv[0], __builtins__
    sys.modules["__main__"] = module
    exec(code, vars(module))


if __name__ == "__main__":
    main(*sys.argv[1:])
