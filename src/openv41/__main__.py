"""``python -m openv41``: the command line."""

from openv41.cli.main import main

if __name__ == "__main__":
    main()
