"""Run the `everbeat` command as `python -m everbeat`."""

from everbeat.cli.entry import main

if __name__ == "__main__":
    main()
