"""`python -m kvant` is `kvant`."""

from kvant.cli.main import run

if __name__ == "__main__":
    run()
