"""`python -m everbeat` is the command `everbeat`."""

from everbeat.cli.main import main

if __name__ == "__main__":
    main()
