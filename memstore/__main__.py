"""The command ``memstore``, also as ``python -m memstore``: where it starts, before anything of it is loaded."""

from __future__ import annotations

import signal
import sys

from memstore.tools.interrupts import listen
from memstore.tools.leaving import leave

MISSING = 3
"""The exit code for what is not there."""


# Nothing heavy is imported here, so that Ctrl-C while the rest is loaded ends in one line. An interrupted import may
# surface as any error later, so once Ctrl-C was pressed every error is that.
def run() -> int:
    """Run the command line; the exit code.

    Loading it takes a moment, in which Ctrl-C is to end it in one line as at any other time. It owns the process: once
    all is said, Ctrl-C ends it without a word.
    """
    listen()
    try:
        from memstore.tools.app import main as run_verb

        return run_verb()
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.stderr.write(f"memstore: the command needs {error.name}: pip install 'torch-memstore[cli]'\n")
        return MISSING
    except KeyboardInterrupt:
        sys.stderr.write("memstore: interrupted; run the same command again\n")
        return 128 + signal.SIGINT
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def main() -> int:
    """The program ``memstore``: run the command line and leave; the exit code where Python is to end the process."""
    code = run()
    leave(code)
    return code


if __name__ == "__main__":
    sys.exit(main())
