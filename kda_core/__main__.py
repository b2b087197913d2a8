"""``python -m kda_core``."""

from kda_core._cli import main

if __name__ == "__main__":
    main()
