"""nanoeuler.py that sends itself a signal, at a step, after a method of Run:

    python tests/signalled.py METHOD STEP NUMBER ARGS...
"""
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import nanoeuler as ne
from nanoeuler_parts.runs.run import Run


def main(name, step, number, *args):
    method = getattr(Run, name)

    def method_and_signal(run, *given, **options):
        result = method(run, *given, **options)
        if run.state.step == int(step):
            os.kill(os.getpid(), int(number))
        return result

    setattr(Run, name, method_and_signal)
    return ne.main([*args])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
