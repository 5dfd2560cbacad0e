"""`python -m multirate`: the same as the command `multirate`."""

from multirate.cli.main import run

if __name__ == "__main__":
    run()
