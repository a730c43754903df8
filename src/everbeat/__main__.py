"""Run the `everbeat` command as `python -m everbeat`."""

from everbeat.cli.main import main

if __name__ == "__main__":
    main()
