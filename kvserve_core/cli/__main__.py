"""``python -m kvserve_core.cli``."""

from kvserve_core.cli import main

if __name__ == "__main__":
    main()
