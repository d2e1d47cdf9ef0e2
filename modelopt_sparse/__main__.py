"""`python -m modelopt_sparse` is `modelopt-sparse`."""

from modelopt_sparse.cli.commands import main

if __name__ == "__main__":
    main()
