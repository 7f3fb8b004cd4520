"""Run the command line: `flowrl train ppo`, or `python -m flowrl train ppo`."""

import sys


def main() -> int:
    """Run a command and return its exit code; Ctrl-C ends it quietly during imports, too."""
    try:
        from flowrl.cli.main import main as run_command

        return run_command()
    except KeyboardInterrupt:
        return 130  # INTERRUPTED of signal_handler, whose import may be interrupted, too


if __name__ == "__main__":
    sys.exit(main())
