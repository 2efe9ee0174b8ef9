"""`python -m specinfer` is the command `specinfer`."""

from specinfer.cli import main

if __name__ == "__main__":
    main()
