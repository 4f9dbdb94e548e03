"""Signals that stop a run: Ctrl-C, `kill`, and a terminal that closes."""
import contextlib
import os
import signal
import threading

def saving_signals():
    """The signals that stop a run after its step: Ctrl-C, that of `kill`, and that of a terminal
    that closes, unless nohup has made the process ignore it.  Windows lacks the last one."""
    hangup = getattr(signal, "SIGHUP", None)
    ignored = hangup is None or signal.getsignal(hangup) == signal.SIG_IGN
    return [signal.SIGINT, signal.SIGTERM] + ([] if ignored else [hangup])

@contextlib.contextmanager
def signals_caught():
    """Yields a list that collects `saving_signals`, so that the current step can finish.  A second
    signal of the same kind has its default effect: it ends the process at once.  Python delivers
    signals to the main thread only, so in another thread the list stays empty."""
    caught = []
    if threading.current_thread() is not threading.main_thread():
        yield caught
        return

    def catch(number, frame):
        caught.append(number)
        signal.signal(number, signal.SIG_DFL)
        with contextlib.suppress(OSError):   # no print: the signal may have interrupted one
            os.write(2, b"\nstopping soon, and saving; "
                        b"the same signal again stops at once, unsaved\n")

    before = {number: signal.signal(number, catch) for number in saving_signals()}
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
